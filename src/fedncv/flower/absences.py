"""Which clients the rounds of a finished run lack, in words."""

from collections.abc import Iterable
from typing import Any

KINDS = ("absent", "refused")


def absences(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for every client that was excluded, or not counted in a round in which it was drawn.

    >>> rows = [{"round": 0}, {"round": 1, "absent": [2]}, {"round": 2, "absent": [2], "refused": {"0": "not finite"}}]
    >>> absences(rows)
    ['client 0 was not counted in 1 of 2 rounds: refused in 2 (not finite)', \
'client 2 was not counted in 2 of 2 rounds: absent in 1-2']
    """
    rounds = max((line["round"] for line in rows), default=0)
    barred = {int(u): why for line in rows for u, why in line.get("barred", {}).items()}
    found: dict[int, dict[str, list[int]]] = {}
    reasons: dict[int, str] = {}
    for line in rows:
        for kind in KINDS:
            for u in map(int, line.get(kind, ())):
                if u not in barred:
                    found.setdefault(u, {}).setdefault(kind, []).append(line["round"])
        reasons |= {int(u): why for u, why in line.get("refused", {}).items()}
    lines = {u: f"client {u} was excluded from the run: {why}" for u, why in barred.items()}
    for u, kinds in found.items():
        words = [f"{kind} in {_ranges(kinds[kind])}" for kind in KINDS if kind in kinds]
        why = f" ({reasons[u]})" if u in reasons else ""
        lines[u] = f"client {u} was not counted in {sum(map(len, kinds.values()))} of {rounds} rounds: "
        lines[u] += ", ".join(words) + why
    return [lines[u] for u in sorted(lines)]


def _ranges(rounds: Iterable[int]) -> str:
    """
    >>> _ranges([1, 2, 3, 7])
    '1-3, 7'
    """
    parts: list[list[int]] = []
    for each in rounds:
        if parts and each == parts[-1][1] + 1:
            parts[-1][1] = each
        else:
            parts.append([each, each])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)

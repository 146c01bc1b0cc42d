"""The clients of a federation, from the rows of its run: who replied when, and who did not, with the reason."""

import json
from html import escape
from typing import Any, NamedTuple

from fedncv.results import Run
from fedncv.watch.follow import FollowedRun
from fedncv.watch.tail import open_plain, stamp

JOINED, LOG = "joined.json", "log.txt"
SHOWN = 200  # clients
ROUNDS = 60  # latest rounds of a client's strip
LINES = 12  # of the log
REASON = 300  # characters of a reason

COUNTED, REFUSED, ABSENT, EXCLUDED, AWAITED, UNDRAWN = (
    "counted", "refused", "absent", "excluded", "not joined", "not drawn yet",
)  # fmt: skip

KEYS = "<ul class='keys'>" + "".join(
    f"<li><svg class='strip key' viewBox='0 0 4 12'><path class='{state}' d='M0 0h3v12h-3z'/></svg>{words}</li>"
    for state, words in ((COUNTED, "counted"), (REFUSED, "refused"), (ABSENT, "no reply in time"))
) + "</ul>"  # fmt: skip


class Client(NamedTuple):
    client: int
    samples: int | None
    state: str  # in the last round that asked it
    why: str
    last: int | None  # the last round that counted it
    when: float | None  # about when that round ended, in seconds since 1970
    rounds: dict[int, str]  # round -> counted, refused or absent


def is_federation(followed: FollowedRun, run: Run) -> bool:
    """Return whether the run is one of real clients: those rows, or files of its server, tell it."""
    rows = any("counted" in row for row in run.rows[-1:]) or bool(run.rows and "sizes" in run.rows[0])
    return rows or any((followed.folder / name).exists() for name in (JOINED, LOG))


def clients(followed: FollowedRun, run: Run) -> list[Client]:
    """Return what is known of each client, at most ``SHOWN`` of them."""
    joined = _joined(followed)
    first = run.rows[0] if run.rows else {}
    sizes = dict(enumerate(first["sizes"])) if "sizes" in first else joined.get("sizes", {})
    barred = first.get("barred") or joined.get("barred", {})
    rounds: dict[int, dict[int, str]] = {}
    reasons: dict[int, str] = {}
    for row in run.rows:
        for u in _numbers(row.get("counted", [])):
            rounds.setdefault(u, {})[row["round"]] = COUNTED
            reasons[u] = ""
        for u, why in row.get("clipped", {}).items():
            reasons[_number(u)] = f"clipped: {', '.join(map(str, why)) if isinstance(why, list) else why}"
        for u in _numbers(row.get("absent", [])):
            rounds.setdefault(u, {})[row["round"]] = ABSENT
            reasons[u] = "no reply in time"
        for u, why in row.get("refused", {}).items():
            rounds.setdefault(_number(u), {})[row["round"]] = REFUSED
            reasons[_number(u)] = str(why)
    ended = _ends(followed)
    found = []
    for u in range(min(run.config.clients, SHOWN)):
        mine = rounds.get(u, {})
        last = max((t for t, state in mine.items() if state == COUNTED), default=None)
        state, why = mine[max(mine)] if mine else UNDRAWN, reasons.get(u, "")
        if str(u) in barred or u in barred:
            state, why = EXCLUDED, str(barred.get(str(u), barred.get(u)))
        elif u not in sizes:
            state, why = AWAITED, ""
        samples = sizes.get(u)
        found.append(
            Client(u, samples if isinstance(samples, int) else None, state, why, last,
                   None if last is None else ended.get(last), mine)
        )  # fmt: skip
    return found


def _numbers(values: list[Any]) -> list[int]:
    return [value for value in values if type(value) is int]


def _number(text: Any) -> int:
    try:
        return int(text)
    except (ValueError, TypeError):
        return -1


def _ends(followed: FollowedRun) -> dict[int, float]:
    """Return round -> about when it ended: the time of the last row, less the seconds of the rounds after it."""
    at, found = followed.last_row, {}
    for number, seconds in sorted(followed.seconds.items(), reverse=True):
        found[number] = at
        at -= seconds
    return found


def _joined(followed: FollowedRun) -> dict[str, Any]:
    """Return the sizes and the excluded clients of joined.json; empty if it is missing or damaged."""
    try:
        said = json.loads(_beginning(followed, JOINED))
        return {
            "sizes": {int(u): size for u, size in said["sizes"].items()},
            "barred": {int(u): str(why) for u, why in said["barred"].items()},
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _beginning(followed: FollowedRun, name: str, *, end: bool = False) -> bytes:
    """Return a small file, or the end of a large one. Raise ValueError if it is missing or a link."""
    path, most = followed.folder / name, 1 << 13 if end else 1 << 22
    found = stamp(path)
    if found is None:
        raise ValueError(f"there is no {path}")
    with open(open_plain(path), "rb") as file:
        file.seek(max(0, found.size - most) if end else 0)
        return file.read(most)


# ---- on the page -----------------------------------------------------------------------------------------


def table(followed: FollowedRun, run: Run) -> str:
    """Return a table of the clients, with a strip of their latest rounds."""
    found = clients(followed, run)
    if not found:
        return ""
    last = max((row["round"] for row in run.rows), default=0)
    shown = range(max(1, last - ROUNDS + 1), last + 1)
    rows = []
    for each in found:
        when = "" if each.when is None else f" <small>{age(each.when)}</small>"
        reply = "–" if each.last is None else f"round {each.last}{when}"
        why = f"<small class='why'>{escape(each.why[:REASON])}</small>" if each.why else ""
        rows.append(
            f"<tr><th>client {each.client}</th><td>{'–' if each.samples is None else f'{each.samples:,}'}</td>"
            f"<td>{badge(each.state)} {why}</td><td>{reply}</td><td>{_strip(each, shown)}</td></tr>"
        )
    more = f"<p class='soft small'>{run.config.clients - len(found):,} more clients.</p>"
    heads = (
        "Client",
        "Samples",
        "State",
        "Last counted reply",
        f"Rounds {shown.start} to {last}" if last else "Rounds",
    )
    return rows_below("Clients", heads, rows) + KEYS + (more if run.config.clients > len(found) else "")


def rows_below(label: str, heads: tuple[str, ...], rows: list[str]) -> str:
    """Return a table of these rows, which scrolls by itself."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f"<div class='scroll left tall' tabindex='0' role='region' aria-label='{label}'><table class='runs'>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _strip(client: Client, shown: range) -> str:
    """Return a small picture: a mark for each round that asked the client."""
    marks = dict.fromkeys((COUNTED, REFUSED, ABSENT), "")
    for i, t in enumerate(shown):
        if t in client.rounds:
            marks[client.rounds[t]] += f"M{4 * i} 0h3v12h-3z"
    paths = "".join(f'<path class="{state}" d="{d}"/>' for state, d in marks.items() if d)
    words = ", ".join(f"{state} {sum(client.rounds.get(t) == state for t in shown)} times" for state in marks)
    return f'<svg class="strip" role="img" viewBox="0 0 {4 * ROUNDS} 12" aria-label="{words}">{paths}</svg>'


def badge(state: str, words: str = "") -> str:
    return f"<span class='state {state.split()[0]}'>{escape(words or state)}</span>"


def age(at: float) -> str:
    """Return a time that the page shows as an age, and keeps current."""
    return f"<time data-at='{at:.0f}'></time>" if at else "–"


def log(followed: FollowedRun) -> str:
    """Return the last lines of the server's log; empty if there is none."""
    try:
        lines = _beginning(followed, LOG, end=True).decode("utf-8", errors="replace").splitlines()[-LINES:]
    except ValueError:
        return ""
    text = escape("\n".join(line[:REASON] for line in lines))
    return f"<details><summary>Last lines of {LOG}</summary><div><pre>{text}</pre></div></details>" if text else ""

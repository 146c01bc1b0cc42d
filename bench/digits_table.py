"""Every method once on the built-in digits: the scores, and a fingerprint of the model that training ended with.

    python bench/digits_table.py --out before.json                 at one commit
    python bench/digits_table.py --out after.json --compare before.json      at another

A refactoring must not change a digit. The sequential engine with one thread repeats itself to the last bit on one
machine, so equal fingerprints mean equal models. On another machine the last bits may differ.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import fedncv

PROTOCOL: dict[str, Any] = {
    "data": "digits", "clients": 20, "per_round": 5, "rounds": 20, "lr": 0.05, "eval_every": 0, "engine": "sequential",
}  # fmt: skip
DRAWN = [name for name in fedncv.METHODS if name != "d2"]  # which needs every client in every round
WITH_PARTS = (
    "fedavg+prior",
    "scaffold+prior",
    "fedavg+even",
    "fedavg+average",
    "scaffold+even+prior",
    "fedavg+samples",
)


def measure(method: str, seed: int) -> dict[str, Any]:
    """Return the scores at the end and the fingerprint of what client 0 then predicts with."""
    result = fedncv.simulate(method=method, seed=seed, **PROTOCOL)
    digest = hashlib.sha256()
    for name, value in sorted(result.state_dict(client=0).items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return {"before": result.last["before"], "after": result.last["after"], "model": digest.hexdigest()[:16]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=[*DRAWN, *WITH_PARTS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path, help="a file that this script wrote, at another commit")
    chosen = parser.parse_args()
    others = json.loads(chosen.compare.read_text()) if chosen.compare else {}
    found: dict[str, Any] = {}
    for method in chosen.methods:
        found[method] = here = measure(method, chosen.seed)
        other = others.get(method)
        verdict = ""
        if other:
            scores = all(here[name] == other[name] for name in ("before", "after"))
            verdict = "same bits" if here == other else "same scores" if scores else f"WAS {other}"
        print(
            f"{method:34} {100 * here['before']:6.2f} {100 * here['after']:6.2f}  {here['model']}  {verdict}",
            flush=True,
        )
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

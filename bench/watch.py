"""What it costs to watch a study: processor time per minute of an open page, while nothing happens and while it grows.

    PYTHONPATH=src python bench/watch.py --runs 100 --rounds 100

It writes a study of made-up rows into a temporary folder, then asks as a browser does, once a second, for as long as
``--seconds`` says, and takes the processor time of the process. While it grows, one run gets a row in every second.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from study import machine

from fedncv.config import Settings, write_toml
from fedncv.study import FILE, Cell, Study, to_toml
from fedncv.watch.live import LivePage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=int, default=30)
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        settings = Settings(rounds=arguments.rounds, eval_every=5)
        study = Study(
            name="watched", title="A study that is watched", settings=settings, datasets=("cifar10",),
            methods=("fedavg", "fedprox", "scaffold", "fedrep", "fedncv"), seeds=tuple(range(arguments.runs // 5)),
        )  # fmt: skip
        (root / FILE).write_text(to_toml(study), encoding="utf-8")
        cells = study.cells()
        for cell in cells:
            write(root / cell.folder, cell, arguments.rounds if cell is not cells[-1] else 1)
        page, began = LivePage(root), time.process_time()
        page.document("nonce")
        spent = time.process_time() - began
        print(f"first page of {len(cells)} runs x {arguments.rounds} rounds: {spent:.2f} s of processor time")
        print(f"idle:    {asked(page, arguments.seconds, lambda: None)}")
        metrics, rounds = root / cells[-1].folder / "metrics.jsonl", iter(range(2, 10**9))

        def grow() -> None:
            with metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row(next(rounds), settings)) + "\n")

        print(f"growing: {asked(page, arguments.seconds, grow)}")


def asked(page: LivePage, seconds: int, happen: Callable[[], None]) -> str:
    """Ask once a second; return the processor time in words, without that of ``happen``."""
    spent, seen = 0.0, page.changes("")["seen"]
    sent = 0
    for _ in range(seconds):
        happen()
        began = time.process_time()
        answer = page.changes(seen)
        sent += len(json.dumps(answer))
        spent += time.process_time() - began
        seen = answer["seen"]
        time.sleep(1.0)
    share, size = 100 * spent / seconds, sent / seconds / 1000
    return f"{1000 * spent / seconds:.1f} ms of processor time per second ({share:.2f} % of a core), {size:.1f} kB sent"


def write(folder: Path, cell: Cell, rounds: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(write_toml(cell.config), encoding="utf-8")
    rows = "".join(json.dumps(row(t, cell.config)) + "\n" for t in range(rounds + 1))
    clocks = "".join(json.dumps({"round": t, "seconds": 1.0}) + "\n" for t in range(rounds + 1))
    (folder / "metrics.jsonl").write_text(rows, encoding="utf-8")
    (folder / "timing.jsonl").write_text(clocks, encoding="utf-8")


def row(t: int, settings: Settings) -> dict[str, object]:
    """Return a row as a run of 100 clients writes it."""
    found: dict[str, object] = {"round": t, "loss": random.random(), "samples": 500 * t, "bytes_down": t, "bytes_up": t}
    if t % settings.eval_every == 0:
        found |= {"before": random.random(), "before_clients": [random.random() for _ in range(100)]}
    return found


if __name__ == "__main__":
    main()

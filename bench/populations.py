"""Compare federations of different sizes side by side: start-up, memory, time of a round, bytes on disk.

    python bench/scaling.py --population 10000 1000000

Every population is a run of its own in a process of its own: synthetic samples, natural clients, the state of clients
on disk, a sample of 1,000 clients scored at the start and at the end, a checkpoint every ten rounds. The processes take
turns, one round each, so that a busy machine slows all of them alike. A ratio is that of ten rounds with their
checkpoint; its median over all tens is printed, with the range.

As a script of its own it is one such run: it reads a line for every round to train, and writes a line about it.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

EVERY = 10  # rounds from checkpoint to checkpoint
SCORED = 1_000


def settings(clients: int, method: str, rounds: int, per_round: int, samples: int) -> dict[str, Any]:
    return {
        "method": method, "data": f"synthetic:clients={clients},samples={samples}", "partition": "natural",
        "clients": clients, "per_round": per_round, "rounds": rounds, "epochs": 2, "model": "mlp", "rows": "disk",
        "eval_clients": SCORED, "eval_every": rounds, "checkpoint_every": EVERY, "engine": "sequential",
    }  # fmt: skip


class Population:
    """A run in a process of its own that waits for ``train`` before every round."""

    def __init__(self, folder: Path, words: dict[str, Any]) -> None:
        self.folder = folder
        self.seconds: list[float] = []
        command = [sys.executable, __file__, str(folder), json.dumps(words)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        began = time.perf_counter()
        self.cpu = [self._read()["cpu"]]  # of the process until each round
        self.start = time.perf_counter() - began

    def train(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        said = self._read()
        self.seconds.append(said["seconds"])
        self.cpu.append(said["cpu"])

    def end(self) -> tuple[float, int]:
        """Return the peak of memory in GB, and the bytes on disk."""
        peak = self._read()["peak"]
        assert self._process.wait() == 0
        return peak / 1e9, sum(path.stat().st_size for path in self.folder.iterdir())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a run failed; its message is above")
        found: dict[str, Any] = json.loads(line)
        return found


def compare(populations: list[int], methods: list[str], *, tens: int, per_round: int, samples: int) -> None:
    print(f"{per_round} clients per round, {samples} samples each, {SCORED:,} clients scored, state of clients on disk")
    head = (
        "method",
        "clients",
        "start, s (CPU)",
        "peak, GB",
        "s/round",
        "ratio of ten rounds",
        "last, s (CPU)",
        "on disk, MB",
    )
    print("".join(f"{word:>{width}}" for word, width in zip(head, WIDTHS, strict=True)), flush=True)
    for method in methods:
        with tempfile.TemporaryDirectory(prefix="fedncv-populations-") as place:
            rounds = EVERY * tens + 1  # the last one, with the scores, is timed apart
            runs = [
                Population(Path(place) / str(n), settings(n, method, rounds, per_round, samples)) for n in populations
            ]
            for _ in range(rounds - 1):
                for run in runs:
                    run.train()
            ends = []
            for run in runs:  # one ends before the next one is timed
                run.train()
                ends.append(run.end())
            each_RT = np.array([run.seconds[:-1] for run in runs]).reshape(len(runs), tens, EVERY).sum(axis=2)
            for n, run, seconds_T, (peak, disk) in zip(populations, runs, each_RT, ends, strict=True):
                ratio_T = seconds_T / each_RT[0]
                ratio = f"{np.median(ratio_T):.2f} ({ratio_T.min():.2f} to {ratio_T.max():.2f})"
                cells = (
                    method, f"{n:,}", f"{run.start:.1f} ({run.cpu[0]:.1f})", f"{peak:.2f}",
                    f"{np.median(seconds_T) / EVERY:.3f}", ratio,
                    f"{run.seconds[-1]:.1f} ({run.cpu[-1] - run.cpu[-2]:.1f})", f"{disk / 1e6:.0f}",
                )  # fmt: skip
                print("".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)), flush=True)


WIDTHS = (10, 11, 16, 10, 9, 22, 15, 13)


def main(folder: Path, words: dict[str, Any]) -> None:
    import fedncv

    clock = time.perf_counter()

    def wait(row: dict[str, Any]) -> None:
        nonlocal clock
        said = {"round": row["round"], "seconds": time.perf_counter() - clock, "cpu": time.process_time()}
        print(json.dumps(said), flush=True)
        if row["round"] < words["rounds"]:
            sys.stdin.readline()
        clock = time.perf_counter()

    fedncv.simulate(out=folder, on_round=wait, progress=False, **words)
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

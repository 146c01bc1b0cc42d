"""Load a real federation on this machine: time a round, and look for memory, files and processes that grow.

    python bench/federation_load.py --clients 5 10 20 --rounds 4         time a round against the number of clients
    python bench/federation_load.py --clients 10 --rounds 50             is anything left behind?
    python bench/federation_load.py --figure OUT.png RESULT.json ...     draw the results of several calls

One server and all clients run as real processes, with TLS and node authentication, on the loopback interface: an MLP on
the digits, one local epoch, so that nearly all of a round is Flower's and ours, not training. For every round it notes

    seconds     between the server's rounds (timing.jsonl), without the first, in which processes are still cold
    processes   of the federation that live on between rounds, and the tasks (one for each request) beside them
    memory      PSS of the former: shared pages are divided among those that share them
    files       open descriptors of the former

Clients on one machine share its cores: every request starts a process that imports PyTorch, so a round of N clients
takes at least N * (seconds of CPU for one start) / cores. This floor is measured and printed beside the time.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedncv.config import RunConfig
from fedncv.flower import coordinator, processes
from fedncv.flower import folder as folders
from fedncv.flower.rules import Rules

START = "import fedncv.flower.client_app, fedncv.engine.sequential"


def look(folder: Path) -> dict[str, float]:
    """Return what the processes of a federation hold now."""
    found = {"processes": 0, "tasks": 0, "memory_MiB": 0.0, "files": 0}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            line = (place / "cmdline").read_bytes()
            if str(folder).encode() not in line or int(place.name) == os.getpid():
                continue
            if b"--token-file" in line:
                found["tasks"] += 1
                continue
            (pss,) = (
                row.split()[1] for row in (place / "smaps_rollup").read_text().splitlines() if row.startswith("Pss:")
            )
            found["files"] += len(os.listdir(place / "fd"))
            found["memory_MiB"] += int(pss) / 1024
            found["processes"] += 1
    return found


def start_seconds() -> float:
    """Return the CPU seconds that one start of a client's process takes, the least of three."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", START], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


def measure(clients: int, rounds: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "federation"
        config = RunConfig(
            method="fedavg", model="mlp", partition="iid", clients=clients, per_round=clients, rounds=rounds, epochs=1,
            eval_every=0,
        )  # fmt: skip
        rules = Rules(join_seconds=seconds, round_seconds=seconds)
        folders.init(folder, config, host="127.0.0.1", port=0, listen="127.0.0.1", rules=rules)
        seen: list[dict[str, float]] = []

        def on_round(number: int) -> None:
            seen.append({"round": number, **look(folder), "load": os.getloadavg()[0]})
            print(json.dumps(seen[-1]), file=sys.stderr, flush=True)

        try:
            began = time.perf_counter()
            processes.up(folder, seconds=seconds)
            up = time.perf_counter() - began
            coordinator.create(folder, "load", config)
            coordinator.follow(folder, "load", seconds=seconds * rounds, on_round=on_round)
            run = folder / "server" / "runs" / "load"
            lasted = [json.loads(line)["seconds"] for line in (run / "timing.jsonl").read_text().splitlines()]
            counted = [
                len(json.loads(line).get("counted", ()))
                for line in (run / "metrics.jsonl").read_text().split("\n")[1:-1]
            ]
            time.sleep(5.0)
            quiet = look(folder)
        finally:
            processes.down(folder)
        deadline = time.monotonic() + 30.0
        while (left := look(folder))["processes"] + left["tasks"] and time.monotonic() < deadline:
            time.sleep(0.5)
    return {
        "clients": clients, "rounds": rounds, "up_seconds": up, "round_seconds": lasted[1:], "counted": counted,
        "seen": seen, "after": quiet, "left": left, "start_seconds": start_seconds(), "cores": os.cpu_count(),
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """Return a row of the table."""
    warm = found["round_seconds"][1:] or found["round_seconds"]
    middle = statistics.median(warm)
    floor = found["clients"] * found["start_seconds"] / found["cores"]
    first, last = found["seen"][0], found["seen"][-1]
    memory = f"{first['memory_MiB']:,.0f} → {last['memory_MiB']:,.0f}"
    return (
        f"| {found['clients']} | {found['rounds']} | {middle:.1f} ({min(warm):.1f} to {max(warm):.1f}) "
        f"| {floor:.1f} | {min(found['counted'])} to {max(found['counted'])} "
        f"| {first['processes']:.0f} → {last['processes']:.0f} | {memory} "
        f"| {first['files']:,.0f} → {last['files']:,.0f} | {found['left']['processes'] + found['left']['tasks']:.0f} |"
    )


def figure(out: Path, results: list[dict[str, Any]]) -> None:
    """Draw seconds against clients, of results with the fewest rounds, and memory over the rounds of the longest."""
    import matplotlib

    matplotlib.use("svg" if out.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    fewest = min(found["rounds"] for found in results)
    short = sorted((found for found in results if found["rounds"] == fewest), key=lambda found: found["clients"])
    longest = max(results, key=lambda found: found["rounds"])
    number = [found["clients"] for found in short]
    warm = [found["round_seconds"][1:] or found["round_seconds"] for found in short]
    middle = [statistics.median(each) for each in warm]
    drawn, (left, right) = pyplot.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    low = [m - min(each) for m, each in zip(middle, warm, strict=True)]
    high = [max(each) - m for m, each in zip(middle, warm, strict=True)]
    left.errorbar(number, middle, [low, high], fmt="o-", capsize=3, label="measured: median, least and most")
    floor = [found["clients"] * found["start_seconds"] / found["cores"] for found in short]
    left.plot(number, floor, "--", color="gray", label="floor: starts of Python and PyTorch")
    left.set(xlabel="clients on one machine", ylabel="seconds a round", xlim=(0, None), ylim=(0, None))
    left.legend(frameon=False)
    rounds = [seen["round"] for seen in longest["seen"]]
    right.plot(rounds, [seen["memory_MiB"] for seen in longest["seen"]], label="memory, MiB")
    right.plot(rounds, [seen["files"] for seen in longest["seen"]], label="open files")
    right.plot(rounds, [seen["processes"] for seen in longest["seen"]], label="processes")
    right.set(xlabel=f"round, {longest['clients']} clients", yscale="log", ylim=(10, None))
    right.legend(frameon=False, loc=(0.56, 0.27))
    drawn.savefig(out, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=900.0, help="for the start, and for a single round")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument("--figure", type=Path, help="draw the results in the files instead of measuring")
    parser.add_argument("results", type=Path, nargs="*", help="files that --out has written")
    chosen = parser.parse_args()
    if chosen.figure:
        figure(chosen.figure, [each for path in chosen.results for each in json.loads(path.read_text())])
        return 0
    print("| clients | rounds | s per round | floor, s | counted | processes | memory, MiB | files | left at the end |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    results = []
    for clients in chosen.clients:
        results.append(measure(clients, chosen.rounds, chosen.seconds))
        print(line(results[-1]), flush=True)
        if chosen.out:
            chosen.out.write_text(json.dumps(results, indent=1))
    return int(any(found["left"]["processes"] + found["left"]["tasks"] for found in results))


if __name__ == "__main__":
    sys.exit(main())

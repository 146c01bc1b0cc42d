"""Measure the peak memory of a command and all its processes, and the time until they have started.

    python bench/memory.py fedncv run --data cifar10 --data-dir DIR --rounds 2 --layers compiled

Ten times per second it sums the proportional set sizes (PSS, /proc/PID/smaps_rollup) of the command and all its
descendants. PSS divides a page among the processes that share it, so the sum counts every page once. Linux only.
"""

import os
import subprocess
import sys
import time
from pathlib import Path


def children(pid: int) -> list[int]:
    try:
        found = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return []
    return [int(child) for each in found for child in each]


def tree(pid: int) -> list[int]:
    return [pid, *(below for child in children(pid) for below in tree(child))]


def pss(pid: int) -> int:
    """Return the PSS in bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of one process so far: its duration on an idle machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    began = time.perf_counter()
    process = subprocess.Popen(sys.argv[1:])
    peak, most, forked, spent = 0, 1, 0.0, 0.0
    while process.poll() is None:
        pids = tree(process.pid)
        peak = max(peak, sum(map(pss, pids)))
        if len(pids) > most:
            most, forked, spent = len(pids), time.perf_counter() - began, cpu_seconds(process.pid)
        time.sleep(0.1)
    print(f"peak of {most} processes together: {peak / 1e6:,.0f} MB (PSS)")
    print(f"all processes started after {forked:.1f} s, {spent:.1f} s of it on a core")
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()

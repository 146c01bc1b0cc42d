"""Time all peers on all settings, one after the other on the same device, and print a table.

    PYTHONPATH=src:bench python bench/peers/run_all.py --device cuda --settings a b c d --rounds 20 b=50 \\
        --data-dir DIR --out results.jsonl --limit-s 150

Every peer is a process of its own. A peer that fails, or takes longer than ``--limit-s`` seconds with its start-up, is
listed with the reason. Ratios are to the plain loop of the same setting and the same call.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLAIN = "plain PyTorch loop"
PEERS: dict[str, tuple[str, ...]] = {
    "plain": ("plain.py",),
    "ours": ("ours.py",),
    "ours-5": ("ours.py", "--seeds", "5"),
    "pfl": ("pfl_peer.py",),
    "pfl-5": ("pfl_peer.py", "--processes", "5"),
    "flbench": ("flbench_peer.py",),
    "blazefl": ("blazefl_peer.py",),
    "blazefl-processes": ("blazefl_peer.py", "--mode", "process"),
}
DEFAULT = [name for name in PEERS if name != "blazefl-processes"]  # it takes seconds to start in every round
TITLES = {
    "plain": PLAIN,
    "ours": "ours",
    "ours-5": "ours, 5 seeds together",
    "pfl": "pfl",
    "pfl-5": "pfl, 5 processes",
    "flbench": "FL-bench",
    "blazefl": "BlazeFL",
    "blazefl-processes": "BlazeFL, processes",
}

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["a", "b", "c", "d"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=DEFAULT)
    parser.add_argument("--rounds", nargs="+", default=["50"], help="of every setting, or of one: 20 b=50")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"), help="lines are added")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds of one peer on one setting")
    parser.add_argument("--small", action="store_true", help="few and small clients: does it run?")
    arguments = parser.parse_args()
    lines: list[Line] = []
    for setting in arguments.settings:
        for peer in arguments.peers:
            command = [sys.executable, str(HERE / PEERS[peer][0]), *PEERS[peer][1:], "--setting", setting]
            command += ["--rounds", str(rounds_of(setting, arguments.rounds)), "--device", arguments.device]
            command += ["--data-dir", arguments.data_dir, *["--small"] * arguments.small]
            line = run(command, limit_s=arguments.limit_s) | {"setting": setting}
            line = {"peer": TITLES[peer]} | line
            lines.append(line)
            print(described(line), flush=True)
            with open(arguments.out, "a") as file:
                file.write(json.dumps(line) + "\n")
    print(f"\n{table(lines)}")


def rounds_of(setting: str, texts: list[str]) -> int:
    """Return the rounds of a setting.

    >>> rounds_of("a", ["20", "b=50"]), rounds_of("b", ["20", "b=50"])
    (20, 50)
    """
    named = dict(text.split("=") for text in texts if "=" in text)
    return int(named.get(setting) or next(text for text in texts if "=" not in text))


def run(command: list[str], *, limit_s: float) -> Line:
    """Run a peer and return its line; if it fails, the reason. No process of it is left running."""
    began = time.perf_counter()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {limit_s:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its group: those that it started, too
    printed = [text for text in stdout.splitlines() if text.startswith('{"peer"')]
    if process.returncode or not printed:
        print(stderr[-2000:], file=sys.stderr)
        words = [text for text in stderr.splitlines() if text.strip()] or [f"exit status {process.returncode}"]
        return {"failed": words[-1].strip()[:300]}
    line: Line = json.loads(printed[-1])
    return line | {"total_s": round(time.perf_counter() - began, 1)}


def described(line: Line) -> str:
    if "failed" in line:
        return f"{line['setting']}  {line['peer']:28s} FAILED: {line['failed']}"
    return (
        f"{line['setting']}  {line['peer']:28s} {line['rounds_per_s']:9.3f} rounds/s {line['samples_per_s']:12,.0f} "
        f"samples/s   {line['seconds']:7.2f} s of {line['total_s']:6.1f} s   accuracy {line['accuracy']:.3f}   "
        f"{line['note']}"
    )


def table(lines: list[Line]) -> str:
    """Return the Markdown table of one call, with ratios to the plain loop of the same setting."""
    rows = ["| setting | peer | version | rounds/s | samples/s | times the plain loop | accuracy | GPU, GiB | note |"]
    rows.append("|---|---|---|---:|---:|---:|---:|---:|---|")
    for line in lines:
        start = f"| {line['setting']} | {line['peer']} |"
        if "failed" in line:
            rows.append(f"{start} | | | | | | failed: {line['failed'].replace('|', '/')} |")
            continue
        plain = [each for each in lines if each["setting"] == line["setting"] and each["peer"] == PLAIN]
        ratio = ""
        if plain and "failed" not in plain[0]:
            ratio = f"{line['samples_per_s'] / plain[0]['samples_per_s']:.2f}"
        per_run = " per run" if line["runs"] > 1 else ""
        memory = "" if line["gpu_gib"] is None else f"{line['gpu_gib']:.1f}"
        rows.append(
            f"{start} {line['version']} | {line['rounds_per_s']:.3f}{per_run} | {line['samples_per_s']:,.0f} | {ratio} "
            f"| {line['accuracy']:.3f} | {memory} | {line['note']} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()

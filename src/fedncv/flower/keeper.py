"""Runs commands side by side, and all of them again whenever one ends, until it is told to stop.

Flower refuses a killed node until its last heartbeat has run out (up to a minute), and the node then gives
up; a server that was restarted on its database knows its nodes again. Somebody has to start them again.

    python keeper.py COMMAND ... [-- COMMAND ...]

Imports nothing but the standard library, so that it starts at once and stays small.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType

RESTART_SECONDS = 3.0
GRACE_SECONDS = 5.0


def keep(commands: list[list[str]], environment: dict[str, str] | None = None) -> int:
    """Until SIGTERM or SIGINT, which the commands are given too."""
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while not stopping:
        children = [subprocess.Popen(command, env=environment) for command in commands]
        while not stopping and all(child.poll() is None for child in children):
            time.sleep(0.1)
        if not stopping:
            ended = [
                f"{c[0]} ({child.returncode})" for c, child in zip(commands, children, strict=True) if child.poll()
            ]
            print(f"fedncv: ended: {', '.join(ended) or 'without error'}; starting again", file=sys.stderr, flush=True)
        _end(children)
        if not stopping:
            _end_helpers()
        until = time.monotonic() + RESTART_SECONDS
        while not stopping and time.monotonic() < until:
            time.sleep(0.1)
    return 0


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _end_helpers() -> None:
    """End what the commands have started and left behind; it would get in the way of the next ones."""
    if os.getpgrp() != os.getpid():
        return  # the group has members that are not ours
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    signal.signal(signal.SIGTERM, mine)


def split(words: list[str]) -> list[list[str]]:
    """The commands between the words --."""
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


if __name__ == "__main__":
    sys.exit(keep(split(sys.argv[1:])))

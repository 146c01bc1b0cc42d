"""Run commands in parallel, and restart all of them whenever one ends, until a signal stops it.

Flower rejects a killed node until its last heartbeat has expired (up to a minute), and the node then gives up. A
server that is restarted on its database knows its nodes again. So both must be restarted.

    python keeper.py COMMAND ... [-- COMMAND ...]

It imports only the standard library, so that it starts fast and stays small.
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
    """Run the commands until SIGTERM or SIGINT, which is passed on to them."""
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
    """End processes that the commands left running; they would disturb the next ones."""
    if os.getpgrp() != os.getpid():
        return  # the group has members that are not ours
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    signal.signal(signal.SIGTERM, mine)


def split(words: list[str]) -> list[list[str]]:
    """Return the commands between the words --."""
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


if __name__ == "__main__":
    sys.exit(keep(split(sys.argv[1:])))

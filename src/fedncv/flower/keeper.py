"""Runs a command, and again whenever it ends, until it is told to stop.

Flower refuses a killed node until its last heartbeat has run out (up to a minute), and the node then gives
up; a server that was restarted on its database knows its nodes again. Somebody has to start them again.

    python keeper.py COMMAND ...

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


def keep(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Until SIGTERM or SIGINT, which the command is given too."""
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while not stopping:
        child = subprocess.Popen(command, env=environment)
        while child.poll() is None and not stopping:
            time.sleep(0.1)
        if stopping:
            child.terminate()
            try:
                child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            break
        _end_helpers()
        print(f"fedncv: {command[0]} ended ({child.returncode}); starting it again", file=sys.stderr, flush=True)
        until = time.monotonic() + RESTART_SECONDS
        while not stopping and time.monotonic() < until:
            time.sleep(0.1)
    return 0


def _end_helpers() -> None:
    """End what the command has started and left behind; it would get in the way of the next one."""
    if os.getpgrp() != os.getpid():
        return  # the group has members that are not ours
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    signal.signal(signal.SIGTERM, mine)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))

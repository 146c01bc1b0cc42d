"""Run commands in parallel, and restart all of them whenever one ends or gets stuck, until a signal stops it.

Flower rejects a killed node until its last heartbeat has expired (up to a minute), and the node then gives up. A
server that is restarted on its database knows its nodes again. So both must be restarted.

    python keeper.py [--watch HOST:PORT AUTHORITY FILE FILE --] COMMAND ... [-- COMMAND ...]

With ``--watch`` the commands set the time of both files again and again, as long as they work. They are stuck if they
have not set one of them for ``STALE_SECONDS``, although the server has been reachable for ``REACHABLE_SECONDS``.
While the server cannot be reached, they are left alone: a restart would only lose the training in progress.

It imports only the standard library, so that it starts fast and stays small.
"""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

RESTART_SECONDS = 3.0
GRACE_SECONDS = 5.0
STALE_SECONDS = 45.0  # a node sends a heartbeat every 23 s or sooner
REACHABLE_SECONDS = 45.0  # a node repeats a request that fails after 20 s or sooner
PROBE_SECONDS = 3.0


class Watch(NamedTuple):
    """What shows that the commands work."""

    server: str  # host:port
    authority: str  # the certificate that the server's must be signed with
    files: tuple[str, ...]


class Watcher:
    """Tells when commands that run are stuck. Its times are those of the monotonic clock."""

    def __init__(self, watch: Watch, probe: Callable[[Watch], bool], now: float) -> None:
        self._watch, self._probe = watch, probe
        self._seen = {
            name: (_time_of(name), now) for name in watch.files
        }  # file -> its time, and when we saw it change
        self._probed, self._reachable_since = now, float("inf")

    def stuck(self, now: float) -> bool:
        for name, (time_of_file, _) in self._seen.items():
            if (latest := _time_of(name)) != time_of_file:
                self._seen[name] = (latest, now)
        if all(now - changed < STALE_SECONDS for _, changed in self._seen.values()):
            self._reachable_since = float("inf")
        elif now - self._probed >= PROBE_SECONDS:
            self._probed = now
            self._reachable_since = min(self._reachable_since, now) if self._probe(self._watch) else float("inf")
        return now - self._reachable_since >= REACHABLE_SECONDS


def touch(path: Path) -> None:
    """Set the file's time to now. A full disk does not end the caller."""
    with contextlib.suppress(OSError):
        path.touch(mode=0o600)


def _time_of(name: str) -> int:
    try:
        return os.stat(name).st_mtime_ns
    except OSError:
        return 0


def answers(watch: Watch) -> bool:
    """Return whether the server completes a TLS handshake."""
    host, _, port = watch.server.rpartition(":")
    host = host.strip("[]")
    try:
        context = ssl.create_default_context(cafile=watch.authority)
        with (
            socket.create_connection((host, int(port)), timeout=PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except (OSError, ValueError):
        return False


def keep(
    commands: list[list[str]],
    environment: dict[str, str] | None = None,
    watch: Watch | None = None,
    probe: Callable[[Watch], bool] = answers,
) -> int:
    """Run the commands until SIGTERM or SIGINT, which is passed on to them."""
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    os.umask(0o077)  # other users of the machine see nothing of what the commands write
    while not stopping:
        children = [subprocess.Popen(command, env=environment) for command in commands]
        watcher = Watcher(watch, probe, time.monotonic()) if watch else None
        stuck, next_look = False, 0.0
        while not stopping and not stuck and all(child.poll() is None for child in children):
            time.sleep(0.1)
            if watcher is not None and (now := time.monotonic()) >= next_look:
                stuck, next_look = watcher.stuck(now), now + 1.0
        if not stopping:
            ended = [
                f"{_name(c)} ({child.returncode})" for c, child in zip(commands, children, strict=True) if child.poll()
            ]
            why = f"ended: {', '.join(ended) or 'without error'}"
            if stuck and watch is not None:
                why = f"no contact with {watch.server} for {STALE_SECONDS:g} s, although it is reachable"
            print(f"fedncv: {why}; starting again", file=sys.stderr, flush=True)
        _end(children)
        if not stopping:
            _end_helpers()
        until = time.monotonic() + RESTART_SECONDS
        while not stopping and time.monotonic() < until:
            time.sleep(0.1)
    return 0


def _name(command: list[str]) -> str:
    return command[3] if command[1:3] == ["-P", "-m"] else command[0]


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


def watch_words(watch: Watch) -> list[str]:
    """Return the words that ``main`` reads."""
    return ["--watch", watch.server, watch.authority, *watch.files, "--"]


def main(words: list[str]) -> int:
    parts = split(words)
    watch = None
    if parts[0][0] == "--watch":
        _, server, authority, *files = parts.pop(0)
        watch = Watch(server, authority, tuple(files))
    return keep(parts, watch=watch)


if __name__ == "__main__":
    os.closerange(3, 1024)  # files of whoever started this, such as locks
    sys.exit(main(sys.argv[1:]))

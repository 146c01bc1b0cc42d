"""SIGTERM, as `kill`, batch systems and container managers send it, leaves a checkpoint like Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

STATUS = 128 + signal.SIGTERM  # what a shell reports for a program that SIGTERM ended: 143

_arrived = threading.Event()


class Terminated(SystemExit):
    """SIGTERM arrived. If nobody catches it, the program ends with status 143 and without a traceback."""

    def __init__(self) -> None:
        super().__init__(STATUS)


def note(_signal: int, _frame: Any) -> None:
    """Handle SIGTERM: let the next ``check`` raise. Ignore further signals, so that nothing disturbs the saving."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _arrived.set()


def terminate(signal_: int, frame: Any) -> None:
    """Handle SIGTERM at once: raise Terminated.

    Python drops what is raised in some places, such as the hooks of a fork, so long work also calls ``check``.
    """
    note(signal_, frame)
    raise Terminated


def check() -> None:
    """Raise Terminated if SIGTERM has arrived."""
    if _arrived.is_set():
        raise Terminated


@contextlib.contextmanager
def saving_on_sigterm() -> Iterator[None]:
    """Raise Terminated in this block when SIGTERM arrives.

    Change nothing outside the main thread, which alone receives signals, or if the program handles SIGTERM itself.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not ours:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        _arrived.clear()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def noting() -> Iterator[Callable[[], None]]:
    """Yield a function that raises if Ctrl-C or SIGTERM has arrived in this block; nothing else raises for them.

    For code of other libraries, which may lose what a handler raises. A second Ctrl-C raises at once.
    """
    pressed = threading.Event()

    def press(_signal: int, _frame: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def raise_it() -> None:
        check()
        if pressed.is_set():
            raise KeyboardInterrupt

    ours = {signal.SIGINT: (signal.default_int_handler, press), signal.SIGTERM: (terminate, note)}
    in_main = threading.current_thread() is threading.main_thread()
    changed = {number: pair for number, pair in ours.items() if in_main and signal.getsignal(number) == pair[0]}
    for number, (_, noted) in changed.items():
        signal.signal(number, noted)
    try:
        yield raise_it
    finally:
        for number, (before, _) in changed.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # which ``note`` has set until the run is saved
                signal.signal(number, before)
    raise_it()

"""A Ray cluster of several raylets on this machine, and what its tests share."""

import contextlib
import os

import psutil
import pytest

QUIET = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves its log files to the end of the process
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
]


def assert_same_bytes(folder, other):
    for name in ("config.toml", "metrics.jsonl", "state.safetensors"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def left_of(process):
    """Processes of the session that ``process`` has begun and that are alive."""
    found = []
    for each in psutil.process_iter(["pid"]):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(each.pid) == process.pid and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found

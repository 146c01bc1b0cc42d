"""What a run is called, for all that its folder may say."""

import os
import subprocess
import sys

import pytest

from fedncv import heartbeat
from fedncv.config import RunConfig
from fedncv.heartbeat import Beat
from fedncv.results import Run
from fedncv.watch.condition import condition

NONE, SOME = [], [{"round": 0}, {"round": 1}]
DONE = [*SOME, {"round": 2}]
BAD, QUIT = [*SOME, {"round": 2, "failed": "it diverged"}], [*SOME, {"round": 1, "stopped": "enough"}]
OURS = heartbeat.this_machine()


def beat(state, machine=OURS, reason=""):
    return Beat(state, reason, "2026-01-01T00:00:00+00:00", 1, machine, 0, 0)


@pytest.mark.parametrize(
    ("rows", "said", "locked", "silent", "state", "why"),
    [
        (NONE, None, False, 9e9, "waiting", ""),
        (NONE, None, True, 0, "running", ""),
        (NONE, beat("failed", reason="no data"), False, 0, "failed", "no data"),
        (SOME, None, True, 1, "running", ""),
        (SOME, None, True, 600, "running", "no row for 10 min"),  # it lives, but is slow or hangs
        (SOME, None, False, 1, "quiet", "no process of this machine trains it; no row for 1 s"),
        (SOME, beat("running"), True, 1, "running", ""),
        (SOME, beat("running"), False, 1, "stopped", "its process ended without a word"),  # killed: at once
        (SOME, beat("running", "other"), False, 1, "running", "on another machine"),
        (SOME, beat("running", "other"), False, 301, "quiet", "no row for 5 min"),
        (SOME, beat("running"), None, 1, "running", "on another machine"),  # no locks can be looked at here
        (SOME, beat("running"), None, 301, "quiet", "no row for 5 min"),
        (SOME, beat("stopped", reason="stopped by Ctrl-C"), False, 1, "stopped", "stopped by Ctrl-C"),
        (SOME, beat("stopped"), True, 1, "running", ""),  # resumed, and not yet said so
        (BAD, beat("failed"), False, 1, "failed", "it diverged"),
        (BAD, None, True, 1, "running", ""),
        (QUIT, None, False, 1, "stopped", "enough"),
        (DONE, beat("running"), False, 1, "finished", ""),
        (DONE, None, True, 1, "finished", ""),  # its group trains on
    ],
)  # fmt: skip
def test_the_state_of_a_run(tmp_path, rows, said, locked, silent, state, why):
    run = Run(tmp_path, RunConfig(rounds=2), rows)
    found = condition(run, said, locked=locked, silent=silent)
    assert found.state == state
    assert found.why.startswith(why)
    assert bool(found.why) == bool(why)


def test_patience_grows_with_the_length_of_rounds(tmp_path):
    run = Run(tmp_path, RunConfig(rounds=2), SOME)
    there = beat("running", "other")
    assert condition(run, there, locked=False, silent=301, slowest=16).state == "running"  # 20 rounds of 16 s: 320 s
    assert condition(run, there, locked=False, silent=321, slowest=16).state == "quiet"


HOLD = """
import sys
from pathlib import Path
from fedncv.store import hold
hold(Path(sys.argv[1]))
print(flush=True)
input()
"""


def test_a_lock_of_another_process_is_seen_and_not_taken(tmp_path):
    from fedncv import store

    assert heartbeat.is_locked(tmp_path) is False
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        assert heartbeat.is_locked(tmp_path) is True
        holder.communicate(b"\n")
    assert heartbeat.is_locked(tmp_path) is False
    store.hold(tmp_path)  # nothing has kept it
    store.release(tmp_path)


def test_what_a_process_says_can_be_read_and_what_is_damaged_is_not_believed(tmp_path):
    heartbeat.write(tmp_path, "failed", "no <data>")
    found = heartbeat.read(tmp_path)
    assert (found.state, found.reason, found.pid, found.machine) == ("failed", "no <data>", os.getpid(), OURS)
    assert found.memory > 1_000_000
    path = tmp_path / "status.json"
    whole = path.read_bytes().strip()
    for end in range(len(whole)):  # a copy that was cut
        path.write_bytes(whole[:end])
        assert heartbeat.read(tmp_path) is None
    for wrong in (b"[]", b"null", whole.replace(b'"failed"', b"1"), b"[" * 60_000):
        path.write_bytes(wrong)
        assert heartbeat.read(tmp_path) is None
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(whole)
    path.symlink_to(tmp_path / "elsewhere")
    assert heartbeat.read(tmp_path) is None


def test_a_folder_that_cannot_be_written_stops_no_run(tmp_path):
    heartbeat.write(tmp_path / "gone", "running")
    assert not (tmp_path / "gone").exists()

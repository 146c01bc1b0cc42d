"""Tell whether a run trains: from its rows, the lock on its folder, and what its process last said.

    the last round is there                                    finished
    another process of this machine holds the lock             running, whatever the files say
    the last row says so                                       failed (diverged) or stopped (by a callback)
    status.json says so                                        failed or stopped, with the reason
    status.json says running, and is of this machine           stopped: the process has died without a word
    status.json says running, of another machine, and is new   running there
    otherwise, with rows                                       quiet: it seems to have stopped
    no rows                                                    waiting

A run is called running only if a lock or a fresh file shows it.
"""

from typing import NamedTuple

from fedncv import heartbeat
from fedncv.heartbeat import Beat
from fedncv.report import names
from fedncv.results import Run

FINISHED, RUNNING, FAILED, STOPPED, QUIET, WAITING = "finished", "running", "failed", "stopped", "quiet", "waiting"
UNREADABLE = "unreadable"
WORDS = {QUIET: "seems stopped", WAITING: "not started"}
PATIENCE = 300.0  # seconds without a sign after which a run on another machine seems stopped
ROUNDS = 20.0  # or so many times its latest round, if that is longer


class Condition(NamedTuple):
    state: str
    why: str = ""

    @property
    def words(self) -> str:
        return WORDS.get(self.state, self.state)


def condition(run: Run, beat: Beat | None, *, locked: bool | None, silent: float, slowest: float = 0.0) -> Condition:
    """Return the state of a run.

    ``silent`` is the number of seconds since its files were last written, ``slowest`` the longest of its latest rounds.
    ``locked`` is None where locks cannot be looked at.
    """
    patience = max(PATIENCE, ROUNDS * slowest)
    late = f"no row for {names.duration(silent)}" if run.rows else f"no sign for {names.duration(silent)}"
    if run.status == "finished":
        return Condition(FINISHED)
    if locked:
        return Condition(RUNNING, late if silent > patience else "")
    if run.status == "failed":
        return Condition(FAILED, str(run.rows[-1]["failed"]))
    if run.stopped:
        return Condition(STOPPED, run.stopped)
    if beat is not None and beat.state in (heartbeat.FAILED, heartbeat.STOPPED):
        return Condition(beat.state, beat.reason)
    if beat is not None and beat.state == heartbeat.RUNNING:
        if locked is not None and beat.machine == heartbeat.this_machine():
            return Condition(STOPPED, "its process ended without a word: it was killed, or the machine went down")
        if silent <= patience:
            return Condition(RUNNING, "on another machine")
        return Condition(QUIET, late)
    if run.rows:
        return Condition(QUIET, f"no process of this machine trains it; {late}")
    return Condition(WAITING)

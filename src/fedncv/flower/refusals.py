"""A client's refusal or failure as a code, so that no text, path or name of the client's machine crosses the wire.

    record "refusal"    code: a name of REASONS      said: a few words that the code needs, such as a version

The whole text stays in the client's own log. The server has the words for every code, and what the operator can do; it
shows ``said`` as foreign text. A refusal is final for the round; only codes in ``PASSING`` are asked again.
"""

import errno as numbers
import os
from typing import NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict

from fedncv.flower.foreign import quoted
from fedncv.flower.samples import SamplesError
from fedncv.flower.wire import WireError

REFUSAL = "refusal"
_LEAVE_OUT = "leave it out (leave_out = [{u}] in the server's rules.toml, then resume)"
_SAME_VERSION = "install the same fedncv on both machines, then resume"

REASONS: dict[str, tuple[str, str]] = {
    "fedncv": ("it runs another version of fedncv than the server", _SAME_VERSION),
    "source": (
        "its fedncv has the server's version number, but other code",
        "install the same release or commit on both machines, then resume",
    ),
    "method": ("the method's name means other knobs there than at the server", _SAME_VERSION),
    "settings": ("the run's settings mean something else there than at the server", _SAME_VERSION),
    "code": (
        "the code of the run's own method, model or data is not the server's, or its Python has another version",
        "install the same code and the same Python on both machines, then resume",
    ),
    "constants": (
        "the frozen weights or constant buffers of its model are not the server's",
        "let the model's function make the same ones on every machine, then resume",
    ),
    "data": (
        "its data file, or its file `secret`, is not the one with which it joined",
        f"restore the file; or {_LEAVE_OUT}; or start a new run with the new data",
    ),
    "unreadable": (
        "its data file is missing, damaged or of another form",
        "see its log; restore the file, then resume",
    ),
    "samples": (
        "its number of training samples is not the one that the server holds",
        f"restore its data file, or joined.json of the run; or {_LEAVE_OUT}; or start a new run",
    ),
    "state": (
        "its stored state of the last counted round is missing or damaged: its disk was lost or set back to an old one",
        f"restore its folder; or {_LEAVE_OUT}; or go back to a round whose state it still has (`fedncv federation "
        "resume … --from-round N`; it names them); or start a new run. Without its state it would be reset silently",
    ),
    "old server": (
        "it has been asked for a later round before: the server's folder was set back to an old copy",
        "restore the newer folder of the server; or start a new run",
    ),
    "secure": (
        "it refuses a step of the secure sum",
        "see its log; if a machine was set back to an old copy, restore it; if nothing explains it, the server cheats",
    ),
    "record": (
        "its record of the run's secure sums is missing or damaged: its disk was lost or set back to an old one",
        f"restore its folder; or {_LEAVE_OUT}; or start a new run",
    ),
    "roster": (
        "its roster of the clients' public keys is missing, damaged or not the server's",
        "copy clients/NUMBER/roster.toml from the machine where keys were last changed to every client, then resume",
    ),
    "room": (
        "it has more training samples than the sums have room for",
        f"raise samples in +fixed_point in a new run; or {_LEAVE_OUT}",
    ),
    "plain": ("the run has secure sums, and it is asked to send its own reply", "see its log; the server cheats"),
    "not finite": ("its update is not finite", "use a lower learning rate"),
    "consent": (
        "its own rules.toml does not allow this run",
        f"agree on a run with whoever keeps the client, who can change the file; or {_LEAVE_OUT}",
    ),
    "device": (
        "the device in its client.toml is not there",
        f"whoever keeps the client mends the GPU, or sets device to cpu; or {_LEAVE_OUT}",
    ),
    "scores": ("it tells no scores", "nothing; evaluate and min_test_samples in its own rules.toml decide"),
    "audit": (
        "the end of its audit log was changed or is damaged",
        "see its log; whoever keeps the client restores audit.jsonl, or begins a new one; then resume",
    ),
    "few": ("it has too few training samples for one step", _LEAVE_OUT),
    "number": ("its number is not one of the run's clients", "correct `client` in its client.toml"),
    "message": ("it rejects the server's message", "see its log"),
    "disk": ("it cannot read or write a file", "see its log; it is asked again"),
    "memory": ("it has not enough memory", "see its log; it is asked again"),
    "failed": ("its code failed", "see its log; it is asked again"),
}
"""Code -> what happened, and what the operator can do."""
PASSING = ("disk", "memory", "failed")  # these may pass: the request is repeated


class RefusedError(ValueError):
    """The client does not take part in this request. Only the code and ``said`` are sent; the text stays here."""

    def __init__(self, code: str, text: str, said: str = "") -> None:
        super().__init__(text)
        self.code, self.said = code, said


class Refusal(NamedTuple):
    """A client's refusal as the server shows it."""

    code: str
    words: str  # one line: what happened
    remedy: str

    @property
    def passes(self) -> bool:
        return self.code in PASSING


def write(error: Exception, request: Message) -> Message:
    """Return the reply that stands for an error."""
    code, said = "failed", ""
    if isinstance(error, RefusedError):
        code, said = error.code, error.said
    elif isinstance(error, WireError):
        code = "message"
    elif isinstance(error, SamplesError):
        code = "unreadable"
    elif isinstance(error, MemoryError):
        code = "memory"
    elif isinstance(error, OSError):
        code, said = "disk", numbers.errorcode.get(error.errno or 0, "")
    return Message(RecordDict({REFUSAL: ConfigRecord({"code": code, "said": said})}), reply_to=request)


def read(answer: Message, u: int) -> Refusal | None:
    """Return the refusal in client u's answer, or None; raise WireError if it is not in this form."""
    if REFUSAL not in answer.content:
        return None
    found = answer.content[REFUSAL]
    values = dict(found) if isinstance(found, ConfigRecord) else {}
    code, said = values.get("code"), values.get("said")
    if len(answer.content) != 1 or sorted(values) != ["code", "said"] or not isinstance(said, str):
        raise WireError("it refuses in a form that is not known here")
    if not isinstance(code, str) or code not in REASONS:
        raise WireError(f"it refuses for a reason that is not known here, {quoted(code)}")
    words, remedy = REASONS[code]
    if code == "disk" and said in numbers.errorcode.values():
        words += f" ({os.strerror(getattr(numbers, said))})"
    elif said:
        words += f" (it says {quoted(said)})"
    return Refusal(code, words, remedy.format(u=u))

"""A client's state between rounds, on its disk, so that a killed machine loses and resets nothing.

    runs/RUN/round-000007.safetensors      the client's state after training in round 7

Every request contains the last round of this client that the server counted (0: none yet). The client starts from
its state of that round, and stores its new state under the number of the new round:

    counted = 5, round = 7    begin from round-000005, train, write round-000007, reply

If the reply is lost, late or rejected, the next request still has counted = 5, and the client's round 7 is dropped.
So the client's state is always the one that the server counted. A repeated request starts from the same file and
writes the same bytes. A missing or damaged file stops the client with an error; it never starts again from the
beginning by itself. Files remain for the counted round, the new one, and those that the request lists: the client's
last counted rounds at the checkpoints to which the server can roll back.

    rollbacks = 1, round = 6      the operator rolled the run back: what was trained from round 6 on is dropped

A request with fewer roll-backs than the client knows, or for a round before its newest one, comes from a server whose
disk was set back to an old copy, and is refused.
"""

import contextlib
import fcntl
import json
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedncv.engine.problem import Kept, Problem, State, keeps
from fedncv.flower.private import private_files, private_folder
from fedncv.flower.refusals import RefusedError
from fedncv.flower.wire import fill
from fedncv.store import write_atomically
from fedncv.tree import leaves


class OwnError(RefusedError):
    """The client's stored state is missing, or the request is an old one."""


class Own:
    """The store of one client for one run."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder / run, run
        private_folder(folder)
        private_folder(self._folder)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Allow one request at a time: a second process of the same client waits."""
        with private_files():
            file = (self._folder / "lock").open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def begin(
        self, problem: Problem, u: int, *, round: int, counted: int, keep: Collection[int] = (), rollbacks: int = 0
    ) -> Kept:
        """Return client u's state of round ``counted``, or that of ``init_own`` if the server never counted it.

        ``keep`` are other counted rounds whose states stay, and ``rollbacks`` says how often the run was rolled back.
        """
        if not 0 <= counted < round:
            raise OwnError("message", f"round {round} of run {self._run} cannot follow counted round {counted}")
        self._follow(round, rollbacks)
        newest = max(self._rounds(), default=0)
        if round < newest:
            text = f"round {round} of run {self._run} is over: the client has been asked for round {newest}"
            raise OwnError("old server", text, f"round {newest}")
        fresh = keeps(problem, State(0, (), (), {}), u)
        nothing = all(leaf.numel() == 0 for leaf in _tensors(fresh).values())  # nothing can be lost
        kept = fresh if counted == 0 or nothing else self._read(counted, fresh)
        for old in self._rounds():
            if old not in (counted, round, *keep):
                self._path(old).unlink(missing_ok=True)
        return kept

    def _follow(self, round: int, rollbacks: int) -> None:
        """Drop the rounds that were trained before a roll-back that the client hears of now."""
        path = self._folder / "rollbacks"
        known = int(path.read_text()) if path.exists() else 0
        if rollbacks < known:
            text = f"the server knows of {rollbacks} roll-backs of run {self._run}, and this client of {known}"
            raise OwnError("old server", text, f"{known} roll-backs")
        if rollbacks > known:
            for old in self._rounds():
                if old >= round:
                    self._path(old).unlink()
            with private_files():
                write_atomically(path, str(rollbacks).encode(), name="own rollbacks")

    def write(self, round: int, kept: Kept) -> None:
        tensors = _tensors(kept)
        about = {"run": self._run, "round": round, "check": _checksum(tensors)}
        with private_files():
            write_atomically(self._path(round), save(tensors, {"fedncv": json.dumps(about)}), name="own")

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:06d}.safetensors"

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("round-")) for path in self._folder.glob("round-*.safetensors"))

    def _read(self, round: int, template: Kept) -> Kept:
        path = self._path(round)
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["fedncv"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
            if about != {"run": self._run, "round": round, "check": _checksum(tensors)}:
                raise ValueError("it belongs to another run or round, or is damaged")
            expected = dict(leaves(template))
            if {n: (t.shape, t.dtype) for n, t in tensors.items()} != {
                n: (t.shape, t.dtype) for n, t in expected.items()
            }:
                raise ValueError("its tensors have another form")
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            there = ", ".join(map(str, self._rounds())) or "no round"
            raise OwnError(
                "state",
                f"this client's state of round {round} cannot be used ({path}: {error}); restore it from a copy, "
                "or start a new run: continuing without it would silently reset the client",
                f"it has states of {there}",
            ) from None
        filled = fill(template, {path: tensor.to(expected[path].device) for path, tensor in tensors.items()})
        assert isinstance(filled, Kept)
        return filled


def _tensors(kept: Kept) -> dict[str, Tensor]:
    found = {}
    for path, leaf in leaves(kept):
        if not isinstance(leaf, Tensor):
            raise OwnError("failed", f"a client's state consists of tensors, but {path} is a {type(leaf).__name__}")
        found[path] = leaf.detach().cpu().contiguous().clone()
    return found


def _checksum(tensors: dict[str, Tensor]) -> int:
    check = 0
    for name in sorted(tensors):
        check = zlib.crc32(
            tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes(), zlib.crc32(name.encode(), check)
        )
    return check

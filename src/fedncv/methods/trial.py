"""Call the client functions of a user's own method once, so that a mistake in them is one line before training."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.flat import Model
from fedncv.imports import is_ours, place_of
from fedncv.keys import key_for
from fedncv.methods.ask import Ask, Batch, Client
from fedncv.methods.base import Federation, Method, Work, check_reveals
from fedncv.tasks import Task
from fedncv.tree import row

CALLS = {
    "init": "init(x_P, federation)",
    "init_own": "init_own(ask, x_P)",
    "phases": "phases(epochs)",
    "broadcast": "broadcast(server, ids_S)",
    "begin": "begin(ask, down, own)",
    "direction": "direction(ask, y_P, batch, down, own, scratch)",
    "finish": "finish(ask, y_P, work, down, own, scratch)",
}
WANTED = {"begin": ("y_P", "scratch"), "direction": ("g_P", "scratch"), "finish": ("up", "own")}


class Given(NamedTuple):
    """What the trial is made with."""

    model: Model
    task: Task
    federation: Federation
    client: Client
    batch: Batch
    epochs: int
    work: Work


def try_method(name: str, method: Method, given: Given) -> None:
    """Raise ValueError with the function that fails or returns the wrong thing; random generators stay as they are."""
    with _same_draws(given.batch.x.device):
        _try(name, method, given)


def _try(name: str, method: Method, given: Given) -> None:
    model = given.model
    x_P, b_R, size = model.start_P, model.start_R, len(given.batch.x)

    def asked(**phase: Any) -> Ask:
        key = key_for(0, "trial").to(x_P.device)
        known: dict[str, Any] = {"client": given.client, "round": 0, "key": key, "num_batches": 1, "batch_size": size}
        return Ask(model, given.task, b_R, **known, **phase)

    def call(function: str, *arguments: Any) -> Any:
        try:
            return getattr(method, function)(*arguments)
        except Exception as error:  # any error of the user's function
            if isinstance(error, ValueError) and is_ours(error):
                raise
            raise ValueError(
                f"method {name!r}: {function} failed: {place_of(error)}; it is called as {CALLS[function]}"
            ) from error

    def call_for_two(function: str, *arguments: Any, like: Tensor | None = None) -> tuple[Any, Any]:
        found = call(function, *arguments)
        first, second = WANTED[function]
        vector = "" if like is None else f", {first} of shape ({like.numel()},)"
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ValueError(
                f"method {name!r}: {function} returns {_said(found)}; it must return ({first}, {second}){vector}"
            )
        if like is not None and not (isinstance(found[0], Tensor) and _fits(found[0], like, first)):
            raise ValueError(
                f"method {name!r}: {function} returns {_said(found[0])} as {first}; it must return "
                f"({first}, {second}){vector}, one number per trainable parameter"
            )
        return found[0], found[1]

    server = call("init", x_P, given.federation)
    own = call("init_own", asked(), x_P)
    down = row(call("broadcast", server, torch.zeros(1, dtype=torch.int64, device=x_P.device)), 0)
    y_P, scratch = call_for_two("begin", asked(), down, own, like=x_P)
    for i, phase in enumerate(call("phases", given.epochs)):
        ask = asked(phase=i, mode=phase.mode)
        trains = bool(phase.trains)  # otherwise nobody uses the direction
        like = y_P if trains else None
        g_P, scratch = call_for_two("direction", ask, y_P, given.batch, down, own, scratch, like=like)
        y_P = y_P - given.work.lr * g_P if trains else y_P
    up, _ = call_for_two("finish", asked(), y_P, given.work, down, own, scratch)
    try:
        check_reveals(method, up)
    except ValueError as error:
        raise ValueError(f"method {name!r}: {error}") from None


def _fits(found: Tensor, like: Tensor, name: str) -> bool:
    """Return whether it has the shape of ``like``; behind the model, ``y_P`` may have personal parameters."""
    longer = name == "y_P" and found.dim() == 1 and found.numel() > like.numel()
    return found.shape == like.shape or longer


def _said(found: object) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    if isinstance(found, tuple | list):
        return f"{len(found)} values"
    return type(found).__name__


@contextlib.contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    """Restore the global random generators afterwards, so that a method that uses them draws as without a trial."""
    python, theirs = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(theirs)

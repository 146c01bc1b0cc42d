"""The contract: what a federated method is, and what its pieces may ask for.

A method is a value of pure functions. What crosses the wire is explicit (``down``, ``up``), what never leaves a
client is explicit (``own``), and no engine knows a method by name. One round:

    server   down_S  = broadcast(server, ids_S)
    client   y, scratch = begin(ask, down, own)
             for every batch:  g, scratch = direction(ask, y, batch, down, own, scratch);  y <- SGD(y, g)
             up, own = finish(ask, y, work, down, own, scratch)
    server   combined = combine(server, replies)               replies in the order of their ids
             server   = step(ask, server, combined)

The sums form: a method without ``combine`` never sees a single reply. Its ``step`` is given ``Sums``, the weighted
means and sums of every field of ``up``. Secure aggregation, differential privacy and partial sums rest on this form.

``down``, ``up``, ``own``, ``scratch`` and ``server`` are tensors, tuples or NamedTuples of tensors (``()`` for
nothing); a server's state may also hold Python numbers. Client pieces contain no Python branch on the value of a
tensor, so that ``torch.vmap`` can run a thousand clients at once.

Letters of shapes: P parameters, R running statistics, B samples of a batch, C classes, S clients of the
round, N all clients.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedncv.flat import Layout, Mode, Model
from fedncv.keys import Key
from fedncv.methods.ask import Ask, Batch, Client, Notes
from fedncv.methods.sums import Replies, Sums, Weight, field_of, sums_from_totals, sums_of, weighted_sum
from fedncv.tree import leaves, row

__all__ = [
    "Ask", "Batch", "BufferRule", "Client", "Federation", "Method", "Notes", "Phase", "Prediction", "Replies",
    "ServerAsk", "Step", "Stepped", "Sums", "Weight", "Work", "aggregate", "combined", "field_of", "for_all",
    "moved_by", "sums_from_totals", "sums_of", "weighted_sum",
]  # fmt: skip


class Federation(NamedTuple):
    """What the server knows of the federation when it begins."""

    num_clients: int
    per_round: int
    rounds: int
    sizes_N: Tensor  # training samples of every client, asked once when it joins; float64
    num_classes: int
    layout: Layout
    key: Key  # for draws of the server before the first round


class Phase(NamedTuple):
    """A part of local training. A phase that trains nothing is a pass over the data."""

    epochs: int
    trains: tuple[str, ...] = ("body", "head")
    mode: Mode = "train"


class Work(NamedTuple):
    """What a client did this round."""

    steps: int | Tensor  # that moved the model; a pass over the data has none
    samples: int | Tensor  # of those steps
    lr: float | Tensor
    total_step: float | Tensor
    """Sum of the factors with which the gradients entered x - y: steps * lr, more with momentum."""


class Prediction(NamedTuple):
    """What a client predicts with."""

    x_P: Tensor
    buffers_R: Tensor  # running statistics
    offset_C: Tensor | None = None  # added to its logits


Step = Callable[[Model, Any, Any, Any], Any]  # (model, state, row, given) -> state, by its arguments alone


class ServerAsk(NamedTuple):
    """What ``step`` may ask for."""

    model: Model
    round: int
    key: Key
    repeat: Callable[[Step, Any, Any, Any], Any] | None = None  # an engine's own way to run a loop

    def loop(self, step: Step, state: Any, rows: Any, given: Any) -> Any:
        """Return state <- step(model, state, row, given) after every row of ``rows``: for a server that trains.

        An engine may record the step and replay it, so ``step`` is one function for all rounds, it reads nothing
        but its arguments, and numbers in ``state`` that are not tensors stay as they are.
        """
        if self.repeat is not None:
            return self.repeat(step, state, rows, given)
        for i in range(len(next(leaf for _, leaf in leaves(rows)))):
            state = step(self.model, state, row(rows, i), given)
        return state


class Stepped(NamedTuple):
    """What a server's step gives."""

    server: Any
    move_P: Tensor | None = None
    """x - x', where the step computed it: momentum builds on it without the rounding of x - x'."""
    numbers: Mapping[str, float | Tensor] = {}
    """Named numbers for the row of the round in metrics.jsonl, such as a step size or a learned beta."""


class BufferRule(NamedTuple):
    """How running statistics travel where the usual rules do not fit; the state is the rule's own."""

    init: Callable[[Tensor, Federation], Any]  # start_R, federation -> state
    broadcast: Callable[[Any, Any, Tensor], Tensor]  # state, server, ids_S -> b_SR
    step: Callable[[ServerAsk, Any, Any, Any], Any]  # ask, state, server, combined -> state
    combine: Callable[[Tensor, Replies], Any] | None = None  # b_SR, replies -> combined; None: the mean b_R by samples
    with_statistics: Callable[[Any, Tensor], Any] = lambda _state, b_R: b_R  # the state with these in place of its own
    shared: bool = False
    """All clients are sent the same; a study that wants personal statistics gets those instead."""


class Method(NamedTuple):
    """See the top of the file. ``fedavg()._replace(…)`` is the usual way to make one."""

    init: Callable[[Tensor, Federation], Any]
    init_own: Callable[[Ask, Tensor], Any]
    phases: Callable[[int], tuple[Phase, ...]]  # local epochs of the study -> phases
    broadcast: Callable[[Any, Tensor], Any]
    begin: Callable[[Ask, Any, Any], tuple[Tensor, Any]]
    direction: Callable[[Ask, Tensor, Batch, Any, Any, Any], tuple[Tensor, Any]]
    finish: Callable[[Ask, Tensor, Work, Any, Any, Any], tuple[Any, Any]]
    step: Callable[[ServerAsk, Any, Any], Stepped]
    predict: Callable[[Ask, Tensor, Any, Any], Prediction]  # ask, y, down, own
    shared: Callable[[Any], Tensor | None]
    """server -> the one model all clients share; None where each has a part of its own."""
    reveals: Mapping[str, str]
    """Field of ``up`` -> what the server learns from it. Nothing undeclared crosses."""
    combine: Callable[[Any, Replies], Any] | None = None
    """server, replies -> what ``step`` is given. None is the sums form: ``step`` is given ``Sums``."""
    weights: Mapping[str, Weight] = {}
    """Field of ``up`` -> its weight in ``Sums``; a field that is not named goes by samples."""
    model: Callable[[Any], Tensor] | None = None
    """server -> the model that clients train from; None where there is no one model."""
    with_model: Callable[[Any, Tensor], Any] | None = None
    """server, x_P -> the server with this model to train from; None where ``model`` is."""
    buffers: Literal["averaged", "personal"] | BufferRule = "averaged"
    same_batches: bool = False
    """Batches keep their samples through a round and only change places: for a memory per batch."""
    fixed_sizes: bool = False
    """Its sums hold only while clients keep their number of samples: no streams."""
    switches: tuple[str, ...] = ()
    """Switches that are part of it already; a second time they would count twice."""
    hand_out: Callable[[Any, Tensor], Any] | None = None
    """Like ``broadcast``, for inference, where that model differs from the one that clients train from."""

    @property
    def form(self) -> str:
        return "sums" if self.combine is None else "each reply"


def combined(method: Method, server: Any, replies: Replies) -> Any:
    """Return what the method's ``step`` works with."""
    return sums_of(replies, method.weights) if method.combine is None else method.combine(server, replies)


def aggregate(method: Method, ask: ServerAsk, server: Any, replies: Replies) -> Stepped:
    """Return the server's half of a round."""
    stepped = method.step(ask, server, combined(method, server, replies))
    if not isinstance(stepped, Stepped):
        raise TypeError(f"step must return Stepped(server), not {type(stepped).__name__}")
    return stepped


def moved_by(server: Any, move_P: Tensor, **changes: Any) -> Stepped:
    """Return x <- x - move, for a server with the field ``x_P``, and other fields as given."""
    return Stepped(server._replace(x_P=server.x_P - move_P, **changes), move_P)


def for_all(x: Tensor, ids_S: Tensor) -> Tensor:
    """Return the same message for every client of the round (a view: nothing is copied)."""
    return x.expand(len(ids_S), *x.shape)

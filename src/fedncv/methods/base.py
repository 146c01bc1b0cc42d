"""Define the contract of a federated method: its functions and the types that they exchange.

A method is a value made of pure functions. Messages are explicit (``down``, ``up``), and so is the state that never
leaves a client (``own``). No engine knows a method by name. One round:

    server   down_S  = broadcast(server, ids_S)
    client   y, scratch = begin(ask, down, own)
             for every batch:  g, scratch = direction(ask, y, batch, down, own, scratch);  y <- optimizer(y, g)
             up, own = finish(ask, y, work, down, own, scratch)
    server   combined = combine(server, replies)               replies in the order of their ids
             server   = step(ask, server, combined)

A client uses its model as ``predict`` says, with what ``begin`` gives it ("before") and after its local training
("after"). ``predict`` may see the notes of a ``survey`` of the client's training samples, and ``decide`` may make more
of the model's output than its logits.

A method without ``combine`` is in the sums form: it never sees a single reply. Its ``step`` receives ``Sums``, the
weighted means and sums of every field of ``up``. Secure aggregation, differential privacy and partial sums need this
form.

``down``, ``up``, ``own``, ``scratch`` and ``server`` are tensors, tuples or NamedTuples of tensors (``()`` for
nothing); a server's state may also hold Python numbers. Client functions contain no Python branch on the value of a
tensor, so that ``torch.vmap`` can run a thousand clients at once.

Letters of shapes: P parameters, R running statistics, B samples of a batch, C classes, S clients of the
round, N all clients.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv.accountant import Accountant
from fedncv.flat import Mode, Model, Output
from fedncv.keys import Key
from fedncv.layout import Layout
from fedncv.methods.ask import Ask, Batch, Client, Notes
from fedncv.methods.sums import (
    Replies,
    Sums,
    Totals,
    Weight,
    field_of,
    sums_from_totals,
    sums_of,
    sums_of_whole,
    totals_of,
    weighted_sum,
    whole_totals_of,
)
from fedncv.secure.fixed_point import Grid
from fedncv.tree import leaves, row

__all__ = [
    "Ask", "Batch", "BufferRule", "Changes", "Client", "Federation", "FineTuning", "Grid", "Method", "Notes", "Phase",
    "Prediction", "Privacy", "Replies", "Rule", "Screen", "ServerAsk", "Step", "Stepped", "Sums", "Survey", "Totals",
    "Weight", "Work", "aggregate", "combined", "field_of", "for_all", "moved_by", "rows_at", "sums_from_totals",
    "sums_of", "sums_of_whole", "take_step", "totals_of", "weighted_sum", "whole_totals_of",
]  # fmt: skip


class Federation(NamedTuple):
    """Facts that the server knows before the first round."""

    num_clients: int
    per_round: int
    rounds: int
    sizes_N: Tensor  # training samples of every client, reported when it joins; float64
    num_classes: int
    layout: Layout
    key: Key  # for random draws of the server before the first round
    label_counts: Callable[[], Tensor] | None = None
    """Samples of each class at every client (N x C), for a method whose ``joining`` asks for them."""
    sampling: str = "uniform"
    """How the clients of a round are drawn, as in the config."""
    inclusion_N: Tensor | None = None
    """Probability that each client is drawn and replies in a round, float64; None: per_round / num_clients."""
    drops_out: bool = False
    """Whether clients that are drawn may fail to reply."""


class Phase(NamedTuple):
    """A part of local training. A phase that trains nothing is a pass over the data."""

    epochs: int
    trains: tuple[str, ...] = ("body", "head")
    """Slices that it trains: of the model "body" and "head", and "own", what ``begin`` put behind the model."""
    mode: Mode = "train"


class Work(NamedTuple):
    """Local work of one client in this round."""

    steps: int | Tensor  # that moved the model; a phase that trains nothing of it adds none
    samples: int | Tensor  # of those steps
    lr: float | Tensor
    total_step: float | Tensor
    """Sum of the factors with which the gradients entered x - y: steps * lr, more with momentum. NaN if the optimizer
    is not SGD; a method that uses it sets ``needs_sgd``."""


class Prediction(NamedTuple):
    """Model, running statistics and logit offset that a client predicts with."""

    x_P: Tensor
    buffers_R: Tensor  # running statistics
    offset_C: Tensor | None = None  # added to its logits
    given: Any = ()  # for ``Method.decide``: tensors, a tuple or NamedTuple of them


class Survey(NamedTuple):
    """A pass over the client's training samples before every prediction, at the model that it predicts with.

    Every sample is seen once, in keyed order, also where a batch is too small for training. ``predict`` finds the last
    notes in ``ask.survey``. Scoring is not counted as work, and neither is this pass.
    """

    start: Callable[[Ask, Tensor], Any]  # ask, y_P -> notes
    see: Callable[[Ask, Tensor, Batch, Any], Any]  # ask (mode "eval"), y_P, batch, notes -> notes


class FineTuning(NamedTuple):
    """The local training that "after" measures, if it is not the method's training of a round."""

    phases: Callable[[int], tuple[Phase, ...]]  # local epochs of the study -> phases
    lr: float | None = None  # learning rate of all its steps; None: the study's in that round


Step = Callable[[Model, Any, Any, Any], Any]  # (model, state, row, given) -> state, by its arguments alone


class ServerAsk(NamedTuple):
    """Model, round and random key for ``step``."""

    model: Model
    round: int
    key: Key
    repeat: Callable[[Step, Any, Any, Any], Any] | None = None  # an engine's faster way to run `loop`

    def loop(self, step: Step, state: Any, rows: Any, given: Any) -> Any:
        """Apply state <- step(model, state, row, given) for every row of ``rows`` and return the state.

        It is for a server that trains. An engine may record the step and replay it. So ``step`` must be the same
        function in all rounds and read only its arguments; numbers in ``state`` that are not tensors do not change.
        """
        if self.repeat is not None:
            return self.repeat(step, state, rows, given)
        for i in range(len(next(leaf for _, leaf in leaves(rows)))):
            state = step(self.model, state, row(rows, i), given)
        return state


class Stepped(NamedTuple):
    """Result of a server's step."""

    server: Any
    move_P: Tensor | None = None
    """x - x', if the step computed it. Momentum uses it and avoids the rounding error of x - x'."""
    numbers: Mapping[str, float | Tensor] = {}
    """Named numbers for the row of the round in metrics.jsonl, such as a step size or a learned beta."""


class BufferRule(NamedTuple):
    """Rule for sending and combining running statistics, if "averaged" and "personal" do not fit."""

    init: Callable[[Tensor, Federation], Any]  # start_R, federation -> state
    broadcast: Callable[[Any, Any, Tensor], Tensor]  # state, server, ids_S -> b_SR
    step: Callable[[ServerAsk, Any, Any, Any], Any]  # ask, state, server, combined -> state
    combine: Callable[[Tensor, Replies], Any] | None = None  # b_SR, replies -> combined; None: the mean b_R by samples
    with_statistics: Callable[[Any, Tensor], Any] = lambda _state, b_R: b_R  # the state with these statistics
    shared: bool = False
    """All clients receive the same statistics. A study may then choose personal ones instead."""


Rule = Callable[[Tensor, Tensor], Tensor]
"""(a_SP, w_S) -> rows a'_SP whose mean with the weights w is a robust mean of a_SP."""


class Screen(NamedTuple):
    """Rules that limit what a few bad replies can do."""

    rows: Rule  # for arrays
    coordinates: Rule  # for running statistics and for fields of one number, as (S, 1)


class Changes(NamedTuple):
    """A field of ``up`` that the server adds to its state and the client to its own, such as c_u' - c_u."""

    field: str
    kept: Callable[[Any], Tensor]
    """own -> what the field changes, such as c_u."""
    keep: Callable[[Any, Any, Tensor], Any]
    """own before the round, own after it, the change that was sent -> own with this change instead of the whole one."""
    new: str = ""
    """Field that is 1 in a client's first round and 0 later, if the server counts the clients that it has seen."""


class Privacy(NamedTuple):
    """Guarantee of differential privacy, for the engine, which accounts for the rounds."""

    epsilon: float  # budget; inf: none
    delta: float
    noise: Callable[[Any], float]  # server's state -> deviation of the noise / clip
    accountant: Accountant
    found: bool  # whether the noise was found for the planned number of rounds


class Method(NamedTuple):
    """Functions and facts of one method (see the top of the file). Usually made with ``fedavg()._replace(…)``."""

    init: Callable[[Tensor, Federation], Any]
    init_own: Callable[[Ask, Tensor], Any]
    phases: Callable[[int], tuple[Phase, ...]]  # local epochs of the study -> phases
    broadcast: Callable[[Any, Tensor], Any]
    begin: Callable[[Ask, Any, Any], tuple[Tensor, Any]]
    """ask, down, own -> y, scratch. Parameters behind those of the model are personal: y[:P] is the model."""
    direction: Callable[[Ask, Tensor, Batch, Any, Any, Any], tuple[Tensor, Any]]
    finish: Callable[[Ask, Tensor, Work, Any, Any, Any], tuple[Any, Any]]
    step: Callable[[ServerAsk, Any, Any], Stepped]
    predict: Callable[[Ask, Tensor, Any, Any], Prediction]  # ask, y, down, own
    shared: Callable[[Any], Tensor | None]
    """server -> the model that all clients share; None if each client has a personal part."""
    reveals: Mapping[str, str]
    """Field of ``up`` -> what the server learns from it. Every field must be declared."""
    joining: Mapping[str, str] = {}
    """What every client tells once, when it joins, beside its number of samples: ``label_counts_C`` -> what that is."""
    combine: Callable[[Any, Replies], Any] | None = None
    """server, replies -> the last argument of ``step``. None is the sums form: ``step`` receives ``Sums``."""
    weights: Mapping[str, Weight] = {}
    """Field of ``up`` -> its weight in ``Sums``; fields that are not named are weighted by samples."""
    model: Callable[[Any], Tensor] | None = None
    """server -> the model that clients train from; None if there is no single model."""
    with_model: Callable[[Any, Tensor], Any] | None = None
    """server, x_P -> the server with this model to train from; None if ``model`` is None."""
    buffers: Literal["averaged", "personal"] | BufferRule = "averaged"
    same_batches: bool = False
    """Batches keep their samples during a round; only their order changes. A memory per batch needs this."""
    fixed_sizes: bool = False
    """Its sums are correct only if clients' numbers of samples do not change, so streams are refused."""
    needs_sgd: str = ""
    """Reason why the clients must train with SGD, such as a division of x - y by ``Work.total_step``; empty: any
    optimizer is correct."""
    switches: tuple[str, ...] = ()
    """Switches that it already contains; adding one again is refused."""
    changes: Changes | None = None
    """The field of ``up`` that changes what a client keeps, so that a client can keep what it really sent."""
    privacy: Privacy | None = None
    """Guarantee of differential privacy, if there is one. The server then also makes a step in a round without
    replies, because its noise hides whether there was one."""
    hand_out: Callable[[Any, Tensor], Any] | None = None
    """Like ``broadcast``, for inference, where that model differs from the one that clients train from."""
    decide: Callable[[Model, Tensor, Output, Any], Tensor] | None = None
    """model, x_P, output with the offset added, ``Prediction.given`` -> logits; None: those of the model."""
    survey: Survey | None = None
    finetune: FineTuning | None = None
    refuses: Mapping[str, str] = {}
    """Switch -> the reason why it cannot be added."""
    screen: Screen | None = None
    """Rules of robust combining. The server applies them to running statistics; ``combine`` has applied them to the
    fields of ``up``, and a switch that stores single replies applies them to what it stores."""
    only_simulated: str = ""
    """Reason why a real federation must not use it; empty: it may."""
    graph: Literal["any", "symmetric", "tree"] = "any"
    """What it needs of a federation without a server (docs/topology.md): symmetric, the same symmetric weights in every
    round; tree, relayed sums on a tree. Both need every client in every round, symmetric with a server too."""
    bounds: Mapping[str, float] = {}
    """Field of ``up`` -> a bound on its absolute values for ``+fixed_point``, if it is not like a model's update."""
    grid: Grid | None = None
    """Steps and bounds of the fields, which ``+fixed_point`` has rounded. Sums are then sums of whole numbers."""

    @property
    def form(self) -> str:
        by_rule = isinstance(self.buffers, BufferRule) and self.buffers.combine is not None
        return "each reply" if self.combine is not None or by_rule else "sums"


def check(method: Method) -> None:
    """Raise ValueError if the weights of a method name a field that it does not declare, or are not weights."""
    for field, weight in method.weights.items():
        if field not in method.reveals:
            raise ValueError(f"weights name {field!r}, which reveals does not declare ({', '.join(method.reveals)})")
        if weight not in ("samples", "one"):
            raise ValueError(f"the weight of {field!r} must be 'samples' or 'one', not {weight!r}")
    for field in (method.changes.field, method.changes.new) if method.changes else ():
        if field and field not in method.reveals:
            raise ValueError(f"changes name {field!r}, which reveals does not declare ({', '.join(method.reveals)})")


def check_reveals(method: Method, up: Any) -> None:
    """Raise ValueError if a reply has other fields than the method declares."""
    sent = [path.rpartition(".")[2] or "a tensor without a name" for path, _ in leaves(up)]
    if sorted(sent) != sorted(method.reveals):
        declared = ", ".join(method.reveals) or "nothing"
        raise ValueError(f"clients send {', '.join(sent) or 'nothing'}, but the method's reveals declares {declared}")


def combined(method: Method, server: Any, replies: Replies) -> Any:
    """Return the last argument of the method's ``step``."""
    if method.combine is not None:
        return method.combine(server, replies)
    if method.grid is None:
        return sums_of(replies, method.weights)
    dtype = next(leaf.dtype for _, leaf in leaves(replies.ups))
    return sums_of_whole(whole_totals_of(replies, method.weights, method.grid), method.weights, method.grid, dtype)


def aggregate(method: Method, ask: ServerAsk, server: Any, replies: Replies) -> Stepped:
    """Combine the replies, take the server's step and return its result."""
    return take_step(method, ask, server, combined(method, server, replies))


def take_step(method: Method, ask: ServerAsk, server: Any, given: Any) -> Stepped:
    """Take the server's step with what it is given about the replies, and return its result."""
    stepped = method.step(ask, server, given)
    if not isinstance(stepped, Stepped):
        raise TypeError(f"step must return Stepped(server), not {type(stepped).__name__}")
    return stepped


def moved_by(server: Any, move_P: Tensor, **changes: Any) -> Stepped:
    """Return the step x <- x - move of a server with the field ``x_P``; ``changes`` sets other fields."""
    return Stepped(server._replace(x_P=server.x_P - move_P, **changes), move_P)


def rows_at(table_N: Tensor, ids_S: Tensor, other: Tensor | float) -> Tensor:
    """Return the rows of these clients; ``other`` for clients that never train, which are in no table (``unseen``)."""
    known_S = (ids_S < len(table_N)).view(-1, *[1] * (table_N.dim() - 1))
    return torch.where(known_S, table_N[ids_S.clamp(max=len(table_N) - 1)], other)


def for_all(x: Tensor, ids_S: Tensor) -> Tensor:
    """Return the same message for every client of the round (a view: nothing is copied)."""
    return x.expand(len(ids_S), *x.shape)

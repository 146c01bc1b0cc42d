"""The contract: what a federated method is, and what it may ask.

A method is a value of pure functions. What crosses the wire is explicit (``down``, ``up``), what never
leaves a client is explicit (``own``), and an engine knows no method by name. A round, in their terms:

    server   down_S  = broadcast(server, ids_S)
    client   y, scratch = begin(ask, down, own)
             for every batch:  g, scratch = direction(ask, y, batch, down, own, scratch);  y <- SGD(y, g)
             up, own = finish(ask, y, work, down, own, scratch)
    server   server  = aggregate(ask, server, replies)          replies in the order of their ids

``down``, ``up``, ``own``, ``scratch`` and ``server`` are tensors, tuples or NamedTuples of tensors (``()``
for nothing); a server's state may hold Python numbers as well. Client pieces contain no Python branch on
the value of a tensor, so that ``torch.vmap`` can run a thousand clients at once.

Letters of shapes: P parameters, R running statistics, B samples of a batch, C classes, S clients of the
round, N all clients.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv.flat import Layout, Mode, Model, Output
from fedncv.keys import Key
from fedncv.tasks import Task
from fedncv.tree import leaves, row


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    weight_B: Tensor  # 1 for a sample, 0 for padding
    number: int | Tensor  # which of the client's batches; the same samples all round where `same_batches`

    @property
    def size(self) -> Tensor:
        return self.weight_B.sum()


class Client(NamedTuple):
    """What a client knows of itself. It never leaves the client unless a method's ``up`` declares it."""

    id: int | Tensor
    num_samples: Tensor  # training samples it holds this round
    full_batch: Tensor  # samples of each of its batches but the last, which may have fewer
    label_counts_C: Tensor


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


class Replies(NamedTuple):
    """The answers of a round, stacked in the order of their ids, whatever order they came in."""

    ups: Any  # what `finish` sent, with a leading axis S
    ids_S: Tensor
    sizes_S: Tensor  # training samples
    inclusion_S: Tensor  # probability with which this client's answer was to be expected this round

    @property
    def weight_S(self) -> Tensor:
        """p_u, normalised over the replies."""
        return self.sizes_S / self.sizes_S.sum()


class Ask:
    """What the pieces of a client may ask for: gradients, logits and features at any parameters.

    Made anew for every step. A pass in mode "train" moves ``buffers_R``, and calls are counted: the engine
    multiplies them with the samples of the step.
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        buffers_R: Tensor,
        *,
        client: Client,
        round: int,
        key: Key,
        num_batches: int,
        phase: int = 0,
        mode: Mode = "train",
        stacked: bool = False,
    ) -> None:
        self.layout = model.layout
        self.client = client
        self.round = round
        self.key = key
        """Keyed by seed, round, client and step, for draws of the method's own."""
        self.num_batches = num_batches
        """Batches of one epoch (the most of any client, where clients are stacked)."""
        self.phase = phase
        """Which of the method's phases; a Python number, so a branch on it is allowed."""
        self.buffers_R = buffers_R
        self.received_R = buffers_R
        """Running statistics as they arrived, for a client that predicts after its training."""
        self.num_gradients = 0
        self.num_forwards = 0
        self.value = torch.zeros(())
        """The loss at the latest gradient."""
        self.prior_C: Tensor | None = None
        """Added to all logits before the loss looks at them."""
        self._model, self._task, self._mode, self._stacked = model, task, mode, stacked
        self._differentiating = False

    def forward(self, y_P: Tensor, batch: Batch, *, mode: Mode | None = None) -> Output:
        """Logits and features of the batch at ``y_P``; ``mode`` is the phase's unless given."""
        if self._differentiating:
            self.num_gradients += 1
        else:
            self.num_forwards += 1
        mode = mode or self._mode
        output, self.buffers_R = self._model.forward(
            y_P, self.buffers_R, batch.x, mode=mode, key=self.key, weight_B=batch.weight_B
        )
        return output

    def head(self, y_P: Tensor, features_BF: Tensor) -> Tensor:
        """Logits of given features under the head of ``y_P``."""
        return self._model.head(y_P, features_BF)

    def losses(self, logits_BC: Tensor, batch: Batch) -> Tensor:
        """The study's loss, one number a sample."""
        return self._task.loss(logits_BC if self.prior_C is None else logits_BC + self.prior_C, batch.y)

    def loss(self, y_P: Tensor, batch: Batch, *, offset_C: Tensor | None = None, mode: Mode | None = None) -> Tensor:
        """Mean loss of the batch at ``y_P``, with ``offset_C`` added to the logits."""
        logits_BC = self.forward(y_P, batch, mode=mode).logits_BC
        losses_B = self.losses(logits_BC if offset_C is None else logits_BC + offset_C, batch)
        return (batch.weight_B * losses_B).sum() / batch.size

    def grad(self, y_P: Tensor, batch: Batch, *, offset_C: Tensor | None = None, mode: Mode | None = None) -> Tensor:
        """Gradient of ``loss`` at ``y_P``."""
        return self.grad_of(lambda y: self.loss(y, batch, offset_C=offset_C, mode=mode), y_P)

    def grad_of(self, loss: Callable[[Tensor], Tensor], y_P: Tensor) -> Tensor:
        """Gradient at ``y_P`` of any function of the parameters, written with the other questions."""
        self._differentiating = True
        try:
            if self._stacked:
                return self._functional_gradient(loss, y_P)
            with torch.enable_grad():  # the same numbers as torch.func.grad in two thirds of its time
                leaf_P = y_P.detach().requires_grad_()
                value = loss(leaf_P)
                (g_P,) = torch.autograd.grad(value, leaf_P)
            self.value, self.buffers_R = value.detach(), self.buffers_R.detach()
            return g_P
        finally:
            self._differentiating = False

    def _functional_gradient(self, loss: Callable[[Tensor], Tensor], y_P: Tensor) -> Tensor:
        def with_buffers(y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            value = loss(y)
            return value, (value, self.buffers_R)

        g_P: Tensor
        g_P, (self.value, self.buffers_R) = torch.func.grad(with_buffers, has_aux=True)(y_P)
        return g_P


Step = Callable[[Model, Any, Any, Any], Any]  # (model, state, row, given) -> state, by its arguments alone


class ServerAsk(NamedTuple):
    """What ``aggregate`` may ask for."""

    model: Model
    round: int
    key: Key
    repeat: Callable[[Step, Any, Any, Any], Any] | None = None  # an engine's own way to run a loop

    def loop(self, step: Step, state: Any, rows: Any, given: Any) -> Any:
        """state <- step(model, state, row, given) for every row of ``rows``: for a server that trains.

        An engine may record the step and replay it, so ``step`` is one function for all rounds, it reads nothing
        but its arguments, and numbers in ``state`` that are not tensors stay as they are.
        """
        if self.repeat is not None:
            return self.repeat(step, state, rows, given)
        for i in range(len(next(leaf for _, leaf in leaves(rows)))):
            state = step(self.model, state, row(rows, i), given)
        return state


class BufferRule(NamedTuple):
    """How running statistics travel where the usual rules do not fit; the state is the rule's own."""

    init: Callable[[Tensor, Federation], Any]  # start_R, federation -> state
    broadcast: Callable[[Any, Any, Tensor], Tensor]  # state, server, ids_S -> b_SR
    aggregate: Callable[[ServerAsk, Any, Any, Tensor, Replies], Any]  # ask, state, server, b_SR, replies -> state
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
    aggregate: Callable[[ServerAsk, Any, Replies], Any]
    predict: Callable[[Ask, Tensor, Any, Any], tuple[Tensor, Tensor | None]]
    """(ask, y, down, own) -> the parameters a client predicts with, and an offset on its logits.

    It predicts with the running statistics ``ask.buffers_R``, which may be set here."""
    shared: Callable[[Any], Tensor | None]
    """server -> the one model all clients share; None where each has a part of its own."""
    reveals: Mapping[str, str]
    """Field of ``up`` -> what the server learns from it. Nothing undeclared crosses."""
    buffers: Literal["averaged", "personal"] | BufferRule = "averaged"
    same_batches: bool = False
    """Batches keep their samples through a round and only change places: for a memory per batch."""
    fixed_sizes: bool = False
    """Its sums hold only while clients keep their number of samples: no streams."""
    switches: tuple[str, ...] = ()
    """Switches that are part of it already; a second time they would count twice."""
    hand_out: Callable[[Any, Tensor], Any] | None = None
    """``broadcast`` to clients that are to use the model, where that is another one than they train from."""


def for_all(x: Tensor, ids_S: Tensor) -> Tensor:
    """The same message to every client of the round (a view: nothing is copied)."""
    return x.expand(len(ids_S), *x.shape)


def weighted_sum(weight_S: Tensor, a_SP: Tensor) -> Tensor:
    """sum_u w_u a_u. Every method reduces with this one, so that equal methods give equal bits."""
    return weight_S.to(a_SP.dtype) @ a_SP

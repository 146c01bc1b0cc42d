"""Give a method's client functions their inputs: gradients and logits (``Ask``), a batch, and facts about the client.

Letters of shapes: P parameters, R running statistics, B samples of a batch, C classes, F features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.flat import Mode, Model, Output
from fedncv.keys import Key
from fedncv.layout import Layout
from fedncv.tasks import Task


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    weight_B: Tensor  # 1 for a sample, 0 for padding
    number: int | Tensor  # index of the batch; with `same_batches` it keeps its samples all round

    @property
    def size(self) -> Tensor:
        return self.weight_B.sum()


class Client(NamedTuple):
    """Facts that a client knows about itself. They leave the client only if a method's ``up`` declares them."""

    id: int | Tensor
    num_samples: Tensor  # training samples it holds this round
    full_batch: Tensor  # samples in each of its batches except the last, which may be smaller
    label_counts_C: Tensor


NOTHING = torch.zeros(())


class Notes:
    """Record for the engine: the running statistics after a step, and the number of calls."""

    __slots__ = ("beside", "buffers_R", "differentiating", "num_forwards", "num_gradients", "saw_round", "value")

    def __init__(self, buffers_R: Tensor, beside: "Notes | None" = None) -> None:
        self.beside = beside
        """Notes of the model that this one is trained beside, in which its work is counted too."""
        self.buffers_R = buffers_R
        """Running statistics after the latest pass in mode "train"."""
        self.num_gradients = 0
        self.num_forwards = 0
        self.value = NOTHING
        """The loss at the latest gradient."""
        self.saw_round = False
        """Whether the round number was read; a recorded step that used it is valid for one round only."""
        self.differentiating = False


class Ask:
    """Compute gradients, logits and features at any parameters.

    An ask is immutable: ``replace`` returns another one. The engine makes a new ask for every step. It counts the calls
    and multiplies them by the samples of the step.
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
        batch_size: int,
        phase: int = 0,
        mode: Mode = "train",
        stacked: bool = False,
        received_R: Tensor | None = None,
        prior_C: Tensor | None = None,
        survey: Any = (),
        notes: Notes | None = None,
    ) -> None:
        self.__dict__.update(
            layout=model.layout,
            client=client,
            key=key,
            num_batches=num_batches,
            batch_size=batch_size,
            phase=phase,
            buffers_R=buffers_R,
            received_R=buffers_R if received_R is None else received_R,
            prior_C=prior_C,
            survey=survey,
            notes=notes or Notes(buffers_R),
            _model=model,
            _task=task,
            _round=round,
            _mode=mode,
            _stacked=stacked,
        )

    layout: Layout
    client: Client
    key: Key
    """Key of seed, round, client and step, for the method's own random draws."""
    num_batches: int
    """Batches of one epoch (if clients are stacked, the largest number of any client)."""
    batch_size: int
    """Samples of the largest batch, a Python number (if clients are stacked, of any client)."""
    phase: int
    """Index of the method's current phase; a Python number, so branching on it is allowed."""
    buffers_R: Tensor
    """The client's current running statistics."""
    received_R: Tensor
    """Running statistics as received, for prediction after local training."""
    prior_C: Tensor | None
    """Added to all logits before the loss is computed."""
    survey: Any
    """In ``predict``: the notes of the method's ``Survey`` of the client's training samples; ``()`` without one."""
    notes: Notes
    """For the engine."""
    _model: Model
    _task: Task
    _round: int
    _mode: Mode
    _stacked: bool

    def __setattr__(self, name: str, _value: object) -> None:
        raise AttributeError(f"an ask does not change, so {name} cannot be set; ask.replace sets phase or prior_C")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an ask does not change, so {name} cannot be deleted")

    @property
    def round(self) -> int:
        for each in (self.notes, self.notes.beside):
            if each is not None:
                each.saw_round = True
        return self._round

    def replace(self, **changes: Any) -> "Ask":
        """Return a copy with another ``phase`` or ``prior_C``; both count work in the same notes."""
        given = {"phase": self.phase, "prior_C": self.prior_C} | changes
        if len(given) > 2:
            raise TypeError(f"ask.replace sets phase or prior_C, not {', '.join(changes)}")
        return self._copy(self.buffers_R, self.notes, **given)

    def beside(self, buffers_R: Tensor) -> "Ask":
        """Return an ask for a second model of the same client, with running statistics of its own.

        Its passes move ``notes.buffers_R`` of the returned ask alone; its work is counted with this one's.
        """
        return self._copy(buffers_R, Notes(buffers_R, self.notes), phase=self.phase, prior_C=self.prior_C)

    def _copy(self, buffers_R: Tensor, notes: Notes, *, phase: int, prior_C: Tensor | None) -> "Ask":
        return Ask(
            self._model,
            self._task,
            buffers_R,
            client=self.client,
            round=self._round,
            key=self.key,
            num_batches=self.num_batches,
            batch_size=self.batch_size,
            phase=phase,
            mode=self._mode,
            stacked=self._stacked,
            received_R=self.received_R,
            prior_C=prior_C,
            survey=self.survey,
            notes=notes,
        )

    def forward(self, y_P: Tensor, batch: Batch, *, mode: Mode | None = None) -> Output:
        """Return logits and features of the batch at ``y_P``; ``mode`` is the phase's unless given."""
        notes = self.notes
        for each in (notes, notes.beside):
            if each is not None and notes.differentiating:
                each.num_gradients += 1
            elif each is not None:
                each.num_forwards += 1
        output, notes.buffers_R = self._model.forward(
            y_P, notes.buffers_R, batch.x, mode=mode or self._mode, key=self.key, weight_B=batch.weight_B
        )
        return output

    def head(self, y_P: Tensor, features_BF: Tensor) -> Tensor:
        """Return the logits of given features under the head of ``y_P``."""
        return self._model.head(y_P, features_BF)

    def losses(self, logits_BC: Tensor, batch: Batch) -> Tensor:
        """Return the study's loss, one number per sample."""
        return self._task.loss(logits_BC if self.prior_C is None else logits_BC + self.prior_C, batch.y)

    def loss(self, y_P: Tensor, batch: Batch, *, offset_C: Tensor | None = None, mode: Mode | None = None) -> Tensor:
        """Return the mean loss of the batch at ``y_P``, with ``offset_C`` added to the logits."""
        logits_BC = self.forward(y_P, batch, mode=mode).logits_BC
        losses_B = self.losses(logits_BC if offset_C is None else logits_BC + offset_C, batch)
        return (batch.weight_B * losses_B).sum() / batch.size

    def grad(self, y_P: Tensor, batch: Batch, *, offset_C: Tensor | None = None, mode: Mode | None = None) -> Tensor:
        """Return the gradient of ``loss`` at ``y_P``."""
        return self.grad_of(lambda y: self.loss(y, batch, offset_C=offset_C, mode=mode), y_P)

    def grad_of(self, loss: Callable[[Tensor], Tensor], y_P: Tensor) -> Tensor:
        """Return the gradient at ``y_P`` of any function of the parameters that is written with the other calls."""
        notes = self.notes
        notes.differentiating = True
        try:
            if self._stacked:
                return self._functional_gradient(loss, y_P)
            with torch.enable_grad():  # the same numbers as torch.func.grad in two thirds of its time
                leaf_P = y_P.detach().requires_grad_()
                value = loss(leaf_P)
                (g_P,) = torch.autograd.grad(value, leaf_P)
            notes.value, notes.buffers_R = value.detach(), notes.buffers_R.detach()
            return g_P
        finally:
            notes.differentiating = False
            if notes.beside is not None:
                notes.beside.value = notes.value

    def _functional_gradient(self, loss: Callable[[Tensor], Tensor], y_P: Tensor) -> Tensor:
        notes = self.notes

        def with_buffers(y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            value = loss(y)
            return value, (value, notes.buffers_R)

        g_P: Tensor
        g_P, (notes.value, notes.buffers_R) = torch.func.grad(with_buffers, has_aux=True)(y_P)
        return g_P

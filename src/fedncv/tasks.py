"""Tasks: a per-sample loss and a per-sample score, both replaceable."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fedncv.imports import import_object
from fedncv.results import ACCURACY
from fedncv.spec import nearest


class Task(NamedTuple):
    """Outputs and targets have one row per sample; both functions return one number per row, not their mean.

    A number that belongs to many samples at once, such as F1, is a metric (``fedncv.metrics``), not a score.
    """

    loss: Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> losses_B
    score: Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> scores_B, higher is better
    score_name: str


def _per_row(values: Tensor) -> Tensor:
    if values.dim() == 1:
        return values
    return values.reshape(values.shape[0], -1).mean(dim=1)


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return _per_row((outputs.argmax(dim=1) == targets).to(outputs.dtype))


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return _per_row(F.mse_loss(outputs, targets.reshape(outputs.shape).to(outputs.dtype), reduction="none"))


TASKS: dict[str, Task] = {
    "classification": Task(
        loss=lambda outputs, targets: _per_row(F.cross_entropy(outputs, targets, reduction="none")),
        score=_accuracy,
        score_name=ACCURACY,
    ),
    "regression": Task(
        loss=_squared_error,
        score=lambda outputs, targets: -_squared_error(outputs, targets),
        score_name="minus squared error",
    ),
}


def find_task(name: str) -> Task:
    if name in TASKS:
        return TASKS[name]
    if ":" not in name:
        raise ValueError(nearest(name, TASKS, what="task") + "; or name your own as package.module:task")
    task = import_object(name, what="task")
    if not isinstance(task, Task):
        raise ValueError(f"task {name!r} is {type(task).__name__}, not a fedncv.Task")
    return task

"""Asks of stacked clients: run a function of a method on every row, each row with its own ask."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.flat import Model
from fedncv.keys import Key
from fedncv.methods.base import Ask, Client
from fedncv.tasks import Task
from fedncv.tree import row, stack


class Asks(NamedTuple):
    """Data for making asks: clients and keys are stacked, the rest is the same for all."""

    model: Model
    task: Task
    num_batches: int
    batch_size: int
    round: int
    client: Client
    key_K2: Key
    vmapped: bool = True  # all rows at once, under torch.vmap; otherwise one after the other


def asking(function: Any, asks: Asks, *arguments: Any) -> Any:
    """Apply ``function(ask_of, …)`` to every row, where ``ask_of(buffers_R)`` is the row's ask."""

    def one(client, key, *rows):  # type: ignore[no-untyped-def]
        def ask_of(buffers_R: Tensor, received_R: Tensor | None = None, survey: Any = ()) -> Ask:
            return Ask(
                asks.model,
                asks.task,
                buffers_R,
                client=client,
                round=asks.round,
                key=key,
                num_batches=asks.num_batches,
                batch_size=asks.batch_size,
                stacked=asks.vmapped,
                received_R=received_R,
                survey=survey,
            )

        return function(ask_of, *rows)

    stacked = asks.client, asks.key_K2, *arguments
    if asks.vmapped:
        return torch.vmap(one)(*stacked)
    return stack([one(*row(stacked, k)) for k in range(len(asks.key_K2))])  # type: ignore[no-untyped-call]

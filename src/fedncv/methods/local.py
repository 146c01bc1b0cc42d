"""Local: every client trains alone. A federation has to beat this baseline.

    client   y <- y - lr * grad_u(y)        over its batches, starting from its own model
             keeps y and its running statistics, sends nothing
    server   nothing

The baseline of every paper on personalisation, for instance Tan et al., 2022, https://arxiv.org/abs/2103.00710.
Departures from the paper: a client trains in the rounds in which it is drawn, as with every other method, so
that the work is the same. All clients start from the study's initial model.
"""

from typing import Any

from torch import Tensor

from fedncv.methods.base import Ask, Federation, Method, ServerAsk, Stepped, Sums, Work
from fedncv.methods.fedavg import fedavg


def local() -> Method:
    def init(_x_P: Tensor, _federation: Federation) -> tuple[()]:
        return ()

    def init_own(_ask: Ask, x_P: Tensor) -> Tensor:
        return x_P  # the client's model

    def broadcast(_server: tuple[()], _ids_S: Tensor) -> tuple[()]:
        return ()

    def begin(_ask: Ask, _down: tuple[()], own_P: Tensor) -> tuple[Tensor, Any]:
        return own_P, ()

    def finish(
        _ask: Ask, y_P: Tensor, _work: Work, _down: tuple[()], _own_P: Tensor, _scratch: Any
    ) -> tuple[tuple[()], Tensor]:
        return (), y_P

    def step(_ask: ServerAsk, server: tuple[()], _sums: Sums) -> Stepped:
        return Stepped(server)

    def shared(_server: tuple[()]) -> None:
        return None

    return fedavg()._replace(
        init=init,
        init_own=init_own,
        broadcast=broadcast,
        begin=begin,
        finish=finish,
        step=step,
        shared=shared,
        model=None,
        with_model=None,
        reveals={},
        buffers="personal",
    )

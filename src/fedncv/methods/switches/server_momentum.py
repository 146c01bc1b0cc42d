"""Server momentum on top of any method whose server holds the shared model ``x_P``.

    step = x - x'            x' is what the method alone would make of x
    v <- beta * v + step
    x <- x - v

On FedAvg it is FedAvgM (Hsu et al., 2019, https://arxiv.org/abs/1909.06335). Running statistics take no momentum.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.methods.base import BufferRule, Federation, Method, Replies, ServerAsk


@dataclass(frozen=True, kw_only=True)
class Config:
    beta: float = 0.5
    """Momentum, from 0 to below 1; 0 leaves the method as it is."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be at least 0 and below 1, not {self.beta}")


class Moving(NamedTuple):
    server: Any  # the method's own
    v_P: Tensor


def with_momentum(method: Method, config: Config = Config()) -> Method:
    """``method`` whose server keeps moving the way it moved."""
    if config.beta == 0:
        return method
    if method.hand_out is not None:
        raise ValueError("the average is taken of the models that momentum makes: write +momentum before +average")

    def init(x_P: Tensor, federation: Federation) -> Moving:
        server = method.init(x_P, federation)
        if not hasattr(server, "x_P"):
            raise ValueError("momentum needs a model that all clients share; this method has none")
        return Moving(server, x_P.new_zeros(x_P.shape))

    def broadcast(moving: Moving, ids_S: Tensor) -> Any:
        return method.broadcast(moving.server, ids_S)

    def aggregate(ask: ServerAsk, moving: Moving, replies: Replies) -> Moving:
        old_P = moving.server.x_P
        server = method.aggregate(ask, moving.server, replies)
        v_P = config.beta * moving.v_P + (old_P - server.x_P)
        return Moving(server._replace(x_P=old_P - v_P), v_P)

    def shared(moving: Moving) -> Tensor | None:
        return method.shared(moving.server)

    return method._replace(
        init=init,
        broadcast=broadcast,
        aggregate=aggregate,
        shared=shared,
        buffers=_through(method.buffers),
        switches=(*method.switches, "momentum"),
    )


def _through(rule: Any) -> Any:
    """A buffer rule that looks at the method's own server state."""
    if not isinstance(rule, BufferRule):
        return rule
    return rule._replace(
        broadcast=lambda state, moving, ids_S: rule.broadcast(state, moving.server, ids_S),
        aggregate=lambda ask, state, moving, b_SR, replies: rule.aggregate(ask, state, moving.server, b_SR, replies),
    )

"""Server momentum: continue a share of the previous step.

    v <- beta * v + move          move: the step x - x' of the method alone
    x <- x - v                    or x - (move + beta * v), with nesterov

On FedAvg it is FedAvgM (Hsu et al., 2019, https://arxiv.org/abs/1909.06335). Running statistics have no momentum.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.methods.base import Federation, Method, ServerAsk, Stepped
from fedncv.methods.switches.through import through


@dataclass(frozen=True, kw_only=True)
class Config:
    beta: float = 0.5
    """Momentum, from 0 to below 1; 0 leaves the method unchanged."""
    nesterov: bool = False
    """Use Nesterov momentum: step along move + beta * v instead of v."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must be at least 0 and below 1, not {self.beta}")


class Moving(NamedTuple):
    server: Any  # the method's own
    v_P: Tensor


def with_momentum(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with momentum at the server."""
    if config.beta == 0:
        return method
    model, with_model = method.model, method.with_model
    if model is None or with_model is None:
        raise ValueError("momentum needs a model that all clients share, as in fedavg+momentum")
    if method.graph == "symmetric":
        raise ValueError("momentum moves the model past what these clients remember of it; leave +momentum out")
    if method.hand_out is not None:
        raise ValueError("put +momentum before +average, which averages the models after momentum")

    def init(x_P: Tensor, federation: Federation) -> Moving:
        return Moving(method.init(x_P, federation), x_P.new_zeros(x_P.shape))

    def step(ask: ServerAsk, moving: Moving, combined: Any) -> Stepped:
        old_P = model(moving.server)
        stepped = method.step(ask, moving.server, combined)
        move_P = old_P - model(stepped.server) if stepped.move_P is None else stepped.move_P
        v_P = config.beta * moving.v_P + move_P
        move_P = move_P + config.beta * v_P if config.nesterov else v_P
        server = with_model(stepped.server, old_P - move_P)
        return Stepped(Moving(server, v_P), move_P, stepped.numbers)

    return through(method)._replace(init=init, step=step, switches=(*method.switches, "momentum"))

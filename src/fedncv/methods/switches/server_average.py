"""Average of the server's latest models, for inference; training continues from the last model.

    a <- a + (x - a) / (1 + share * t)          t rounds came before this one, with replies or without

The average covers about ``share * t`` rounds. Early it follows the model closely; later it removes the noise of single
rounds (Shamir and Zhang, ICML 2013, https://arxiv.org/abs/1212.1824, section 4, with eta = 1 / share - 1). Running
statistics are averaged in the same way; the weights are positive and sum to one, so variances stay positive. Messages
do not grow: a client that trains receives ``x``, a client that only uses the model receives ``a``.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.methods.base import BufferRule, Federation, Method, ServerAsk, Stepped, for_all
from fedncv.methods.switches.through import through


@dataclass(frozen=True, kw_only=True)
class Config:
    share: float = 0.05
    """Share of the rounds so far that the average covers, at least 0; 0 uses the last model."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < math.inf:
            raise ValueError(f"share must be at least 0 and finite, not {self.share}")


class Averaging(NamedTuple):
    server: Any  # the method's own
    a_P: Tensor


def moved(a: Tensor, x: Tensor, round: int, share: float) -> Tensor:
    """Return the average after this round's ``x``."""
    return a + (x - a) / (1 + share * round)


def averaged_statistics(share: float) -> BufferRule:
    """Return the rule that averages the mean statistics of each round over rounds, like the model."""

    def init(start_R: Tensor, _federation: Federation) -> Tensor:
        return start_R

    def broadcast(b_R: Tensor, _server: Any, ids_S: Tensor) -> Tensor:
        return for_all(b_R, ids_S)

    def step(ask: ServerAsk, b_R: Tensor, _server: Any, mean_R: Tensor) -> Tensor:
        return moved(b_R, mean_R, ask.round, share)

    return BufferRule(init, broadcast, step, shared=True)


def with_average(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` whose clients use the average of its models for inference."""
    if config.share == 0:
        return method

    model, with_model = method.model, method.with_model
    if model is None or with_model is None or method.buffers != "averaged":
        raise ValueError("average needs a model that all clients share, as in fedavg+average")

    def init(x_P: Tensor, federation: Federation) -> Averaging:
        return Averaging(method.init(x_P, federation), x_P)

    def hand_out(averaging: Averaging, ids_S: Tensor) -> Any:
        return method.broadcast(with_model(averaging.server, averaging.a_P), ids_S)

    def step(ask: ServerAsk, averaging: Averaging, combined: Any) -> Stepped:
        stepped = method.step(ask, averaging.server, combined)
        a_P = moved(averaging.a_P, model(stepped.server), ask.round, config.share)
        return stepped._replace(server=Averaging(stepped.server, a_P))

    def shared(averaging: Averaging) -> Tensor:
        return averaging.a_P

    return through(method)._replace(
        init=init,
        hand_out=hand_out,
        step=step,
        shared=shared,
        buffers=averaged_statistics(config.share),
        switches=(*method.switches, "average"),
    )

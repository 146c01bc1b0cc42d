"""Blend: a client predicts with a weighted mean of the model it received and the model it trained.

    x + (y - x) / (1 + rate * t)          y trained from x, t rounds are over; running statistics alike

Early in training the shared model is poor, and local training improves a client's predictions. Later the shared model
is better, and a short local training mostly adds noise. Training and messages do not change.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedncv.methods.base import Ask, Method, Prediction


@dataclass(frozen=True, kw_only=True)
class Config:
    rate: float = 0.03
    """Decay rate of the local model's weight at prediction time, at least 0; 0 keeps the trained model."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ValueError(f"rate must be at least 0 and finite, not {self.rate}")


def with_blend(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` whose clients predict between the model they received and the one they trained."""
    if config.rate == 0:
        return method
    if method.with_model is None:
        raise ValueError("blend needs a model that all clients share, as in fedavg+blend")

    def predict(ask: Ask, y_P: Tensor, down: Any, own: Any) -> Prediction:
        share = 1 / (1 + config.rate * ask.round)
        x_P, _ = method.begin(ask, down, own)
        trained = method.predict(ask, x_P + share * (y_P - x_P), down, own)
        return trained._replace(buffers_R=ask.received_R + share * (trained.buffers_R - ask.received_R))

    return method._replace(predict=predict, switches=(*method.switches, "blend"))

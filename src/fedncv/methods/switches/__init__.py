"""Switches that a method can have, so that a comparison shows what the method itself adds.

``scaffold+prior+momentum:beta=0.5`` is SCAFFOLD with both. Momentum and average need a model that all clients share.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedncv.methods.base import Method
from fedncv.methods.switches import even_samples, label_prior, sample_level, server_average, server_momentum


class Switch(NamedTuple):
    apply: Callable[..., Method]  # (method, config) -> method
    config: Callable[..., Any]
    summary: str


SWITCHES: dict[str, Switch] = {
    "prior": Switch(label_prior.with_prior, label_prior.Config, "train and predict with the client's label prior"),
    "even": Switch(even_samples.with_even_samples, even_samples.Config, "a smaller last batch makes a smaller step"),
    "samples": Switch(sample_level.with_samples, sample_level.Config, "a control variate for every mini-batch"),
    "momentum": Switch(server_momentum.with_momentum, server_momentum.Config, "momentum at the server"),
    "average": Switch(server_average.with_average, server_average.Config, "hand out the average of the latest models"),
}

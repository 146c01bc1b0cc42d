"""List the switches: parts that can be added to a method.

``scaffold+prior+momentum:beta=0.5`` is SCAFFOLD with two switches. They are applied in the order of the dictionary,
whatever order they are written in; later switches wrap earlier ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedncv.methods.base import Method
from fedncv.methods.switches import (
    blend,
    calibrated,
    differential_privacy,
    drift,
    even_samples,
    horvitz_thompson,
    label_prior,
    labels,
    memory,
    sample_level,
    server_average,
    server_momentum,
)
from fedncv.spec import nearest


class Switch(NamedTuple):
    apply: Callable[..., Method]  # (method, config) -> method
    config: Callable[..., Any]
    summary: str


SWITCHES: dict[str, Switch] = {
    "memory": Switch(memory.with_memory, memory.Config, "use stored updates for absent clients"),
    "labels": Switch(labels.with_labels, labels.Config, "predict updates from label shares, as a control variate"),
    "ht": Switch(horvitz_thompson.with_horvitz_thompson, horvitz_thompson.Config, "average with unbiased weights"),
    "calibrated": Switch(
        calibrated.with_calibrated, calibrated.Config, "weigh replies so that their labels are those of all clients"
    ),
    "drift": Switch(drift.with_drift, drift.Config, "correct client drift with control variates"),
    "blend": Switch(blend.with_blend, blend.Config, "predict between the received and the trained model"),
    "even": Switch(even_samples.with_even_samples, even_samples.Config, "shorten the step of a smaller last batch"),
    "samples": Switch(sample_level.with_samples, sample_level.Config, "use a control variate for every mini-batch"),
    "prior": Switch(label_prior.with_prior, label_prior.Config, "train and predict with the client's label prior"),
    "momentum": Switch(server_momentum.with_momentum, server_momentum.Config, "momentum at the server"),
    "average": Switch(server_average.with_average, server_average.Config, "use the average of the latest models"),
    "dp": Switch(
        differential_privacy.with_dp,
        differential_privacy.Config,
        "differential privacy of clients: clip each, add noise to the sums",
    ),
}


def chain(method: Method, **configs: Any) -> Method:
    """Return ``method`` with the switches whose config is not None, applied in the order of ``SWITCHES``."""
    for name in configs:
        if name not in SWITCHES:
            raise ValueError(nearest(name, SWITCHES, what="switch"))
        if configs[name] is not None and name in method.switches:
            raise ValueError(f"the method already has {name}; leave it out")
    for name, switch in SWITCHES.items():
        if configs.get(name) is not None:
            method = switch.apply(method, configs[name])
    return method

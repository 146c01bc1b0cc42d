"""List the switches: parts that can be added to a method.

``scaffold+prior+momentum:beta=0.5`` is SCAFFOLD with two switches. They are applied in the order of the dictionary,
whatever order they are written in; later switches wrap earlier ones.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedncv.methods.base import Method
from fedncv.methods.space import Even, Log, Range
from fedncv.methods.switches import (
    blend,
    calibrated,
    clipped,
    differential_privacy,
    drift,
    even_samples,
    finetune,
    fixed_point,
    horvitz_thompson,
    krum,
    label_prior,
    labels,
    median,
    memory,
    poisoned,
    sample_level,
    server_average,
    server_momentum,
    trimmed,
)
from fedncv.spec import nearest


class Switch(NamedTuple):
    apply: Callable[..., Method]  # (method, config) -> method
    config: Callable[..., Any]
    summary: str
    space: Mapping[str, Range] = {}  # what `fedncv study --tune` tries


SWITCHES: dict[str, Switch] = {
    "median": Switch(median.with_median, median.Config, "combine replies by their coordinate-wise median"),
    "trimmed": Switch(trimmed.with_trimmed, trimmed.Config, "combine replies by their coordinate-wise trimmed mean"),
    "krum": Switch(krum.with_krum, krum.Config, "average the replies that have the most others near them"),
    "clipped": Switch(clipped.with_clipped, clipped.Config, "shorten replies that are longer than most others"),
    "memory": Switch(
        memory.with_memory, memory.Config, "use stored updates for absent clients", {"beta": Even(0.1, 1.0)}
    ),
    "labels": Switch(
        labels.with_labels,
        labels.Config,
        "predict updates from label shares, as a control variate",
        {"ridge": Log(0.003, 0.3), "forget": Even(0.8, 1.0)},
    ),
    "ht": Switch(horvitz_thompson.with_horvitz_thompson, horvitz_thompson.Config, "average with unbiased weights"),
    "calibrated": Switch(
        calibrated.with_calibrated,
        calibrated.Config,
        "weigh replies so that their labels are those of all clients",
        {"ridge": Log(0.001, 0.1)},
    ),
    "drift": Switch(
        drift.with_drift, drift.Config, "correct client drift with control variates", {"alpha": Even(0.3, 1.0)}
    ),
    "blend": Switch(
        blend.with_blend, blend.Config, "predict between the received and the trained model", {"rate": Log(0.003, 0.3)}
    ),
    "even": Switch(even_samples.with_even_samples, even_samples.Config, "shorten the step of a smaller last batch"),
    "samples": Switch(
        sample_level.with_samples,
        sample_level.Config,
        "use a control variate for every mini-batch",
        {"alpha": Even(0.1, 1.0)},
    ),
    "prior": Switch(
        label_prior.with_prior,
        label_prior.Config,
        "train and predict with the client's label prior",
        {"tau": Even(0.5, 1.5)},
    ),
    "momentum": Switch(
        server_momentum.with_momentum, server_momentum.Config, "momentum at the server", {"beta": Even(0.0, 0.9)}
    ),
    "average": Switch(
        server_average.with_average,
        server_average.Config,
        "use the average of the latest models",
        {"share": Log(0.01, 0.5)},
    ),
    "finetune": Switch(
        finetune.with_finetune,
        finetune.Config,
        "score after a local training of its own",
        {"lr": Log(0.003, 0.3), "epochs": (1, 2, 5, 10)},
    ),
    "poisoned": Switch(poisoned.with_poisoned, poisoned.Config, "let some clients attack, for studies"),
    "dp": Switch(
        differential_privacy.with_dp,
        differential_privacy.Config,
        "differential privacy of clients: clip each, add noise to the sums",
    ),
    "fixed_point": Switch(
        fixed_point.with_fixed_point, fixed_point.Config, "round what clients send to a grid, as secure sums do"
    ),
}


def chain(method: Method, **configs: Any) -> Method:
    """Return ``method`` with the switches whose config is not None, applied in the order of ``SWITCHES``."""
    for name in configs:
        if name not in SWITCHES:
            raise ValueError(nearest(name, SWITCHES, what="switch"))
        if configs[name] is not None and name in method.switches:
            raise ValueError(f"the method already has {name}; leave it out")
        if configs[name] is not None and name in method.refuses:
            raise ValueError(f"leave +{name} out: {method.refuses[name]}")
    for name, switch in SWITCHES.items():
        if configs.get(name) is not None:
            method = switch.apply(method, configs[name])
    return method

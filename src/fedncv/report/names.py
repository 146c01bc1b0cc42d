"""Display names of methods, datasets and metrics."""

import re

from fedncv.catalogue import methods as listed_methods

OURS = "fedncv"
METHODS = {name: about.title for name, about in listed_methods().items()}
# Variants of FedNCV by the parts they lack and have. A variant that sets all six parts is FedAvg with the parts that
# are on; with all parts off it is FedAvg.
WITHOUT = {
    "drift=off": "drift correction",
    "even=off": "even samples",
    "prior=off": "label prior",
    "momentum=off": "momentum",
    "average=off": "average",
    "blend=off": "blend",
    # as runs before the parts were switches spell it
    "even=false": "even samples",
    "tau=0": "label prior",
    "momentum=0": "momentum",
    "average=0": "average",
    "blend=0": "blend",
}
WITH = {
    "drift=fixed": "drift correction",
    "blend=0.03": "blend",
    "memory=adaptive": "server memory",
    "samples=saga": "sample level (SAGA)",
}
SAID = {"drift=adaptive": "alpha learned", "drift.alpha=learned": "alpha learned", "beta=learned": "learned"}
DATASETS = {
    "digits": "Digits",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "emnist": "EMNIST",
    "emnist_balanced": "EMNIST balanced",
    "emnist_letters": "EMNIST letters",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "svhn_extra": "SVHN extra",
    "tiny_imagenet": "Tiny-ImageNet",
    "cinic10": "CINIC-10",
}
METRICS = {
    "before": "before local training",
    "after": "after local training",
    "before_client_mean": "before, mean over clients",
    "before_worst_decile": "before, worst tenth of clients",
    "after_client_mean": "after, mean over clients",
    "after_worst_decile": "after, worst tenth of clients",
    "pooled": "shared model on all test samples",
    "loss": "training loss",
    "variance_signal": "signal",
    "variance_within": "within clients",
    "variance_between": "between clients",
    "variance_snr": "signal-to-noise ratio",
    "variance_sampling": "sampling of clients",
    "variance_batches": "batches of a round",
}


def method(text: str) -> str:
    """fedprox:mu=0.1+prior -> FedProx, mu 0.1 + prior.

    >>> method("fedprox:mu=0.1,server_lr=2+prior:tau=1")
    'FedProx, mu 0.1, server_lr 2 + prior, tau 1'
    >>> method("fedncv:memory=adaptive,drift=off")
    'FedNCV with server memory, without drift correction'
    """
    parts = []
    for part in re.split(r"\+(?=[a-z])", text):
        name, _, rest = part.partition(":")
        knobs = [knob for knob in rest.split(",") if knob]
        said = _variant(knobs) if name == OURS else _with_knobs(METHODS.get(name, name), knobs)
        parts.append(said)
    return " + ".join(parts)


def _with_knobs(name: str, knobs: list[str]) -> str:
    return ", ".join([name, *(SAID.get(knob, knob.replace("=", " ")) for knob in knobs)])


def _variant(knobs: list[str]) -> str:
    has = [WITH[knob] for knob in knobs if knob in WITH]
    lacks = [WITHOUT[knob] for knob in knobs if knob in WITHOUT]
    others = [knob for knob in knobs if knob not in WITH and knob not in WITHOUT]
    sets = {knob.partition("=")[0] for knob in knobs}
    name = "FedNCV"
    if has + others and sets >= {"drift", "even", "tau", "momentum", "average", "blend"}:
        name, lacks = "FedAvg", []
    words = [f"with {', '.join(has)}"] * bool(has) + [f"without {', '.join(lacks)}"] * bool(lacks)
    return _with_knobs(" ".join([name, ", ".join(words)]).strip(), others)


def dataset(name: str) -> str:
    return DATASETS.get(name, name)


def metric(name: str) -> str:
    return METRICS.get(name, name.replace("_", " "))


def traffic(number: float) -> str:
    """
    >>> traffic(1234567), traffic(999_900)
    ('1.23 MB', '1 MB')
    """
    return _three_digits(number, " B", " kB", " MB", " GB", " TB")


def quantity(number: float) -> str:
    """
    >>> quantity(31902), quantity(1234567), quantity(999.6)
    ('31.9 k', '1.23 M', '1 k')
    """
    return _three_digits(number, "", " k", " M", " G")


def _three_digits(number: float, *units: str) -> str:
    for unit in units[:-1]:
        if number < 999.5:  # more would round to 1000
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}"

"""The methods, one file each, in one dictionary written by hand."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedncv.methods.base import Method
from fedncv.methods.fedavg import Config as FedAvgConfig
from fedncv.methods.fedavg import fedavg
from fedncv.methods.fedper import fedper
from fedncv.methods.fedprox import Config as FedProxConfig
from fedncv.methods.fedprox import fedprox
from fedncv.methods.scaffold import Config as ScaffoldConfig
from fedncv.methods.scaffold import scaffold
from fedncv.spec import parse


class Entry(NamedTuple):
    make: Callable[..., Method]
    config: Callable[..., Any] | None  # the method's knobs; None where it has none
    summary: str
    reference: str


METHODS: dict[str, Entry] = {
    "fedavg": Entry(fedavg, FedAvgConfig, "average the locally trained models", "McMahan 2017, arXiv:1602.05629"),
    "fedprox": Entry(fedprox, FedProxConfig, "a pull towards the received model", "Li 2020, arXiv:1812.06127"),
    "scaffold": Entry(
        scaffold,
        ScaffoldConfig,
        "control variates against client drift",
        "Karimireddy 2020, arXiv:1910.06378",
    ),
    "fedper": Entry(fedper, None, "shared body, personal head", "Arivazhagan 2019, arXiv:1912.00818"),
}


def _no_knobs() -> None: ...


def find_method(text: str) -> Method:
    """The method that ``name`` or ``name:knob=value,…`` names.

    >>> find_method("fedprox:mu=0.1").reveals
    {'delta_P': "the client's model update"}
    """
    name, knobs = parse(text, {name: e.config or _no_knobs for name, e in METHODS.items()}, what="method")
    entry = METHODS[name]
    return entry.make() if entry.config is None else entry.make(entry.config(**knobs))


__all__ = ["METHODS", "Entry", "find_method"]

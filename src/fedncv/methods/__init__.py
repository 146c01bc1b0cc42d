"""The methods, one file each, in one dictionary written by hand."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fedncv.methods import (
    fat_clipping,
    fedadp,
    fedavg,
    fedavgm,
    feddyn,
    fedgen,
    fedlc,
    fedncv,
    fedncv_paper,
    fedncv_sums,
    fednova,
    fedopt,
    fedper,
    fedprox,
    fedrep,
    fedstale,
    fedvarp,
    local,
    mifa,
    moon,
    pfedsim,
    scaffold,
)
from fedncv.methods.base import Method
from fedncv.methods.switches import SWITCHES
from fedncv.spec import parse, write


class Entry(NamedTuple):
    make: Callable[..., Method]
    config: Callable[..., Any] | None  # the method's knobs; None where it has none
    summary: str
    reference: str


METHODS: dict[str, Entry] = {
    "fedncv": Entry(
        fedncv.fedncv,
        fedncv.Config,
        "centred control variates at server and client, and the label prior",
        "after Chen 2024, the centred reading (docs/theory.md)",
    ),
    "fedncv-sums": Entry(
        fedncv_sums.fedncv_sums,
        fedncv_sums.Config,
        "fedncv with its memory at the clients: the server needs only sums",
        "after Chen 2024, the centred reading (docs/theory.md)",
    ),
    "fedncv-paper": Entry(
        fedncv_paper.fedncv_paper,
        fedncv_paper.Config,
        "the paper's equations as printed; they cancel themselves",
        "Chen 2024, Algorithm 1",
    ),
    "fedavg": Entry(
        fedavg.fedavg, fedavg.Config, "average the locally trained models", "McMahan 2017, arXiv:1602.05629"
    ),
    "fedavgm": Entry(fedavgm.fedavgm, fedavgm.Config, "momentum at the server", "Hsu 2019, arXiv:1909.06335"),
    "fedprox": Entry(fedprox.fedprox, fedprox.Config, "a pull towards the received model", "Li 2020, arXiv:1812.06127"),
    "fednova": Entry(fednova.fednova, None, "updates normalised by local steps", "Wang 2020, arXiv:2007.07481"),
    "scaffold": Entry(
        scaffold.scaffold,
        scaffold.Config,
        "control variates against client drift",
        "Karimireddy 2020, arXiv:1910.06378",
    ),
    "feddyn": Entry(
        feddyn.feddyn,
        feddyn.Config,
        "dynamic regularisation that aligns local and global optima",
        "Acar 2021, arXiv:2111.04263",
    ),
    "fedgen": Entry(
        fedgen.fedgen,
        fedgen.Config,
        "a generator of features carries the clients' knowledge",
        "Zhu 2021, arXiv:2105.10056",
    ),
    "fedlc": Entry(fedlc.fedlc, fedlc.Config, "logits calibrated by label counts", "Zhang 2022, arXiv:2209.00189"),
    "moon": Entry(
        moon.moon,
        moon.Config,
        "features contrasted with the global and the previous model's",
        "Li 2021, arXiv:2103.16257",
    ),
    "fedper": Entry(fedper.fedper, None, "shared body, personal head", "Arivazhagan 2019, arXiv:1912.00818"),
    "fedrep": Entry(
        fedrep.fedrep, fedrep.Config, "personal head first, then the shared body", "Collins 2021, arXiv:2102.07078"
    ),
    "pfedsim": Entry(
        pfedsim.pfedsim,
        pfedsim.Config,
        "bodies mixed among clients with similar heads",
        "Tan 2023, arXiv:2305.15706",
    ),
    "fat_clipping_pi": Entry(
        fat_clipping.fat_clipping_iteration,
        fat_clipping.IterationConfig,
        "every local gradient clipped",
        "Yang 2022, arXiv:2210.00690",
    ),
    "fat_clipping_pr": Entry(
        fat_clipping.fat_clipping_round,
        fat_clipping.RoundConfig,
        "every client's update clipped",
        "Yang 2022, arXiv:2210.00690",
    ),
    "fedadp": Entry(
        fedadp.fedadp, fedadp.Config, "weights from the angles between updates", "Wu 2021, arXiv:2012.00661"
    ),
    "fedvarp": Entry(
        fedvarp.fedvarp,
        fedvarp.Config,
        "remembered updates stand in for absent clients",
        "Jhunjhunwala 2022, arXiv:2207.14130",
    ),
    "fedstale": Entry(
        fedstale.fedstale,
        fedstale.Config,
        "remembered updates, trusted in part",
        "Rodio 2024, arXiv:2405.04171",
    ),
    "mifa": Entry(mifa.mifa, mifa.Config, "steps along everybody's latest update", "Gu 2021, arXiv:2106.04159"),
    "fedadagrad": Entry(
        fedopt.fedadagrad, fedopt.AdagradConfig, "Adagrad at the server", "Reddi 2021, arXiv:2003.00295"
    ),
    "fedadam": Entry(fedopt.fedadam, fedopt.Config, "Adam at the server", "Reddi 2021, arXiv:2003.00295"),
    "fedyogi": Entry(fedopt.fedyogi, fedopt.Config, "Yogi at the server", "Reddi 2021, arXiv:2003.00295"),
    "local": Entry(local.local, None, "every client alone, nothing sent", "Tan 2022, arXiv:2103.00710"),
}


def _no_knobs() -> None: ...


def find_method(text: str) -> Method:
    """The method that ``name``, ``name:knob=value,…`` or ``name+switch+switch:knob=value`` names.

    >>> find_method("fedprox:mu=0.1+prior").reveals
    {'delta_P': "the client's model update"}
    """
    (base, knobs), *switches = _parts(text)
    entry = METHODS[base]
    method = entry.make() if entry.config is None else entry.make(entry.config(**knobs))
    for name, knobs in switches:
        if name in method.switches:
            raise ValueError(f"{base!r} has {name!r} already; set its knobs there, or name the switch once")
        method = SWITCHES[name].apply(method, SWITCHES[name].config(**knobs))
    return method


def in_full(text: str) -> str:
    """The same method with every knob: what it is, whatever a later version takes for granted.

    >>> in_full("fedavg+prior:tau=2")
    'fedavg:server_lr=1.0+prior:tau=2.0,epsilon=1.0'
    """
    (name, knobs), *switches = _parts(text)
    config = METHODS[name].config
    words = [write(name, {} if config is None else vars(config(**knobs)))]
    return "+".join(words + [write(name, vars(SWITCHES[name].config(**knobs))) for name, knobs in switches])


def _parts(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and given knobs of the method, and of every switch behind it."""
    first, *switches = re.split(r"\+(?=[a-z])", text)
    methods = {name: entry.config or _no_knobs for name, entry in METHODS.items()}
    known = {name: switch.config for name, switch in SWITCHES.items()}
    return [parse(first, methods, what="method"), *(parse(each, known, what="switch") for each in switches)]


__all__ = ["METHODS", "SWITCHES", "Entry", "find_method", "in_full"]

"""List all methods in one dictionary, written by hand."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedncv.methods import (
    d2,
    fat_clipping,
    fedadp,
    fedavg,
    fedavgm,
    feddyn,
    fedexp,
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
    quasi_global,
    relaysgd,
    scaffold,
)
from fedncv.methods.base import Method


class Entry(NamedTuple):
    """Facts about a method that are not in its own file."""

    title: str  # as people write it
    make: Callable[..., Method]
    config: Callable[..., Any] | None  # the method's knobs; None if it has none
    summary: str
    reference: str
    chain: str = ""
    """Base method, if the fields of the config are switches that are applied to it."""
    limit: str = ""
    """Knobs that make it FedAvg to the last bit."""
    no_limit: str = ""
    """Reason if there are no such knobs. Give one of the two."""
    quick: str = ""
    """Knobs that make it cheap enough for a test to run it a hundred times."""
    settles: str = ""
    """Knobs with which it converges on two quadratics within 40 rounds, if the defaults take longer."""


METHODS: dict[str, Entry] = {
    "fedncv": Entry(
        "FedNCV",
        fedncv.fedncv,
        fedncv.Config,
        "fedavg with even, drift, prior, momentum, average and blend",
        "after Chen 2024, the centred reading (docs/theory.md)",
        chain="fedavg",
        limit="even=off,drift=off,prior=off,momentum=off,average=off,blend=off",
        settles="momentum=off",
    ),
    "fedncv-sums": Entry(
        "FedNCV, sums only",
        fedncv_sums.fedncv_sums,
        fedncv_sums.Config,
        "fedncv with the memory at the clients; the server needs only sums",
        "after Chen 2024, the centred reading (docs/theory.md)",
        chain="fedavg",
        limit="even=off,drift=off,prior=off,momentum=off,average=off,blend=off",
        settles="momentum=off",
    ),
    "fedncv-paper": Entry(
        "FedNCV, as printed",
        fedncv_paper.fedncv_paper,
        fedncv_paper.Config,
        "the paper's equations as printed; their terms cancel",
        "Chen 2024, Algorithm 1",
        no_limit="its server weights sum to zero",
    ),
    "fedavg": Entry(
        "FedAvg",
        fedavg.fedavg,
        fedavg.Config,
        "average the locally trained models",
        "McMahan 2017, arXiv:1602.05629",
        limit="server_lr=1",
    ),
    "fedavgm": Entry(
        "FedAvgM",
        fedavgm.fedavgm,
        fedavgm.Config,
        "momentum at the server",
        "Hsu 2019, arXiv:1909.06335",
        limit="beta=0",
        settles="beta=0.3",
    ),
    "fedprox": Entry(
        "FedProx",
        fedprox.fedprox,
        fedprox.Config,
        "pull local models towards the received one",
        "Li 2020, arXiv:1812.06127",
        limit="mu=0",
    ),
    "fednova": Entry(
        "FedNova",
        fednova.fednova,
        None,
        "normalise updates by the number of local steps",
        "Wang 2020, arXiv:2007.07481",
        no_limit="equal steps give FedAvg to rounding",
    ),
    "scaffold": Entry(
        "SCAFFOLD",
        scaffold.scaffold,
        scaffold.Config,
        "correct client drift with control variates",
        "Karimireddy 2020, arXiv:1910.06378",
        no_limit="it averages clients uniformly",
    ),
    "feddyn": Entry(
        "FedDyn",
        feddyn.feddyn,
        feddyn.Config,
        "regularise local training so that local and global optima agree",
        "Acar 2021, arXiv:2111.04263",
        no_limit="it divides by alpha",
        settles="alpha=1",
    ),
    "fedgen": Entry(
        "FedGen",
        fedgen.fedgen,
        fedgen.Config,
        "share knowledge through a generator of features",
        "Zhu 2021, arXiv:2105.10056",
        limit="alpha=0,beta=0,generator_steps=1",
        quick="generator_steps=2,hidden=8,generated=4",
    ),
    "fedlc": Entry(
        "FedLC",
        fedlc.fedlc,
        fedlc.Config,
        "calibrate logits by label counts",
        "Zhang 2022, arXiv:2209.00189",
        limit="tau=0",
    ),
    "moon": Entry(
        "MOON",
        moon.moon,
        moon.Config,
        "contrast features with those of the global and the previous model",
        "Li 2021, arXiv:2103.16257",
        limit="mu=0",
    ),
    "fedper": Entry(
        "FedPer",
        fedper.fedper,
        None,
        "shared body, personal head",
        "Arivazhagan 2019, arXiv:1912.00818",
        no_limit="the head is personal",
    ),
    "fedrep": Entry(
        "FedRep",
        fedrep.fedrep,
        fedrep.Config,
        "train the personal head, then the shared body",
        "Collins 2021, arXiv:2102.07078",
        no_limit="the head is personal",
    ),
    "pfedsim": Entry(
        "pFedSim",
        pfedsim.pfedsim,
        pfedsim.Config,
        "mix bodies among clients with similar heads",
        "Tan 2023, arXiv:2305.15706",
        limit="warm_up=1",
    ),
    "fat_clipping_pi": Entry(
        "FAT-Clipping-PI",
        fat_clipping.fat_clipping_iteration,
        fat_clipping.IterationConfig,
        "clip every local gradient",
        "Yang 2022, arXiv:2210.00690",
        limit="clip=inf",
    ),
    "fat_clipping_pr": Entry(
        "FAT-Clipping-PR",
        fat_clipping.fat_clipping_round,
        fat_clipping.RoundConfig,
        "clip every client's update",
        "Yang 2022, arXiv:2210.00690",
        limit="clip=inf",
    ),
    "fedadp": Entry(
        "FedAdp",
        fedadp.fedadp,
        fedadp.Config,
        "weight updates by their angle to the mean update",
        "Wu 2021, arXiv:2012.00661",
        limit="alpha=0",
    ),
    "fedvarp": Entry(
        "FedVARP",
        fedvarp.fedvarp,
        fedavg.Config,
        "use stored updates for absent clients",
        "Jhunjhunwala 2022, arXiv:2207.14130",
        no_limit="with all clients in every round it is FedAvg, to rounding",
    ),
    "fedstale": Entry(
        "FedStale",
        fedstale.fedstale,
        fedstale.Config,
        "use stored updates for absent clients, scaled by beta",
        "Rodio 2024, arXiv:2405.04171",
        limit="beta=0",
    ),
    "mifa": Entry(
        "MIFA",
        mifa.mifa,
        fedavg.Config,
        "step along the latest update of every client",
        "Gu 2021, arXiv:2106.04159",
        no_limit="with all clients in every round it is FedAvg, to rounding",
    ),
    "fedadagrad": Entry(
        "FedAdagrad",
        fedopt.fedadagrad,
        fedopt.AdagradConfig,
        "Adagrad at the server",
        "Reddi 2021, arXiv:2003.00295",
        no_limit="a large tau gives FedAvg to rounding",
        settles="server_lr=2,tau=1",
    ),
    "fedadam": Entry(
        "FedAdam",
        fedopt.fedadam,
        fedopt.Config,
        "Adam at the server",
        "Reddi 2021, arXiv:2003.00295",
        no_limit="a large tau gives FedAvg to rounding",
        settles="server_lr=2,tau=1,beta1=0",
    ),
    "fedyogi": Entry(
        "FedYogi",
        fedopt.fedyogi,
        fedopt.Config,
        "Yogi at the server",
        "Reddi 2021, arXiv:2003.00295",
        no_limit="a large tau gives FedAvg to rounding",
        settles="server_lr=2,tau=1,beta1=0",
    ),
    "fedexp": Entry(
        "FedExP",
        fedexp.fedexp,
        fedexp.Config,
        "lengthen the server step where updates disagree",
        "Jhunjhunwala 2023, arXiv:2301.09604",
        limit="epsilon=inf",
        settles="epsilon=0.1",
    ),
    "d2": Entry(
        "D²",
        d2.d2,
        None,
        "without a server: correct by what mixing did to the last model",
        "Tang 2018, arXiv:1803.07068",
        no_limit="with a server it is FedAvg with equal weights, to rounding",
    ),
    "quasi_global": Entry(
        "Quasi-global momentum",
        quasi_global.quasi_global,
        quasi_global.Config,
        "without a server: local momentum along the path of the mixed model",
        "Lin 2021, arXiv:2102.04761",
        limit="beta=0",
        settles="beta=0.3,mu=0.3",
    ),
    "relaysgd": Entry(
        "RelaySGD",
        relaysgd.relaysgd,
        None,
        "without a server: relay sums of models on a tree",
        "Vogels 2021, arXiv:2110.04175",
        no_limit="with a server it is FedAvg to the last bit, without a knob",
    ),
    "local": Entry(
        "Local only",
        local.local,
        None,
        "train every client alone; nothing is sent",
        "Tan 2022, arXiv:2103.00710",
        no_limit="it has no server",
    ),
}

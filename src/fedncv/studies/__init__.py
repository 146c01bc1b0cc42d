"""Named studies: functions that return a `Study`. The paper's tables and figures, and the quick one."""

from collections.abc import Callable

from fedncv.config import Settings
from fedncv.methods import find_method
from fedncv.recipes import RECIPES
from fedncv.studies.study import Study

TABLE1 = ("fedavg", "fedprox", "scaffold", "fedrep", "fedper", "pfedsim", "fedncv")
FIG3 = (
    "fedavg", "fedavgm", "fedprox", "scaffold", "feddyn", "fedgen", "fedlc", "moon", "fedrep", "fedper",
    "pfedsim", "fedncv",
)  # fmt: skip
# Beside the paper's methods: no federation at all, the paper's equations as printed, and what the label prior
# alone does for the shared-head methods, so that the table shows what the control variates add.
BESIDE = ("local", "fedncv-paper", "fedavg+prior", "fedavgm+prior", "scaffold+prior")
RELATIVES = ("fedvarp", "fedstale", "mifa")


def present(*methods: str) -> tuple[str, ...]:
    """Those of the methods that this version has, knobs included."""
    return tuple(method for method in methods if _found(method))


def _found(method: str) -> bool:
    try:
        find_method(method)
    except ValueError:
        return False
    return True


def table1() -> Study:
    """Seven methods on four datasets, before and after local training; 100 clients, 100 rounds."""
    return Study(
        name="table1",
        title="Table 1: accuracy before and after local training",
        settings=Settings(eval_every=5),
        datasets=("cifar10", "cifar100", "tiny_imagenet", "emnist"),
        methods=present(*TABLE1, *BESIDE),
        seeds=tuple(range(10)),
    )


def fig1() -> Study:
    """The curves of Table 1, measured every round."""
    return Study(
        name="fig1",
        title="Fig. 1: accuracy against rounds",
        settings=Settings(eval_every=1),
        datasets=("cifar10", "cifar100", "tiny_imagenet", "emnist"),
        methods=present(*TABLE1, "local"),
        seeds=tuple(range(5)),
    )


def fig2() -> Study:
    """100 to 1,000 clients, a tenth of them drawn each round."""
    return Study(
        name="fig2",
        title="Fig. 2: from 100 to 1,000 clients",
        settings=Settings(eval_every=20),
        datasets=("emnist",),
        methods=present("fedrep", "fedper", "pfedsim", "fedncv", "fedncv-paper", "fedavg", "local"),
        seeds=tuple(range(5)),
        clients=(100, 200, 400, 600, 800, 1000),
    )


def fig3() -> Study:
    """Twelve methods on four more datasets: curves."""
    return Study(
        name="fig3",
        title="Fig. 3: twelve methods, accuracy against rounds",
        settings=Settings(eval_every=5),
        datasets=("mnist", "svhn", "fashion_mnist", "cinic10"),
        methods=present(*FIG3, "local"),
        seeds=tuple(range(5)),
    )


def table2() -> Study:
    """The datasets themselves: nothing is trained."""
    return Study(
        name="table2",
        title="Table 2: the datasets",
        settings=Settings(),
        datasets=("mnist", "cifar10", "cifar100", "svhn", "tiny_imagenet", "emnist", "fashion_mnist", "cinic10"),
        methods=(),
        seeds=(0,),
    )


def ablation() -> Study:
    """FedNCV with its switches one by one, beside its relatives."""
    switches = (
        "fedncv", "fedncv:memory=off", "fedncv:drift=off", "fedncv:tau=0", "fedncv:momentum=0",
        "fedncv:memory=off,drift=off", "fedncv:memory=off,drift=off,momentum=0", "fedncv:tau=0,momentum=0",
        "fedncv-paper", "fedavg", "fedavg+prior", "fedavg+prior+momentum",
    )  # fmt: skip
    return Study(
        name="ablation",
        title="Ablation: what each part of FedNCV adds",
        settings=Settings(eval_every=10),
        datasets=("cifar10",),
        methods=present(*switches, *RELATIVES),
        seeds=tuple(range(5)),
    )


def smoke() -> Study:
    """The built-in digits among 20 clients, in a few minutes on a laptop: what `make run` trains."""
    recipe = RECIPES["smoke"]()
    return Study(
        name="smoke",
        title="Smoke: the built-in digits among 20 clients",
        settings=recipe.settings,
        datasets=("digits",),
        methods=present(*recipe.methods),
        seeds=(0, 1, 2),
    )


STUDIES: dict[str, Callable[[], Study]] = {
    "table1": table1,
    "fig1": fig1,
    "fig2": fig2,
    "fig3": fig3,
    "table2": table2,
    "ablation": ablation,
    "smoke": smoke,
}

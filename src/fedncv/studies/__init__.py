"""Named studies: functions that return a `Study`, for the paper's tables and figures and for a quick trial."""

from collections.abc import Callable
from typing import Any

from fedncv.config import Settings
from fedncv.recipes import RECIPES
from fedncv.study import Study

TABLE1 = ("fedavg", "fedprox", "scaffold", "fedrep", "fedper", "pfedsim", "fedncv")
FIG3 = (
    "fedavg", "fedavgm", "fedprox", "scaffold", "feddyn", "fedgen", "fedlc", "moon", "fedrep", "fedper",
    "pfedsim", "fedncv",
)  # fmt: skip
# In addition to the paper's methods: no federation at all, the paper's equations as printed, and the shared-head
# methods with the label prior, so that the table shows what the control variates add.
BESIDE = ("local", "fedncv-paper", "fedavg+prior", "fedavgm+prior", "scaffold+prior", "feddyn+prior")
# FedNCV's parts on other methods. SCAFFOLD that counts samples, with these parts, differs from FedNCV only in details
# of the memory: in a client's first round, and in clients never seen.
EXTRAS = (
    "fedavg+even+prior+momentum+average+blend",
    "fedavgm+even+prior+average+blend",
    "scaffold:weights=samples+even+prior+momentum+average+blend",
)
# Rivals of later years
RIVALS = ("fedrod", "ditto", "fedbabu", "fedpac", "pfedfda", "knnper", "fedavg+finetune")
# Learning rates chosen by `fedncv study table1 --tune` (docs/results/table1.tar.xz), if not the protocol's 0.01
TUNED_ON_CIFAR10 = {
    "fedavg": 0.03,
    "fedprox": 0.03,
    "fedper": 0.03,
    "scaffold": 0.03,
    "scaffold+prior": 0.03,
    "fedrep": 0.1,
    "local": 0.03,
}
# The same for methods of the ablation that are not in Table 1 (docs/results/ablation_tuning.jsonl)
TUNED_FOR_ABLATION = {"fedavgm": 0.03, "fedvarp": 0.03, "scaffold+momentum": 0.03}
TUNED_ON_FASHION_MNIST = {
    "fedavg": 0.1,
    "fedprox": 0.1,
    "fedper": 0.1,
    "scaffold": 0.03,
    "scaffold+prior": 0.03,
    "fedrep": 0.1,
    "local": 0.1,
    "fedavg+prior": 0.1,
    "fedncv": 0.03,
}


def table1() -> Study:
    """The paper's methods, rivals and controls on six datasets, before and after local training; 100 clients."""
    five = ("tiny_imagenet", "emnist", "fashion_mnist", "mnist")
    return Study(
        name="table1",
        title="Table 1: accuracy before and after local training",
        settings=Settings(eval_every=5),
        datasets=("cifar10", "cifar100", *five),
        methods=(*TABLE1, *BESIDE, *EXTRAS, *RIVALS),
        seeds=tuple(range(10)),
        num_seeds=dict.fromkeys(five, 5),
        transfers={"tiny_imagenet": "cifar100", "emnist": "fashion_mnist", "mnist": "fashion_mnist"},
    )


def fig1() -> Study:
    """The curves of Table 1, measured every round."""
    return Study(
        name="fig1",
        title="Fig. 1: accuracy against rounds",
        settings=Settings(eval_every=1),
        datasets=("cifar10", "cifar100", "tiny_imagenet", "emnist"),
        methods=(*TABLE1, "local"),
        seeds=tuple(range(5)),
    )


def fig2() -> Study:
    """100 to 1,000 clients, a tenth of them drawn each round; with the label prior on other methods."""
    clients = (100, 200, 400, 700, 1000)
    return Study(
        name="fig2",
        title="Fig. 2: from 100 to 1,000 clients",
        settings=Settings(eval_every=20),
        datasets=("emnist",),
        methods=("fedrep", "fedper", "pfedsim", "fedncv", "fedncv-paper", "fedavg", "local", *BESIDE[2:5]),
        seeds=tuple(range(5)),
        clients=clients,
        lr={f"fashion_mnist/clients-{n}": TUNED_ON_FASHION_MNIST for n in clients},
    )


def fig3() -> Study:
    """Twelve methods on four more datasets: curves."""
    return Study(
        name="fig3",
        title="Fig. 3: twelve methods, accuracy against rounds",
        settings=Settings(eval_every=5),
        datasets=("mnist", "svhn", "fashion_mnist", "cinic10"),
        methods=(*FIG3, "local"),
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
    """FedNCV without each part, FedAvg with each part alone, and the parts on other methods."""
    off_alone = [f"fedncv:{part}=off" for part in ("drift", "even", "prior", "momentum", "average", "blend")]
    more = [
        "fedncv+memory:beta=learned", "fedncv:drift=off+memory:beta=learned", "fedncv:drift.alpha=learned",
        "fedncv+samples",
    ]  # fmt: skip
    on_alone = [
        "fedavg+drift", "fedavg+memory:beta=learned", "fedavg+blend", "fedavg+even", "fedavg+momentum",
        "fedavg+average", "fedavg+prior",
    ]  # fmt: skip
    others = [
        "fedavg", "fedavgm", "scaffold", "fedvarp", "scaffold+momentum", "fedavg+prior+momentum", "fedavgm+prior",
        "scaffold+prior", "scaffold+prior+momentum", "fedavg+even+prior+momentum+average",
        "scaffold+even+prior+momentum+average",
    ]  # fmt: skip
    # a part alone runs at the learning rate of FedAvg, unless the two were tuned together
    rates = dict.fromkeys(on_alone[:-1], TUNED_ON_CIFAR10["fedavg"]) | TUNED_ON_CIFAR10 | TUNED_FOR_ABLATION
    on_fashion = dict.fromkeys(on_alone[:-1], TUNED_ON_FASHION_MNIST["fedavg"]) | TUNED_FOR_ABLATION
    return Study(
        name="ablation",
        title="Ablation: what each part of FedNCV adds",
        settings=Settings(eval_every=20, probe="every=20"),
        datasets=("cifar10", "cifar100", "fashion_mnist"),
        methods=("fedncv", *off_alone, *more, *on_alone, *others),
        seeds=tuple(range(5)),
        # CIFAR-100 takes CIFAR-10's; what was tuned on CIFAR-10 only is also used on Fashion-MNIST
        lr={"cifar10": rates, "cifar100": rates, "fashion_mnist": on_fashion | TUNED_ON_FASHION_MNIST},
    )


def robustness() -> Study:
    """Other label skews, numbers of clients and draws, with the learning rates tuned for Table 1 on CIFAR-10."""
    methods = (*TABLE1, "local", "fedavg+prior", "fedavgm+prior", "scaffold+prior")
    variants: dict[str, dict[str, Any]] = {
        "alpha-0.05": {"partition": "dirichlet:alpha=0.05"},
        "alpha-0.3": {"partition": "dirichlet:alpha=0.3"},
        "alpha-1": {"partition": "dirichlet:alpha=1"},
        "50-clients": {"clients": 50},
        "500-clients": {"clients": 500},
        "5-a-round": {"per_round": 5},
        "50-a-round": {"per_round": 50},
    }
    return Study(
        name="robustness",
        title="Robustness: other skews, numbers of clients and draws, nothing tuned anew",
        settings=Settings(eval_every=20),
        datasets=("cifar10",),
        methods=methods,
        seeds=tuple(range(5)),
        variants=variants,
        lr={f"cifar10/{name}": TUNED_ON_CIFAR10 for name in variants},
    )


def resnet18() -> Study:
    """A larger model, ResNet-18 with GroupNorm, under the main protocol; learning rates as tuned for LeNet5."""
    methods = (
        "fedavg", "fedper", "fedavg+prior", "scaffold+prior",
        "scaffold:weights=samples+even+prior+momentum+average+blend", "fedncv",
    )  # fmt: skip
    return Study(
        name="resnet18",
        title="ResNet-18 with GroupNorm",
        settings=Settings(model="resnet18", eval_every=10),
        datasets=("cifar10", "cifar100"),
        methods=methods,
        seeds=(0, 1, 2),
        lr=dict.fromkeys(("cifar10", "cifar100"), TUNED_ON_CIFAR10),
    )


def unseen() -> Study:
    """A fifth of the clients never trains: their scores before and after their own local training."""
    return Study(
        name="unseen",
        title="Clients that never train",
        settings=Settings(eval_every=20, unseen=0.2),
        datasets=("cifar10", "fashion_mnist"),
        methods=(*TABLE1, "local", "fedavg+prior", "fedavgm+prior", "scaffold+prior", *EXTRAS, *RIVALS),
        seeds=tuple(range(5)),
        lr={"cifar10": TUNED_ON_CIFAR10, "fashion_mnist": TUNED_ON_FASHION_MNIST},
    )


def smoke() -> Study:
    """The built-in digits divided among 20 clients: a few minutes on a laptop. `make run` trains this study."""
    recipe = RECIPES["smoke"]()
    return Study(
        name="smoke",
        title="Smoke: the built-in digits among 20 clients",
        settings=recipe.settings,
        datasets=("digits",),
        methods=recipe.methods,
        seeds=(0, 1, 2),
    )


STUDIES: dict[str, Callable[[], Study]] = {
    "table1": table1,
    "fig1": fig1,
    "fig2": fig2,
    "fig3": fig3,
    "table2": table2,
    "ablation": ablation,
    "robustness": robustness,
    "resnet18": resnet18,
    "unseen": unseen,
    "smoke": smoke,
}

"""Time FL-bench (KarhouTam/FL-bench): its ``main.py method=fedavg`` in serial mode.

    PYTHONPATH=src:bench python bench/peers/flbench_peer.py --setting a --rounds 50 --device cuda --data-dir DIR

Its parallel mode needs Ray, which is not carried. The evaluation of clients is off, as its config file advises for
speed; with evaluation every ten rounds it scores the global model on all test samples. The samples are in its own
``BaseDataset``: on the host, scaled one by one, as for its CIFAR-10.
"""

import os
import random
import runpy
import shutil
import sys
import tempfile
from functools import wraps
from json import dumps
from pathlib import Path
from pickle import dump
from typing import Any

import torch
from peers.settings import CARRIED, Federation, use_carried
from peers.timing import Clock, arguments_of, federation_of, report
from torch import Tensor, nn

NAME = "peers"  # of our data and our model in its registries


def main() -> None:
    arguments = arguments_of(__doc__)
    clock = Clock(arguments.rounds, arguments.device)
    federation = federation_of(arguments)
    initial = federation.initial()
    source = CARRIED / "FL-bench"
    if not source.is_dir():
        raise SystemExit(f"FL-bench is not in {source}; put a clone there (bench/peers/README.md)")
    commit = (source / "COMMIT").read_text()[:8]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "FL-bench"
        shutil.copytree(source, root)  # it writes its data and results beside its code
        write_partition(federation, root)
        state_dict = run(federation, initial, clock, arguments.device, root)
        os.chdir(source)
    report("FL-bench", commit, arguments, clock, [federation], state_dict, "serial; cudnn.deterministic, its default")


def write_partition(federation: Federation, root: Path) -> None:
    """Write the files that its ``generate_data.py`` writes."""
    folder = root / "data" / NAME
    folder.mkdir()
    everyone = list(range(federation.setting.clients))
    indices = [
        {"train": train.tolist(), "val": [], "test": test.tolist()}
        for train, test in zip(federation.clients.train, federation.clients.test, strict=True)
    ]
    separation = {"train": everyone, "test": everyone, "val": [], "total": len(everyone)}
    with open(folder / "partition.pkl", "wb") as file:
        dump({"separation": separation, "data_indices": indices}, file)
    (folder / "args.json").write_text(dumps({"split": "sample"}))


def run(federation: Federation, initial: dict[str, Tensor], clock: Clock, device: str, root: Path) -> dict[str, Tensor]:
    """Run its main program with our data, partition and model, and return the global model."""
    use_carried()
    # its packages are called src and data, as our folder and a script of ours
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path or ".").resolve() not in ours())]
    os.chdir(root)
    from data.utils import datasets
    from src.server import fedavg
    from src.utils import constants, models

    datasets.DATASETS[NAME] = dataset_class(datasets.BaseDataset, federation)
    if federation.dataset.mean:
        constants.DATA_MEAN[NAME], constants.DATA_STD[NAME] = (
            list(federation.dataset.mean),
            list(federation.dataset.std),
        )
    models.MODELS[NAME] = model_factory(models.DecoupledModel, federation, initial)
    chosen = torch.device("cuda:0" if device == "cuda" else device)
    fedavg.get_optimal_cuda_device = lambda use_cuda: chosen  # it asks NVML for the one with most free memory
    servers = watch(fedavg.FedAvgServer, federation, clock)
    setting = federation.setting
    evaluation = {"interval": setting.eval_every, "test": True} if setting.eval_every else {"interval": -1}
    options = {
        "method": "fedavg",
        "dataset.name": NAME,
        "model.name": NAME,
        "mode": "serial",
        "optimizer.lr": setting.lr,
        "common.seed": federation.seed,
        "common.join_ratio": setting.per_round / setting.clients,
        "common.global_epoch": clock.last,
        "common.local_epoch": setting.epochs,
        "common.batch_size": setting.batch_size,
        "common.client_side_evaluation": False,
        "common.test.client.interval": -1,
        "common.test.client.test": False,
        **{f"common.test.server.{name}": value for name, value in evaluation.items()},
        "common.verbose_gap": 10**6,
        "common.use_cuda": device.startswith("cuda"),
        **{f"common.save_{name}": False for name in ("log", "model", "learning_curve_plot", "metrics")},
    }
    sys.argv = [str(root / "main.py"), *(f"{name}={value}" for name, value in options.items())]
    runpy.run_path(sys.argv[0], run_name="__main__")
    (server,) = servers
    assert {name.partition(".")[0] for name in server.public_model_params} == {"base", "classifier"}
    return {
        name.removeprefix("base.").replace("classifier.", "head."): tensor.data
        for name, tensor in server.public_model_params.items()
    }


def ours() -> set[Path]:
    here = Path(__file__).resolve()
    return {here.parent, here.parents[1], here.parents[2]}


def dataset_class(base: Any, federation: Federation) -> Any:
    class Ours(base):  # type: ignore[misc]
        """Our samples in its dataset, which scales pictures one by one with its transforms."""

        def __init__(self, root: Any, args: Any = None, **transforms: Any) -> None:
            dataset = federation.dataset
            pictures = dataset.x.dtype == torch.uint8
            data = dataset.x.float() if pictures else dataset.x.long()
            classes = list(range(dataset.num_classes))
            super().__init__(data=data, targets=dataset.y, classes=classes, **transforms)

        def _rescale_data(self) -> None:
            if self.data.is_floating_point():
                super()._rescale_data()

    return Ours


def model_factory(base: Any, federation: Federation, initial: dict[str, Tensor]) -> Any:
    class Ours(base):  # type: ignore[misc]
        """Our module as its two parts: the features, and the classifier."""

        def __init__(self, dataset: str, pretrained: bool) -> None:
            super().__init__()
            module: Any = federation.module()
            module.load_state_dict(initial)
            self.classifier, module.head = module.head, nn.Identity()
            self.base = module

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                TRAINED[0] += len(x)
            logits: Tensor = super().forward(x)
            return logits

    return Ours


TRAINED = [0]  # samples


def watch(server_class: Any, federation: Federation, clock: Clock) -> list[Any]:
    """Give its server our draw of clients, and let the clock tick at the end of every round."""
    servers: list[Any] = []
    run_experiment, display_metrics = server_class.run_experiment, server_class.display_metrics

    @wraps(run_experiment)
    def drawn(self: Any) -> Any:
        servers.append(self)
        self.client_sample_stream = [federation.ids(t) for t in range(clock.last)]
        random.seed(federation.seed)
        return run_experiment(self)

    @wraps(display_metrics)
    def ticking(self: Any) -> Any:
        result = display_metrics(self)  # the last thing that it does in a round
        clock.tick(TRAINED[0])
        return result

    server_class.run_experiment, server_class.display_metrics = drawn, ticking
    return servers


if __name__ == "__main__":
    main()

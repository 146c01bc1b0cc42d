"""Time BlazeFL with its own FedAvg: ``FedAvgBaseServerHandler`` and a pool of threads or processes.

    PYTHONPATH=src:bench python bench/peers/blazefl_peer.py --setting a --rounds 50 --device cuda --data-dir DIR

Its README recommends threads, on a free-threading build of Python 3.14; on other builds they take turns. ``--mode
process`` runs its pool of processes, which it starts anew every round. Data and model are the user's in BlazeFL. They
are as fast here as its interface allows: each client's samples are on the device (with processes: in a file, as in its
example) and a batch is one lookup.
"""

import argparse
import copy
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from peers.settings import Federation, use_carried
from peers.timing import Clock, arguments_of, federation_of, report
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

use_carried()
PARALLEL = 10  # as in its quickstart


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples of one client, of which a batch is looked up at once."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices, device=self.x.device)
        return self.x[rows], self.y[rows]


def unchanged(batch: Any) -> Any:
    return batch


class Partitioned:
    """BlazeFL's ``PartitionedDataset``: samples of each client in memory, or in files for other processes."""

    def __init__(self, parts: list[Samples] | Path, test: Samples | None) -> None:
        self.parts, self.test = parts, test

    def get_dataset(self, type_: str, cid: int | None) -> Any:
        if cid is None:
            return self.test
        if isinstance(self.parts, Path):
            return torch.load(self.parts / f"{cid}.pt", weights_only=False)
        return self.parts[cid]

    def set_dataset(self, type_: str, cid: int | None, dataset: Any) -> None:
        """Keep nothing: no client changes its samples."""

    def get_dataloader(
        self, type_: str, cid: int | None, batch_size: int | None, generator: torch.Generator | None
    ) -> Any:
        dataset = self.get_dataset(type_, cid)
        if cid is None:
            return DataLoader(dataset, batch_size=2_000, collate_fn=unchanged)
        return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator, collate_fn=unchanged)


class Selector:
    """BlazeFL's ``ModelSelector``: a copy of the initial model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def select_model(self, model_name: str) -> nn.Module:
        return copy.deepcopy(self.model)


def main() -> None:
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--mode", choices=("thread", "process"), default="thread")
    more.add_argument("--parallel", type=int, default=PARALLEL, help="threads or processes")
    arguments = arguments_of(__doc__, more=more)
    clock = Clock(arguments.rounds, arguments.device)
    federation = federation_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        state_dict = run(federation, clock, arguments, Path(folder))
    gil = "" if arguments.mode == "process" else ", under the GIL"
    peer = "BlazeFL" if arguments.mode == "thread" else "BlazeFL, processes"
    name = {"thread": "threads", "process": "processes"}[arguments.mode]
    note = f"{arguments.parallel} {name}{gil}"
    report(peer, metadata.version("blazefl"), arguments, clock, [federation], state_dict, note)


def run(federation: Federation, clock: Clock, arguments: argparse.Namespace, folder: Path) -> dict[str, Tensor]:
    from blazefl.contrib.fedavg import FedAvgBaseServerHandler

    setting = federation.setting
    torch.manual_seed(federation.seed)
    module = federation.module()
    module.load_state_dict(federation.initial())
    common = {
        "model_selector": Selector(module),
        "model_name": "the same for all",
        "dataset": partitioned(federation, arguments, folder),
        "num_clients": setting.clients,
        "device": arguments.device,
        "batch_size": setting.batch_size,
        "seed": federation.seed,
    }
    handler: Any = FedAvgBaseServerHandler(
        global_round=clock.last, sample_ratio=setting.per_round / setting.clients, **common
    )
    assert handler.num_clients_per_round == setting.per_round
    trainer = trainer_of(arguments, folder, common | {"epochs": setting.epochs, "lr": setting.lr})
    trainer.progress_fn = unchanged
    trained = 0
    while not handler.if_stop():  # the loop of its quickstart
        t = handler.round
        trainer.local_process(handler.downlink_package(), federation.ids(t))
        for package in trainer.uplink_package():
            trained += package.data_size
            handler.load(package)
        if setting.eval_every and (t + 1) % setting.eval_every == 0:
            handler.get_summary()
        clock.tick(trained)
    state_dict: dict[str, Tensor] = handler.model.state_dict()
    return state_dict


def partitioned(federation: Federation, arguments: argparse.Namespace, folder: Path) -> Partitioned:
    in_files = arguments.mode == "process"
    x, y = federation.tensors("cpu" if in_files else arguments.device)
    parts = [Samples(x[index], y[index]) for index in map(torch.from_numpy, federation.clients.train)]
    test = Samples(x[federation.test], y[federation.test])
    if not in_files:
        return Partitioned(parts, test)
    for u, part in enumerate(parts):
        torch.save(part, folder / f"{u}.pt")
    return Partitioned(folder, None if not federation.setting.eval_every else test)


def trainer_of(arguments: argparse.Namespace, folder: Path, common: dict[str, Any]) -> Any:
    from blazefl.contrib.fedavg import FedAvgProcessPoolClientTrainer, FedAvgThreadPoolClientTrainer
    from blazefl.core import IPCMode

    if arguments.mode == "thread":
        return FedAvgThreadPoolClientTrainer(num_parallels=arguments.parallel, **common)
    torch.multiprocessing.set_start_method("spawn", force=True)  # CUDA asks for it
    return FedAvgProcessPoolClientTrainer(
        num_parallels=arguments.parallel,
        share_dir=folder / "share",
        state_dir=folder / "state",
        ipc_mode=IPCMode.SHARED_MEMORY,
        **common,
    )


if __name__ == "__main__":
    main()

"""Time pfl (apple/pfl-research) as its own CIFAR-10 benchmark runs it: SimulatedBackend, PyTorchModel, FedAvg.

    PYTHONPATH=src:bench python bench/peers/pfl_peer.py --setting b --rounds 50 --device cuda --data-dir DIR

Samples are tensors on the device, as in pfl's benchmark. ``--processes 5`` shares the users of a round among processes
on the same GPU, which pfl's guide suggests for small models (1 to 5 of them). What differs from the others: batches are
the same in every epoch and round (pfl does not shuffle), BatchNorm's running statistics are not averaged (those of the
last client remain), and with evaluation it also scores each user of that round before and after training.
"""

import argparse
import atexit
import itertools
import os
import socket
import subprocess
import sys
import types
from typing import Any

import numpy as np
import torch
from peers.settings import Federation, use_carried
from peers.timing import WARM_UP, Clock, arguments_of, federation_of, report
from torch import Tensor, nn

NEVER = 10**9  # rounds between evaluations
RANK = "PFL_WORKER_RANK"


def main() -> None:
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--processes", type=int, default=1, help="that share the device and a round's users")
    arguments = arguments_of(__doc__, more=more)
    os.environ["PFL_PYTORCH_DEVICE"] = arguments.device
    others = start_others(arguments.processes)
    use_carried()
    use_gloo()
    import pfl

    clock = Clock(arguments.rounds, arguments.device)
    federation = federation_of(arguments)
    if arguments.processes > federation.setting.per_round:
        raise SystemExit("more processes than clients in a round: pfl waits forever for one without a client")
    state_dict = run(federation, clock, arguments.device)
    if os.environ.get(RANK, "0") != "0":
        return
    for process in others:
        process.wait()
    note = "batches not reshuffled"
    if any(isinstance(part, nn.BatchNorm2d) for part in federation.module().modules()):
        note += "; BatchNorm's statistics not averaged"
    peer = "pfl" if arguments.processes == 1 else f"pfl, {arguments.processes} processes"
    report(peer, pfl.__version__, arguments, clock, [federation], state_dict, note)


def start_others(num: int) -> list[subprocess.Popen[bytes]]:
    """Start this program once more for every further process, with the variables by which pfl finds them."""
    if num == 1 or RANK in os.environ:
        return []
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([address] * num)
    os.environ[RANK] = "0"
    command = [sys.executable, *sys.argv]
    others = [subprocess.Popen(command, env=os.environ | {RANK: str(rank)}, stdout=2) for rank in range(1, num)]
    for process in others:
        atexit.register(process.kill)  # they would wait for a process that failed
    return others


def use_gloo() -> None:
    """Let pfl's processes talk through gloo: it asks for NCCL, which refuses two processes on one GPU."""
    init_process_group = torch.distributed.init_process_group

    def init(*_: Any, backend: str = "", **settings: Any) -> Any:
        return init_process_group(backend="gloo", **settings)

    torch.distributed.init_process_group = init  # type: ignore[assignment]


def counted(trained: int) -> int:
    """Return the samples of all processes."""
    if RANK not in os.environ:
        return trained
    total = torch.tensor([trained])
    torch.distributed.all_reduce(total)
    return int(total)


def run(federation: Federation, clock: Clock, device: str) -> dict[str, Tensor]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    torch.manual_seed(federation.seed)
    setting = federation.setting
    module = trainable(federation, device)
    x, y = federation.tensors(device)
    users = [(x[index], y[index]) for index in (torch.from_numpy(part).to(device) for part in federation.clients.train)]
    np.random.seed(federation.seed)  # the same in every process, which pfl asks for
    ids = (u for t in itertools.count() for u in federation.ids(t))
    sizes = {u: len(y_u) for u, (_, y_u) in enumerate(users)}  # pfl balances its processes by them
    training_data = FederatedDataset(lambda u: Dataset(users[u], user_id=u), lambda: next(ids), sizes)
    test = federation.test.to(device)
    central_data = Dataset(raw_data=(x[test], y[test]))
    every = setting.eval_every or NEVER
    evaluating = NNEvalHyperParams(local_batch_size=10_000)

    class Tick(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            noted = clock.ticks + 1 in (WARM_UP, clock.last)
            clock.tick(counted(module.trained) if noted else 0)
            return False, Metrics()

    callbacks: list[Any] = [Tick()]  # the last, so that evaluation is timed
    if setting.eval_every:
        callbacks.insert(0, CentralEvaluationCallback(central_data, model_eval_params=evaluating, frequency=every))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=clock.last,
            evaluation_frequency=every,
            train_cohort_size=setting.per_round,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=training_data, val_data=training_data, postprocessors=[WeightByDatapoints()]
        ),
        model=PyTorchModel(
            model=module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=setting.lr, local_num_epochs=setting.epochs, local_batch_size=setting.batch_size
        ),
        model_eval_params=evaluating,
        callbacks=callbacks,
    )
    state_dict: dict[str, Tensor] = module.state_dict()
    return state_dict


def trainable(federation: Federation, device: str) -> Any:
    """Return the module with the methods ``loss`` and ``metrics`` that pfl asks for, as its benchmarks write them."""
    from pfl.metrics import Weighted

    def loss(self: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        self.train()
        self.trained += len(targets)
        return nn.functional.cross_entropy(self(inputs), targets)

    @torch.no_grad()
    def metrics(self: Any, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        self.eval()
        logits = self(inputs)
        right = (logits.argmax(-1) == targets).float().sum().item()
        total = nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        return {"loss": Weighted(total, len(targets)), "accuracy": Weighted(right, len(targets))}

    module: Any = federation.module()
    module.load_state_dict(federation.initial())
    module.trained = 0
    module.loss, module.metrics = types.MethodType(loss, module), types.MethodType(metrics, module)
    return module.to(device)


if __name__ == "__main__":
    main()

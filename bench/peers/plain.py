"""Time FedAvg as a plain PyTorch loop: a module and an optimizer, one client after the other, samples on the device.

PYTHONPATH=src:bench python bench/peers/plain.py --setting a --rounds 50 --device cuda --data-dir DIR
"""

import torch
from peers.settings import Federation
from peers.timing import Clock, arguments_of, federation_of, report
from torch import Tensor, nn


def main() -> None:
    arguments = arguments_of(__doc__)
    clock = Clock(arguments.rounds, arguments.device)
    federation = federation_of(arguments)
    state_dict = fedavg(federation, clock, arguments.device)
    report("plain PyTorch loop", torch.__version__, arguments, clock, [federation], state_dict)


def fedavg(federation: Federation, clock: Clock, device: str) -> dict[str, Tensor]:
    """Train ``clock.last`` rounds and return the model."""
    torch.manual_seed(federation.seed)
    setting = federation.setting
    x, y = federation.tensors(device)
    train = [torch.from_numpy(part).to(device) for part in federation.clients.train]
    test = federation.test.to(device)
    model = {name: tensor.to(device) for name, tensor in federation.initial().items()}
    module = federation.module().to(device)
    trained = 0
    for t in range(clock.last):
        ids = federation.ids(t)
        total = sum(len(train[u]) for u in ids)
        mean = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in model.items()}
        for u in ids:
            module.load_state_dict(model)
            trained += train_client(module, x[train[u]], y[train[u]], setting.epochs, setting.batch_size, setting.lr)
            for name, tensor in module.state_dict().items():
                mean[name].add_(tensor, alpha=len(train[u]) / total)
        model = {name: mean[name].to(tensor.dtype) for name, tensor in model.items()}
        if setting.eval_every and (t + 1) % setting.eval_every == 0:
            module.load_state_dict(model)
            accuracy(module, x[test], y[test])
        clock.tick(trained)
    return model


def train_client(module: nn.Module, x: Tensor, y: Tensor, epochs: int, batch_size: int, lr: float) -> int:
    """Train the module and return the number of samples."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    samples = 0
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(x), device=x.device), batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(module(x[rows]), y[rows]))
            optimizer.step()
            samples += len(rows)
    return samples


@torch.no_grad()
def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    module.eval()
    batches = zip(torch.split(x, 10_000), torch.split(y, 10_000), strict=True)
    right = sum((module(inputs).argmax(1) == targets).sum() for inputs, targets in batches)
    return float(right) / len(y)


if __name__ == "__main__":
    main()

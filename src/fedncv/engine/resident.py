"""Data that stay on the device for a whole study: all samples once, and a table of all clients.

J runs of N clients each share the samples. Client u of run j has row j N + u of the tables.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedncv.data import Dataset, label_counts
from fedncv.data.owners import grouped
from fedncv.engine import fused
from fedncv.engine.orders import Table
from fedncv.engine.problem import Problem
from fedncv.methods.base import Client

Ints = NDArray[np.int64]
SHARE_FOR_INPUTS = 0.1  # of the device's free memory for scaled inputs; if they need more, they are scaled per batch


class Parts:
    """The sample numbers of many clients, one client after another."""

    def __init__(self, runs: Sequence[tuple[Sequence[Ints], int]], device: torch.device) -> None:
        """Take the clients of every run, and where the run's samples begin."""
        every = [(grouped(parts), place) for parts, place in runs]
        self.sizes = np.concatenate([parts.sizes for parts, _ in every])
        self._starts = np.cumsum(self.sizes) - self.sizes
        self._flat = torch.from_numpy(np.concatenate([parts.flat + place for parts, place in every])).to(device)

    def only(self, rows: Ints) -> "Parts":
        """Return some of the clients, without copying sample numbers."""
        other = copy.copy(self)
        other.sizes, other._starts = self.sizes[rows], self._starts[rows]
        return other

    def samples(self, place: Tensor, rows: Ints) -> Tensor:
        """Return the sample numbers at the places (…, K) of the clients ``rows`` (K)."""
        return self._flat[place + torch.from_numpy(self._starts[rows]).to(self._flat.device)]


class Resident:
    """Samples, targets and clients of runs on one dataset."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        self.dtype, self.device = first.dtype, first.model.start_P.device
        self.num_clients = len(first.clients.train)
        self.dataset, places = _together([problem.dataset for problem in problems], self.dtype)
        self.y = self.dataset.y.to(self.device)
        clients = [problem.clients for problem in problems]
        self.train = Parts([(each.train, place) for each, place in zip(clients, places, strict=True)], self.device)
        self.test = Parts([(each.test, place) for each, place in zip(clients, places, strict=True)], self.device)
        self._counts = _label_counts(problems).to(self.device, self.dtype)
        self._batch_size = problems[0].config.batch_size
        self._sizes = torch.from_numpy(self.train.sizes).to(self.device, self.dtype)
        self._x = self._scaled_inputs()

    def _scaled_inputs(self) -> Tensor | None:
        x = self.dataset.x
        if x.dtype in (torch.int8, torch.int16):
            return None  # tokens that are stored small; ``Dataset.inputs`` widens a batch of them
        if not (x.is_floating_point() or x.dtype == torch.uint8):
            return x.to(self.device)  # tokens are not scaled
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            if x.numel() * self._sizes.element_size() > SHARE_FOR_INPUTS * free:
                return None
        pieces = torch.split(torch.arange(len(x), device=x.device), 4096)
        return torch.cat([self.dataset.inputs(piece, self.dtype) for piece in pieces])

    def inputs(self, index: Tensor) -> Tensor:
        """Return the scaled inputs at an index of any shape."""
        flat = index.reshape(-1)
        x = self.dataset.inputs(flat, self.dtype) if self._x is None else self._x.index_select(0, flat)
        return x.view(*index.shape, *x.shape[1:])

    def targets(self, index: Tensor) -> Tensor:
        y = self.y.index_select(0, index.reshape(-1))
        return y.view(*index.shape, *y.shape[1:])

    def batch(self, table: Table, step: Tensor, k: int) -> tuple[Tensor, ...]:
        """Return inputs (B, k, …), targets, weights, batch numbers and keys of the first k clients in one step."""
        x = self._x
        if fused.HAVE_KERNELS and x is not None and x.is_cuda and x.is_contiguous() and self.y.dim() == 1:
            return fused.batch(table, step, x, self.y, k)
        index_BK, weight_BK = (a.index_select(0, step)[0, :, :k] for a in (table.index_TBK, table.weight_TBK))
        number_K, key_K2 = (a.index_select(0, step)[0, :k] for a in (table.number_TK, table.key_TK2))
        return self.inputs(index_BK), self.targets(index_BK), weight_BK, number_K, key_K2

    def only(self, runs: Sequence[int]) -> "Resident":
        """Return the clients of some of the runs, and the same samples in the same memory."""
        rows = (np.array(runs)[:, None] * self.num_clients + np.arange(self.num_clients)).reshape(-1)
        other = copy.copy(self)
        other.train, other.test = self.train.only(rows), self.test.only(rows)
        row_K = torch.from_numpy(rows).to(self.device)
        other._counts, other._sizes = self._counts[row_K], self._sizes[row_K]
        return other

    def clients(self, rows: Ints) -> Client:
        """Return what these clients know about themselves, stacked."""
        row_K = torch.from_numpy(rows).to(self.device)
        sizes_K = self._sizes[row_K]
        return Client(row_K % self.num_clients, sizes_K, sizes_K.clamp(max=self._batch_size), self._counts[row_K])


def _together(datasets: Sequence[Dataset], dtype: torch.dtype) -> tuple[Dataset, list[int]]:
    """Return one dataset for all runs, and where each run's samples begin in it.

    Runs share the samples, unless each has its own scale; then each has its scaled copy.
    """
    first, n = datasets[0], len(datasets[0].x)
    if all((each.mean, each.std) == (first.mean, first.std) for each in datasets):
        return first, [0] * len(datasets)
    every = torch.arange(n, device=first.x.device)
    x = torch.cat([each.inputs(every, dtype) for each in datasets])
    copies = first._replace(x=x, y=torch.cat([each.y for each in datasets]), mean=(), std=())
    return copies, [n * j for j in range(len(datasets))]


def _label_counts(problems: Sequence[Problem]) -> Tensor:
    """Return (J N, C) training samples of each class; zeros if labels are not classes."""
    first = problems[0]
    labels, num_classes = first.dataset.y, first.dataset.num_classes
    rows = len(problems) * len(first.clients.train)
    if labels.is_floating_point() or labels.dim() != 1:
        return torch.zeros(rows, num_classes)
    labels_n = labels.cpu().numpy()
    return torch.from_numpy(
        np.concatenate([label_counts(labels_n, problem.clients.train, num_classes) for problem in problems])
    )

"""Make the batches of many clients at once, as index tables: the same batches as ``local.plan`` for one client.

Everything is integer arithmetic on the keyed generator, so a GPU builds the same tables as a CPU.

K clients, E epochs, T steps, B samples of a batch.
"""

import math
import zlib
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedncv.engine.local import moves
from fedncv.keys import WORD, Key, bits, fold, philox
from fedncv.methods.base import Method

Ints = NDArray[np.int64]
CHUNK = 1 << 24  # random numbers sorted at a time
LAST = (1 << 63) - 1  # sorts after every random number


def keys_for(seeds: list[int], purpose: str, round: int, ids: Ints) -> Key:
    """Return (K, 2): ``keys.key_for`` of each (seed, client)."""
    words = [[seed & WORD, (seed >> 32) & WORD] for seed in seeds]
    seed_K2 = torch.tensor(words, dtype=torch.int64).reshape(len(seeds), 2)  # also of nobody
    client_K = torch.from_numpy(ids)
    word_K = torch.zeros_like(client_K)
    c0, c1, _, _ = philox(seed_K2, client_K, word_K + round, word_K + zlib.crc32(purpose.encode()), word_K)
    return torch.stack([c0, c1], dim=-1)


def permutations(key: Key, sizes: Tensor, longest: int) -> Tensor:
    """Return ``keys.permutation`` of 0..n-1 for each key and its own n; values after the n-th are meaningless.

    Padding gets the largest number, so the first n values have the same order as without padding.
    """
    c0, c1, _, _ = bits(key, longest)
    real = torch.arange(longest, device=key.device) < sizes[..., None]
    return torch.argsort(torch.where(real, (c0 << 31) | (c1 >> 1), LAST), stable=True)


class Counts(NamedTuple):
    """The work of each client, known on the host before anything runs."""

    batches_K: Ints  # per epoch, as drawn
    used_K: Ints  # without a last one that is too small for the model
    steps_KF: Ints  # in each phase; a straggler has fewer
    samples_KF: Ints

    def trained_KF(self, method: Method, epochs: int) -> Ints:
        """Return the steps of the phases that train; those of all phases if the method only looks at the data."""
        trains = np.array([bool(phase.trains) for phase in method.phases(epochs)])
        trained_KF: Ints = self.steps_KF * (trains if trains.any() else 1)
        return trained_KF

    def moved_KF(self, method: Method, epochs: int) -> Ints:
        """Return the steps of the phases that move the model."""
        moved_KF: Ints = self.steps_KF * np.array(moves(method.phases(epochs)))
        return moved_KF


def count(
    method: Method, n_K: Ints, shares: list[float], *, epochs: int, batch_size: int, smallest: int, keys: Key
) -> Counts:
    """Count the work; the clients' batch ``keys`` tell which steps, and so how many samples, a straggler reaches."""
    batches_K = -(-n_K // batch_size)
    last_K = n_K - (batches_K - 1) * batch_size
    used_K = batches_K - (last_K < smallest)
    epochs_F = np.array([phase.epochs for phase in method.phases(epochs)])
    whole_KF = used_K[:, None] * epochs_F
    done_K = np.array([math.ceil(s * k) for s, k in zip(shares, whole_KF.sum(1).tolist(), strict=True)], dtype=np.int64)
    before_KF = np.cumsum(whole_KF, axis=1) - whole_KF
    steps_KF = np.clip(done_K[:, None] - before_KF, 0, whole_KF)
    # every step has a full batch, except one per epoch on the client's last batch
    short_K = np.where(last_K >= smallest, batch_size - last_K, 0)
    passes_KF = steps_KF // np.maximum(used_K, 1)[:, None]
    if method.same_batches:
        for k, f in zip(*np.nonzero(steps_KF % np.maximum(used_K, 1)[:, None]), strict=True):
            epoch = int(epochs_F[:f].sum() + passes_KF[k, f])
            order = permutations(
                fold(keys[k], int(epochs_F.sum()) + epoch), torch.tensor(int(batches_K[k])), int(batches_K[k])
            )
            order = order[order < int(used_K[k])]
            reached = int(batches_K[k]) - 1 in order[: int(steps_KF[k, f] % used_K[k])].tolist()
            passes_KF[k, f] += reached
    return Counts(batches_K, used_K, steps_KF, steps_KF * batch_size - passes_KF * short_K[:, None])


class Orders(NamedTuple):
    """The samples and batches of every epoch, in order."""

    order_KEn: Tensor  # positions among the client's training samples
    numbers_KEb: Tensor | None  # the order of batches, if batches keep their samples
    n_K: Tensor
    used_K: Tensor
    step_keys_K2: Key


def draw(method: Method, counts: Counts, n_K: Ints, *, epochs: int, keys: Key, step_keys: Key) -> Orders:
    """Draw the orders on the device of ``keys``, in pieces that bound the memory."""
    device = keys.device
    total = sum(phase.epochs for phase in method.phases(epochs))
    sizes_K, used_K = (torch.from_numpy(a).to(device) for a in (n_K, counts.used_K))
    epoch_E = torch.arange(1 if method.same_batches else total, device=device)
    longest = int(n_K.max())
    piece = max(1, CHUNK // (longest * len(epoch_E)))
    order = [
        permutations(fold(k[:, None], epoch_E), n[:, None].expand(-1, len(epoch_E)), longest)
        for k, n in zip(torch.split(keys, piece), torch.split(sizes_K, piece), strict=True)
    ]
    numbers = None
    if method.same_batches:  # the batch that is left out, the client's last, sorts after the others
        later_E = torch.arange(total, 2 * total, device=device)
        most = int(counts.batches_K.max())
        numbers = permutations(fold(keys[:, None], later_E), used_K[:, None].expand(-1, total), most)
    return Orders(torch.cat(order), numbers, sizes_K, used_K, step_keys)


class Plan(NamedTuple):
    """Batches of K clients; ``who`` are the clients with at least one step."""

    rows: Ints
    shares: list[float]
    round: int
    counts: Counts
    orders: Orders | None
    who: Ints


class Table(NamedTuple):
    """The steps of one phase. After a client's last step its entries are valid samples whose results are not used."""

    index_TBK: Tensor  # positions among the client's training samples
    weight_TBK: Tensor
    number_TK: Tensor
    key_TK2: Key


def table(
    method: Method,
    orders: Orders,
    counts: Counts,
    rows: Ints,
    phase: int,
    *,
    epochs: int,
    batch: int,
    batch_size: int,
    dtype: torch.dtype,
) -> Table:
    """Return the steps of ``phase`` of the clients ``rows``, in that order, with ``batch`` places per batch."""
    device = orders.n_K.device
    epochs_F = [each.epochs for each in method.phases(epochs)]
    steps = counts.steps_KF[rows, phase]
    whole_KF = counts.used_K[:, None] * np.array(epochs_F)
    first_K = torch.from_numpy(whole_KF[rows, :phase].sum(1)).to(device)
    steps_K, row_K = torch.from_numpy(steps).to(device), torch.from_numpy(rows).to(device)
    n_K, used_K = orders.n_K[row_K], orders.used_K[row_K].clamp(min=1)

    step_T1 = torch.arange(int(steps.max()), device=device)[:, None]
    live_TK = step_T1 < steps_K
    epoch_TK = torch.where(live_TK, step_T1 // used_K, 0) + sum(epochs_F[:phase])
    number_TK = step_T1 % used_K
    if orders.numbers_KEb is not None:
        number_TK = orders.numbers_KEb[row_K, epoch_TK, number_TK]
        epoch_TK = torch.zeros_like(epoch_TK)
    place_TBK = number_TK[:, None] * batch_size + torch.arange(batch, device=device)[:, None]
    real_TBK = (place_TBK < n_K) | ~live_TK[:, None]
    place_TBK = torch.minimum(place_TBK, n_K - 1)
    index_TBK = orders.order_KEn[row_K, epoch_TK[:, None], place_TBK]
    key_TK2 = fold(orders.step_keys_K2[row_K], first_K + step_T1)
    return Table(index_TBK, real_TBK.to(dtype), number_TK, key_TK2)

"""Fixed-point numbers: fields of a reply as whole numbers whose sum cannot overflow.

    q    = clip(round(a / step), -2^precision, 2^precision)        step = 2^ceil(log2(bound)) / 2^precision
    sum  = sum_S w_u q_u   modulo 2^bits                           w_u = n_u ("samples") or 1 ("one")
    |sum| <= S * n_max * 2^precision < 2^(bits - 1)                so the sum modulo 2^bits is the sum

Steps are powers of two, so step * q is exact in float32 and in float64. A sum of whole numbers does not depend on its
order: clients, machines and partial sums can be added in any way. ``Grid`` holds the constants of a run.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STATISTICS = "buffers_R"  # the running statistics, as a field
COUNTS = ("beyond_bound",)  # fields that are numbers of things: their step is 1

Words = NDArray[np.uint64]


class Grid(NamedTuple):
    """Steps and bounds of all fields, and the size of the words in which they are summed."""

    bits: int = 64  # of a word on the wire, a multiple of 8
    precision: int = 24  # bits of a value without its sign
    bound: float = 16.0  # of a field without a bound of its own
    statistics: float = 1024.0  # bound of the running statistics
    samples: int = 1_000_000  # most training samples of a client, n_max
    bounds: tuple[tuple[str, float], ...] = ()  # field -> its own bound

    @property
    def limit(self) -> int:
        """Return the largest |q|."""
        return 1 << self.precision

    @property
    def most(self) -> int:
        """Return the largest |sum|: 2^(bits - 1) - 1."""
        return (1 << (self.bits - 1)) - 1

    def bound_of(self, name: str) -> float:
        if name in COUNTS:
            return float(self.limit)
        return self.statistics if name == STATISTICS else dict(self.bounds).get(name, self.bound)

    def step_of(self, name: str) -> float:
        """Return the distance of two neighbouring values of a field, a power of two."""
        return float(2.0 ** (math.ceil(math.log2(self.bound_of(name))) - self.precision))

    def largest_of(self, name: str) -> int:
        """Return the largest |q| of a field."""
        return min(self.limit, math.floor(self.bound_of(name) / self.step_of(name)))

    def bytes_of(self, numbers: int) -> int:
        return numbers * self.bits // 8


def check_room(grid: Grid, clients: int, *, largest: int | None = None) -> None:
    """Raise ValueError if the sum over so many clients, of at most ``largest`` samples, could overflow."""
    samples = grid.samples if largest is None else largest
    needed = (clients * samples * grid.limit).bit_length() + 1
    if needed > grid.bits:
        remedy = f"bits={-(-needed // 8) * 8}, or " if needed <= 64 else ""
        raise ValueError(
            f"fixed_point: the sum over {clients} clients of up to {samples:,} samples with precision={grid.precision} "
            f"needs {needed} bits, and a word has bits={grid.bits}; use {remedy}a lower precision, or a lower samples "
            "(the largest number of training samples of a client)"
        )


def rounded(grid: Grid, name: str, a: Tensor) -> Tensor:
    """Return the nearest value within the bound that the field can have; values that are not finite become NaN."""
    step, largest = grid.step_of(name), grid.largest_of(name)
    q = torch.round(a / step).clamp(-largest, largest)
    return torch.where(torch.isfinite(a), q * step, torch.nan)


def outside(grid: Grid, name: str, a: Tensor) -> Tensor:
    """Return how many values are beyond the field's bound."""
    return (torch.round(a / grid.step_of(name)).abs() > grid.largest_of(name)).sum().to(a.dtype)


def whole(grid: Grid, name: str, a: Tensor) -> Tensor:
    """Return the whole numbers q of the values, int64."""
    return (rounded(grid, name, a).to(torch.float64) / grid.step_of(name)).to(torch.int64)


def value(grid: Grid, name: str, total: Tensor) -> Tensor:
    """Return a sum of whole numbers as a number, float64; rounded if it needs more than 53 bits."""
    return total.to(torch.float64) * grid.step_of(name)


# ---- one vector -----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A field in the vector of a client."""

    name: str
    shape: tuple[int, ...]
    by_samples: bool


def to_words(grid: Grid, parts: list[tuple[Part, Tensor]], samples: int) -> Words:
    """Return w_u q_u of all fields, in order, and the number of samples n_u at the end, modulo 2^bits."""
    if not 1 <= samples <= grid.samples:
        raise ValueError(f"{samples:,} training samples; with samples={grid.samples:,} the sum has room for no more")
    flat = [whole(grid, part.name, a).reshape(-1) * (samples if part.by_samples else 1) for part, a in parts]
    joined = torch.cat([*flat, torch.tensor([samples])]).cpu().numpy()
    return words(grid.bits, joined)


def from_words(grid: Grid, parts: list[Part], summed: Words, replies: int) -> tuple[Mapping[str, Tensor], int]:
    """Return field -> sum_S w_u q_u (int64), and sum_S n_u; raise ValueError if it cannot be a sum of ``replies``."""
    numbers = torch.from_numpy(signed(grid.bits, summed))
    samples = int(numbers[-1])
    if not replies <= samples <= replies * grid.samples:
        raise ValueError(f"the sum says {samples} samples of {replies} clients, which cannot be: a client cheated")
    fields: dict[str, Tensor] = {}
    at = 0
    for part in parts:
        size = math.prod(part.shape)
        fields[part.name] = numbers[at : at + size].reshape(part.shape)
        most = grid.largest_of(part.name) * (samples if part.by_samples else replies)
        if size and int(fields[part.name].abs().max()) > most:
            raise ValueError(f"the sum of {part.name} is beyond what {replies} clients can send: a client cheated")
        at += size
    if at + 1 != len(numbers):
        raise ValueError(f"the sum has {len(numbers)} numbers, not {at + 1}")
    return fields, samples


def words(bits: int, numbers: NDArray[np.int64]) -> Words:
    """Return whole numbers modulo 2^bits."""
    return numbers.astype(np.uint64) & mask_of(bits)


def signed(bits: int, summed: Words) -> NDArray[np.int64]:
    """Return the numbers of -2^(bits - 1) to 2^(bits - 1) - 1 that are equal modulo 2^bits."""
    shift = np.uint64(64 - bits)
    return (summed << shift).view(np.int64) >> np.int64(64 - bits)


def mask_of(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def pack(bits: int, vector: Words) -> bytes:
    """Return bits / 8 bytes of every word, the lowest first."""
    return vector.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : bits // 8].tobytes()


def unpack(bits: int, data: bytes, numbers: int) -> Words:
    """Return the words that ``pack`` made; raise ValueError if the length is wrong."""
    size = bits // 8
    if len(data) != numbers * size:
        raise ValueError(f"{len(data)} bytes are not {numbers} words of {size}")
    full = np.zeros((numbers, 8), np.uint8)
    full[:, :size] = np.frombuffer(data, np.uint8).reshape(numbers, size)
    return full.reshape(-1).view("<u8").astype(np.uint64)

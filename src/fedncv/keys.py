"""Keyed randomness: every draw is a pure function of (seed, purpose, round, client).

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
written in integer tensor arithmetic: the same words on every device, under ``torch.vmap``, in any order
and on any number of workers. There is no generator state to save, share or synchronise, and no global generator
is used.

    key          two 32-bit words
    key_for      (seed, purpose, round, client) -> key
    fold         key, number -> another key, for a step, an epoch, a layer
    bits         key, n -> n x 4 random 32-bit words
    generator    (seed, purpose, round, client) -> a NumPy Generator, for draws made on the host

A 32-bit word is held in an int64, because torch has few operations on unsigned integers.
"""

import functools
import zlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

Key = Tensor  # int64, shape (2,), two 32-bit words
Word = TypeVar("Word", int, Tensor, NDArray[np.int64])


def _multiply(a: int, b: Word) -> tuple[Word, Word]:
    """Return high and low word of a 32 x 32 -> 64 bit product (int64 wraps; the bits are right)."""
    product = a * b
    return (product >> 32) & WORD, product & WORD


def ten_rounds(k0: Word, k1: Word, c0: Word, c1: Word, c2: Word, c3: Word) -> tuple[Word, Word, Word, Word]:
    """Apply Philox to whole numbers, tensors or arrays; arrays of the size of a cache are the fastest on a CPU."""
    for _ in range(10):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def philox(key: Key, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply ten Philox rounds to the counter (c0, c1, c2, c3) under ``key``; all are 32-bit words."""
    k0, k1 = key[..., 0], key[..., 1]
    if c0.is_cuda and (in_one := _kernel()) is not None:
        return in_one(k0, k1, c0, c1, c2, c3)
    if c0.device.type == "cpu" and not torch._C._are_functorch_transforms_active():
        words = (each.numpy() for each in (k0, k1, c0, c1, c2, c3))  # NumPy starts an operation in a fifth of the time
        with np.errstate(over="ignore"):  # a single number that wraps would warn
            w0, w1, w2, w3 = map(torch.as_tensor, ten_rounds(*words))
        return w0, w1, w2, w3
    return ten_rounds(k0, k1, c0, c1, c2, c3)


@functools.cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None:
    """Return the same function as one GPU kernel, if Triton can compile it."""
    try:
        from fedncv.keys_kernel import philox as in_one
    except ImportError:
        return None
    return in_one


def key_for(seed: int, purpose: str, round: int = 0, client: int | Tensor = 0) -> Key:
    """Return the key of one draw. Different purposes never share words, whatever their rounds and clients.

    >>> key_for(0, "batches", 3, 7)
    tensor([1254397809, 3131939416])
    """
    words, number = (seed & WORD, (seed >> 32) & WORD), zlib.crc32(purpose.encode())
    if not isinstance(client, Tensor):  # a tensor of one number takes thirty times as long
        return torch.tensor(ten_rounds(*words, int(client), round, number, 0)[:2])
    word = torch.zeros_like(client)
    c0, c1, _, _ = philox(torch.tensor(words, device=client.device), client, word + round, word + number, word)
    return torch.stack([c0, c1], dim=-1)


def fold(key: Key, number: int | Tensor) -> Key:
    """Return another key, for the ``number``-th part (step, epoch, layer) of the work of ``key``."""
    if not isinstance(number, Tensor):
        number = torch.full((), number, dtype=torch.int64, device=key.device)  # a fill: a CUDA graph can hold it
    number = number.to(key.device)
    zero = torch.zeros_like(number)
    c0, c1, _, _ = philox(key, number, zero, zero, zero + WORD)  # the last word makes folds differ from bits
    return torch.stack([c0, c1], dim=-1)


def bits(key: Key, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return n x 4 random 32-bit words, for each of the keys if ``key`` holds several."""
    counter = torch.arange(n, device=key.device)
    zero = torch.zeros_like(counter)
    return philox(key[..., None, :], counter, zero, zero, zero)


def uniform(key: Key, n: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return n uniforms in [0, 1), on a grid of 2^-53 (2^-24 in float32)."""
    c0, c1, _, _ = bits(key, n)
    if dtype == torch.float64:
        return (((c0 << 21) | (c1 >> 11)).to(dtype)) * 2.0**-53
    return (c0 >> 8).to(dtype) * 2.0**-24


def normal(key: Key, n: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return n standard normals by Box and Muller's transform."""
    u, v = uniform(fold(key, 0), n, dtype=dtype), uniform(fold(key, 1), n, dtype=dtype)
    return torch.sqrt(-2 * torch.log1p(-u)) * torch.cos(2 * torch.pi * v)


def permutation(key: Key, n: int) -> Tensor:
    """Return a permutation of 0..n-1 (a row for each key): the order of n random 63-bit numbers.

    >>> sorted(permutation(key_for(0, "doc"), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    c0, c1, _, _ = bits(key, n)
    return torch.argsort((c0 << 31) | (c1 >> 1), stable=True)


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return NumPy's own Philox under the same kind of key, for draws with a distribution (Dirichlet, choice)."""
    return np.random.Generator(_philox(key_for(seed, purpose, round, client)))


def uniform_at(key: Key, place: int) -> float:
    """Return the number at ``place`` of ``generator(...).random(n)`` with this key, without those before it.

    >>> uniform_at(key_for(0, "doc"), 1234) == float(generator(0, "doc").random(2000)[1234])
    True
    """
    bits = _philox(key).advance(place // 4)  # four numbers for each value of the counter
    return float(np.random.Generator(bits).random(place % 4 + 1)[-1])


def _philox(key: Key) -> np.random.Philox:
    k0, k1 = key.tolist()
    return np.random.Philox(key=(k1 << 32) | k0)

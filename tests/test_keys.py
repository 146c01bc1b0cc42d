"""Keyed randomness: the published words, and no draw that depends on another."""

import random

import numpy as np
import pytest
import torch
from federations import tiny, train

import fedncv
from fedncv.keys import bits, fold, generator, key_for, normal, permutation, philox, uniform


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_words_published_with_it(key, counter, words):
    """Random123's known answers for philox4x32-10."""
    assert tuple(int(w) for w in philox(torch.tensor(key), *map(torch.tensor, counter))) == words


def test_every_part_of_a_key_matters():
    base = (3, "batches", 5, 7)
    others = [
        (4, "batches", 5, 7),
        (3, "dropout", 5, 7),
        (3, "batches", 6, 7),
        (3, "batches", 5, 8),
        (3 + 2**32, *base[1:]),
    ]
    keys = {tuple(key_for(*parts).tolist()) for parts in [base, *others]}
    assert len(keys) == 6
    assert tuple(fold(key_for(*base), 0).tolist()) not in keys
    assert fold(key_for(*base), 0).tolist() != bits(key_for(*base), 1)[0].tolist()


def test_keys_of_many_clients_at_once_are_their_keys_one_by_one():
    together = key_for(1, "batches", 2, torch.arange(5))
    assert torch.equal(together, torch.stack([key_for(1, "batches", 2, u) for u in range(5)]))
    orders = permutation(together, 9)
    assert torch.equal(orders, torch.stack([permutation(key, 9) for key in together]))
    assert torch.equal(orders, torch.vmap(lambda key: permutation(key, 9))(together))
    assert torch.equal(fold(together[0], torch.arange(3)), torch.stack([fold(together[0], i) for i in range(3)]))


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_a_permutation_holds_every_number_once(n):
    assert torch.equal(permutation(key_for(0, "p"), n).sort().values, torch.arange(n))


def test_permutations_of_three_are_equally_likely():
    """6 orders, 6000 draws: chi-squared with 5 degrees of freedom stays below its 1e-6 quantile, 35.9."""
    orders = permutation(key_for(0, "orders", 0, torch.arange(6000)), 3)
    _, counts = torch.unique(orders, dim=0, return_counts=True)
    assert len(counts) == 6
    assert ((counts - 1000.0) ** 2 / 1000).sum() < 35.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_and_normals_have_their_moments(dtype):
    n = 100_000
    u, z = uniform(key_for(2, "u"), n, dtype=dtype), normal(key_for(2, "z"), n, dtype=dtype)
    assert u.min() >= 0
    assert u.max() < 1
    for value, expected, deviation in [
        (u.mean(), 1 / 2, (1 / 12) ** 0.5),
        (u.square().mean(), 1 / 3, (4 / 45) ** 0.5),
        (z.mean(), 0, 1),
        (z.square().mean(), 1, 2**0.5),
        (z.pow(4).mean(), 3, 96**0.5),
    ]:
        assert abs(float(value) - expected) < 5 * deviation / n**0.5


def test_a_host_generator_repeats_itself():
    assert generator(1, "a", 2, 3).random() == generator(1, "a", 2, 3).random()
    assert generator(1, "a", 2, 3).random() != generator(1, "a", 2, 4).random()


def global_states():
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


def test_a_whole_run_touches_no_global_generator():
    import sklearn.datasets  # noqa: F401  (importing it draws from `random`; that is not ours to judge)

    before = global_states()
    fedncv.simulate(rounds=2, clients=5, per_round=3, epochs=1, stragglers=0.5, dropout=0.2)
    assert global_states() == before


def test_a_run_does_not_depend_on_global_generators():
    torch.manual_seed(1)
    first = train(tiny("fedavg"), rounds=2).server.x_P
    torch.manual_seed(2)
    assert torch.equal(first, train(tiny("fedavg"), rounds=2).server.x_P)

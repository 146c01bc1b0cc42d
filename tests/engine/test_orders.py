"""Batches drawn for many clients at once are the ones that ``local.plan`` draws one client at a time."""

import math

import numpy as np
import pytest
import torch

from fedncv.engine import orders
from fedncv.engine.local import plan
from fedncv.keys import fold, key_for, permutation
from fedncv.methods import find_method
from fedncv.methods.base import Phase

SIZES = np.array([13, 1, 4, 9, 8, 30, 5])


def test_keys_of_many_clients_and_seeds_are_those_of_each():
    seeds, ids = [0, 7, 2**64 - 1], np.array([3, 0, 99])
    expected = [key_for(seed, "batches", 5, u) for seed, u in zip(seeds, ids.tolist(), strict=True)]
    assert torch.equal(orders.keys_for(seeds, "batches", 5, ids), torch.stack(expected))


def test_a_padded_permutation_begins_with_the_plain_one():
    keys = orders.keys_for([0] * len(SIZES), "batches", 0, np.arange(len(SIZES)))
    padded = orders.permutations(keys, torch.from_numpy(SIZES), 40)
    for k, n in enumerate(SIZES.tolist()):
        assert torch.equal(padded[k, :n], permutation(keys[k], n))


@pytest.mark.parametrize("same_batches", [False, True])
@pytest.mark.parametrize("smallest", [1, 2])
@pytest.mark.parametrize("shares", [[1.0] * 7, [0.0, 1.0, 0.5, 0.33, 1e-9, 0.77, 0.9]])
def test_tables_hold_the_plan_of_every_client(same_batches, smallest, shares):
    phases = (Phase(1, trains=(), mode="still"), Phase(2, trains=("head",)), Phase(1))
    method = find_method("fedavg")._replace(phases=lambda _epochs: phases, same_batches=same_batches)
    settings = {"epochs": 4, "batch_size": 4}
    ids = np.arange(len(SIZES))
    keys, step_keys = (orders.keys_for([3] * len(SIZES), purpose, 2, ids) for purpose in ("batches", "step"))
    counts = orders.count(method, SIZES, shares, smallest=smallest, keys=keys, **settings)
    drawn = orders.draw(method, counts, SIZES, epochs=4, keys=keys, step_keys=step_keys)
    rows = np.array([5, 0, 3, 4, 6, 2, 1])
    tables = [
        orders.table(method, drawn, counts, rows, f, batch=4, dtype=torch.float64, **settings)
        if counts.steps_KF[:, f].any()
        else None
        for f in range(len(phases))
    ]
    for place, u in enumerate(rows.tolist()):
        expected = plan(method, key_for(3, "batches", 2, u), int(SIZES[u]), smallest=smallest, **settings)
        expected = expected[: math.ceil(shares[u] * len(expected))]
        assert counts.steps_KF[u].sum() == len(expected)
        assert counts.samples_KF[u].tolist() == [sum(len(s.rows) for s in expected if s.phase == f) for f in range(3)]
        at = [0, 0, 0]
        for i, step in enumerate(expected):
            table, t = tables[step.phase], at[step.phase]
            real = table.weight_TBK[t, :, place] > 0
            assert torch.equal(table.index_TBK[t, real, place], step.rows)
            assert real[: len(step.rows)].all(), "samples come first, padding behind them"
            assert table.number_TK[t, place] == step.number
            assert torch.equal(table.key_TK2[t, place], fold(key_for(3, "step", 2, u), i))
            at[step.phase] += 1


def test_drawing_in_pieces_changes_nothing(monkeypatch):
    method, keys = find_method("fedavg"), orders.keys_for([0] * 7, "batches", 0, np.arange(7))
    counts = orders.count(method, SIZES, [1.0] * 7, epochs=3, batch_size=4, smallest=1, keys=keys)
    whole = orders.draw(method, counts, SIZES, epochs=3, keys=keys, step_keys=keys)
    monkeypatch.setattr(orders, "CHUNK", 100)
    assert torch.equal(
        orders.draw(method, counts, SIZES, epochs=3, keys=keys, step_keys=keys).order_KEn, whole.order_KEn
    )

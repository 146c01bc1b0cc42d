"""Two ways to the same numbers: a federation that is hard on engines, and how closely two of them must agree."""

import pytest
import torch
from torch.testing import assert_close

from fedncv.engine.problem import start
from fedncv.tree import leaves

HARD = {  # one client with a single sample, stragglers, losses, momentum: all that makes clients unequal
    "sizes": (20, 1, 9, 18, 31),
    "per_round": 4,
    "stragglers": 0.5,
    "dropout": 0.2,
    "momentum": 0.5,
    "weight_decay": 0.01,
    "epochs": 3,
}
QUICK = {"fedgen": "fedgen:generator_steps=3,hidden=8"}  # a server that trains for long says nothing more here


def close(tree, other, atol=1e-10):
    ours, theirs = list(leaves(tree)), list(leaves(other))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        if isinstance(a, torch.Tensor):
            assert_close(a, b, rtol=atol, atol=atol, msg=lambda m, path=path: f"{path}: {m}")
        else:
            assert a == b, path


def same(tree, other):
    for (path, a), (_, b) in zip(leaves(tree), leaves(other), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


def close_rows(row, other, atol=1e-10):
    """Counts, bytes and the learning rate are equal; the loss and the numbers of a method's step to rounding."""
    assert row.keys() == other.keys()
    for name, value in row.items():
        if isinstance(value, float) and name != "lr":
            assert value == pytest.approx(other[name], abs=atol)
        else:
            assert value == other[name], name


def runs(engine, rounds, states=None, drawn=None):
    """States and rows of some rounds."""
    states, rows = states or [start(problem) for problem in engine.problems], []
    for _ in range(rounds):
        settled = engine.run_rounds(states, drawn)
        states = [state for state, _ in settled]
        rows.append([row for _, row in settled])
    return states, rows

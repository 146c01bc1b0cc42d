"""Standardising by the training samples of all clients: the same in every engine, for each seed's own split."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

import fedncv
from fedncv.config import RunConfig
from fedncv.data import Clients, divide, split, standardised
from fedncv.data.dataset import Dataset
from fedncv.engine.problem import build

SETTINGS = {
    "model": "mlp",
    "partition": "iid",
    "clients": 4,
    "per_round": 2,
    "rounds": 2,
    "epochs": 1,
    "dtype": "float64",
}


def table(n=60, **more):
    random = np.random.default_rng(0)
    x = random.normal(size=(n, 3)) * [1, 100, 0] + [0, 1.7e9, 7]  # the last column has no spread
    y = torch.from_numpy((x[:, 0] > 0).astype(np.int64))
    return Dataset("t", torch.from_numpy(x), y, 2, standardise=True, **more)


def test_it_is_scikit_learns_scaler_fitted_on_the_training_samples():
    data = table()
    clients = split(divide(data, "iid", num_clients=4, seed=3), 0.25, seed=3)
    train = np.concatenate(clients.train)
    ours = standardised(data, clients).inputs(torch.arange(60), torch.float64).numpy()
    scaler = StandardScaler().fit(data.x[train].numpy())
    np.testing.assert_allclose(ours[:, :2], scaler.transform(data.x.numpy())[:, :2], atol=1e-7)
    assert (ours[:, 2] == 7).all()  # stays


def test_no_test_sample_is_looked_at():
    data = table()
    clients = split(divide(data, "iid", num_clients=4, seed=0), 0.25, seed=0)
    x = data.x.clone()
    x[np.concatenate(clients.test)] = 1e6
    changed, same = standardised(data._replace(x=x), clients), standardised(data, clients)
    assert (changed.mean, changed.std) == (same.mean, same.std)


def test_large_numbers_keep_their_digits_in_single_precision():
    data = table()
    scaled = standardised(data, Clients([np.arange(60)], [np.array([], dtype=np.int64)]))
    single, double = (scaled.inputs(torch.arange(60), dtype) for dtype in (torch.float32, torch.float64))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, atol=1e-6, rtol=0)


def test_every_axis_but_the_second_is_averaged_over():
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3, 5)))
    everyone = Clients([np.arange(8)], [np.array([], dtype=np.int64)])
    data = standardised(Dataset("t", x, torch.zeros(8).long(), 1, standardise=True), everyone)
    scaled = data.inputs(torch.arange(8), torch.float64)
    torch.testing.assert_close(scaled.mean(dim=(0, 2)), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(scaled.std(dim=(0, 2), correction=0), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("x", [torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4)])
def test_bytes_and_single_numbers_are_refused(x):
    with pytest.raises(ValueError, match="standardise works on floats with a feature axis"):
        standardised(
            Dataset("t", x, torch.zeros(4).long(), 1, standardise=True), Clients([np.arange(4)], [np.arange(0)])
        )


def test_every_seed_has_its_own_scale_in_every_engine():
    """Runs of a stack share the samples, and must not share the scale."""
    alone = [fedncv.simulate(data=table(), seed=seed, engine="sequential", **SETTINGS) for seed in (0, 1)]
    assert alone[0].problem.dataset.mean != alone[1].problem.dataset.mean
    for engine in ("sequential", "stacked"):
        together = fedncv.simulate_many(data=table(), seeds=(0, 1), engine=engine, **SETTINGS)
        for one, other in zip(alone, together, strict=True):
            assert one.problem.dataset.mean == other.problem.dataset.mean
            torch.testing.assert_close(one.state.server.x_P, other.state.server.x_P, atol=1e-10, rtol=0)
            assert one.last["before"] == pytest.approx(other.last["before"], abs=1e-12)


def test_a_federation_scales_as_its_simulation(tmp_path):
    pytest.importorskip("flwr")
    from fedncv.flower import folder, samples

    text = "\n".join(["a,b,y", *(f"{k},{k * k % 7},{k % 2}" for k in range(24))])
    (tmp_path / "t.csv").write_text(text)
    config = RunConfig(data=f"table:path={tmp_path}/t.csv,y=y,standardise=true", partition="iid", model="mlp")
    config = replace(config, clients=2, per_round=1, seed=5)
    folder.init(tmp_path / "fed", config, host="127.0.0.1", port=0, listen="127.0.0.1")
    problem = build(config)
    for u in range(2):
        mine = samples.read(tmp_path / "fed" / "clients" / str(u) / "data")
        there = mine.dataset.inputs(torch.from_numpy(mine.train), torch.float32)
        assert there.equal(problem.dataset.inputs(torch.from_numpy(problem.clients.train[u]), torch.float32))

"""NaN and infinite numbers are refused when data are given or loaded, with their place."""

import numpy as np
import pytest
import torch

import fedncv
from fedncv.config import RunConfig
from fedncv.data import check_samples, from_arrays, sound
from fedncv.data.dataset import Dataset
from fedncv.engine.problem import check_targets
from fedncv.flower import samples
from fedncv.flower.halves import client_problem

NAN, INF = float("nan"), float("inf")


def floats(bad=NAN, place=(17, 3), shape=(20, 5)):
    x = torch.zeros(shape)
    x[place] = bad
    return x


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (floats(), "mine: sample 17, feature 3 is nan; remove or fill such values"),
        (floats(-INF), "sample 17, feature 3 is -inf"),
        (floats(INF, (4, 1, 2), (20, 2, 3)), r"sample 4, feature \(1, 2\) is inf"),
        (floats(NAN, (19,), (20,)), "sample 19, the feature is nan"),
    ],
)
def test_a_feature_that_is_not_finite_is_named(x, words):
    with pytest.raises(ValueError, match=words):
        from_arrays(x, [0, 1] * 10, name="mine")
    with pytest.raises(ValueError, match=words):
        check_samples(Dataset("mine", x, torch.tensor([0, 1] * 10), 2))


def test_the_first_of_several_is_found_in_any_block(monkeypatch):
    monkeypatch.setattr(sound, "BLOCK", 10)
    x = torch.zeros(20, 5)
    assert sound.first_not_finite(x) is None
    x[13, 4] = x[13, 1] = x[19, 0] = NAN
    assert sound.first_not_finite(x) == [13, 1]
    assert sound.first_not_finite(x[:, :0]) is None


def test_targets_count_too():
    data = Dataset("mine", torch.zeros(20, 5), floats(INF, (3,), (20,)), 1)
    with pytest.raises(ValueError, match="mine: sample 3, the target is inf"):
        check_samples(data)


@pytest.mark.parametrize(
    "change", [{"std": (1.0, 0.0)}, {"mean": (NAN, 0.0)}, {"y": torch.zeros(3)}, {"owners": torch.zeros(1)}]
)
def test_a_scale_or_a_length_that_does_not_fit_is_refused(change):
    data = Dataset("mine", torch.zeros(2, 2), torch.zeros(2), 1, (0.0, 0.0), (1.0, 1.0))
    check_samples(data)
    with pytest.raises(ValueError, match=r"mine: (mean|2 inputs and)"):
        check_samples(data._replace(**change))


def test_a_run_refuses_them_instead_of_blaming_the_learning_rate():
    data = Dataset("mine", floats(), torch.tensor([0, 1] * 10), 2)
    with pytest.raises(ValueError, match="sample 17, feature 3 is nan"):
        fedncv.simulate(data=data, model="mlp", partition="iid", clients=2, per_round=1, rounds=1)


def test_a_client_of_a_federation_refuses_them(tmp_path):
    data = Dataset("mine", floats(), torch.tensor([0, 1] * 10), 2)
    samples.write(tmp_path, samples.Samples(data, np.arange(15), np.arange(15, 20)))
    with pytest.raises(ValueError, match=r"samples.safetensors: mine: sample 17, feature 3 is nan"):
        samples.read(tmp_path)


@pytest.mark.parametrize("wrong", [-100, -1, 2])
def test_a_target_outside_the_classes_is_refused_for_classification_by_name(wrong):
    """cross_entropy ignores -100, but a score and a metric would count it as wrong."""
    y = torch.tensor([0, 1] * 10)
    y[[7, 9]] = wrong
    data = Dataset("mine", torch.zeros(20, 5), y, 2)
    quick = {"model": "mlp", "partition": "dirichlet", "clients": 2, "per_round": 1, "rounds": 1, "epochs": 1}
    words = rf"mine: the target of sample 7 is {wrong}, and classes are 0 to 1; number them so"
    with pytest.raises(ValueError, match=words):
        fedncv.simulate(data=data, **quick)
    with pytest.raises(ValueError, match=words.replace("mine", "rows")):
        check_targets("classification", data._replace(name="rows", y=y[:, None].expand(20, 3)))
    samples_of = samples.Samples(data, np.arange(10), np.arange(10, 20))
    with pytest.raises(ValueError, match=words):
        client_problem(RunConfig(clients=2, per_round=1, model="mlp"), samples_of, 0)
    check_targets("package.module:task", data)

"""The Python side: names or objects, rows, callbacks, and things that are not images."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from federations import Tiny, tiny_dataset
from torch import nn

import fedncv
from fedncv.config import own_object
from fedncv.methods import find_method
from fedncv.results import read_rows
from fedncv.tasks import TASKS

QUICK = {"clients": 5, "per_round": 2, "rounds": 3, "epochs": 1}


def test_rows_are_tidy_and_the_callback_sees_every_one():
    seen = []
    result = fedncv.simulate(model="mlp", on_round=seen.append, eval_every=2, **QUICK)
    assert [row["round"] for row in result.rows] == [0, 1, 2, 3]
    assert seen == result.rows
    assert [("before" in row, "after" in row) for row in seen] == [
        (True, False),
        (False, False),
        (True, False),
        (True, True),
    ]
    for row in result.tidy():
        assert (row["method"], row["seed"]) == ("fedavg", 0)
        assert not any(isinstance(value, list) for value in row.values())
    assert result.last["before"] == result.rows[-1]["before"]
    assert result.last["label_prior"] == result.rows[0]["label_prior"]


@pytest.mark.parametrize("setting", [{"workers": 2}, {"cluster": "10.0.0.5:6379"}])
def test_a_setting_of_the_cluster_without_engine_ray_is_refused(tmp_path, setting):
    with pytest.raises(ValueError, match="but only engine=ray uses it; use engine=ray, or leave it out"):
        fedncv.simulate(out=tmp_path / "run", **QUICK, **setting)
    assert not (tmp_path / "run").exists()


def test_after_can_be_measured_on_the_way():
    result = fedncv.simulate(model="mlp", eval_every=0, after_every=2, **QUICK)
    assert [("before" in row, "after" in row) for row in result.rows] == [
        (False, False),
        (False, False),
        (False, True),
        (True, True),
    ]


def test_a_seed_is_paired_across_methods():
    """The same partition, initial model and draws for every method: FedProx with mu = 0 repeats FedAvg's rows."""
    a = fedncv.simulate(method="fedavg", model="mlp", seed=7, **QUICK)
    b = fedncv.simulate(method="fedprox:mu=0", model="mlp", seed=7, **QUICK)
    assert a.rows == b.rows
    assert fedncv.simulate(model="mlp", seed=8, **QUICK).rows != a.rows


def test_no_rounds_measure_the_initial_model():
    result = fedncv.simulate(model="mlp", clients=5, per_round=2, rounds=0, epochs=1)
    assert [row["round"] for row in result.rows] == [0]
    assert {"before", "after", "label_prior"} <= result.rows[0].keys()


def test_objects_stand_in_for_names():
    result = fedncv.simulate(
        method=find_method("fedper"),
        data=tiny_dataset(200),
        model=Tiny,
        partition="iid",
        lr=0.2,
        batch_size=8,
        **(QUICK | {"rounds": 10}),
    )
    config = result.problem.config
    assert all(own_object(text) for text in (config.method, config.data, config.model))
    assert result.last["before"] > 0.5


def test_a_run_with_objects_is_resumed_with_the_same_objects(tmp_path):
    objects = {"data": tiny_dataset(100), "model": Tiny}
    fedncv.simulate(out=tmp_path / "run", **objects, **QUICK)
    with pytest.raises(ValueError, match=r"started from Python with objects of your own \(data tiny\)"):
        fedncv.resume(tmp_path / "run")
    assert len(fedncv.resume(tmp_path / "run", **objects).rows) == 4


WRONG = [
    ({"config": {}}, "config must be a fedncv.RunConfig, not dict; write simulate(**config)"),
    ({"config": 3}, "config must be a fedncv.RunConfig, not int"),
    ({"method": 3}, "method must be a name, a fedncv.Method, or a function"),
    ({"task": 3}, "task must be a name, a fedncv.Task, or a function"),
    ({"data": (np.zeros((4, 2)), np.zeros(4))}, "not tuple; make one with fedncv.data.from_arrays(x, y)"),
    ({"data": np.zeros((4, 2))}, "not ndarray; make one with fedncv.data.from_arrays(x, y)"),
    ({"metrics": 3}, "metrics are a list of names and functions of (outputs, targets), not 3 (int)"),
    ({"out": 3}, "out must be a path, as a text or a pathlib.Path, not 3"),
    ({"out": "a\0b"}, "out must be a path"),
    ({"data": "folder:path=a\0b"}, "data is 'folder:path=a\\x00b', which holds a null character"),
    ({"overwrite": "no"}, "overwrite must be True or False, not 'no'"),
    ({"progress": "no"}, "progress must be True, False or None, not 'no'"),
    ({"lr": 10**400}, "lr must be at most 1e+300, not a number of 401 digits"),
    ({"rounds": 10**5000}, "rounds must be at most 10,000,000, not a number of 5001 digits"),
    ({"rounds": 2**63}, "rounds must be at most 10,000,000, not 9223372036854775808"),
    ({"epochs": 10**6 + 1}, "epochs must be at most 1,000,000, not 1000001"),
    ({"sampling": ["uniform"]}, "sampling must be one of uniform, poisson, weighted, available, not ['uniform']"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"), WRONG, ids=[f"{i} {next(iter(given))}" for i, (given, _) in enumerate(WRONG)]
)
def test_an_argument_of_another_type_or_without_end_is_refused_with_what_is_wanted(given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        fedncv.simulate(**{"model": "mlp", "rounds": 0} | given)
    assert "\n" not in str(caught.value)


def test_seeds_and_folders_of_another_type_are_refused(tmp_path):
    for seeds in (3, None, [0.5], "ab"):
        with pytest.raises(ValueError, match=r"seeds must be whole numbers, such as seeds=range\(5\), not"):
            fedncv.simulate_many(seeds=seeds)
    with pytest.raises(ValueError, match=r"write simulate_many\(\*\*config\)"):
        fedncv.simulate_many({}, seeds=[0])
    for call in (fedncv.resume, fedncv.export_run):
        with pytest.raises(ValueError, match="folder must be a path"):
            call(3)


def test_an_unknown_setting_is_named():
    with pytest.raises(ValueError, match="simulate: unknown key 'round'; did you mean 'rounds'"):
        fedncv.simulate(round=3)


def test_regression_is_learned():
    """y = 2 x1 - x2 + 1, a linear model, clients with shifted inputs: the loss goes to zero."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(5), 40)
    x = rng.normal(size=(200, 2)) + group[:, None]
    y = 2 * x[:, :1] - x[:, 1:] + 1
    data = fedncv.Dataset("line", torch.from_numpy(x), torch.from_numpy(y), 1, groups=torch.from_numpy(group))
    result = fedncv.simulate(
        data=data, model=lambda _s, outputs: nn.Linear(2, outputs), task="regression", partition="iid",
        clients=5, per_round=5, rounds=60, epochs=5, lr=0.05,
    )  # fmt: skip
    assert result.last["before"] > -1e-4
    assert result.rows[0]["score_name"] == "minus squared error"
    assert "label_prior" not in result.last
    weights = result.state_dict()
    assert weights["weight"].flatten().tolist() == pytest.approx([2, -1], abs=0.02)
    assert weights["bias"].tolist() == pytest.approx([1], abs=0.05)


class Sentences(nn.Module):
    """Token ids in, a class out: an embedding, a recurrent layer, dropout, a head."""

    def __init__(self, _shape, num_classes):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.recurrent = nn.GRU(8, 16, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, num_classes)

    def forward(self, tokens):
        return self.head(self.dropout(self.recurrent(self.embedding(tokens))[0][:, -1]))


@pytest.mark.slow
def test_text_is_learned():
    """Which of the tokens 0, 1, 2 comes last decides the class: far above the third that guessing gives."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 12, size=(300, 6))
    y = rng.integers(3, size=300)
    tokens[:, 5] = y
    data = fedncv.Dataset("sentences", torch.from_numpy(tokens), torch.from_numpy(y), 3)
    result = fedncv.simulate(
        data=data, model=Sentences, partition="iid", clients=5, per_round=5, rounds=15, epochs=5, lr=0.3, batch_size=8
    )
    assert result.last["before"] > 0.9


def test_a_custom_loss_and_score_are_used():
    task = fedncv.Task(
        loss=lambda out, y: (out - nn.functional.one_hot(y, 3)).square().sum(1),
        score=lambda out, y: torch.full((len(y),), 0.25),
        score_name="a quarter",
    )
    result = fedncv.simulate(data=tiny_dataset(100), model=Tiny, task=task, partition="iid", **QUICK)
    assert result.last["before"] == 0.25


@pytest.mark.parametrize("what", ["loss", "score"])
@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (nn.functional.cross_entropy, r"shape \(\)"),
        (lambda out, y: (out - nn.functional.one_hot(y, 3)).square(), r"shape \(2, 3\)"),
        (lambda out, y: (out - nn.functional.one_hot(y, 3)).square().mean(0, keepdim=True), r"shape \(1, 3\)"),
        (lambda out, y: (out - nn.functional.one_hot(y, 3)).square().mean(1, keepdim=True), r"shape \(2, 1\)"),
        (lambda out, y: 0.5, "float"),
    ],
)
def test_a_task_that_returns_other_than_one_number_per_sample_is_refused(what, function, returned):
    task = TASKS["classification"]._replace(**{what: function})
    message = rf"task '\w+': {what} of 2 samples returns {returned}; one number per sample is wanted, shape \(2,\)"
    with pytest.raises(ValueError, match=message):
        fedncv.simulate(data=tiny_dataset(100), model=Tiny, task=task, partition="iid", **QUICK)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_mean_over_samples_is_noticed_whatever_the_number_of_classes(num_classes):
    """One number per class has the shape of one batch only."""
    task = TASKS["classification"]._replace(score=lambda out, y: out.softmax(1).mean(0))
    data = tiny_dataset(100, num_classes)
    with pytest.raises(ValueError, match=r"score of \d samples returns shape"):
        fedncv.simulate(data=data, model=Tiny, task=task, partition="iid", **QUICK)


class PerStep(nn.Module):
    """Outputs (samples, classes, steps)."""

    def __init__(self, outputs):
        super().__init__()
        self.head = nn.Conv1d(1, outputs, 1)

    def forward(self, x):
        return self.head(x[:, None])


@pytest.mark.parametrize("outputs", [2, 3, 5])
def test_a_classifier_has_an_output_for_each_class(outputs):
    """More outputs than classes would train without an error; with further axes the classes are the second."""
    data = tiny_dataset(100)
    each_step = data._replace(y=data.y[:, None].expand(-1, 4).contiguous(), groups=data.y)
    given = {"model": lambda shape, _n: nn.Linear(shape[0], outputs), "partition": "iid", **QUICK | {"rounds": 0}}
    steps = given | {"data": each_step, "model": lambda _shape, _n: PerStep(outputs)}
    if outputs == 3:
        assert "before" in fedncv.simulate(data=data, **given).last
        assert "before" in fedncv.simulate(**steps).last
        return
    with pytest.raises(ValueError, match=rf"returns shape \(3, {outputs}\) for 3 samples, but tiny has 3 classes"):
        fedncv.simulate(data=data, **given)
    with pytest.raises(ValueError, match=rf"returns shape \(3, {outputs}, 4\)"):
        fedncv.simulate(**steps)
    regression = {"data": data._replace(y=torch.ones(100, outputs)), "task": "regression"}
    assert "before" in fedncv.simulate(**given | regression).last


def test_the_core_needs_torch_numpy_and_scipy_alone():
    """A run in memory on arrays of one's own imports none of the other dependencies."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in "safetensors tyro rich matplotlib sklearn plotly PIL datasets flwr".split():
            raise ImportError(f"{name} is refused here")
sys.meta_path.insert(0, Refuse())
import torch, fedncv
x = torch.arange(80.0).reshape(40, 2) % 7
data = fedncv.Dataset("own", x, (x[:, 0] > 3).long(), 2)
result = fedncv.simulate(data=data, model="mlp", partition="iid", clients=4, per_round=2, rounds=2, epochs=1)
print(result.last["before"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_are_given_back():
    torch.set_num_threads(2)
    try:
        fedncv.simulate(model="mlp", **QUICK)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_loss_that_is_not_finite_is_no_number_in_the_rows(tmp_path):
    """The gradient, and so the model, may be finite all the same: log 0 of a class that a client never has."""
    known = TASKS["classification"]
    task = known._replace(loss=lambda outputs, targets: known.loss(outputs, targets) + math.inf)
    fedncv.simulate(task=task, model="mlp", out=tmp_path / "run", **QUICK)
    assert [row.get("loss") for row in read_rows(tmp_path / "run")] == [None] * 4

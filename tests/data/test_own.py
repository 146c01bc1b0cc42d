"""Bring your own: arrays, a torch Dataset, a Hugging Face table."""

import numpy as np
import pytest
import torch
from PIL import Image

import fedncv
from fedncv.data import arrivals, divide, from_arrays, from_table, from_torch, split

PICTURES = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 5), dtype=np.uint8)
SMALL = {"clients": 4, "per_round": 4, "rounds": 1, "epochs": 5}
LABELS = [0, 2, 1, 2, 0, 1]


def test_arrays_become_a_dataset_that_can_be_divided():
    data = from_arrays(PICTURES, LABELS, name="mine")
    assert np.array_equal(data.x.numpy(), PICTURES)
    assert data.y.tolist() == LABELS
    assert data.y.dtype == torch.int64
    assert data.num_classes == 3
    assert data.mean == pytest.approx(PICTURES.mean(axis=(0, 2, 3)) / 255)
    clients = split(divide(data, "iid", num_clients=2, seed=0), 0.25, 0)
    assert clients.sizes.tolist() == [2, 2]


def test_tensors_are_not_copied_and_floats_are_left_alone():
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    data = from_arrays(x, torch.tensor([0, 1, 0, 1]), num_classes=5)
    assert data.x.data_ptr() == x.data_ptr()
    assert data.mean == ()
    assert data.num_classes == 5


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (PICTURES, [0, 1], "6 inputs and 2 labels"),
        (PICTURES[:0], [], "labels are"),
        (PICTURES, [0.5j] * 6, "give one integer or text per sample, or floats"),
        (PICTURES, [[0]] * 6, r"of shape \(6, 1\)"),
        (PICTURES, [[[0.5]]] * 6, r"labels are torch.float64 of shape \(6, 1, 1\)"),
        (PICTURES, [[0.5]] * 3, "6 inputs and 3 labels"),
        (PICTURES, ["a", 1.5, None, "b", "a", "a"], "the label of sample 1 is 1.5, but others are texts"),
        (PICTURES, [None] * 6, "labels are object, such as None; give numbers"),
        ([["a"]] * 6, LABELS, "inputs are <U1, such as .*'a'.*; give numbers"),
        (PICTURES, [-1, 0, 0, 0, 0, 0], "label -1 is out of range"),
        (PICTURES.transpose(0, 2, 3, 1), LABELS, "move the channels"),
        (PICTURES[:, 0, 0], LABELS, "give .n, channels, height, width."),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x, y, words):
    with pytest.raises(ValueError, match=words):
        from_arrays(x, y)


def test_labels_beyond_the_classes_and_owners_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"label 2 is out of range 0..1"):
        from_arrays(PICTURES, LABELS, num_classes=2)
    with pytest.raises(ValueError, match=r"owners have shape \(2,\)"):
        from_arrays(PICTURES, LABELS, owners=[1, 2])


def test_floats_are_the_targets_of_a_regression():
    one, two = from_arrays(PICTURES, np.arange(6) / 2), from_arrays(PICTURES, torch.ones(6, 2))
    assert (one.y.tolist(), one.num_classes) == ([0, 0.5, 1, 1.5, 2, 2.5], 1)
    assert (two.y.shape, two.num_classes) == ((6, 2), 2)
    with pytest.raises(ValueError, match="numbers of a regression, but num_classes is 3"):
        from_arrays(PICTURES, np.arange(6) / 2, num_classes=3)
    with pytest.raises(ValueError, match="not one class number per sample; use the partition iid"):
        divide(one, "dirichlet:min_samples=1", num_clients=2, seed=0)
    with pytest.raises(ValueError, match="order is by_class, but the targets are float64"):
        arrivals([np.arange(6)], one.y.numpy(), 0, order="by_class")
    with pytest.raises(ValueError, match="the targets are numbers, not classes; use task regression, or give integers"):
        fedncv.simulate(data=one, model="mlp", partition="iid", **SMALL)


@pytest.mark.parametrize("width", [None, 1, 2])
def test_a_regression_from_arrays_is_trained(width):
    """y = 1 for all inputs: the bias alone learns it."""
    x, y = np.zeros((40, 3)), np.ones(40) if width is None else np.ones((40, width))
    data = from_arrays(x, y, owners=np.arange(40) % 4)
    result = fedncv.simulate(
        data=data, model=lambda shape, outputs: torch.nn.Linear(shape[0], outputs), task="regression",
        partition="natural", metrics=["rmse"], lr=0.1, **SMALL | {"rounds": 6},
    )  # fmt: skip
    assert result.last["before_rmse"] < 0.2 < result.rows[0]["before_rmse"]


@pytest.mark.parametrize("kind", [list, np.array, lambda y: np.array(y, dtype=object)])
def test_texts_are_classes_in_sorted_order(kind):
    data = from_arrays(PICTURES, kind(["ill", "well", "ill", "dead", "well", "ill"]))
    assert (data.y.tolist(), data.classes, data.num_classes) == ([1, 2, 1, 0, 2, 1], ("dead", "ill", "well"), 3)
    with pytest.raises(ValueError, match="labels have 3 different texts, but num_classes is 2"):
        from_arrays(PICTURES, data.classes * 2, num_classes=2)


def test_owners_may_be_names_or_numbers():
    assert from_arrays(PICTURES, LABELS, owners=list("abcabc")).owners.tolist() == [0, 1, 2, 0, 1, 2]
    assert from_arrays(PICTURES, LABELS, owners=torch.tensor([9, 9, 9, 4, 4, 4])).owners.tolist() == [1, 1, 1, 0, 0, 0]


class Samples(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_a_torch_dataset_is_read_once():
    tensors = from_torch(Samples([(torch.from_numpy(x), y) for x, y in zip(PICTURES, LABELS, strict=True)]))
    assert np.array_equal(tensors.x.numpy(), PICTURES)
    pillow = from_torch(
        Samples([(Image.fromarray(x.transpose(1, 2, 0)), y) for x, y in zip(PICTURES, LABELS, strict=True)])
    )
    assert np.array_equal(pillow.x.numpy(), PICTURES)
    assert pillow.y.tolist() == LABELS
    subset = from_torch(torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 1])))
    assert subset.y.tolist() == [0, 1, 1]


def test_targets_of_a_torch_dataset_are_not_rounded():
    items = [(torch.zeros(2), y) for y in (0.5, 1.25)]
    assert from_torch(Samples(items)).y.tolist() == [0.5, 1.25]
    assert from_torch(torch.utils.data.TensorDataset(torch.zeros(2, 2), torch.rand(2, 3))).num_classes == 3
    assert from_torch(torch.utils.data.TensorDataset(torch.zeros(2, 2), torch.tensor([[1], [0]]))).y.tolist() == [1, 0]
    assert from_torch(Samples([(torch.zeros(2), "b"), (torch.zeros(2), "a")])).classes == ("a", "b")


def test_samples_of_different_shapes_are_named():
    with pytest.raises(ValueError, match=r"sample 1 has shape \(3,\), sample 0 \(2,\)"):
        from_torch(Samples([(torch.zeros(2), 0), (torch.zeros(3), 1)]))
    with pytest.raises(ValueError, match="the dataset is empty"):
        from_torch(Samples([]))


def test_a_table_brings_its_owners():
    library = pytest.importorskip("datasets", reason="the extra 'hub' (datasets) is not installed")
    pictures = [Image.fromarray(x.transpose(1, 2, 0)) for x in PICTURES]
    columns = {"image": pictures, "label": LABELS, "writer": list("xxyyzz")}
    features = library.Features(
        {"image": library.Image(), "label": library.Value("int64"), "writer": library.Value("string")}
    )
    table = library.Dataset.from_dict(columns, features=features)
    data = from_table(table, owner="writer")
    assert np.array_equal(data.x.numpy(), PICTURES)
    parts = divide(data, "natural", num_clients=3, seed=0)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="there is no column 'author'; the table has image, label, writer"):
        from_table(table, owner="author")


def test_a_dataset_is_printed_in_one_line():
    data = from_arrays(PICTURES, LABELS, name="mine", owners=list("abcabc"))
    assert repr(data) == "Dataset('mine', x (6, 3, 4, 5) torch.uint8, y (6,) torch.int64, 3 outputs, 3 owners)"

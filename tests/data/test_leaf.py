"""LEAF's JSON files, whole and damaged."""

import json

import numpy as np
import pytest
import torch

from fedncv.data import divide, load, read_leaf
from fedncv.data.text import ALPHABET

PIXELS = (np.random.default_rng(0).integers(0, 256, (5, 784)) / 255).tolist()
WINDOW = "And thus I clothe my naked villany with odd old ends stol'n forth of holy writ, "
TWEET = ["1", "Mon", "NO_QUERY", "me", "so good é", "x"]
USERS = {
    "femnist": {"f0": {"x": PIXELS[:3], "y": [0, 61, 5]}, "f1": {"x": PIXELS[3:], "y": [7, 8]}},
    "shakespeare": {"R": {"x": [WINDOW, WINDOW[1:] + "$"], "y": ["A", "\n"]}, "J": {"x": [WINDOW], "y": ["z"]}},
    "sent140": {"a": {"x": [TWEET, [*TWEET[:4], ""]], "y": ["4", "0"]}, "b": {"x": [TWEET], "y": [1]}},
    "numbers": {"u": {"x": [[1.5, 2.0], [0, 1]], "y": [0, 1]}, "v": {"x": [[3, 4]], "y": [2]}},
}


def write(path, users, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = [len(held["y"]) for held in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": users} | more))
    return path


def test_femnist_becomes_pictures_of_the_same_values(tmp_path):
    data = read_leaf(write(tmp_path / "a.json", USERS["femnist"], hierarchies=[], user_data_raw={}))
    assert data.x.shape == (5, 1, 28, 28)
    assert data.x.dtype == torch.uint8
    assert (data.num_classes, data.y.tolist(), data.owners.tolist()) == (62, [0, 61, 5, 7, 8], [0, 0, 0, 1, 1])
    scaled = data.inputs(torch.arange(5), torch.float64)
    np.testing.assert_allclose(scaled.reshape(5, -1), PIXELS, atol=1e-15)


def test_shakespeare_becomes_ids_of_the_alphabet(tmp_path):
    data = read_leaf(write(tmp_path / "a.json", USERS["shakespeare"]))
    assert data.x.shape == (3, 80)
    assert "".join(ALPHABET[k] for k in data.x[0]) == WINDOW
    assert [ALPHABET[k] for k in data.y] == ["A", "\n", "z"]
    assert data.owners.tolist() == [1, 1, 0]
    assert data.inputs(torch.arange(1), torch.float32).dtype == torch.int64


def test_tweets_become_bytes_with_padding(tmp_path):
    path = write(tmp_path / "a.json", USERS["sent140"])
    data = load(f"leaf:path={path},length=12")
    text = "so good é".encode()
    assert data.x[0].tolist() == [byte + 1 for byte in text] + [0] * (12 - len(text))
    assert data.x[1].tolist() == [0] * 12
    assert data.y.tolist() == [1, 0, 1]
    assert read_leaf(path, length=4).x[0].tolist() == [byte + 1 for byte in text[:4]]


def test_numbers_of_any_shape_are_floats(tmp_path):
    data = read_leaf(write(tmp_path / "a.json", USERS["numbers"]))
    assert data.x.tolist() == [[1.5, 2], [0, 1], [3, 4]]
    assert data.num_classes == 3


@pytest.mark.parametrize("layout", ["train/a.json test/a.json", "all_data/a.json", "a.json", "data/train/a.json"])
def test_every_layout_of_the_folder_is_found_and_a_users_samples_are_pooled(tmp_path, layout):
    for place in layout.split():
        write(tmp_path / place, USERS["numbers"])
    data = load(f"leaf:path={tmp_path}")
    times = len(layout.split())
    assert np.bincount(data.owners).tolist() == [2 * times, times]
    assert [len(part) for part in divide(data, "natural", num_clients=2, seed=0)] == [2 * times, times]


@pytest.mark.parametrize(
    ("users", "kind", "words"),
    [
        ({"u": {"x": [[0.5] * 783], "y": [0]}}, "femnist", "samples of 'u' are not LEAF's femnist"),
        ({"u": {"x": [[0.1] * 784], "y": [0]}}, "auto", "not multiples of 1/255 .* use kind=numbers"),
        ({"u": {"x": PIXELS[:1], "y": [62]}}, "auto", r"label 62 is out of range 0..61"),
        ({"u": {"x": PIXELS[:1], "y": ["a"]}}, "auto", "not integers"),
        ({"u": {"x": ["abc", "ab"], "y": ["a", "b"]}}, "auto", "windows have 2 to 3 characters"),
        ({"u": {"x": ["ab", "cd"], "y": ["", "ee"]}}, "auto", r"'u' are not .* \(sample 0: y is '', not one character"),
        ({"u": {"x": ["ab", "cd"], "y": ["e", "ee"]}}, "auto", "sample 1: y is 'ee', not one character"),
        ({"u": {"x": ["ab", "cd"], "y": ["e", 3]}}, "auto", "sample 1: y is 3, not one character"),
        ({"u": {"x": [TWEET], "y": [2]}}, "auto", "'2' is not a label"),
        ({"u": {"x": ["000001.jpg"], "y": [1]}}, "auto", "cannot tell what the samples are"),
        ({"u": {"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}}, "auto", r"LEAF's numbers \(samples have 1 to 2 numbers"),
        ({"u": {"x": [[1.0]], "y": [0]}, "v": {"x": [[1.0, 2.0]], "y": [0]}}, "auto", "samples have the shapes"),
        ({"u": {"x": [[1.0]], "y": [0, 1]}}, "auto", "'u' must have as many x as y"),
        ({"u": {"x": [], "y": []}}, "auto", "has no samples"),
    ],
)
def test_what_is_not_leafs_is_named(tmp_path, users, kind, words):
    with pytest.raises(ValueError, match=words) as caught:
        read_leaf(write(tmp_path / "a.json", users), kind=kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"users": [', "[]", "{}", '{"users": ["u"], "user_data": {}}', "[" * 100000])
def test_other_files_are_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a.json is not (complete JSON|a LEAF file)"):
        read_leaf(tmp_path)


def test_an_empty_folder_and_a_wrong_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no LEAF files; give a .json file, or a folder"):
        load(f"leaf:path={tmp_path}")
    with pytest.raises(ValueError, match="kind must be one of auto, femnist, shakespeare, sent140, numbers"):
        load(f"leaf:path={tmp_path},kind=celeba")

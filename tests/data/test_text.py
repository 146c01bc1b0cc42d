"""Shakespeare's speakers as clients, and the windows of characters."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedncv import simulate
from fedncv.data import DATASETS, divide, load
from fedncv.data.text import ALPHABET, characters, load_shakespeare, speakers, windows

DATA = os.environ.get("FEDNCV_DATA", "")
PLAY = "A Man:\nab\ncd\n\nB:\nxyz\n\n\nA Man:\nef\n\nno speech here\n\nEMPTY:\n"


def test_every_character_has_the_id_of_its_place_and_others_are_spaces():
    assert len(set(ALPHABET)) == 80
    assert characters(ALPHABET).tolist() == list(range(80))
    assert set(characters("$é語😀\t~\x7f").tolist()) == {ALPHABET.index(" ")}


def test_speeches_of_one_speaker_are_joined():
    assert speakers(PLAY) == {"A Man": "ab\ncd\nef", "B": "xyz"}
    assert speakers(PLAY.replace("\n", "\r\n")) == speakers(PLAY)


@pytest.mark.parametrize(("n", "length", "stride"), [(10, 3, 1), (10, 3, 4), (4, 3, 1), (11, 10, 7)])
def test_windows_are_the_plain_loop(n, length, stride):
    ids = np.random.default_rng(0).integers(0, 80, n).astype(np.int8)
    x, y = windows(ids, length, stride)
    starts = range(0, n - length, stride)
    assert x.tolist() == [ids[k : k + length].tolist() for k in starts]
    assert y.tolist() == [ids[k + length] for k in starts]


def test_no_window_crosses_from_one_speaker_to_another(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("A:\n" + "a" * 50 + "\n\nB:\n" + "b" * 30 + "\n\nC:\nc\n")
    data = load_shakespeare(tmp_path, length=5, stride=1, min_chars=30)
    assert np.bincount(data.owners).tolist() == [45, 25]  # C is too short
    for owner, letter in enumerate("ab"):
        mine = data.owners == owner
        assert (data.x[mine] == ALPHABET.index(letter)).all()
        assert (data.y[mine] == ALPHABET.index(letter)).all()
    batch = data.inputs(torch.arange(3), torch.float32)
    assert batch.dtype == torch.int64  # ids for an embedding
    assert torch.equal(batch, data.x[:3].long())


def test_small_ids_train_the_same_in_every_engine(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("\n\n".join(f"{name}:\n{'to be or not' * 9}" for name in "AB"))
    data = load_shakespeare(tmp_path, length=5, stride=3, min_chars=30)

    def model(input_shape, num_classes):
        return nn.Sequential(nn.Embedding(80, 2), nn.Flatten(), nn.Linear(2 * input_shape[0], num_classes))

    settings = {"partition": "natural", "clients": 2, "per_round": 2, "rounds": 1, "epochs": 1, "dtype": "float64"}
    one, other = (
        simulate(data=data._replace(x=x), model=model, engine=engine, **settings).state.server.x_P
        for x, engine in ((data.x.long(), "sequential"), (data.x, "stacked"))
    )
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("knobs", [{"length": 0}, {"stride": 0}, {"min_chars": 10**6}, {"length": 99}])
def test_knobs_that_leave_nothing_are_refused(tmp_path, knobs):
    (tmp_path / "shakespeare.txt").write_text("A:\n" + "a" * 50)
    with pytest.raises(ValueError, match=r"at least 1|none of its 1 speakers has \d+ characters"):
        load_shakespeare(tmp_path, **{"min_chars": 1, "length": 5} | knobs)


def test_the_file_is_found_in_the_data_folder_or_missed_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"shakespeare is not in .*; put shakespeare.txt into .*, from https://"):
        load("shakespeare", tmp_path)
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "shakespeare.txt").write_text("A:\n" + "a" * 50)
    assert load("shakespeare:min_chars=1,length=5,stride=5", tmp_path).x.shape == (9, 5)
    with pytest.raises(ValueError, match=r"has no knob 'lenght' \(it has length, stride, min_chars\)"):
        load("shakespeare:lenght=5", tmp_path)


def test_the_real_file_has_the_numbers_of_the_registry():
    if not DATA or not (Path(DATA) / "shakespeare.txt").is_file():
        pytest.skip(f"no shakespeare.txt in FEDNCV_DATA ({DATA or 'not set'})")
    data, entry = load("shakespeare", DATA), DATASETS["shakespeare"]
    assert (len(data.x), tuple(data.x.shape[1:]), data.num_classes) == (
        entry.num_images,
        entry.shape,
        entry.num_classes,
    )
    assert len(divide(data, "natural", num_clients=141, seed=0)) == 141

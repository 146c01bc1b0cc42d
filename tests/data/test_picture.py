"""The picture of who holds what."""

import numpy as np
import pytest
from PIL import Image

from fedncv import keys
from fedncv.data import statistics
from fedncv.data.partition import dirichlet
from fedncv.data.picture import draw, drawn_order


@pytest.mark.parametrize(("num_clients", "num_classes"), [(1, 1), (10, 10), (1_000, 10), (3_000, 62), (20, 200)])
def test_a_picture_is_drawn_for_few_and_for_many(tmp_path, num_clients, num_classes):
    labels = np.arange(20_000) % num_classes
    parts = dirichlet(labels, num_clients, keys.generator(0, "test"), min_samples=1, retries=1)
    draw(statistics(labels, parts, num_classes), "title", tmp_path / "new" / "p.png")
    with Image.open(tmp_path / "new" / "p.png") as picture:
        assert picture.size[0] >= 900
        assert 600 <= picture.size[1] <= 1400


def test_few_clients_keep_their_order_many_are_sorted_and_very_many_thinned():
    random = np.random.default_rng(0)
    assert drawn_order(random.integers(1, 9, (30, 4))).tolist() == list(range(30))
    counts = random.integers(1, 9, (500, 4))
    order = drawn_order(counts)
    assert sorted(order.tolist()) == list(range(500))
    assert (np.diff(counts[order].argmax(axis=1)) >= 0).all()
    assert 1_000 <= len(drawn_order(random.integers(1, 9, (100_000, 4)))) <= 2_000


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path):
    stats = statistics(np.array([0, 1]), [np.array([0, 1])], 2)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot write the picture"):
        draw(stats, "title", tmp_path / "file" / "p.png")
    with pytest.raises(ValueError, match=r"cannot write the picture .*p.nonsense"):
        draw(stats, "title", tmp_path / "p.nonsense")

"""Online clients hold a growing, keyed prefix of their samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedncv import keys, spec
from fedncv.data import STREAMS, arrivals, label_counts

LABELS = np.random.default_rng(0).integers(0, 5, 400)
TRAIN = [np.arange(0, 150), np.arange(150, 151), np.arange(151, 400)]


@settings(deadline=None, max_examples=60)
@given(
    start=st.floats(0, 1),
    rate=st.floats(0, 1),
    seed=st.integers(0, 2**40),
    order=st.sampled_from(["shuffled", "by_class"]),
)
def test_what_a_client_holds_only_grows_and_is_never_empty(start, rate, seed, order):
    stream = arrivals(TRAIN, LABELS, seed, start=start, rate=rate, order=order)
    before = [set() for _ in TRAIN]
    for round in range(4):
        held = stream.visible(round)
        assert [len(samples) for samples in held] == stream.sizes(round).tolist()
        for old, new, all_of_it in zip(before, held, TRAIN, strict=True):
            assert 1 <= len(new) <= len(all_of_it)
            assert old <= set(new.tolist()) <= set(all_of_it.tolist())
        before = [set(samples.tolist()) for samples in held]


def test_sizes_follow_the_formula():
    stream = arrivals(TRAIN, LABELS, 0, start=0.1, rate=0.2)
    assert [stream.sizes(t).tolist() for t in range(6)] == [
        [15, 1, 24],
        [45, 1, 74],  # floor(0.3 * 249) = 74
        [75, 1, 124],
        [105, 1, 174],
        [135, 1, 224],
        [150, 1, 249],
    ]


def test_rounding_of_floats_costs_no_sample():
    """0.29 * 100 is 28.999999999999996 in floating point."""
    stream = arrivals([np.arange(100)], LABELS, 0, start=0.29, rate=0.0)
    assert stream.sizes(0).tolist() == [29]


def test_a_start_of_one_is_the_static_federation():
    stream = arrivals(TRAIN, LABELS, 0, start=1.0, rate=0.0)
    assert all(map(np.array_equal, stream.visible(0), TRAIN))


def test_the_shuffled_order_is_the_client_s_keyed_permutation():
    stream = arrivals(TRAIN, LABELS, 3)
    for u, samples in enumerate(TRAIN):
        order = keys.permutation(keys.key_for(3, "stream", 0, u), len(samples)).numpy()
        assert np.array_equal(stream.order[u], samples[order])


def test_by_class_one_class_comes_after_another_and_the_labels_drift():
    stream = arrivals(TRAIN, LABELS, 0, start=0.2, rate=0.2, order="by_class")
    for samples in stream.order:
        changes = np.count_nonzero(np.diff(LABELS[samples]))
        assert changes == len(set(LABELS[samples])) - 1
    first, last = (label_counts(LABELS, stream.visible(t), 5) for t in (0, 4))
    assert (first[0] > 0).sum() < (last[0] > 0).sum() == 5


def test_clients_meet_the_classes_in_different_orders():
    stream = arrivals(np.split(np.arange(400), 20), LABELS, 0, order="by_class")
    assert len({int(LABELS[samples[0]]) for samples in stream.order}) > 2


@pytest.mark.parametrize("knobs", [{"start": -0.1}, {"start": 1.5}, {"rate": 2.0}, {"rate": float("nan")}])
def test_shares_outside_their_range_are_refused(knobs):
    with pytest.raises(ValueError, match=f"{next(iter(knobs))} is"):
        arrivals(TRAIN, LABELS, 0, **knobs)


def test_a_stream_can_be_named_in_a_config():
    _, knobs = spec.parse("arrivals:start=0.5,order=by_class", STREAMS, what="stream")
    assert knobs == {"start": 0.5, "order": "by_class"}
    with pytest.raises(ValueError, match="shuffled, by_class"):
        spec.parse("arrivals:order=backwards", STREAMS, what="stream")
    with pytest.raises(ValueError, match="without training samples"):
        arrivals([np.array([], dtype=np.int64)], LABELS, 0)

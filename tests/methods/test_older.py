"""Spellings of FedNCV from before it was a chain."""

import pytest

from fedncv.methods import find_method


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fedncv:tau=0", "fedncv:prior=off"),
        ("fedncv:even=false", "fedncv:even=off"),
        ("fedncv:tau=0,rate=0.5", "fedncv:prior=off,drift.rate=0.5"),
        ("fedncv:alpha=0.5", "fedncv:drift.alpha=0.5"),
        ("fedncv:even=true,tau=2", "fedncv:even=on,prior.tau=2"),
        ("fedncv:memory=adaptive,forget=0.5", "fedncv+memory:beta=learned,forget=0.5"),
        ("fedncv:drift=adaptive,rate=1", "fedncv:drift.alpha=learned,drift.rate=1"),
        ("fedncv:memory=adaptive,drift=off", "fedncv:drift=off+memory:beta=learned"),
        ("fedncv:memory=fixed,beta=0.7,weights=ht", "fedncv+memory:beta=0.7+ht"),
        ("fedncv:samples=saga,momentum=0", "fedncv:momentum=0+samples:kind=saga"),
        ("fedncv:drift=off,alpha=1,rate=0.5", "fedncv:drift=off"),  # knobs of a part that is off must not bring it back
        ("fedncv:tau=0,epsilon=2,personal=none", "fedncv:prior=off"),
        ("fedncv:drift=adaptive,alpha=0.5", "fedncv:drift.alpha=learned"),
    ],
)
def test_an_old_spelling_is_refused_with_the_new_one(old, new):
    find_method(new)
    with pytest.raises(ValueError, match="older version") as caught:
        find_method(old)
    assert new in str(caught.value)


def test_a_personal_head_is_gone():
    with pytest.raises(ValueError, match="personal"):
        find_method("fedncv:personal=head")


def test_a_part_that_was_off_stays_off():
    for old in ("fedncv:drift=off,alpha=1", "fedncv:drift=off,rate=1,memory=adaptive"):
        with pytest.raises(ValueError, match="in a new run write") as caught:
            find_method(old)
        assert "drift" not in find_method(str(caught.value).split("write ")[1].strip("'")).switches


def test_the_old_fedncv_sums_was_another_method():
    with pytest.raises(ValueError, match="another method then"):
        find_method("fedncv-sums:alpha=0.5,tau=0")


@pytest.mark.parametrize("place", ["server", "clients"])
def test_where_the_memory_is_belongs_to_drift(place):
    with pytest.raises(ValueError, match=f"write fedncv:drift.memory={place}"):
        find_method(f"fedncv:memory={place}")
    assert find_method(f"fedncv:drift.memory={place}").form == ("sums" if place == "clients" else "each reply")

"""Spellings of FedNCV from before it was a chain."""

import pytest

from fedncv.methods import find_method


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fedncv:tau=0", "fedncv:prior=off"),
        ("fedncv:even=false", "fedncv:even=off"),
        ("fedncv:drift=adaptive,rate=1", "fedncv:drift.alpha=learned,drift.rate=1"),
        ("fedncv:memory=adaptive,drift=off", "fedncv:drift=off+memory:beta=learned"),
        ("fedncv:memory=fixed,beta=0.7,weights=ht", "fedncv+memory:beta=0.7+ht"),
        ("fedncv:samples=saga,momentum=0", "fedncv:momentum=0+samples:kind=saga"),
        ("fedncv-sums:alpha=0.5,tau=0", "fedncv-sums:drift.alpha=0.5,prior=off"),
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

"""Every statement is decided once a session, however many tests ask."""

from functools import cache

import pytest

from fedncv.theory import evaluate


@pytest.fixture(scope="session")
def decide():
    return cache(evaluate)

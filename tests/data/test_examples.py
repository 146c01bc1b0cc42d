"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import fedncv.data

MODULES = [module.name for module in pkgutil.iter_modules(fedncv.data.__path__, "fedncv.data.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0

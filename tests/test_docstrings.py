"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import fedncv

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(fedncv.__path__, "fedncv.")
    if not module.name.startswith(("fedncv.flower", "fedncv.data.")) and not module.name.endswith("__main__")
)  # data has a list of its own in tests/data; flower is an extra


@pytest.mark.parametrize("name", ["fedncv", *MODULES])
def test_the_examples_of_a_module_hold(name):
    try:
        module = importlib.import_module(name)
    except ImportError as missing:
        pytest.skip(f"{name} needs {missing.name}")
    assert doctest.testmod(module).failed == 0

"""Everything public is exported by hand, and nothing else."""

import importlib
import inspect
import pkgutil

from fedncv import estimators


def test_the_package_exports_every_public_function_of_its_files():
    found = set()
    for module_info in pkgutil.iter_modules(estimators.__path__):
        if module_info.name == "units":  # shared checks, not estimators
            continue
        module = importlib.import_module(f"fedncv.estimators.{module_info.name}")
        for name, value in vars(module).items():
            if (
                (inspect.isfunction(value) or inspect.isclass(value))
                and value.__module__ == module.__name__
                and name[0] != "_"
            ):
                found.add(name)
    assert found == set(estimators.__all__)

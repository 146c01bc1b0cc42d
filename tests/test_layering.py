"""Imports point one way, and reading results loads no torch. The graph is read from the source, not by importing."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fedncv

PACKAGE = Path(fedncv.__file__).parent

# From the bottom up. A module or package may import those of lower lines, and itself.
LAYERS = [
    ("notes", "portable"),
    ("accountant",),
    ("adapters", "comparison", "files", "fingerprint", "keys_kernel", "layout", "spec", "termination", "tree"),
    ("catalogue", "group_norm_kernel", "imports", "keys", "machine", "probe", "rows", "schedule"),
    ("config", "functional", "estimators", "group_norm"),
    ("flat",),
    ("results", "study", "recipes"),
    ("data", "figures", "heartbeat", "metrics", "models", "optimizers", "secure", "tasks", "theory"),
    ("cluster", "methods", "notebook"),
    ("objects", "topology"),
    ("engine",),
    ("observatory",),
    ("export", "ledger", "store"),
    ("runner",),
    ("simulation",),
    ("flower", "report", "studies"),
    ("tensorboard", "watch"),
    ("cli",),
    ("__main__",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Those that read what runs have left, and what they may import beside each other.
READERS = {
    "catalogue", "comparison", "config", "figures", "files", "heartbeat", "notes", "portable", "probe", "report",
    "results", "schedule", "spec", "study", "watch",
}  # fmt: skip
LIGHT = [
    "fedncv",
    *(f"fedncv.{name}" for name in sorted(READERS)),
    *(f"fedncv.report.{path.stem}" for path in sorted((PACKAGE / "report").glob("*.py")) if path.stem != "__init__"),
    "fedncv.cli.methods",
    "fedncv.cli.report",
    "fedncv.cli.show",
    "fedncv.cli.watch",
]


def modules():
    """Name -> file, of every module in the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path, known):
    """The package's modules that a file imports, within functions too, but not those for type checkers only."""
    found, waiting = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
            continue
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        waiting += ast.iter_child_nodes(node)
    return {name for name in found if name.partition(".")[0] == "fedncv"}


KNOWN = modules()
GRAPH = {name: imports(path, KNOWN) - {name} for name, path in KNOWN.items()}


def unit(module):
    """What the table names: a package, or a module beside it. fedncv.engine.choose is in engine."""
    return module.split(".")[1] if "." in module else module


def test_every_module_has_its_place_in_the_table():
    assert {unit(name) for name in KNOWN} - {"fedncv"} == set(LEVEL)


def test_imports_point_down():
    wrong = [
        f"{module} imports {imported}"
        for module, found in GRAPH.items()
        for imported in found
        if unit(module) != unit(imported) and LEVEL[unit(module)] <= LEVEL[unit(imported)]
    ]
    assert not wrong


def test_no_packages_and_no_modules_import_each_other_in_a_circle():
    packages = {}
    for module, found in GRAPH.items():
        packages.setdefault(unit(module), set()).update({unit(name) for name in found} - {unit(module)})
    for graph in (packages, GRAPH):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


def test_the_top_of_the_package_imports_nothing_by_itself():
    assert GRAPH["fedncv"] == set()


def test_what_reads_results_imports_no_training_code():
    wrong = [
        f"{module} imports {imported}"
        for module, found in GRAPH.items()
        if unit(module) in READERS
        for imported in found
        if unit(imported) not in READERS
    ]
    assert not wrong


def test_reading_loads_neither_torch_nor_sklearn():
    """One process imports them all, and prints the first that loads either."""
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if loaded := {"torch", "sklearn"} & set(sys.modules):
        sys.exit(f"{name} loads {loaded}")
"""
    done = subprocess.run([sys.executable, "-c", code, *LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_found_at_their_first_use():
    assert set(fedncv.MODULES) == set(fedncv.__all__)
    for name in (*fedncv.__all__, *fedncv.SUBMODULES):
        assert name in dir(fedncv)
        assert getattr(fedncv, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = fedncv.simulat


def test_no_module_hides_a_public_name():
    """The import system would put the module where the function is expected: fedncv.simulate(...) would fail."""
    assert not set(fedncv.MODULES) & {unit(name) for name in KNOWN}

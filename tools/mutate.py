"""Break the source on purpose, one small change at a time, and see that a test notices.

    python tools/mutate.py src/fedncv/estimators tests/estimators docs/mutants.md

Every file of the first folder is mutated against its own test file (``x.py`` against ``test_x.py``).
A mutant that survives must stand in the third argument, a Markdown page with the reason why it cannot
matter; a survivor that does not stand there, or an entry that is killed or gone, fails the run.

The unchanged tests run once in this process, which loads torch and everything they need; each mutant then
lives and dies in a fork of it, which forgets the package and compiles the changed tree in place of the
file. No file is written.
"""

import ast
import copy
import importlib.machinery
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import hypothesis
import pytest
import torch

SECONDS = 60  # a mutant that hangs is noticed, too
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip

SYMMETRIC = {"max", "check_same_shape"}  # swapping their arguments changes nothing


class Mutant(NamedTuple):
    """What was changed, in words that survive a change of line numbers, and the tree to compile."""

    name: str
    tree: ast.Module


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Every small change of one node."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in SWAPS:
            yield ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)  # type: ignore[arg-type]
        yield node.left  # a dropped term or factor
        yield node.right
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPS[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value is not True:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call):
        if len(node.args) >= 2 and _words(node.func) not in SYMMETRIC:
            yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
        if isinstance(node.func, ast.Attribute) and not node.args and node.func.attr != "items":
            yield node.func.value  # .mean(dim=0), .square() and the like left out
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()  # a check left out


def mutants(source: str) -> Iterator[Mutant]:
    tree = ast.parse(source)
    skip = {id(n) for a in ast.walk(tree) for n in _untouched(a)}
    owner = {id(n): f.name for f in tree.body if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if id(node) not in skip and id(node) in owner:
                for changed in (v for v in variants(node) if _words(v) != _words(node)):
                    memo: dict[int, object] = {id(node): ast.fix_missing_locations(ast.copy_location(changed, node))}
                    name = f"{owner[id(node)]}: {_words(node)} → {_words(changed)}"
                    yield Mutant(name, copy.deepcopy(tree, memo))


def _untouched(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations, and the words of error messages: tests read the value in them, not the prose."""
    if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation:
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.FunctionDef) and node.returns:
        yield from ast.walk(node.returns)
    if isinstance(node, ast.Raise):
        yield from ast.walk(node)


def _words(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:100]


def passes(tests: list[Path]) -> bool:
    imported_early = "-Wignore::pytest.PytestAssertRewriteWarning"
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", imported_early]
    return pytest.main([*options, *map(str, tests)]) == 0


def start(path: Path, tree: ast.Module, test: Path) -> int:
    """Run one test file in a fork in which ``path`` compiles to ``tree``; -> the fork's process id."""
    child = os.fork()
    if child:
        return child
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code, original = compile(tree, str(path), "exec"), importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        return code if Path(self.path) == path else original(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]
    for name in [name for name in sys.modules if name.split(".")[0] in ("fedncv", "tests", "federations")]:
        del sys.modules[name]
    os._exit(not passes([test]))


def survivors_of(path: Path, trees: list[ast.Module], test: Path) -> list[bool]:
    """Does the test file pass on each tree? As many at a time as there are processors."""
    alive = [False] * len(trees)
    running: dict[int, int] = {}
    for i, tree in enumerate(trees):
        running[start(path, tree, test)] = i
        while len(running) >= (os.cpu_count() or 1) or (running and i == len(trees) - 1):
            child, status = os.wait()
            alive[running.pop(child)] = status == 0
    return alive


def main(source: Path, tests: Path, page: Path) -> int:
    torch.set_num_threads(1)
    listed = re.findall(r"^- `(.+?)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    excused = {name for name in listed if name.startswith(f"{source.name}/")}
    # A failing example need not be made small to be noticed.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases)
    hypothesis.settings.load_profile("mutants")
    if not passes([tests]):
        print(f"{tests} fail on the unchanged source")
        return 1
    survivors: set[str] = set()
    total = 0
    for path in sorted(source.resolve().glob("[!_]*.py")):
        test = tests / f"test_{path.stem}.py"
        found = list(mutants(path.read_text()))
        alive = survivors_of(path, [m.tree for m in found], test)
        survivors |= {f"{source.name}/{path.stem}.{m.name}" for m, lives in zip(found, alive, strict=True) if lives}
        total += len(found)
        print(f"{path.stem:20} {len(found):4} mutants, {sum(alive):3} survived", flush=True)
    for name in sorted(survivors - excused):
        print(f"survived, and no reason given: {name}")
    for name in sorted(excused - survivors):
        print(f"excused, but killed or gone:   {name}")
    print(f"{total} mutants, {len(survivors)} survivors, {len(survivors & excused)} of them excused in {page}")
    return int(survivors != excused)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:4])))

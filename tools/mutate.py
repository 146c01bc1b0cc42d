"""Break the source on purpose, one small change at a time, and check that a test detects it.

    python tools/mutate.py src/fedncv/methods tests/methods docs/mutants.md --jobs 8 --only fedprox scaffold

Every function of the first folder is mutated against the tests of its file (``x.py`` against ``test_x.py``;
if there is none, ``folder/x.py`` against ``test_folder.py``). The third argument, a Markdown page, must list every
mutant that survives, with the reason why it has no effect. An unlisted survivor, or a listed mutant that is killed or
no longer exists, fails the run. Default values of knobs are not mutated.

The unchanged tests run once in this process, which loads torch and everything they need. Each mutant then runs in a
fork, which unloads the package, compiles the changed tree instead of the file and runs the tests, quickest first. No
file is written. Survivors are printed as they are found.
"""

import argparse
import ast
import copy
import importlib.machinery
import os
import re
import resource
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import hypothesis
import pytest
import torch

SECONDS = 60  # of CPU time, so that a mutant that hangs is detected
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip

SYMMETRIC = {"max", "check_same_shape"}  # swapping their arguments changes nothing


class Mutant(NamedTuple):
    """A description of the change that does not depend on line numbers, and the tree to compile."""

    name: str
    tree: ast.Module


class Job(NamedTuple):
    """A mutant, the file it replaces and the tests that should detect it."""

    mutant: Mutant
    path: Path
    test: Path


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every small change of one node."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in SWAPS:
            yield ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)  # type: ignore[arg-type]
        yield node.left  # a dropped term or factor
        yield node.right
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPS[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in SWAPS:
                ops = [*node.ops[:i], SWAPS[type(op)](), *node.ops[i + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)  # type: ignore[arg-type]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call):
        if len(node.args) >= 2 and _words(node.func) not in SYMMETRIC:
            yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
        if isinstance(node.func, ast.Attribute) and not node.args and node.func.attr != "items":
            yield node.func.value  # .mean(dim=0), .square() and similar removed
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()  # a removed check


def mutants(source: str, prefix: str = "") -> Iterator[Mutant]:
    """Yield every small change of every function and method; a number is named with its context."""
    tree = ast.parse(source)
    skip = {id(n) for a in ast.walk(tree) for n in _untouched(a)}
    owner = {id(n): name for name, function in _functions(tree) for n in ast.walk(function)}
    seen: Counter[str] = Counter()
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if id(node) not in skip and id(node) in owner:
                for changed in (v for v in variants(node) if _words(v) != _words(node)):
                    memo: dict[int, object] = {id(node): ast.fix_missing_locations(ast.copy_location(changed, node))}
                    before, after = (
                        (parent, copy.deepcopy(parent, dict(memo)))
                        if isinstance(node, ast.Constant)
                        else (node, changed)
                    )
                    name = f"{prefix}{owner[id(node)]}: {_change(_words(before), _words(after))}"
                    seen[name] += 1
                    yield Mutant(name + f" ({seen[name]})" * (seen[name] > 1), copy.deepcopy(tree, memo))


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{f.name}", f) for f in node.body if isinstance(f, ast.FunctionDef))


def _untouched(node: ast.AST) -> Iterator[ast.AST]:
    """Yield annotations and the text of error messages, which are not mutated."""
    if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation:
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.FunctionDef) and node.returns:
        yield from ast.walk(node.returns)
    if isinstance(node, ast.Raise):
        yield from ast.walk(node)


def _words(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _change(before: str, after: str) -> str:
    """Return ``before → after``; of long texts only the part where they differ."""
    differ = (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    same = next(differ, min(len(before), len(after)))
    first = max(0, same - 40) if max(len(before), len(after)) > 100 else 0

    def part(words: str) -> str:
        return "…" * (first > 0) + words[first : first + 100] + "…" * (len(words) > first + 100)

    return f"{part(before)} → {part(after)}"


class QuickestFirst:
    """Runs the quickest tests first, because they detect most mutants."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.seconds[item.nodeid])


QUICKEST_FIRST = QuickestFirst()  # forks inherit the times of the unchanged tests


def passes(tests: list[Path]) -> bool:
    imported_early = "-Wignore::pytest.PytestAssertRewriteWarning"
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", imported_early]
    return pytest.main([*options, *map(str, tests)], plugins=[QUICKEST_FIRST]) == 0


def start(path: Path, tree: ast.Module, test: Path) -> int:
    """Run one test file in a fork in which ``path`` compiles to ``tree``; -> the fork's process id."""
    child = os.fork()
    if child:
        return child
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, 2 * SECONDS))  # CPU time, also on a busy machine
    signal.alarm(20 * SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code, original = compile(tree, str(path), "exec"), importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        return code if Path(self.path) == path else original(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]
    for name in [name for name in sys.modules if name.split(".")[0] in ("fedncv", "tests", "federations")]:
        del sys.modules[name]
    os._exit(not passes([test]))


def test_of(path: Path, tests: Path) -> Path:
    own, shared = tests / f"test_{path.stem}.py", tests / f"test_{path.parent.name}.py"
    return own if own.exists() else shared


def survivors_of(jobs: list[Job], at_a_time: int) -> Iterator[Job]:
    """Yield the mutants whose tests pass, as they are found."""
    running: dict[int, Job] = {}
    waiting = iter(jobs)
    while True:
        while len(running) < at_a_time and (job := next(waiting, None)):
            running[start(job.path, job.mutant.tree, job.test)] = job
        if not running:
            return
        child, status = os.wait()
        job = running.pop(child)
        if status == 0:
            yield job
        elif os.WIFSIGNALED(status):
            print(f"killed by {signal.Signals(os.WTERMSIG(status)).name}: {job.mutant.name}", flush=True)


def main(source: Path, tests: Path, page: Path, only: list[str], at_a_time: int) -> int:
    torch.set_num_threads(1)
    # A failing example need not be minimised.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases)
    hypothesis.settings.load_profile("mutants")
    source = source.resolve()
    jobs, prefixes = [], []
    for path in sorted(source.rglob("*.py")):
        if not only or path.stem in only:
            prefixes.append(f"{source.name}/{path.relative_to(source).with_suffix('')}.")
            jobs += [Job(m, path, test_of(path, tests)) for m in mutants(path.read_text(), prefixes[-1])]
    if not passes(sorted({job.test for job in jobs})):
        print(f"{tests} fail on the unchanged source")
        return 1
    listed = re.findall(r"^- `(.+?)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    excused = {name for name in listed if name.startswith(tuple(prefixes))}
    survivors = set()
    for job in survivors_of(jobs, at_a_time):
        survivors.add(job.mutant.name)
        if job.mutant.name not in excused:
            print(f"survived, but not listed:      {job.mutant.name}", flush=True)
    for name in sorted(excused - survivors):
        print(f"listed, but killed or removed: {name}")
    for prefix in prefixes:
        found = sum(job.mutant.name.startswith(prefix) for job in jobs)
        alive = sum(name.startswith(prefix) for name in survivors)
        print(f"{prefix[:-1]:40} {found:4} mutants, {alive:3} survived")
    print(f"{len(jobs)} mutants, {len(survivors)} survivors, {len(survivors & excused)} of them listed in {page}")
    return int(survivors != excused)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="the folder to mutate")
    parser.add_argument("tests", type=Path, help="the folder of its tests")
    parser.add_argument("page", type=Path, help="Markdown page that lists survivors")
    parser.add_argument("--only", nargs="+", default=[], help="names of source files without .py; all if left out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time, one thread each")
    args = parser.parse_args()
    sys.exit(main(args.source, args.tests, args.page, args.only, args.jobs))

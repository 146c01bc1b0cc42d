"""Python interface: simulate one federation, simulate it with several seeds, resume it, export its model."""

import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fedncv.config import CUSTOM, RunConfig, from_dict
from fedncv.data import Dataset, load
from fedncv.engine.check import anchored
from fedncv.engine.choose import decide
from fedncv.engine.problem import Problem, State, build, start
from fedncv.export import export
from fedncv.flat import Factory
from fedncv.methods.base import Method
from fedncv.metrics import Function
from fedncv.notebook import RoundProgress, described, in_notebook, page, plotted
from fedncv.objects import again, named, named_metrics
from fedncv.optimizers import Optimizer
from fedncv.results import MODEL, Run, read_config
from fedncv.runner import LiveRun, Row, extend, open_run, train
from fedncv.tasks import Task
from fedncv.termination import Terminated


class Watcher(Protocol):
    """A callback that is an object, for ``simulate`` and ``simulate_many``."""

    def on_round(self, row: Row, run: LiveRun, /) -> object: ...


OnRound = Callable[[Row], object] | Callable[[Row, LiveRun], object] | Watcher
OnRoundOf = Callable[[int, Row], object] | Callable[[int, Row, LiveRun], object] | Watcher


@dataclass(frozen=True, repr=False)
class Result:
    """Result of a run: what was trained, its final state, and its metrics."""

    problem: Problem
    state: State
    rows: list[Row]
    """Metrics, one dictionary per round; the first is round 0, the initial model."""
    folder: Path | None = None
    """Folder of the run, if it was saved."""
    stopped: str = ""
    """Reason, if a callback stopped the run before its last round."""

    @property
    def config(self) -> RunConfig:
        """All settings of the run."""
        return self.problem.config

    @property
    def last(self) -> Row:
        """Latest value of every metric."""
        merged: Row = {}
        for row in self.rows:
            merged |= row
        return merged

    def tidy(self) -> list[Row]:
        """Return flat rows with method and seed in each, for a data frame; per-client lists are left out."""
        label = {"method": self.config.method.removeprefix(f"{CUSTOM}:"), "seed": self.config.seed}
        return [label | {k: v for k, v in row.items() if not isinstance(v, list)} for row in self.rows]

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return the trained model for ``module.load_state_dict``: the shared one, or the one ``client`` predicts with.

        Raise ValueError if the method has no shared model, or if there is no such client.
        """
        return export(self.problem, self.state, client)

    def save(self, path: str | Path, client: int | None = None) -> Path:
        """Write ``state_dict(client)`` to a safetensors file and return its path."""
        return _save(self.state_dict(client), Path(path))

    def plot(self, ax: Any = None, *, metric: str = "") -> Any:
        """Draw the score, or a metric of the run, against rounds and return matplotlib's axes.

        ``fedncv.plot`` draws several results.

        Without ``ax`` the figure is new. A notebook shows it at once; elsewhere use ``plot().figure.savefig(path)``.
        """
        return plotted([self._run], ax, metric)

    @property
    def _run(self) -> Run:
        return Run(self.folder or Path(), self.config, self.rows)

    def _facts(self) -> dict[str, str]:
        facts = described(self._run, self.config.rounds, self.stopped)
        return facts | ({} if self.folder is None else {"folder": str(self.folder)})

    def __repr__(self) -> str:
        return f"Result({', '.join(f'{name} {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return page(self._run, self._facts())


def plot(results: Result | Iterable[Result], ax: Any = None, *, metric: str = "") -> Any:
    """Draw results in one figure and return matplotlib's axes: one line per method, the mean over its seeds.

    With several seeds their 95 % interval is drawn too. Results that differ in a setting other than the seed are
    different lines. ``ax`` and ``metric`` are as for ``Result.plot``.

    >>> results = simulate_many(seeds=[0, 1], model="mlp", clients=5, per_round=2, rounds=1, epochs=1)
    >>> plot(results).get_xlabel().split(";")[0]
    'round\\nMean over 2 seeds'
    """
    results = [results] if isinstance(results, Result) else list(results)
    if not results:
        raise ValueError("nothing to plot: give at least one result")
    return plotted([result._run for result in results], ax, metric)


def simulate(
    config: RunConfig | None = None,
    *,
    method: str | Method | Callable[[], Method] | None = None,
    data: str | Dataset | Callable[[], Dataset] | None = None,
    model: str | Factory | None = None,
    task: str | Task | Callable[[], Task] | None = None,
    optimizer: str | Optimizer | Callable[[], Optimizer] | None = None,
    metrics: Iterable[str | Function] = (),
    name: str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_round: OnRound | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train one federation and return its ``Result``.

    Method, data, model, task and optimizer are names or objects; a function without arguments that returns the object
    is as good. ``name`` names a method of your own in tables and curves; without it the function that made it does. All
    other settings are fields of ``RunConfig``; those passed here replace the ones in ``config``. With ``out`` the run
    is saved in that folder and can be resumed. ``on_round`` is called with the row of every round, and with the run if
    it takes two arguments: ``run.state_dict()`` is the model, ``run.stop("why")`` ends the run. It may also be an
    object with a method ``on_round(row, run)``. ``progress`` shows how far the run is: True always, False never, None
    in notebooks, and in a terminal after two seconds if there is no ``on_round``.

    Raise ValueError if a setting is wrong, or if ``out`` already holds a run and ``overwrite`` is False. Raise
    DivergedError, an ArithmeticError, if training diverges.

    >>> result = simulate(method="fedprox:mu=0.1", model="mlp", clients=5, per_round=2, rounds=1, epochs=1)
    >>> sorted(result.last)[:4]
    ['after', 'after_client_mean', 'after_clients', 'after_worst_decile']
    """
    _check_callback(on_round, "row")
    folder = _checked(out, overwrite=overwrite, progress=progress)
    given = {"method": method, "data": data, "model": model, "task": task, "optimizer": optimizer}
    texts, objects = named(given, name=name)
    if metrics:
        settings["metrics"], objects["metrics"] = named_metrics(metrics)
    config = anchored(from_dict(settings | texts, where="simulate", base=config), custom=tuple(objects))
    problem = build(config, **objects)
    decide([problem])  # raises for an engine that cannot run it, before a folder is made
    _create(folder, config, overwrite=overwrite)
    return _trained(LiveRun(problem, start(problem), folder=folder), on_round, progress)


def simulate_many(
    config: RunConfig | None = None,
    *,
    seeds: Iterable[int],
    method: str | Method | Callable[[], Method] | None = None,
    data: str | Dataset | Callable[[], Dataset] | None = None,
    model: str | Factory | None = None,
    task: str | Task | Callable[[], Task] | None = None,
    optimizer: str | Optimizer | Callable[[], Optimizer] | None = None,
    metrics: Iterable[str | Function] = (),
    name: str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_round: OnRoundOf | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> list[Result]:
    """Call ``simulate`` once per seed and return the results in order; train all seeds as one stack if possible.

    The arguments are those of ``simulate``, with two differences. With ``out`` every run is saved in its own folder,
    such as out/seed-3. A function ``on_round`` is called with the seed and the row, and with the run if it takes three
    arguments. If a run diverges or is stopped, the others continue; its DivergedError is raised at the end.

    >>> results = simulate_many(seeds=[0, 1], model="mlp", clients=5, per_round=2, rounds=1, epochs=1)
    >>> [result.problem.config.seed for result in results]
    [0, 1]
    """
    _check_callback(on_round, "seed", "row")
    place = _checked(out, overwrite=overwrite, progress=progress)
    seeds = _seeds(seeds)
    given = {"method": method, "data": data, "model": model, "task": task, "optimizer": optimizer}
    texts, objects = named(given, name=name)
    if metrics:
        settings["metrics"], objects["metrics"] = named_metrics(metrics)
    config = anchored(from_dict(settings | texts, where="simulate_many", base=config), custom=tuple(objects))
    runs: list[LiveRun] = []
    for seed in seeds:
        of_seed = replace(config, seed=seed)
        if not objects.get("data"):
            objects["data"] = load(config.data, config.data_dir or None)
        problem = build(of_seed, **objects)
        decide([problem])
        if runs:  # the same samples: store them on the device once
            problem = problem.sharing(runs[0].problem)
        folder = None if place is None else place / f"seed-{seed}"
        _create(folder, of_seed, overwrite=overwrite)
        runs.append(LiveRun(problem, start(problem, runs=len(seeds)), folder=folder))
    if not runs:
        raise ValueError("no seeds to simulate; give at least one, such as seeds=range(5)")
    _train(runs, _calling(on_round, lambda run, row: (run.config.seed, row)), progress)
    return list(map(_result, runs))


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    method: Method | Callable[[], Method] | None = None,
    data: Dataset | Callable[[], Dataset] | None = None,
    model: Factory | None = None,
    task: Task | Callable[[], Task] | None = None,
    optimizer: Optimizer | Callable[[], Optimizer] | None = None,
    metrics: Iterable[Function] = (),
    on_round: OnRound | None = None,
    progress: bool | None = None,
) -> Result:
    """Resume the run in ``folder`` from its latest checkpoint and return its ``Result``; a finished run stays as it is.

    ``rounds`` replaces the planned number of rounds, so that a finished run goes on. The result is the same as that of
    a run with so many rounds from the start, bit for bit; where it would not be, as with schedule=cosine, it is
    refused.

    Pass the same custom objects as in the original call; those that can be imported are found without. Raise
    ValueError if an object is another one, if the folder is not a run, or if the run cannot be resumed.
    """
    _check_callback(on_round, "row")
    objects: dict[str, Any] = {"method": method, "data": data, "model": model, "task": task, "optimizer": optimizer}
    objects["metrics"] = metrics
    path = _path(folder, "folder")
    _checked(None, progress=progress)
    if rounds is not None:
        extend(path, rounds, **objects)
    return _trained(open_run(path, **objects), on_round, progress)


def export_run(
    folder: str | Path,
    to: str | Path | None = None,
    *,
    client: int | None = None,
    method: Method | Callable[[], Method] | None = None,
    data: Dataset | Callable[[], Dataset] | None = None,
    model: Factory | None = None,
    task: Task | Callable[[], Task] | None = None,
    optimizer: Optimizer | Callable[[], Optimizer] | None = None,
) -> Path:
    """Write the model of the run's latest checkpoint as a state_dict and return the file; the run stays as it is.

    The default file is model.safetensors in the run's folder. It holds the shared model, or the one ``client``
    predicts with. Pass the same custom objects as in the original call; those that can be imported are found without.
    """
    from fedncv import store

    folder = _path(folder, "folder")
    config = replace(read_config(folder), device="cpu", metrics=())
    objects = {"method": method, "data": data, "model": model, "task": task, "optimizer": optimizer}
    problem = build(config, **again(folder, config, objects))
    state = store.read_state(folder, problem)
    return _save(export(problem, state, client), _path(to or folder / MODEL, "to"))


def _path(value: Any, name: str) -> Path:
    """Return the path. Raise ValueError with what is wanted if it is none."""
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise ValueError(f"{name} must be a path, as a text or a pathlib.Path, not {value!r:.60}")
    return Path(value)


def _checked(out: Any, *, overwrite: Any = False, progress: Any = None) -> Path | None:
    """Return the path of ``out``. Raise ValueError if one of these has another type: any text would count as True."""
    if not isinstance(overwrite, bool):
        raise ValueError(f"overwrite must be True or False, not {overwrite!r:.60}")
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"progress must be True, False or None, not {progress!r:.60}")
    return None if out is None else _path(out, "out")


def _seeds(given: Any) -> list[int]:
    try:
        seeds = [operator.index(seed) for seed in given]
    except TypeError:
        raise ValueError(f"seeds must be whole numbers, such as seeds=range(5), not {given!r:.60}") from None
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds {seeds} name one twice; give every seed once")
    return seeds


def _save(tensors: dict[str, Tensor], path: Path) -> Path:
    from safetensors.torch import save

    from fedncv import store

    store.write_atomically(path, save(tensors), name="export")
    return path


def _create(folder: Path | None, config: RunConfig, *, overwrite: bool) -> None:
    if folder is not None:
        from fedncv import store

        store.create(folder, config, overwrite=overwrite)


def _trained(run: LiveRun, on_round: OnRound | None, progress: bool | None) -> Result:
    _train([run], _calling(on_round, lambda _run, row: (row,)), progress)
    return _result(run)


def _calling(on_round: Any, first: Callable[[LiveRun, Row], tuple[Any, ...]]) -> Callable[[LiveRun, Row], None] | None:
    """Return the callback for the runner: call the user's with ``first``, and the run if it takes one more argument."""
    if on_round is None:
        return None

    def call(run: LiveRun, row: Row) -> None:
        arguments = first(run, row)
        if hasattr(on_round, "on_round"):
            on_round.on_round(row, run)
        elif num_required > len(arguments):
            on_round(*arguments, run)
        else:
            on_round(*arguments)

    num_required = _num_required(on_round)
    return call


def _check_callback(on_round: Any, *arguments: str) -> None:
    """Raise ValueError unless ``on_round`` can be called with these arguments, or with the run after them."""
    if on_round is None:
        return
    is_object = hasattr(on_round, "on_round")
    function = on_round.on_round if is_object else on_round
    called = ["row", "run"] if is_object else [*arguments, *["run"] * (_num_required(function) > len(arguments))]
    try:
        inspect.signature(function).bind(*called)
    except TypeError:
        takes = f"it takes {inspect.signature(function)}" if callable(function) else f"it is {function!r:.60}"
        names = ", ".join(arguments)
        raise ValueError(
            f"on_round must be a function of ({names}) or ({names}, run), or an object with a method "
            f"on_round(row, run); {takes}"
        ) from None
    except ValueError:  # Python cannot tell, as for some built-in functions
        return


def _num_required(function: Any) -> int:
    """Return the number of arguments without a default; 0 if Python cannot tell, as for some built-in functions."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in places and p.default is p.empty for p in parameters)


def _train(runs: list[LiveRun], on_round: Callable[[LiveRun, Row], None] | None, progress: bool | None) -> None:
    configs, done = [run.problem.config for run in runs], [run.state.round for run in runs]
    if on_round is not None and progress is None and not in_notebook():
        progress = False  # the callback may print; a bar on the same line would garble it
    with RoundProgress(configs, done, progress) as shown:

        def on_row(run: LiveRun, row: Row) -> None:
            shown.row(row)
            if on_round is not None:
                on_round(run, row)

        try:
            train(runs, on_round=on_row)
        except Terminated:
            calls = ", ".join(f"fedncv.resume({str(run.folder)!r})" for run in runs)
            print(f"stopped by SIGTERM; nothing is lost. Resume with:  {calls}", file=sys.stderr)
            raise


def _result(run: LiveRun) -> Result:
    return Result(run.problem, run.state, run.rows, run.folder, "" if run.is_finished else run.stopped)

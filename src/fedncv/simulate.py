"""A run from beginning to end: rounds, measurements, rows, checkpoints."""

import math
import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedncv.config import CUSTOM, RunConfig, from_dict
from fedncv.data import Dataset, load, prior_accuracy
from fedncv.engine import gradients
from fedncv.engine.choose import engine_for
from fedncv.engine.evaluate import shared_model
from fedncv.engine.problem import DivergedError, Problem, State, arrivals, build, messages, start
from fedncv.engine.protocol import Engine
from fedncv.engine.sequential import one_thread
from fedncv.flat import Factory
from fedncv.methods.base import Method
from fedncv.observatory import at_model
from fedncv.observatory.probe import find_probe
from fedncv.results import read_config, read_rows
from fedncv.tasks import ACCURACY, Task

Row = dict[str, Any]
OnRound = Callable[[Row], None]
OnRoundOf = Callable[[int, Row], None]
OnRoundIn = Callable[["Course", Row], None]


@dataclass(frozen=True)
class Result:
    """What a run leaves behind."""

    problem: Problem
    state: State
    rows: list[Row]
    """One dictionary a round, from round 0 (the initial model) on."""
    folder: Path | None = None

    @property
    def last(self) -> Row:
        """The latest value of every metric."""
        merged: Row = {}
        for row in self.rows:
            merged |= row
        return merged

    def tidy(self) -> list[Row]:
        """Flat rows with method and seed in each, for a data frame; per-client lists are left out."""
        label = {"method": self.problem.config.method, "seed": self.problem.config.seed}
        return [label | {k: v for k, v in row.items() if not isinstance(v, list)} for row in self.rows]

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """The trained model for ``module.load_state_dict``: the shared one, or what ``client`` predicts with."""
        return export(self.problem, self.state, client)


def simulate(
    config: RunConfig | None = None,
    *,
    method: str | Method | None = None,
    data: str | Dataset | None = None,
    model: str | Factory | None = None,
    task: str | Task | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Result:
    """Run a federation and return what it did.

    Method, data, model and task are names or objects; all other settings are fields of ``RunConfig``. With
    ``out`` the run is kept on disk and can be resumed. ``on_round`` is given every row: the place for
    TensorBoard, MLflow or W&B.

    >>> result = simulate(method="fedprox:mu=0.1", model="mlp", clients=5, per_round=2, rounds=1, epochs=1)
    >>> sorted(result.last)[:4]
    ['after', 'after_client_mean', 'after_clients', 'after_worst_decile']
    """
    given = {"method": method, "data": data, "model": model, "task": task}
    names, objects = _names_and_objects(given)
    config = from_dict(settings | names, where="simulate", base=config)
    problem = build(config, **objects)
    if out is None:
        return advance(problem, start(problem), on_round=on_round)
    from fedncv import store

    store.create(Path(out), config, overwrite=overwrite)
    return advance(problem, start(problem), folder=Path(out), on_round=on_round)


def simulate_many(
    config: RunConfig | None = None,
    *,
    seeds: Iterable[int],
    method: str | Method | None = None,
    data: str | Dataset | None = None,
    model: str | Factory | None = None,
    task: str | Task | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_round: OnRoundOf | None = None,
    **settings: Any,
) -> list[Result]:
    """``simulate`` once for each seed, all seeds as one stack where the engine can.

    With ``out`` every run is kept in a folder of its own, out/seed-3. ``on_round`` is given the seed and the row.

    >>> results = simulate_many(seeds=[0, 1], model="mlp", clients=5, per_round=2, rounds=1, epochs=1)
    >>> [result.problem.config.seed for result in results]
    [0, 1]
    """
    names, objects = _names_and_objects({"method": method, "data": data, "model": model, "task": task})
    config = from_dict(settings | names, where="simulate_many", base=config)
    seeds = list(seeds)
    courses: list[Course] = []
    for seed in seeds:
        of_seed = replace(config, seed=operator.index(seed))
        if not objects.get("data"):
            objects["data"] = load(config.data, config.data_dir or None)
        problem = build(of_seed, **objects)
        if courses:  # the samples are the same: on the device once
            problem = problem._replace(dataset=courses[0].problem.dataset)
        folder = None if out is None else Path(out) / f"seed-{seed}"
        if folder is not None:
            from fedncv import store

            store.create(folder, of_seed, overwrite=overwrite)
        courses.append(Course(problem, start(problem, runs=len(seeds)), folder=folder))
    if not courses:
        raise ValueError("no seeds to simulate; give at least one, as in seeds=range(5)")
    seed_and_row = None if on_round is None else lambda course, row: on_round(course.problem.config.seed, row)
    advance_together(courses, on_round=seed_and_row)
    return [course.result for course in courses]


def resume(
    folder: str | Path,
    *,
    method: Method | None = None,
    data: Dataset | None = None,
    model: Factory | None = None,
    task: Task | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """Go on with the run in ``folder`` where its latest checkpoint stands. Objects given then are given again."""
    from fedncv import store

    folder = Path(folder)
    _, objects = _names_and_objects({"method": method, "data": data, "model": model, "task": task})
    problem = build(read_config(folder), **objects)
    state = store.load_state(folder, problem)
    return advance(problem, state, rows=read_rows(folder), folder=folder, on_round=on_round)


def _names_and_objects(given: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """What goes into the config, and what stands in for it; an object is "custom" in the config."""
    names = {name: value if isinstance(value, str) else CUSTOM for name, value in given.items() if value is not None}
    objects = {name: value for name, value in given.items() if not isinstance(value, str | None)}
    return names, objects


@dataclass
class Course:
    """A run under way: where it stands, and where it is kept if it is."""

    problem: Problem
    state: State
    rows: list[Row] = field(default_factory=list)
    folder: Path | None = None
    error: DivergedError | None = None

    def __post_init__(self) -> None:
        self._journal = None
        if self.folder is not None:
            from fedncv.store import Journal

            self._journal = Journal(self.folder, self.problem.config, self.state)

    def trains_in(self, layers: str) -> None:
        if self._journal is not None:
            self._journal.trains_in(layers)

    def complete(self, state: State, row: Row, seconds: float) -> None:
        """The round that led to ``state`` is over."""
        config = self.problem.config
        self.state = state
        self.rows.append(row)
        if self._journal is not None:
            self._journal.append(state, row, {"round": state.round, "seconds": seconds})
            if state.round % config.checkpoint_every == 0 or state.round == config.rounds:
                self._journal.checkpoint()

    def fail(self, error: DivergedError) -> None:
        self.error = error
        if self._journal is not None:
            self._journal.fail(str(error))

    def checkpoint(self) -> None:
        """Leave what is complete on disk; a run that failed has done so."""
        if self._journal is not None and self.error is None:
            self._journal.checkpoint()

    def close(self) -> None:
        """Let other processes have the folder."""
        if self.folder is not None:
            from fedncv.store import release

            release(self.folder)

    @property
    def result(self) -> Result:
        return Result(self.problem, self.state, self.rows, self.folder)


def advance(
    problem: Problem,
    state: State,
    *,
    rows: list[Row] | None = None,
    folder: Path | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """From ``state`` to the last round. However it ends, a run on disk is left with a checkpoint."""
    course = Course(problem, state, rows or [], folder)
    advance_together([course], on_round=None if on_round is None else lambda _course, row: on_round(row))
    return course.result


def advance_together(courses: list[Course], *, on_round: OnRoundIn | None = None) -> None:
    """Runs that differ in ``choose.OWN`` only and stand at the same round, to their last one, as one stack.

    One that diverges is left where it stands; the others go on, and the error is raised at the end.
    """
    live, rounds = list(courses), courses[0].problem.config.rounds
    engine = engine_for([course.problem for course in live])
    for course, each in zip(live, engine.layers, strict=True):
        course.trains_in(each)
    try:
        with one_thread():
            if not live[0].rows:
                rows = [{"round": 0} | floor(course.problem) for course in live]
                _complete(engine, live, [course.state for course in live], rows, time.perf_counter(), on_round)
                engine, live = _without_failed(engine, live)
            while live and live[0].state.round < rounds:
                began = time.perf_counter()
                settled = engine.run_rounds([course.state for course in live])
                for course, outcome in zip(live, settled, strict=True):
                    if isinstance(outcome, DivergedError):
                        course.fail(outcome)
                engine, live = _without_failed(engine, live)
                going = [outcome for outcome in settled if not isinstance(outcome, DivergedError)]
                _complete(engine, live, [state for state, _ in going], [row for _, row in going], began, on_round)
                engine, live = _without_failed(engine, live)
    except BaseException:  # Ctrl-C, a callback that raised, a worker that cannot go on
        for course in courses:
            course.checkpoint()
        raise
    finally:
        engine.close()
        for course in courses:
            course.close()
    for course in courses:
        if course.error is not None:
            raise course.error


def _without_failed(engine: Engine, courses: list[Course]) -> tuple[Engine, list[Course]]:
    runs = [j for j, course in enumerate(courses) if course.error is None]
    if runs and len(runs) < len(courses):
        engine = engine.only(runs)
    return engine, [courses[j] for j in runs]


def _complete(
    engine: Engine,
    courses: list[Course],
    states: list[State],
    rows: list[Row],
    began: float,
    on_round: OnRoundIn | None,
) -> None:
    if not courses:
        return
    measured = _measure_each(engine, courses, states)
    seconds = (time.perf_counter() - began) / len(courses)  # a run's share of what they took together
    for course, state, row, found in zip(courses, states, rows, measured, strict=True):
        if isinstance(found, DivergedError):
            course.fail(found)
            continue
        course.complete(state, row | found, seconds)
        if on_round is not None:
            on_round(course, row | found)


def _measure_each(engine: Engine, courses: list[Course], states: list[State]) -> list[Row | DivergedError]:
    """What is due for each; where a score is not finite they are measured one by one, and the run is named."""
    try:
        return list(measure(engine, courses[0].problem.config, states))
    except DivergedError as error:
        if len(courses) == 1:
            return [error]
    found: list[Row | DivergedError] = []
    for course, state in zip(courses, states, strict=True):
        alone = engine_for([course.problem])
        try:
            found += _measure_each(alone, [course], [state])
        finally:
            alone.close()
    return found


def measure(engine: Engine, config: RunConfig, states: list[State]) -> list[Row]:
    """What is due after this round: all clients before local training, after it, or nothing."""
    t = states[0].round
    last = t == config.rounds
    rows: list[Row] = [{} for _ in states]
    if last or (config.eval_every and t % config.eval_every == 0):
        rows = [row | measured for row, measured in zip(rows, engine.before(states), strict=True)]
    if last or (config.after_every and t and t % config.after_every == 0):
        rows = [row | measured for row, measured in zip(rows, engine.after(states), strict=True)]
    probe = find_probe(config.probe)
    if probe is not None and probe.due(t, config.rounds):
        gradients.check(engine.problems[0])
        splits = map(at_model.split, engine.gradients(states), engine.problems)
        rows = [row | at_model.row(measured) for row, measured in zip(rows, splits, strict=True)]
    return rows


def floor(problem: Problem) -> Row:
    """What a client reaches by always naming its majority class; where the score is no accuracy, what it is called."""
    if problem.task.score_name != ACCURACY:
        return {"score_name": problem.task.score_name}
    labels = problem.dataset.y
    if labels.is_floating_point() or labels.dim() != 1:
        return {}
    accuracy = prior_accuracy(labels.cpu().numpy(), problem.clients, problem.dataset.num_classes)
    return {} if math.isnan(accuracy) else {"label_prior": accuracy}


def export(problem: Problem, state: State, client: int | None = None) -> dict[str, Tensor]:
    """The shared model, or the one that ``client`` predicts with, as an ordinary state_dict."""
    problem = problem.at(state.round).in_use
    method, model = problem.method, problem.model
    if client is None:
        shared_P = shared_model(problem, state)
        if shared_P is None:
            raise ValueError(f"with {problem.config.method} no model is shared by all clients; name one with --client")
        _, b_SR = messages(problem, state, np.array([0]))
        return model.state_dict(shared_P, b_SR[0])
    if not 0 <= client < problem.federation.num_clients:
        raise ValueError(f"there is no client {client}; they are numbered 0 to {problem.federation.num_clients - 1}")
    (arrival,) = arrivals(problem, state, np.array([client]))
    ask = problem.ask(client, arrival.buffers_R, state.round)
    y_P, _ = method.begin(ask, arrival.down, arrival.kept.own)
    x_P, offset_C = method.predict(ask, y_P, arrival.down, arrival.kept.own)
    return model.state_dict(x_P, ask.buffers_R, offset_C)

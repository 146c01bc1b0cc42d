"""A run from beginning to end: rounds, measurements, rows, checkpoints."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedncv.config import CUSTOM, RunConfig, from_dict
from fedncv.data import Dataset, prior_accuracy
from fedncv.engine import evaluate
from fedncv.engine.problem import Problem, State, arrivals, build, start
from fedncv.engine.sequential import DivergedError, one_thread, run_round
from fedncv.flat import Factory
from fedncv.methods.base import Method
from fedncv.results import read_config, read_rows
from fedncv.tasks import Task

Row = dict[str, Any]
OnRound = Callable[[Row], None]


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


def advance(
    problem: Problem,
    state: State,
    *,
    rows: list[Row] | None = None,
    folder: Path | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """From ``state`` to the last round. However it ends, a run on disk is left with a checkpoint."""
    config = problem.config
    rows = rows or []
    journal = None
    if folder is not None:
        from fedncv.store import Journal

        journal = Journal(folder, config, state)

    def complete(state: State, row: Row, began: float) -> None:
        row |= measure(problem, state)
        rows.append(row)
        if journal is not None:
            journal.append(state, row, {"round": state.round, "seconds": time.perf_counter() - began})
            if state.round % config.checkpoint_every == 0 or state.round == config.rounds:
                journal.checkpoint()
        if on_round is not None:
            on_round(row)

    try:
        with one_thread():
            if not rows:
                complete(state, {"round": 0} | prior(problem), time.perf_counter())
            while state.round < config.rounds:
                began = time.perf_counter()
                state, row = run_round(problem, state)
                complete(state, row, began)
    except DivergedError as error:
        if journal is not None:
            journal.fail(str(error))
        raise
    except KeyboardInterrupt:
        if journal is not None:
            journal.checkpoint()
        raise
    return Result(problem, state, rows, folder)


def measure(problem: Problem, state: State) -> Row:
    """What is due after this round: all clients before local training, after it, or nothing."""
    config = problem.config
    last = state.round == config.rounds
    row: Row = {}
    if last or (config.eval_every and state.round % config.eval_every == 0):
        row |= evaluate.before(problem, state)
    if last or (config.after_every and state.round and state.round % config.after_every == 0):
        row |= evaluate.after(problem, state)
    return row


def prior(problem: Problem) -> Row:
    """What a client reaches by always naming its majority class: the floor under every method."""
    labels = problem.dataset.y
    if labels.is_floating_point() or labels.dim() != 1:
        return {}
    accuracy = prior_accuracy(labels.cpu().numpy(), problem.clients, problem.dataset.num_classes)
    return {} if math.isnan(accuracy) else {"label_prior": accuracy}


def export(problem: Problem, state: State, client: int | None = None) -> dict[str, Tensor]:
    """The shared model, or the one that ``client`` predicts with, as an ordinary state_dict."""
    problem = problem.at(state.round)
    method, model = problem.method, problem.model
    if client is None:
        shared_P = method.shared(state.server)
        if shared_P is None or problem.buffer_rule != "averaged":
            raise ValueError(f"with {problem.config.method} no model is shared by all clients; name one with --client")
        return model.state_dict(shared_P, state.buffers)
    if not 0 <= client < problem.federation.num_clients:
        raise ValueError(f"there is no client {client}; they are numbered 0 to {problem.federation.num_clients - 1}")
    (arrival,) = arrivals(problem, state, np.array([client]))
    ask = problem.ask(client, arrival.buffers_R, state.round)
    y_P, _ = method.begin(ask, arrival.down, arrival.kept.own)
    x_P, offset_C = method.predict(ask, y_P, arrival.down, arrival.kept.own)
    return model.state_dict(x_P, arrival.buffers_R, offset_C)

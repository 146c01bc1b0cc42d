"""Estimators compared at the same frozen states of one reference run, or each at the states of its own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from fedncv.config import RunConfig
from fedncv.data import Dataset, load
from fedncv.engine.problem import Problem, build, start
from fedncv.engine.sequential import one_thread
from fedncv.observatory.everyone import Engine, common_point, engine_for, everyone
from fedncv.observatory.shadow import Path, follow, paths_of, states_along
from fedncv.observatory.update import Row, probe

OWN: Literal["own"] = "own"
Tell = Callable[[str, int, int], Any]  # what is under way, rounds done, rounds in all


def rows_of(
    config: RunConfig,
    methods: Sequence[str],
    *,
    seeds: Sequence[int],
    reference: str = "fedavg",
    at: Sequence[int],
    num_draws: int = 2000,
    within: bool = True,
    tell: Tell = lambda _what, _done, _rounds: None,
) -> Iterator[Row]:
    """A row for every method, seed and round of ``at``, as soon as it is known; seeds are one stack where they can.

    ``reference`` is the method whose path all follow, or "own". ``within`` trains all clients a second time.
    """
    rounds = max(at)
    data = load(config.data, config.data_dir or None)
    paths = None
    with one_thread():
        if reference != OWN:
            engine = engine_for(_problems(replace(config, method=reference), seeds, data))
            paths = _paths(engine, rounds, f"{reference}, the reference", tell)
        for method in methods:
            engine = engine_for(_problems(replace(config, method=method), seeds, data))
            for t, states in enumerate(states_along(engine, rounds, paths)):
                tell(method, t, rounds)
                if t not in at:
                    continue
                answers = everyone(engine, states)
                again = everyone(engine, states, replicate=1) if within else [None] * len(states)
                for problem, state, first, second in zip(engine.problems, states, answers, again, strict=True):
                    row = probe(problem, state, first, second, num_draws=num_draws)
                    yield _label(problem, method if reference == OWN else reference, t) | row


def check(config: RunConfig, methods: Sequence[str], reference: str) -> None:
    """ValueError unless data, model, device and every method are there and have a model that all clients share."""
    data = load(config.data, config.data_dir or None)
    for method in dict.fromkeys([*methods, *([] if reference == OWN else [reference])]):
        (problem,) = _problems(replace(config, method=method), [0], data)
        state = start(problem)
        follow(problem, state, common_point(problem, state))


def _problems(config: RunConfig, seeds: Sequence[int], data: Dataset) -> list[Problem]:
    problems: list[Problem] = []
    for seed in seeds:
        problem = build(replace(config, seed=seed), data=data)
        problems.append(problem._replace(dataset=problems[0].dataset) if problems else problem)
    return problems


def _paths(engine: Engine, rounds: int, what: str, tell: Tell) -> list[Path]:
    paths: list[Path] = [[] for _ in engine.problems]
    for t, points in enumerate(paths_of(engine, rounds)):
        tell(what, t, rounds)
        for path, point in zip(paths, points, strict=True):
            path.append(point)
    return paths


def _label(problem: Problem, reference: str, round: int) -> Row:
    config = problem.config
    return {
        "method": config.method,
        "reference": reference,
        "seed": config.seed,
        "round": round,
        "data": config.data,
        "partition": config.partition,
        "clients": config.clients,
        "per_round": config.per_round,
        "lr": config.lr,
        "model": config.model,
    }

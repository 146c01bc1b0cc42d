"""Compare estimators at the same frozen states of one reference run, or each at the states of its own run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from fedncv.config import RunConfig
from fedncv.data import Dataset, load
from fedncv.engine.arithmetic import arithmetic
from fedncv.engine.problem import Problem, State, build, start
from fedncv.engine.sequential import one_thread
from fedncv.observatory.errors import refuse_private
from fedncv.observatory.everyone import Engine, common_point, engine_for, everyone
from fedncv.observatory.shadow import Path, follow, states_along
from fedncv.observatory.update import Row, probe

OWN: Literal["own"] = "own"
Tell = Callable[[str, int, int], Any]  # current work, rounds done, total rounds


def rows_of(
    configs: Sequence[RunConfig],
    methods: Sequence[str],
    *,
    reference: str = "fedavg",
    at: Sequence[int],
    num_draws: int = 2000,
    within: bool = True,
    tell: Tell = lambda _what, _done, _rounds: None,
) -> Iterator[Row]:
    """Yield a row for every method, run and round of ``at``, as soon as it is known.

    ``configs`` are runs of one study that differ only in what runs of one stack may differ in (seed, partition, …).
    ``reference`` is the method whose run all methods follow, or "own". ``within`` trains all clients a second time.
    """
    rounds = max(at)
    data = load(configs[0].data, configs[0].data_dir or None)

    def probed(engine: Engine, states: list[State], t: int, of: str) -> Iterator[Row]:
        if t not in at:
            return
        answers = everyone(engine, states)
        again = everyone(engine, states, replicate=1) if within else [None] * len(states)
        for problem, state, first, second in zip(engine.problems, states, answers, again, strict=True):
            yield _label(problem, of, t) | probe(problem, state, first, second, num_draws=num_draws)

    with one_thread(), arithmetic(configs[0]):
        paths: list[Path] | None = None
        if reference != OWN:
            engine = engine_for(_problems(configs, reference, data))
            paths = [[] for _ in configs]
            for t, states in enumerate(states_along(engine, rounds)):
                tell(f"{reference}, the reference", t, rounds)
                for path, problem, state in zip(paths, engine.problems, states, strict=True):
                    path.append(common_point(problem, state))
                if reference in methods:
                    yield from probed(engine, states, t, reference)
        for method in methods:
            if method == reference:
                continue
            engine = engine_for(_problems(configs, method, data))
            for t, states in enumerate(states_along(engine, rounds, paths)):
                tell(method, t, rounds)
                yield from probed(engine, states, t, method if reference == OWN else reference)


def check(config: RunConfig, methods: Sequence[str], reference: str) -> None:
    """Raise ValueError unless data, model and device exist, and every method has a model that all clients share."""
    data = load(config.data, config.data_dir or None)
    for method in dict.fromkeys([*methods, *([] if reference == OWN else [reference])]):
        (problem,) = _problems([config], method, data)
        if method in methods:
            refuse_private(problem)
        state = start(problem)
        follow(problem, state, common_point(problem, state))
        if problem.inclusion_N.min() * (1 - config.dropout) >= 1:
            raise ValueError(
                f"per_round is {config.per_round}: all clients reply in every round, so no draw has an error to "
                "measure; set per_round to fewer"
            )


def _problems(configs: Sequence[RunConfig], method: str, data: Dataset) -> list[Problem]:
    problems: list[Problem] = []
    for config in configs:
        problem = build(replace(config, method=method), data=data)
        problems.append(problem.sharing(problems[0]) if problems else problem)  # on the device once
    return problems


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

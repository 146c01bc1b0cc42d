"""Which engine runs a study, and the one face they all have."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fedncv.config import RunConfig, named
from fedncv.engine import evaluate
from fedncv.engine.cpu_fused import FusedConv, fused
from fedncv.engine.gradients import Gradients, of_run
from fedncv.engine.problem import DivergedError, Problem, Settled, State
from fedncv.engine.processes import ProcessesEngine, can_fork, num_cores
from fedncv.engine.sequential import run_round

WORTH_FORKING = 5e9  # sample-parameters of local training in a run, below which one process is as fast

OWN = named("own")
"""Settings in which runs of one engine may differ. All others decide the shape of a step or of a study."""


def common(config: RunConfig) -> RunConfig:
    """What runs must have in common to share an engine: the config with ``OWN`` at its defaults."""
    return replace(config, **{name: getattr(RunConfig(), name) for name in OWN})


class Engine(Protocol):
    """One round, or one measurement, of runs that have ``common`` in common."""

    problems: list[Problem]

    def run_rounds(self, states: Sequence[State]) -> list[Settled]:
        """(state, row) of each run; a run that diverged gives its error and leaves the others alone."""

    def before(self, states: Sequence[State]) -> list[dict[str, Any]]: ...

    def after(self, states: Sequence[State]) -> list[dict[str, Any]]: ...

    def gradients(self, states: Sequence[State]) -> Iterable[Gradients]: ...

    def close(self) -> None: ...


class SequentialEngine:
    """The reference, one run after the other."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)

    def run_rounds(self, states: Sequence[State]) -> list[Settled]:
        settled: list[Settled] = []
        for problem, state in zip(self.problems, states, strict=True):
            try:
                settled.append(run_round(problem, state))
            except DivergedError as error:
                settled.append(error)
        return settled

    def before(self, states: Sequence[State]) -> list[dict[str, Any]]:
        return [evaluate.before(problem, state) for problem, state in zip(self.problems, states, strict=True)]

    def after(self, states: Sequence[State]) -> list[dict[str, Any]]:
        return [evaluate.after(problem, state) for problem, state in zip(self.problems, states, strict=True)]

    def gradients(self, states: Sequence[State]) -> Iterable[Gradients]:
        return map(of_run, self.problems, states)

    def close(self) -> None:
        pass


def engine_for(problems: Sequence[Problem]) -> Engine:
    """The engine that the config names; auto takes the fastest measured for the machine and the study.

    Stacked on a GPU. On a CPU, processes where there are cores for them and work enough to be worth a fork, which
    give the bits of the sequential engine; with compiled layers, which agree to rounding, where a run has work enough
    to be worth a compiler.
    """
    first = problems[0]
    if any(common(problem.config) != common(first.config) for problem in problems):
        raise ValueError(f"runs of one engine may differ in {', '.join(OWN)} only")
    name, on_gpu = first.config.engine, first.model.start_P.device.type == "cuda"
    if name == "auto":
        name = "stacked" if on_gpu else "processes" if _worth_forking(problems) else "sequential"
        if not on_gpu:
            problems = [fused(problem) if _worth_compiling(problem) else problem for problem in problems]
    if name == "compiled":
        if on_gpu:
            raise ValueError("engine=compiled is for the CPU; use stacked or auto on a GPU")
        problems, name = list(map(fused, problems)), "processes" if _worth_forking(problems) else "sequential"
    if name == "stacked":
        from fedncv.engine.stacked import CannotStackError
        from fedncv.engine.stacked_scores import ScoringEngine

        try:
            return ScoringEngine(problems)
        except CannotStackError as error:
            print(f"stacked: {error}; running one client after the other instead", file=sys.stderr)
            return SequentialEngine(problems)
    if name == "processes":
        if not can_fork() or on_gpu:
            where = "a GPU" if on_gpu else sys.platform
            raise ValueError(f"engine=processes forks, which does not work on {where}; use sequential or auto")
        return ProcessesEngine(problems)
    return SequentialEngine(problems)


def _worth_forking(problems: Sequence[Problem]) -> bool:
    return can_fork() and num_cores() > 1 and _work(problems) > WORTH_FORKING


def _worth_compiling(problem: Problem) -> bool:
    """Decided by the run's own settings, so that it takes the same layers alone, in company and after a resume."""
    config = problem.config
    share = (1 - config.test_share) * config.per_round / problem.federation.num_clients
    samples = len(problem.dataset.x) * share * config.epochs * max(1, config.rounds)
    return samples * problem.model.layout.num_parameters > WORTH_FORKING


def layers(engine: Engine) -> list[str]:
    """Whose layers each run trains in: with the machine and torch's version they decide a number's last digits."""
    others = "stacked" if hasattr(engine, "only") else "torch's"
    return ["compiled" if problem.model.holds(FusedConv) else others for problem in engine.problems]


def engine_of_some(engine: Engine, problems: Sequence[Problem], runs: Sequence[int]) -> Engine:
    """The engine of these runs, where the other ones of ``problems`` have stopped."""
    only: Callable[[Sequence[int]], Engine] | None = getattr(engine, "only", None)
    if only is not None:  # what is recorded for a GPU is worth keeping
        return only(runs)
    engine.close()
    return engine_for([problems[j] for j in runs])


def _work(problems: Sequence[Problem]) -> float:
    """Samples of local training times parameters, over the whole study."""
    config = problems[0].config
    parameters = problems[0].model.layout.num_parameters
    samples = sum(float(problem.clients.sizes.mean()) for problem in problems) * config.per_round * config.epochs
    return samples * parameters * max(1, config.rounds)

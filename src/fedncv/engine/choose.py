"""Which engine runs a group of runs, and in which layers: decided here and nowhere else."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from fedncv.config import RunConfig, named
from fedncv.engine.cpu_fused import CannotCompileError, fused
from fedncv.engine.problem import Problem
from fedncv.engine.processes import ProcessesEngine, can_fork, num_cores
from fedncv.engine.protocol import Engine
from fedncv.engine.sequential import SequentialEngine

WORTH_FORKING = 5e9  # sample-parameters of local training in a run, below which one process is as fast

OWN = named("own")
"""Settings in which runs of one engine may differ. All others decide the shape of a step or of a study."""


def common(config: RunConfig) -> RunConfig:
    """What runs must have in common to share an engine: the config with ``OWN`` at its defaults."""
    return replace(config, **{name: getattr(RunConfig(), name) for name in OWN})


class Choice(NamedTuple):
    """What a group of runs is run with."""

    engine: Literal["sequential", "stacked", "processes"]
    compiled: list[bool]  # for each run, whether it trains in compiled layers


def decide(problems: Sequence[Problem]) -> Choice:
    """Return the engine of these runs and the layers of each; where the config says auto, the fastest measured.

    engine   stacked on a GPU, which one client at a time leaves almost idle. On a CPU stacking is slower than one
             client at a time: processes where there are several cores and work enough to be worth a fork, sequential
             otherwise. Both give the same bits.
    layers   compiled on a CPU where a run has work enough to be worth a compiler, and no engine is named: compiled
             layers agree with torch's to rounding only, and a run with a named engine keeps the bits of torch's.
             The layers of a run depend on its own settings alone, not on the runs beside it.
    """
    config, on_gpu = problems[0].config, problems[0].model.start_P.is_cuda
    name = config.engine
    if name == "processes" and (on_gpu or not can_fork()):
        where = "a GPU" if on_gpu else sys.platform
        raise ValueError(f"engine=processes forks, which does not work on {where}; use sequential or auto")
    if name == "auto":
        name = "stacked" if on_gpu else "processes" if _worth_forking(problems) else "sequential"
    if config.layers == "compiled" and (on_gpu or name == "stacked"):
        raise ValueError(
            f"layers=compiled is for the CPU, not for {'a GPU' if on_gpu else 'engine=stacked'}; use layers=auto"
        )
    if config.layers == "auto" and config.engine == "auto" and not on_gpu:
        return Choice(name, [_worth_compiling(problem) for problem in problems])
    return Choice(name, [config.layers == "compiled"] * len(problems))


def engine_for(problems: Sequence[Problem]) -> Engine:
    """Return the engine that ``decide`` names; the reference takes its place where it cannot run these."""
    config = problems[0].config
    if any(common(problem.config) != common(config) for problem in problems):
        raise ValueError(f"runs of one engine may differ in {', '.join(OWN)} only")
    choice = decide(problems)
    if choice.engine == "stacked":
        from fedncv.engine.stacked import CannotStackError
        from fedncv.engine.stacked_scores import ScoringEngine

        try:
            return ScoringEngine(problems, fused=False if config.layers == "torch" else None)
        except CannotStackError as error:
            print(f"stacked: {error}; running one client after the other instead", file=sys.stderr)
            return SequentialEngine(problems)
    problems = _with_layers(problems, choice.compiled)
    return ProcessesEngine(problems) if choice.engine == "processes" else SequentialEngine(problems)


def _with_layers(problems: Sequence[Problem], compiled: list[bool]) -> list[Problem]:
    """Return the problems with compiled layers where they should and can be; print why not if it was asked for."""
    made, reasons = [], []
    for problem, wanted in zip(problems, compiled, strict=True):
        try:
            made.append(fused(problem) if wanted else problem)
        except CannotCompileError as error:
            made.append(problem)
            reasons.append(str(error))
    if reasons and problems[0].config.layers == "compiled":
        print(f"layers=compiled: {reasons[0]}; torch's layers are used instead", file=sys.stderr)
    return made


def _worth_forking(problems: Sequence[Problem]) -> bool:
    return can_fork() and num_cores() > 1 and _work(problems) > WORTH_FORKING


def _worth_compiling(problem: Problem) -> bool:
    """Decided by the run's own settings, so that it takes the same layers alone, in company and after a resume."""
    config = problem.config
    share = (1 - config.test_share) * config.per_round / problem.federation.num_clients
    samples = len(problem.dataset.x) * share * config.epochs * max(1, config.rounds)
    return samples * problem.model.layout.num_parameters > WORTH_FORKING


def _work(problems: Sequence[Problem]) -> float:
    """Samples of local training times parameters, over the whole study."""
    config = problems[0].config
    parameters = problems[0].model.layout.num_parameters
    samples = sum(float(problem.clients.sizes.mean()) for problem in problems) * config.per_round * config.epochs
    return samples * parameters * max(1, config.rounds)

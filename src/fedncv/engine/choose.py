"""Choose the engine and the layers of a group of runs. No other module decides them."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from fedncv.config import RunConfig, named
from fedncv.engine.cpu_fused import CannotCompileError, fused
from fedncv.engine.cpu_trial import faster
from fedncv.engine.problem import Problem
from fedncv.engine.processes import ProcessesEngine, can_fork, num_cores
from fedncv.engine.protocol import Engine
from fedncv.engine.sequential import SequentialEngine

WORTH_FORKING = 5e9  # sample-parameters of local training in a run; below this one process is as fast

OWN = named("own")
"""Settings that may differ between runs of one engine. All others decide the shape of a step or of a study."""


def common(config: RunConfig) -> RunConfig:
    """Return what runs must have in common to share an engine: the config with ``OWN`` at its defaults."""
    return replace(config, **{name: getattr(RunConfig(), name) for name in OWN})


class Choice(NamedTuple):
    """Engine and layers of a group of runs."""

    engine: Literal["sequential", "stacked", "processes"]
    compiled: list[bool]  # for each run, whether it trains in compiled layers


def decide(problems: Sequence[Problem]) -> Choice:
    """Return the engine of these runs and the layers of each. ``auto`` takes the fastest measured:

    engine   stacked on a GPU, which is almost idle with one client at a time. On a CPU stacking is slower than one
             client at a time, so it is processes if there are several cores and enough work to be worth a fork, and
             sequential otherwise. Both give the same bits.
    layers   compiled on a CPU if a run has enough work to be worth compiling, engine=auto, and a trial finds them
             faster on this machine. Compiled layers agree with torch's only up to rounding, so a run with a named
             engine keeps torch's layers and their bits. The layers of a run depend only on its own settings and the
             machine, not on the other runs.
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


def engine_for(problems: Sequence[Problem], *, before: Sequence[str] = ()) -> Engine:
    """Return the engine that ``decide`` names, or the sequential engine if that one cannot run these.

    ``before`` names the layers of each run that is resumed: they need no trial.
    """
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
    problems = _with_layers(problems, choice.compiled, before or [""] * len(problems))
    return ProcessesEngine(problems) if choice.engine == "processes" else SequentialEngine(problems)


def _with_layers(problems: Sequence[Problem], compiled: list[bool], before: Sequence[str]) -> list[Problem]:
    """Return the problems with compiled layers if wanted and possible; print why not if layers=compiled.

    With layers=auto they are those that the run had before, or else the faster ones in a trial.
    """
    made, reasons = [], []
    for problem, wanted, had in zip(problems, compiled, before, strict=True):
        try:
            made.append(_compiled(problem, had) if wanted else problem)
        except CannotCompileError as error:
            made.append(problem)
            reasons.append(str(error))
    if reasons and problems[0].config.layers == "compiled":
        print(f"layers=compiled: {reasons[0]}; torch's layers are used instead", file=sys.stderr)
    return made


def _compiled(problem: Problem, before: str) -> Problem:
    other = fused(problem)
    if problem.config.layers == "compiled" or before == other.layers:
        return other
    return other if not before and faster(problem, other) else problem


def _worth_forking(problems: Sequence[Problem]) -> bool:
    return can_fork() and num_cores() > 1 and _work(problems) > WORTH_FORKING


def _worth_compiling(problem: Problem) -> bool:
    """Decide by the run's own settings: it uses the same layers alone, with other runs and after a resume."""
    config = problem.config
    share = (1 - config.test_share) * config.per_round / problem.federation.num_clients
    samples = len(problem.dataset.x) * share * config.epochs * max(1, config.rounds)
    return samples * problem.model.num_weights > WORTH_FORKING


def _work(problems: Sequence[Problem]) -> float:
    """Return samples of local training times parameters, over all these runs."""
    config = problems[0].config
    parameters = problems[0].model.num_weights
    samples = sum(float(problem.clients.sizes.mean()) for problem in problems) * config.per_round * config.epochs
    return samples * parameters * max(1, config.rounds)

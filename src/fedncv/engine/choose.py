"""Choose the engine and the layers of a group of runs. No other module decides them."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from fedncv.config import RunConfig, named
from fedncv.engine.arithmetic import EXACT
from fedncv.engine.cpu_fused import CannotCompileError, fused
from fedncv.engine.cpu_trial import faster
from fedncv.engine.problem import Problem, start
from fedncv.engine.processes import ProcessesEngine, can_fork
from fedncv.engine.protocol import Engine
from fedncv.engine.round import draw
from fedncv.engine.sequential import SequentialEngine
from fedncv.machine import num_cores
from fedncv.notes import note

if TYPE_CHECKING:
    from fedncv.engine.stacked import Way
    from fedncv.engine.stacked_scores import ScoringEngine

TRIAL_CLIENTS, TRIAL_STEPS = 16, 4  # in the trial of both ways on a GPU
WORTH_FORKING = 5e9  # sample-parameters of local training in a run; below this one process is as fast

OWN = named("own")
"""Settings that may differ between runs of one engine. All others decide the shape of a step or of a study."""


def common(config: RunConfig) -> RunConfig:
    """Return what runs must have in common to share an engine: the config with ``OWN`` at its defaults."""
    return replace(config, **{name: getattr(RunConfig(), name) for name in OWN})


class Choice(NamedTuple):
    """Engine and layers of a group of runs."""

    engine: Literal["sequential", "stacked", "streams", "processes", "ray"]
    compiled: list[bool]  # for each run, whether it trains in compiled layers


def decide(problems: Sequence[Problem]) -> Choice:
    """Return the engine of these runs and the layers of each. ``auto`` takes the fastest measured:

    engine   stacked or streams on a GPU, which is almost idle with one client at a time: "stacked" here, and then the
             faster of both in a trial (``on_gpu``). On a CPU stacking is slower than one client at a time, so it is
             processes if there are several cores and enough work to be worth a fork, and sequential otherwise. Both
             give the same bits.
    layers   compiled on a CPU if a run has enough work to be worth compiling, engine=auto, and a trial finds them
             faster on this machine. Compiled layers agree with torch's only up to rounding, so a run with a named
             engine keeps torch's layers and their bits. The layers of a run depend only on its own settings and the
             machine, not on the other runs.
    """
    config, on_gpu = problems[0].config, problems[0].config.device != "cpu"
    name = config.engine
    if name == "processes" and (on_gpu or not can_fork()):
        where = "a GPU" if on_gpu else sys.platform
        raise ValueError(f"engine=processes forks, which does not work on {where}; use sequential or auto")
    if name != "ray" and (config.cluster or config.workers):
        which = "cluster" if config.cluster else "workers"
        raise ValueError(
            f"{which} is {getattr(config, which)!r}, but only engine=ray uses it; use engine=ray, or leave it out"
        )
    if name == "auto":
        name = "stacked" if on_gpu else "processes" if _worth_forking(problems) else "sequential"
    if config.layers == "compiled" and (on_gpu or name in ("stacked", "streams")):
        raise ValueError(
            f"layers=compiled is for the CPU, not for {'a GPU' if on_gpu else f'engine={name}'}; use layers=auto"
        )
    if config.layers == "compiled" and config.precision not in EXACT:
        raise ValueError(f"layers=compiled computes in float32, not in {config.precision}; use layers=auto")
    if name == "ray":
        from fedncv.engine.ray_engine import prepare

        prepare(problems[0])
    if config.layers == "auto" and config.engine == "auto" and config.precision in EXACT and not on_gpu:
        return Choice(name, [_worth_compiling(problem) for problem in problems])
    return Choice(name, [config.layers == "compiled"] * len(problems))


def engine_for(problems: Sequence[Problem], *, before: Sequence[str] = ()) -> Engine:
    """Return the engine that ``decide`` names, or the sequential engine if that one cannot run these.

    ``before`` names the layers of each run that is resumed: they need no trial, and the last digits depend on them.
    """
    config = problems[0].config
    if any(common(problem.config) != common(config) for problem in problems):
        raise ValueError(f"runs of one engine may differ in {', '.join(OWN)} only")
    choice = decide(problems)
    if choice.engine == "ray":
        from fedncv.engine.ray_engine import RayEngine

        is_cuda = problems[0].model.start_P.is_cuda
        return RayEngine(problems, on_gpu=on_gpu if is_cuda else None, compiled=any(choice.compiled), before=before)
    if choice.engine in ("stacked", "streams"):
        return on_gpu(problems, before=before) or SequentialEngine(problems)
    problems = _with_layers(problems, choice.compiled, before or [""] * len(problems))
    return ProcessesEngine(problems) if choice.engine == "processes" else SequentialEngine(problems)


def on_gpu(problems: Sequence[Problem], *, before: Sequence[str] = ()) -> "ScoringEngine | None":
    """Return the engine that trains these runs together, or None if they cannot be; print the reason.

    engine=auto on a GPU tries both ways for a few steps and takes the faster one.
    """
    from fedncv.engine.stacked import CannotStackError, NoMemoryError
    from fedncv.engine.stacked_scores import ScoringEngine

    config, failed, memory = problems[0].config, "", None
    ways = _ways(config.engine, before[0] if before else "", on_gpu=problems[0].model.start_P.is_cuda)
    made: list[ScoringEngine] = []
    for way in ways:
        try:
            fused = False if config.layers == "torch" else None
            if made:
                made[0].release()
            made.append(made[0].turned(way) if made else ScoringEngine(problems, way=way, fused=fused))
        except (CannotStackError, NoMemoryError, torch.cuda.OutOfMemoryError) as error:
            failed, memory = f"{way}: {error}", None if isinstance(error, CannotStackError) else error
            if way != ways[-1]:
                note(f"{failed}; trying each client on a stream of its own")
    if not made and memory is not None:
        raise memory
    if not made:
        note(f"{failed}; running one client after the other instead")
        return None
    return _faster(made) if len(made) > 1 else made[0]


def _ways(engine: str, before: str, *, on_gpu: bool) -> "list[Way]":
    """Return the ways to try: both for engine=auto on a GPU, unless the run was begun in one of them."""
    way = before.partition(",")[0] if engine == "auto" else engine
    if way in ("stacked", "streams"):
        return ["streams" if way == "streams" else "stacked"]
    return ["stacked", "streams"] if on_gpu else ["stacked"]


def _faster(engines: "list[ScoringEngine]") -> "ScoringEngine":
    """Return the engine with the most samples/s in a trial of a few steps; print what was measured."""
    rates = []
    for engine in engines:
        rates.append(_samples_per_second(engine))
        engine.release()  # its memory would be missing in the trial of the other
    best = int(np.argmax(rates))
    taken = engines[best]
    other = "streams" if taken.name == "stacked" else "stacked"
    taken.why = (
        f"{rates[best]:,.0f} samples/s in a trial of {TRIAL_STEPS} steps, {other} {rates[1 - best]:,.0f} samples/s"
    )
    note(f"engine=auto took {taken.name}: {taken.why}")
    return taken


def _samples_per_second(engine: "ScoringEngine") -> float:
    """Time the first steps of the first round's clients, after they were recorded; 0 if they fail."""
    each = -(-TRIAL_CLIENTS // len(engine.problems))
    ids = [draw(problem, 0).ids[:each] for problem in engine.problems]
    try:
        arrived = engine.arrive([start(problem) for problem in engine.problems], ids)
        plan = engine.trial_plan(arrived.rows, TRIAL_STEPS)
        seconds = []
        for _ in range(3):  # the first one records
            torch.cuda.synchronize(engine.device)
            began = time.perf_counter()
            engine.train(arrived, plan)
            torch.cuda.synchronize(engine.device)
            seconds.append(time.perf_counter() - began)
    except Exception as error:  # of any layer, task or method: the other way may run
        note(f"{engine.name}: {(str(error) or type(error).__name__).splitlines()[0]}")
        return 0.0
    engine.used = engine.computed = 0
    return float(plan.counts.samples_KF[plan.who].sum() / min(seconds[1:]))


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
        note(f"layers=compiled: {reasons[0]}; torch's layers are used instead")
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
    share = (1 - config.test_share) * config.per_round / len(problem.clients.train)
    samples = len(problem.dataset.x) * share * config.epochs * max(1, config.rounds)
    return samples * problem.model.num_weights > WORTH_FORKING


def _work(problems: Sequence[Problem]) -> float:
    """Return samples of local training times parameters, over all these runs."""
    config = problems[0].config
    parameters = problems[0].model.num_weights
    samples = sum(float(problem.clients.sizes.mean()) for problem in problems) * config.per_round * config.epochs
    return samples * parameters * max(1, config.rounds)

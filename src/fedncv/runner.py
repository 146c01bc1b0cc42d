"""Train runs to their last round. Every command and every function that trains uses this module.

Runs that differ only in settings such as seed, lr and partition (``choose.OWN``) share an engine and train round by
round together, as one stack on a GPU. Runs in folders are first sorted into such groups, and in a group by the round
they have reached.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedncv import heartbeat, ledger, termination
from fedncv.config import RunConfig
from fedncv.data import holdings, prior_accuracy
from fedncv.engine import budget, gradients
from fedncv.engine.arithmetic import arithmetic
from fedncv.engine.choose import common, engine_for
from fedncv.engine.evaluate import groups, sampled
from fedncv.engine.problem import DivergedError, Problem, State, build
from fedncv.engine.protocol import Engine
from fedncv.engine.sequential import one_thread
from fedncv.export import export
from fedncv.notes import note
from fedncv.objects import again, check_code
from fedncv.observatory import at_model
from fedncv.probe import find_probe
from fedncv.results import ACCURACY, read_config, read_rows

Row = dict[str, Any]
OnRound = Callable[["LiveRun", Row], None]


# ---- one run ---------------------------------------------------------------------------------------------


@dataclass
class LiveRun:
    """A run in progress: its state and rows, and its folder if it has one. Callbacks may read it, and ``stop`` it."""

    problem: Problem
    state: State
    rows: list[Row] = field(default_factory=list)
    folder: Path | None = None
    error: DivergedError | None = None
    stopped: str = ""
    """Reason, if a callback has stopped the run."""

    def __post_init__(self) -> None:
        self._journal = None
        self._heart: heartbeat.Heart | None = None
        if self.folder is not None:
            from fedncv.store import Journal, samples_mark

            model = self.problem.model
            self._journal = Journal(
                self.folder, self.problem.config, self.state, constants=model.constants_mark,
                samples=samples_mark(self.problem), order=model.layout.order,
                graph="" if self.problem.topology is None else self.problem.topology.mark,
            )  # fmt: skip

    @property
    def is_finished(self) -> bool:
        return bool(self.rows) and self.state.round >= self.problem.config.rounds

    @property
    def config(self) -> RunConfig:
        return self.problem.config

    @property
    def layers_before(self) -> str:
        """The layers that the run was trained in so far; empty if it has no rounds or no folder."""
        return self._journal.layers if self._journal is not None else ""

    def state_dict(self, client: int | None = None) -> dict[str, Tensor]:
        """Return the model after this round for ``module.load_state_dict``: the shared one, or that of ``client``."""
        return export(self.problem, self.state, client)

    def stop(self, reason: str) -> None:
        """End the run after this round. It keeps a checkpoint and can be resumed; its last row says why it ended."""
        self.stopped = str(reason) or "no reason given"

    def begin(self, engine: str, layers: str, why: str) -> None:
        """Record the engine and why it was chosen, the layers, the machine and the partition."""
        if self._journal is not None:
            config = self.problem.config
            held = holdings(self.problem.dataset, *self.problem.clients)
            words: Row = {"data": config.data, "partition": config.partition, "seed": config.seed}
            words |= {"unseen": config.unseen} if config.unseen else {}
            self._journal.begin(engine, layers, why, words | held)
        if self.folder is not None:
            self._heart = heartbeat.Heart(self.folder)
            self._say(heartbeat.RUNNING)

    def complete(self, state: State, row: Row, seconds: float) -> None:
        """Record the round that led to ``state``."""
        config = self.problem.config
        self.state = state
        self.rows.append(row)
        if self._journal is not None:
            self._journal.append(state, row, {"round": state.round, "seconds": seconds})
            if state.round % config.checkpoint_every == 0 or state.round == config.rounds:
                self._journal.checkpoint()
        if self._heart is not None:
            self._heart.beat()

    def charge(self) -> None:
        """Write what the next round spends of the privacy budget to the ledger; stop if the budget does not last."""
        problem, state = self.problem, self.state
        privacy = problem.method.privacy
        if privacy is None:
            return
        entry = budget.entry(problem, state)
        if privacy.epsilon < math.inf and budget.spent(problem, state, state.round + 1) > privacy.epsilon:
            now, then = (budget.spent(problem, state, state.round + more) for more in (0, 1))
            self.stop(
                f"the privacy budget is spent: epsilon {now:.4g} of {privacy.epsilon:g} after {state.round} rounds; "
                f"one more would make it {then:.4g}"
            )
            self.end_early()
        elif self.folder is not None:
            ledger.charge(self.folder, entry)

    def fail(self, error: DivergedError) -> None:
        self.error = error
        if self._journal is not None:
            self._journal.fail(str(error))

    def checkpoint(self) -> None:
        """Save the latest complete round; a failed run has already done so."""
        if self._journal is not None and self.error is None:
            self._journal.checkpoint()

    def end_early(self) -> None:
        """Save a run that was stopped, with the reason."""
        if self._journal is not None and not self.is_finished:
            self._journal.stop(self.stopped)

    def interrupted(self, by: BaseException) -> None:
        """Write why the run ended before its last round, for those who watch."""
        if not self.is_finished and self.error is None and not self.stopped:
            quiet = {KeyboardInterrupt: "stopped by Ctrl-C", termination.Terminated: "stopped by SIGTERM"}
            failed = f"{type(by).__name__}: {by}".rstrip(": ")
            state = heartbeat.STOPPED if type(by) in quiet else heartbeat.FAILED
            self._say(state, quiet.get(type(by), failed))

    def _say(self, state: str, reason: str = "") -> None:
        if self._heart is not None:
            self._heart.say(state, reason)

    def close(self) -> None:
        """Release the lock on the folder."""
        if self.error is not None:
            self._say(heartbeat.FAILED, str(self.error))
        elif self.is_finished or self.stopped:
            self._say(heartbeat.FINISHED if self.is_finished else heartbeat.STOPPED, self.stopped)
        if self.folder is not None:
            from fedncv.store import release

            release(self.folder)


def open_run(folder: Path, *, runs: int = 1, **objects: Any) -> LiveRun:
    """Return the run in ``folder`` at its latest checkpoint, one of ``runs`` that share the memory.

    ``objects`` are those that it was started with. Raise ValueError if it cannot be resumed.
    """
    from fedncv import store

    config = read_config(folder)
    check_code(folder, config)
    problem = build(config, **again(folder, config, objects))
    try:
        state = store.load_state(folder, problem, runs=runs)
        return LiveRun(problem, state, read_rows(folder), folder)
    except ValueError:
        store.release(folder)
        raise


def extend(folder: Path, rounds: int, *, only_check: bool = False, **objects: Any) -> None:
    """Plan another number of rounds for the run in ``folder``; resuming it trains them.

    Raise ValueError if the finished rounds would have differed in a run of so many rounds from the start.
    """
    from fedncv import store

    config = replace(read_config(folder), rounds=rounds)
    if config != read_config(folder):
        check_code(folder, config)
        store.extend(folder, build(config, **again(folder, config, objects)), only_check=only_check)


# ---- runs that share an engine ---------------------------------------------------------------------------


def train(runs: list[LiveRun], *, on_round: OnRound | None = None) -> None:
    """Train runs that differ only in ``choose.OWN``, and are at the same round, to their last round.

    A run that diverges stops and the others continue; its error is raised at the end. A run that a callback stops ends
    there. In every case a run with a folder is left with a checkpoint, also if SIGTERM arrives.
    """
    saved = any(run.folder is not None for run in runs)
    try:
        if not runs[0].is_finished:
            saving = termination.saving_on_sigterm() if saved else contextlib.nullcontext()
            with saving, arithmetic(runs[0].config):
                engine = engine_for([run.problem for run in runs], before=[run.layers_before for run in runs])
                _train(engine, runs, on_round)
    finally:
        for run in runs:
            run.close()
    for run in runs:
        if run.error is not None:
            raise run.error


def _train(engine: Engine, runs: list[LiveRun], on_round: OnRound | None) -> None:
    live, config = runs, runs[0].problem.config
    try:
        with one_thread():
            for run, layers in zip(live, engine.layers, strict=True):
                run.begin(engine.name, layers, engine.why)
            if config.probe:
                gradients.check(engine.problems[0])
            for said in dict.fromkeys(budget.words(run.problem, run.state) for run in live if not run.rows):
                if said:
                    note(said)
            if not live[0].rows:
                rows = [{"round": 0} | sampled(run.problem) | floor(run.problem) for run in live]
                _complete(engine, live, [run.state for run in live], rows, time.perf_counter(), on_round)
                engine, live = _still_live(engine, live)
            while live and live[0].state.round < config.rounds:
                termination.check()
                for run in live:
                    run.charge()
                engine, live = _still_live(engine, live)
                if not live:
                    break
                began = time.perf_counter()
                settled = engine.run_rounds([run.state for run in live])
                for run, outcome in zip(live, settled, strict=True):
                    if isinstance(outcome, DivergedError):
                        run.fail(outcome)
                engine, live = _still_live(engine, live)
                done = [outcome for outcome in settled if not isinstance(outcome, DivergedError)]
                _complete(engine, live, [state for state, _ in done], [row for _, row in done], began, on_round)
                engine, live = _still_live(engine, live)
    except BaseException as error:  # Ctrl-C, SIGTERM, a callback that raised, a worker that failed
        for run in runs:
            run.interrupted(error)
            run.checkpoint()
        raise
    finally:
        engine.close()


def _still_live(engine: Engine, runs: list[LiveRun]) -> tuple[Engine, list[LiveRun]]:
    left = [j for j, run in enumerate(runs) if run.error is None and not run.stopped]
    return (engine.only(left) if 0 < len(left) < len(runs) else engine), [runs[j] for j in left]


def _complete(
    engine: Engine, runs: list[LiveRun], states: list[State], rows: list[Row], began: float, on_round: OnRound | None
) -> None:
    if not runs:
        return
    measured = _measure_each(engine, runs[0].problem.config, states)
    seconds = (time.perf_counter() - began) / len(runs)  # a run's share of the common time
    for run, state, row, found in zip(runs, states, rows, measured, strict=True):
        if isinstance(found, DivergedError):
            run.fail(found)
            continue
        run.complete(state, row | found, seconds)
        if on_round is not None:
            on_round(run, row | found)
        if run.stopped:
            run.end_early()


def _measure_each(engine: Engine, config: RunConfig, states: list[State]) -> list[Row | DivergedError]:
    """Measure what is due for each run. If a score is not finite, measure run by run to find whose it is."""
    try:
        return list(measure(engine, config, states))
    except DivergedError as error:
        if len(states) == 1:
            return [error]
    return [_measure_each(engine.only([j]), config, [state])[0] for j, state in enumerate(states)]


def measure(engine: Engine, config: RunConfig, states: list[State]) -> list[Row]:
    """Return the measurements due after this round: scores before and after local training, the probe, or nothing."""
    t = states[0].round
    last = t == config.rounds
    rows: list[Row] = [{} for _ in states]
    if last or (config.eval_every and t % config.eval_every == 0):
        rows = [row | measured for row, measured in zip(rows, engine.before(states), strict=True)]
    if last or (config.after_every and t and t % config.after_every == 0):
        rows = [row | measured for row, measured in zip(rows, engine.after(states), strict=True)]
    probe = find_probe(config.probe)
    if probe is not None and probe.due(t, config.rounds):
        splits = map(at_model.split, engine.gradients(states), engine.problems)
        rows = [row | at_model.row(measured) for row, measured in zip(rows, splits, strict=True)]
    return rows


def floor(problem: Problem) -> Row:
    """Return the accuracy of predicting each client's majority class, or the score's name if it is not an accuracy.

    It is that of the clients that are scored; there is another one for clients that never train.
    """
    if problem.task.score_name != ACCURACY:
        return {"score_name": problem.task.score_name}
    labels = problem.dataset.y
    if labels.is_floating_point() or labels.dim() != 1:
        return {}
    row: Row = {}
    for group in groups(problem):
        clients = problem.clients
        if len(group.ids) < len(clients.train):
            clients = clients.only(group.ids)
        accuracy = prior_accuracy(labels.cpu().numpy(), clients, problem.dataset.num_classes)
        row |= {} if math.isnan(accuracy) else {f"{group.prefix}label_prior": accuracy}
    return row


# ---- runs in folders -------------------------------------------------------------------------------------


class Watch(NamedTuple):
    """Callbacks for runs in folders."""

    begin: Callable[[list[Path], list[int]], None]  # the runs that begin together, and the rounds they already have
    row: Callable[[Path, Row], None]
    fail: Callable[[Path, str], None]  # a run that diverged or cannot be resumed, and the reason
    end: Callable[[list[Path]], None]  # the runs that began together, failed ones included


class Failure(NamedTuple):
    """A run that did not finish: DivergedError, or ValueError if it cannot be resumed."""

    folder: Path
    error: Exception


def refused(failures: list[Failure]) -> list[Failure]:
    """Return the runs that could not be resumed. A diverged run is not among them: it has a result."""
    return [failure for failure in failures if not isinstance(failure.error, DivergedError)]


def reasons(failures: list[Failure]) -> list[str]:
    """Return one line per reason, with the first run that it stopped and the number of others."""
    folders: dict[str, list[Path]] = {}
    for folder, error in failures:
        folders.setdefault(str(error), []).append(folder)
    return [
        reason if reason.startswith(f"{first} ") else f"{first}{f' and {len(others)} more' if others else ''}: {reason}"
        for reason, (first, *others) in folders.items()
    ]


def run_folders(folders: list[Path], watch: Watch) -> list[Failure]:
    """Train the runs in these folders to their end, group after group; return those that failed."""
    return [failure for group in alike(folders) for failure in run_group(group, watch)]


def alike(folders: list[Path]) -> list[list[Path]]:
    """Sort runs into groups that can share an engine: seeds, learning rates and partitions of one method."""
    groups: dict[RunConfig, list[Path]] = {}
    for folder in folders:
        groups.setdefault(common(read_config(folder)), []).append(folder)
    return list(groups.values())


def run_group(group: list[Path], watch: Watch, on_round: OnRound | None = None) -> list[Failure]:
    """Train runs that can share an engine to their end; return those that failed. They do not stop the others."""
    from fedncv import store

    runs: list[LiveRun] = []
    failures: list[Failure] = []

    def told(run: LiveRun, row: Row) -> None:
        watch.row(_folder(run), row)
        if on_round is not None:
            on_round(run, row)

    def fail(folder: Path, error: Exception) -> None:
        failures.append(Failure(folder, error))
        if not isinstance(error, DivergedError) and not heartbeat.is_locked(folder):
            heartbeat.write(folder, heartbeat.FAILED, str(error))
        watch.fail(folder, str(error))

    for folder in group:
        if store.is_finished(folder):  # it needs neither its data nor its objects
            continue
        try:
            run = open_run(folder, runs=len(group))
        except ValueError as error:
            fail(folder, error)
            continue
        if run.is_finished:
            run.close()
            continue
        if runs:  # the same samples: store them on the device once
            run.problem = run.problem.sharing(runs[0].problem)
        runs.append(run)
    for together in _at_the_same_round(runs):
        folders = list(map(_folder, together))
        watch.begin(folders, [run.state.round for run in together])
        try:
            train(together, on_round=told)
        except (ArithmeticError, ValueError) as error:
            for run in together:
                if not run.is_finished:
                    fail(_folder(run), run.error or error)
        watch.end(folders)
    return failures


def _folder(run: LiveRun) -> Path:
    assert run.folder is not None, "a run that was opened has one"
    return run.folder


def _at_the_same_round(runs: list[LiveRun]) -> list[list[LiveRun]]:
    """Group runs by the round they have reached, the earliest first.

    A run is at round 0 before and after its initial model is measured; the number of rows distinguishes the two.
    """
    groups: dict[tuple[int, int], list[LiveRun]] = {}
    for run in runs:
        groups.setdefault((run.state.round, len(run.rows)), []).append(run)
    return [together for _, together in sorted(groups.items())]

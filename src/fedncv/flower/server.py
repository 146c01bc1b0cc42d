"""The server's rounds: request, wait, reject invalid replies, aggregate, write a checkpoint.

    once     every client reports its number of training samples and the mark of its data     joined.json
    round    sample clients as in the sequential engine; send one request to each
             wait for all replies or the time limit; repeat the request to a client that failed or was lost
             count the first valid reply of a client, ignore later ones
             with all replies there, leave out those that are far from the others (see ``rules.outliers``)
             settle as in the sequential engine, with the replies in the order of their ids
             write row and checkpoint to the disk, keep the last checkpoints, then start the next round

Every row of metrics.jsonl lists the counted clients. Resuming truncates it to the checkpoint. So the last round that
counted client u, which is sent with every request, is always that of the checkpoint.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedncv import store
from fedncv.config import RunConfig
from fedncv.engine.local import Trained
from fedncv.engine.problem import Kept, Problem, State, messages
from fedncv.engine.round import draw, of_client, settle
from fedncv.engine.sequential import one_thread
from fedncv.flower import checkpoints
from fedncv.flower.asking import Grid, StoppedError, gather
from fedncv.flower.audit import HEAD
from fedncv.flower.client import DATA, KEEP, SAMPLES
from fedncv.flower.folder import read_keys
from fedncv.flower.halves import Down, Up, blind, constants_of, server_problem, travelling, up_template
from fedncv.flower.handshake import SERVER, identity_of, installed
from fedncv.flower.joining import Joined, join
from fedncv.flower.record import Record, fingerprint
from fedncv.flower.rules import CEILING, FEW, Rules, accept, outliers
from fedncv.flower.samples import Form
from fedncv.flower.scoring import Scorers, due, words_of_scores
from fedncv.flower.wire import ARRAYS, ASK, arrays, decode, encode, records
from fedncv.results import ACCURACY, read_rows
from fedncv.rows import Rows, all_rows
from fedncv.tree import num_bytes, row

log = logging.getLogger("fedncv.flower")


class Summing(Protocol):
    """What replaces joining and rounds if the server must learn sums only (see ``secure_server``)."""

    words: str  # for the log

    def join(self, grid: Grid, folder: Path, nodes: dict[int, int], rules: Rules, config: RunConfig) -> Joined: ...

    def round(
        self, grid: Grid, folder: Path, run: "Run", state: State, history: "History", told: dict[int, str]
    ) -> tuple[State, dict[str, Any]]: ...


class Run(NamedTuple):
    """What stays the same in all rounds of a run."""

    problem: Problem
    template: Up  # the form of a reply
    rules: Rules
    joined: Joined
    nodes: dict[int, int]  # client -> node, of the clients that are asked


class History(NamedTuple):
    """What the server knows of the rounds so far, for its requests."""

    counted: dict[int, list[int]]  # client -> the rounds whose rows count it
    checkpoints: list[int]  # rounds to which the run can be rolled back
    rollbacks: int

    def last(self, u: int, *, until: int | None = None) -> int:
        """Return the last round that counted client u; 0 if there is none."""
        return max((t for t in self.counted.get(u, []) if until is None or t <= until), default=0)

    def after(self, round: int, counted: list[int]) -> "History":
        """Return what is known after a round that counted these clients."""
        more = {u: [*self.counted.get(u, []), round] for u in counted}
        return self._replace(counted=self.counted | more)

    def needed(self, u: int) -> list[int]:
        """Return the rounds whose states client u must keep so that a roll-back finds them."""
        return sorted({self.last(u, until=t) for t in self.checkpoints} - {0})


def serve(
    grid: Grid,
    folder: Path,
    config: RunConfig,
    form: Form,
    nodes: dict[int, int],
    rules: Rules,
    secure: Summing | None = None,
) -> State:
    """Run all unfinished rounds. The folder holds config.toml, and the checkpoint if there is one.

    With ``secure``, the server learns sums of the replies only, and asks for no scores.
    """
    log.info("%s", words_of(rules) if secure is None else secure.words)
    record = Record(folder, config, nodes)
    grid = record.watch(grid)
    record.note("begun", **about_run(folder, config, nodes))
    record.phase("joining", 0, len(nodes))
    if secure is None:
        joined = join(grid, folder, nodes, rules, identity_of(config))
        problem = server_problem(config, form, [joined.sizes[u] for u in range(config.clients)])
    else:
        joined = secure.join(grid, folder, nodes, rules, config)
        problem = blind(server_problem(config, form, [1] * config.clients))
    asked = {u: node for u, node in nodes.items() if u not in joined.barred and u not in rules.leave_out}
    with one_thread():
        run = Run(problem, up_template(problem, form), rules, joined, asked)
        state = store.load_state(folder, problem)
        rows = read_rows(folder)
        model = problem.model
        journal = store.Journal(folder, config, state, constants=model.constants_mark, order=model.layout.order)
        scorers = Scorers(problem, asked, rules, joined.identity)
        recent = {state.round: _rows_of(state)}  # referenced, so that the rows of kept checkpoints are not replaced
        if not rows:
            known = {"sizes": list(joined.sizes.values())} if secure is None else {"samples_in_all": joined.samples}
            rows.append({"round": 0, **known} | _named("barred", joined.barred))
            rows[0] |= {"score_name": problem.task.score_name} if problem.task.score_name != ACCURACY else {}
            if secure is None:
                rows[0] |= measured(grid, run, state, History({}, [], 0), scorers, record)
            record.round(rows[0])
            journal.append(state, rows[0], {"round": 0, "seconds": 0.0, HEAD: record.head})
            journal.checkpoint()
        if any(recent.values()):
            checkpoints.forget(folder, but=state.round)  # only the ended process knew of their rows on the disk
        checkpoints.keep(folder, state.round, rules.checkpoints)
        counted = counted_rounds(rows)
        told: dict[int, str] = {}
        began = time.perf_counter()
        while state.round < config.rounds:
            there = checkpoints.rounds(folder)
            history = History(counted, there, len(checkpoints.rollbacks(folder)))
            record.phase("training", state.round + 1, config.per_round)
            if secure is None:
                state, line = serve_round(grid, run, state, history, told)
                line |= measured(grid, run, state, history.after(state.round, line["counted"]), scorers, record)
            else:
                state, line = secure.round(grid, folder, run, state, history, told)
            record.round(line)
            ended = time.perf_counter()  # including the previous round's checkpoint
            journal.append(state, line, {"round": state.round, "seconds": ended - began, HEAD: record.head})
            began = ended
            journal.checkpoint()
            checkpoints.keep(folder, state.round, rules.checkpoints)
            recent = {t: rows_of for t, rows_of in recent.items() if t in there} | {state.round: _rows_of(state)}
            for u in line["counted"]:
                counted.setdefault(u, []).append(state.round)
            log.info("round %d of %d: counted %s", state.round, config.rounds, line["counted"])
    record.done()
    return state


def about_run(folder: Path, config: RunConfig, nodes: dict[int, int]) -> dict[str, Any]:
    """Return what the audit log says when a run is begun or resumed: the code, the method, and the clients' keys."""
    keys = read_keys(folder.parents[1])
    return {
        "code": installed(),
        "method": config.method,
        "rounds": config.rounds,
        "clients": {str(u): fingerprint(keys[u]) if u in keys else "no key" for u in sorted(nodes)},
    }


def measured(grid: Grid, run: Run, state: State, history: History, scorers: Scorers, record: Record) -> dict[str, Any]:
    """Return what the row of this state says about scores."""
    if not any(due(run.problem, state.round)):
        return {}
    record.phase("scoring", state.round, len(run.nodes))
    found = scorers.measure(grid, state, lambda u: standing(run, history, u, state.round + 1))
    if found:
        log.info("%s", words_of_scores(found))
    return found


def standing(run: Run, history: History, u: int, number: int) -> dict[str, Any]:
    """Return what a request of round ``number`` says about client u."""
    ask: dict[str, Any] = {
        "round": number,
        "counted": history.last(u),
        "rollbacks": history.rollbacks,
        KEEP: history.needed(u),
    }
    return ask | {SAMPLES: run.joined.sizes[u], DATA: run.joined.marks.get(u, "")} | constants_of(run.problem)


def words_of(rules: Rules) -> str:
    """Return the limits on replies, for the log."""
    norms = "".join(f"; {name} at most {limit:g}" for name, limit in sorted(rules.norms.items()))
    least = rules.min_replies or "more than half of a round's clients"
    return (
        f"rules: a reply is left out if a field's norm is above {rules.times_median:g} times the round's median and "
        f"above the norm of what was sent, and with {FEW} or fewer replies above {CEILING:g} times the latter{norms}; "
        f"min_replies: {least}; asked no more: {rules.leave_out or 'nobody'}"
    )


def _rows_of(state: State) -> list[Rows]:
    return [rows for _, rows in all_rows(state)]


def counted_rounds(rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return client -> the rounds whose rows count it."""
    found: dict[int, list[int]] = {}
    for line in rows:
        for u in line.get("counted", []):
            found.setdefault(u, []).append(line["round"])
    return found


def last_counted(rows: list[dict[str, Any]]) -> dict[int, int]:
    """Return client -> the last round whose row counts it."""
    return {u: max(rounds) for u, rounds in counted_rounds(rows).items()}


def serve_round(
    grid: Grid, run: Run, state: State, history: History, told: dict[int, str]
) -> tuple[State, dict[str, Any]]:
    """Run one round; return the state and the row of metrics."""
    problem, rules = run.problem, run.rules
    drawn, number = draw(problem, state.round), state.round + 1
    down_S, b_SR = messages(problem, state, drawn.ids)
    downs = {u: Down(row(down_S, i), travelling(problem, b_SR[i])) for i, u in enumerate(drawn.ids.tolist())}
    clipped: dict[int, list[str]] = {}

    def request(u: int) -> RecordDict:
        server = ConfigRecord(dict(run.joined.identity))
        return RecordDict(
            {ARRAYS: encode(downs[u]), ASK: ConfigRecord(standing(run, history, u, number)), SERVER: server}
        )

    def receive(u: int, answer: Message) -> Up:
        content = records(answer, ARRAYS, what="a reply")
        reply, shortened = accept(rules, decode(arrays(content), run.template, what="a reply"))
        if shortened:
            clipped[u] = shortened
            log.warning("round %d: reply of client %d clipped: %s", number, u, "; ".join(shortened))
        return reply

    gathered = gather(
        grid,
        {u: run.nodes[u] for u in downs if u in run.nodes},
        request,
        receive,
        kind=MessageType.TRAIN,
        group=str(number),
        seconds=rules.round_seconds,
        attempts=rules.attempts,
        told=told,
    )
    far = outliers(rules, gathered.values, [downs[u] for u in gathered.values])
    for u, why in far.items():
        log.warning("%d: reply of client %d rejected: %s", number, u, why)
    replies = {u: reply for u, reply in gathered.values.items() if u not in far}
    refused = gathered.refused | far
    clipped = {u: shortened for u, shortened in clipped.items() if u in replies}
    _check_enough(run, number, [u for u in downs if u not in rules.leave_out], replies, refused)
    outcomes = [
        of_client(problem, u, num_bytes(down), _trained(problem, replies[u]) if u in replies else None)
        for u, down in downs.items()
    ]
    state, line = settle(problem, state, drawn, outcomes)
    for unknown in ("loss", "samples", "gradients", "forwards"):  # these stay at the clients
        line.pop(unknown)
    line["counted"] = sorted(replies)
    absent = [u for u in downs if u not in replies and u not in refused]
    line |= _named("refused", refused) | _named("clipped", clipped) | ({"absent": absent} if absent else {})
    return state._replace(kept={}), line


def _check_enough(run: Run, number: int, drawn: list[int], replies: Mapping[int, Up], refused: dict[int, str]) -> None:
    """Raise StoppedError if the round has too few replies."""
    rules, least = run.rules, run.rules.least(len(drawn))
    if len(replies) >= least:
        return
    why = "".join(f"; client {u}: {refused[u]}" for u in sorted(refused))
    rule = f"min_replies = {rules.min_replies}" if rules.min_replies else f"min_replies = {least} (more than half)"
    absent = sorted(set(drawn) - set(replies) - set(refused))
    raise StoppedError(
        f"round {number} has {len(replies)} replies of {len(drawn)} clients within {rules.round_seconds:g} s, fewer "
        f"than {rule}; absent: {absent or 'nobody'}{why}; mend that, or change min_replies or leave_out in rules.toml, "
        "then resume"
    )


def _trained(problem: Problem, reply: Up) -> Trained:
    """Return a reply in the sequential engine's form, without the values that are not sent."""
    nothing = problem.model.start_P[:0]
    return Trained(nothing, reply.buffers_R, reply.up, Kept((), nothing), 0, 0, 0, torch.zeros(()))


def _named(name: str, reasons: dict[int, Any]) -> dict[str, Any]:
    return {name: {str(u): reasons[u] for u in sorted(reasons)}} if reasons else {}

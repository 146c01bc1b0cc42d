"""The server's rounds: request, wait, reject invalid replies, aggregate, write a checkpoint.

    once     every client reports its number of training samples      joined.json
    round    sample clients as in the sequential engine; send one request to each
             wait for all replies or the time limit; repeat the request to a client that failed or was lost
             count the first valid reply of a client, ignore later ones
             settle as in the sequential engine, with the replies in the order of their ids
             write row and checkpoint to the disk, then start the next round

Every row of metrics.jsonl lists the counted clients. Resuming truncates it to the checkpoint. So the last round that
counted client u, which is sent with every request, is always that of the checkpoint.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable
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
from fedncv.flower.client import SAMPLES
from fedncv.flower.halves import Down, Up, constants_of, server_problem, travelling, up_template
from fedncv.flower.rules import Rules, accept
from fedncv.flower.samples import Form
from fedncv.flower.wire import ARRAYS, ASK, WireError, arrays, decode, encode, records, whole_numbers
from fedncv.results import read_rows
from fedncv.tree import num_bytes, row

JOINED = "joined.json"
POLL_SECONDS = 0.5  # between two checks for replies
RETRY_SECONDS = 2.0  # before a request to a failed client is repeated

log = logging.getLogger("fedncv.flower")


class Grid(Protocol):
    """The part of Flower's Grid that is used here."""

    def get_nodes(self) -> Iterable[Any]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


class StoppedError(RuntimeError):
    """The run cannot continue now; finished rounds are on the disk, and the run can be resumed."""


class Gathered(NamedTuple):
    """Results of the requests: accepted values, and the reasons why other replies are left out."""

    values: dict[int, Any]
    refused: dict[int, str]


# ---- requests -------------------------------------------------------------------------------------------


def gather(
    grid: Grid,
    nodes: dict[int, int],
    request: Callable[[int], RecordDict],
    receive: Callable[[int, Message], Any],
    *,
    kind: str,
    group: str,
    seconds: float,
    attempts: int,
) -> Gathered:
    """Return one valid reply from each client in ``nodes`` (client -> node) that replies in time.

    ``receive`` makes a value of a reply, or raises WireError: then the client is left out of this round. The request
    to a client that is offline, fails or was restarted (and lost the request) is repeated as soon as the client is
    available, ``attempts`` times in total. A repeated request is harmless: the client starts from the same state.
    """
    deadline = time.monotonic() + seconds
    waiting, pending = set(nodes), dict[str, int]()
    left = dict.fromkeys(nodes, attempts)
    not_before = dict.fromkeys(nodes, 0.0)
    began: dict[int, str] = {}  # client -> when its node was activated, at the latest request to it
    gathered = Gathered({}, {})
    while waiting and time.monotonic() < deadline:
        online = {node.node_id: node.last_activated_at for node in grid.get_nodes()}
        for sent, u in list(pending.items()):
            if online.get(nodes[u], began[u]) != began[u]:
                log.warning("%s: client %d was restarted", group, u)
                del pending[sent]
        now = time.monotonic()
        for u in sorted(waiting - set(pending.values())):
            if left[u] and nodes[u] in online and now >= not_before[u]:
                ttl = max(1.0, deadline - now)  # a later reply is useless
                message = Message(request(u), nodes[u], kind, ttl=ttl, group_id=group)
                (sent,) = grid.push_messages([message])
                left[u] -= 1
                began[u] = online[nodes[u]]
                if sent:
                    pending[sent] = u
        for answer in grid.pull_messages(set(pending)) if pending else ():
            u = pending.pop(answer.metadata.reply_to_message_id, -1)
            if u not in waiting:
                continue  # replied before, or never asked
            if answer.has_error():
                log.warning("%s: client %d failed: %s", group, u, _short(answer.error.reason))
                not_before[u] = time.monotonic() + RETRY_SECONDS
                continue
            waiting.discard(u)
            try:
                if answer.metadata.src_node_id != nodes[u]:
                    raise WireError(f"it comes from node {answer.metadata.src_node_id}, not {nodes[u]}")
                gathered.values[u] = receive(u, answer)
            except WireError as error:
                gathered.refused[u] = str(error)
                log.warning("%s: reply of client %d rejected: %s", group, u, error)
        if waiting and not pending and not any(left[u] for u in waiting):
            break  # no client left to ask
        if waiting:
            time.sleep(POLL_SECONDS)
    return gathered


def _short(reason: str | None) -> str:
    return (reason or "no reason given").strip().splitlines()[-1][:300]


# ---- joining --------------------------------------------------------------------------------------------


class Joined(NamedTuple):
    """Reports of the clients that joined: their training samples, 0 for an excluded client, and the reason."""

    sizes: dict[int, int]
    barred: dict[int, str]


def join(grid: Grid, folder: Path, nodes: dict[int, int], rules: Rules) -> Joined:
    """Ask every client once for its number of training samples; earlier reports are kept."""
    joined = _read_joined(folder)
    missing = {u: node for u, node in nodes.items() if u not in joined.sizes}
    if not missing:
        return joined

    def receive(u: int, answer: Message) -> int:
        content = records(answer, ASK, what="the answer about samples")
        (count,) = whole_numbers(content, SAMPLES, what="the answer about samples")
        if not 1 <= count <= rules.max_samples:
            raise WireError(f"it reports {count} samples, outside 1..{rules.max_samples}")
        return count

    gathered = gather(
        grid,
        missing,
        lambda _u: RecordDict(),
        receive,
        kind=MessageType.QUERY,
        group="joining",
        seconds=rules.join_seconds,
        attempts=rules.attempts,
    )
    sizes = joined.sizes | gathered.values | dict.fromkeys(gathered.refused, 0)
    joined = Joined(dict(sorted(sizes.items())), joined.barred | gathered.refused)
    store.write_atomically(folder / JOINED, json.dumps(joined._asdict()).encode(), name="joined")
    absent = sorted(set(nodes) - set(sizes))
    if absent:
        raise StoppedError(
            f"clients {absent} did not join within {rules.join_seconds:g} s; start them and resume, "
            "or raise join_seconds in rules.toml"
        )
    return joined


def _read_joined(folder: Path) -> Joined:
    path = folder / JOINED
    if not path.exists():
        return Joined({}, {})
    try:
        said = json.loads(path.read_bytes())
        sizes = {int(u): int(size) for u, size in said["sizes"].items()}
        return Joined(sizes, {int(u): str(why) for u, why in said["barred"].items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged; restore it, or start a new run") from None


# ---- rounds ---------------------------------------------------------------------------------------------


def serve(grid: Grid, folder: Path, config: RunConfig, form: Form, nodes: dict[int, int], rules: Rules) -> State:
    """Run all unfinished rounds. The folder holds config.toml, and the checkpoint if there is one."""
    joined = join(grid, folder, nodes, rules)
    problem = server_problem(config, form, [joined.sizes[u] for u in range(config.clients)])
    asked = {u: node for u, node in nodes.items() if u not in joined.barred}
    with one_thread():
        template = up_template(problem, form)
        state = store.load_state(folder, problem)
        rows = read_rows(folder)
        model = problem.model
        journal = store.Journal(folder, config, state, constants=model.constants_mark, order=model.layout.order)
        if not rows:
            rows.append({"round": 0, "sizes": list(joined.sizes.values())} | _named("barred", joined.barred))
            journal.append(state, rows[0], {"round": 0, "seconds": 0.0})
            journal.checkpoint()
        counted = last_counted(rows)
        began = time.perf_counter()
        while state.round < config.rounds:
            state, line = serve_round(grid, problem, state, template, asked, counted, rules)
            ended = time.perf_counter()  # including the previous round's checkpoint
            journal.append(state, line, {"round": state.round, "seconds": ended - began})
            began = ended
            journal.checkpoint()
            counted |= dict.fromkeys(line["counted"], state.round)
            log.info("round %d of %d: counted %s", state.round, config.rounds, line["counted"])
    return state


def last_counted(rows: list[dict[str, Any]]) -> dict[int, int]:
    """Return client -> the last round whose row counts it."""
    return {u: line["round"] for line in rows for u in line.get("counted", [])}


def serve_round(
    grid: Grid,
    problem: Problem,
    state: State,
    template: Up,
    nodes: dict[int, int],
    counted: dict[int, int],
    rules: Rules,
) -> tuple[State, dict[str, Any]]:
    """Run one round; return the state and the row of metrics."""
    drawn, number = draw(problem, state.round), state.round + 1
    down_S, b_SR = messages(problem, state, drawn.ids)
    downs = {u: Down(row(down_S, i), travelling(problem, b_SR[i])) for i, u in enumerate(drawn.ids.tolist())}
    clipped: dict[int, list[str]] = {}

    def request(u: int) -> RecordDict:
        ask = ConfigRecord({"round": number, "counted": counted.get(u, 0)} | constants_of(problem))
        return RecordDict({ARRAYS: encode(downs[u]), ASK: ask})

    def receive(u: int, answer: Message) -> Up:
        content = records(answer, ARRAYS, what="a reply")
        reply, shortened = accept(rules, decode(arrays(content), template, what="a reply"))
        if shortened:
            clipped[u] = shortened
            log.warning("round %d: reply of client %d clipped: %s", number, u, "; ".join(shortened))
        return reply

    gathered = gather(
        grid,
        {u: nodes[u] for u in downs if u in nodes},
        request,
        receive,
        kind=MessageType.TRAIN,
        group=str(number),
        seconds=rules.round_seconds,
        attempts=rules.attempts,
    )
    if len(gathered.values) < rules.min_replies:
        raise StoppedError(
            f"round {number} has {len(gathered.values)} replies within {rules.round_seconds:g} s, fewer than "
            f"min_replies = {rules.min_replies}; check which clients are down, then resume"
        )
    outcomes = [
        of_client(problem, u, num_bytes(down), _trained(problem, gathered.values[u]) if u in gathered.values else None)
        for u, down in downs.items()
    ]
    state, line = settle(problem, state, drawn, outcomes)
    for unknown in ("loss", "samples", "gradients", "forwards"):  # these stay at the clients
        line.pop(unknown)
    line["counted"] = sorted(gathered.values)
    absent = [u for u in downs if u not in gathered.values and u not in gathered.refused]
    line |= _named("refused", gathered.refused) | _named("clipped", clipped) | ({"absent": absent} if absent else {})
    return state._replace(kept={}), line


def _trained(problem: Problem, reply: Up) -> Trained:
    """Return a reply in the sequential engine's form, without the values that are not sent."""
    nothing = problem.model.start_P[:0]
    return Trained(nothing, reply.buffers_R, reply.up, Kept((), nothing), 0, 0, 0, torch.zeros(()))


def _named(name: str, reasons: dict[int, Any]) -> dict[str, Any]:
    return {name: {str(u): reasons[u] for u in sorted(reasons)}} if reasons else {}

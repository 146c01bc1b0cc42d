"""The server's part in secure sums over Flower: joining and rounds in which it learns sums, and no single reply.

    round 0   joining: the clients' numbers of training samples are summed     joined.json: samples
    round t   keys, shares, masked (the clients train), confirm, unmask; then the server's step with the sums

After every stage the answers are on the disk: runs/NAME/secure.json and, of the masked vectors, only their sum, in
secure.bin. So a killed server goes on with the same stage of the same attempt; clients give a repeated request the same
reply. A round that loses too many clients before a list of survivors is signed is begun anew, with new keys, when the
run is resumed. After that, only the same list can be unmasked: the server waits for its clients.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedncv import store
from fedncv.config import RunConfig
from fedncv.engine.local import Trained
from fedncv.engine.problem import Kept, State, messages
from fedncv.engine.round import Outcome, Partial, draw, settle
from fedncv.flower.asking import Gathered, Grid, StoppedError, gather
from fedncv.flower.client import KEEP
from fedncv.flower.gate import LARGEST
from fedncv.flower.halves import Down, constants_of, travelling
from fedncv.flower.handshake import SERVER, compare, identity_of
from fedncv.flower.joining import Joined, read_joined, write_joined
from fedncv.flower.roster import read_roster
from fedncv.flower.rules import Rules
from fedncv.flower.secure_client import JOINING, SECURE, cohort_of, layout_of, parts_of, record_of, stage_of, task_of
from fedncv.flower.server import History, Run
from fedncv.flower.wire import ARRAYS, ASK, WireError, encode, records
from fedncv.methods import find_method
from fedncv.methods.base import Totals
from fedncv.secure import server as secure
from fedncv.secure.fixed_point import STATISTICS, Part, Words, from_words, pack, unpack
from fedncv.secure.fixed_point import Grid as FixedPoint
from fedncv.secure.session import RefusedError, Session
from fedncv.secure.settings import NAME, Settings, check_settings, read_settings
from fedncv.secure.signatures import roster_mark
from fedncv.spec import split
from fedncv.tree import num_bytes, row

JOURNAL, SUM = "secure.json", "secure.bin"
KINDS = {"masked": f"{MessageType.TRAIN}.{SECURE}"}
ENVELOPE = 2**16  # bytes of a message beside its numbers

log = logging.getLogger("fedncv.flower")


def with_grid(method: str) -> str:
    """Return the method's text with +fixed_point, which secure sums need."""
    named = [part.partition(":")[0].strip() for part in split(method, r"\+(?!\d)")[1:]]
    return method if "fixed_point" in named else f"{method}+fixed_point"


def check_secure(config: RunConfig, text: str) -> Settings:
    """Return the settings of secure sums for this study; raise ValueError if it cannot have them."""
    settings = read_settings(text)
    if find_method(config.method).grid is None:
        raise ValueError(f"--{NAME} needs a method with whole numbers; use {with_grid(config.method)}")
    if config.sampling != "uniform":
        raise ValueError(
            f"--{NAME}: sampling={config.sampling} needs each client's size, which stays hidden; use uniform"
        )
    check_settings(settings, config.per_round)
    return settings


class Secure:
    """Joining and rounds of a run with secure sums."""

    def __init__(self, server: Path, run: str, text: str, config: RunConfig, rules: Rules) -> None:
        for name in ("norms", "sizes"):
            if getattr(rules, name):
                raise ValueError(f"rules.toml: [{name}] is about single replies, which --{NAME} hides; remove it")
        self._settings, self._run, self._text = check_secure(config, text), run, text
        self._roster = read_roster(server).roster
        fixed = find_method(config.method).grid
        assert fixed is not None
        self._grid: FixedPoint = fixed
        self.words = (
            f"secure sums: threshold {self._settings.threshold} of {config.per_round}; the server sees no single "
            "reply, so the rules about norms and samples cannot hold"
        )

    # ---- joining ---------------------------------------------------------------------------------------

    def join(self, grid: Grid, folder: Path, nodes: dict[int, int], rules: Rules, config: RunConfig) -> Joined:
        """Sum the clients' numbers of samples, once in a run."""
        identity = identity_of(config, self._text)
        joined = read_joined(folder, identity)
        compare(joined.identity, identity, str(folder))
        if joined.samples:
            return joined
        asked = [u for u in cohort_of(config, JOINING) if u not in rules.leave_out]
        session = self._session(config, JOINING, [])
        light = RecordDict({SERVER: ConfigRecord(dict(identity))})
        summed, survivors = self._summed(
            grid,
            folder,
            session,
            {u: nodes[u] for u in asked if u in nodes},
            lambda _u: light,
            seconds={"keys": rules.join_seconds},
            rules=rules,
            told={},
            everyone=asked,
        )
        try:
            _, samples = from_words(self._grid, [], summed, len(survivors))
        except ValueError as error:
            raise StoppedError(f"joining: {error}; start a new run") from None
        barred = dict.fromkeys(sorted(set(range(config.clients)) - set(survivors)), "leave_out in rules.toml names it")
        joined = Joined({}, barred, {}, identity, samples)
        write_joined(folder, joined)
        log.info("joined: %d clients with %d training samples in all", len(survivors), samples)
        return joined

    # ---- a round ---------------------------------------------------------------------------------------

    def round(
        self, grid: Grid, folder: Path, run: Run, state: State, history: History, told: dict[int, str]
    ) -> tuple[State, dict[str, Any]]:
        """Run one round; return the state and the row of metrics."""
        problem, rules = run.problem, run.rules
        drawn, number = draw(problem, state.round), state.round + 1
        down_S, b_SR = messages(problem, state, drawn.ids)
        downs = {u: Down(row(down_S, i), travelling(problem, b_SR[i])) for i, u in enumerate(drawn.ids.tolist())}
        parts = [part for part, _ in parts_of(problem.method, run.template)]

        def content(u: int) -> RecordDict:
            ask: dict[str, Any] = {
                "round": number,
                "counted": history.last(u),
                "rollbacks": history.rollbacks,
                KEEP: history.needed(u),
            }
            ask |= constants_of(problem)
            server = ConfigRecord(dict(run.joined.identity))
            return RecordDict({ARRAYS: encode(downs[u]), ASK: ConfigRecord(ask), SERVER: server})

        session = self._session(problem.config, number, parts)
        size, room = self._grid.bytes_of(session.numbers), LARGEST - ENVELOPE
        if size > room:
            raise ValueError(
                f"a client's vector has {session.numbers:,} numbers of {self._grid.bits} bits, {size:,} bytes, and a "
                f"message has room for {room:,}; use a smaller model, or fewer bits (bits in +fixed_point)"
            )
        summed, survivors = self._summed(
            grid,
            folder,
            session,
            {u: run.nodes[u] for u in downs if u in run.nodes},
            content,
            task=_one_task(problem.config, downs),
            seconds={"masked": rules.round_seconds},
            rules=rules,
            told=told,
            refused=(refused := dict[int, str]()),
        )
        try:
            fields, samples = from_words(self._grid, parts, summed, len(survivors))
        except ValueError as error:
            raise StoppedError(f"round {number}: {error}. A round is never summed twice; start a new run") from None
        sum_R = fields.get(STATISTICS, torch.zeros(0, dtype=torch.int64))
        named = {name: total for name, total in fields.items() if name != STATISTICS}
        totals = Totals(named, torch.tensor(float(samples), dtype=torch.float64), len(survivors))
        nothing = problem.model.start_P[:0]
        bare = Trained(nothing, nothing, (), Kept((), nothing), 0, 0, 0, torch.zeros(()))
        outcomes = [
            Outcome(u, num_bytes(down), size, bare) if u in survivors else Outcome(u, num_bytes(down), 0, None)
            for u, down in downs.items()
        ]
        state, line = settle(problem, state, drawn, outcomes, [Partial(totals, sum_R)])
        for unknown in ("loss", "samples", "gradients", "forwards"):  # these stay at the clients
            line.pop(unknown)
        line["counted"] = survivors
        why = {str(u): refused[u] for u in sorted(refused) if u not in survivors}
        absent = [u for u in downs if u not in survivors and str(u) not in why]
        line |= ({"refused": why} if why else {}) | ({"absent": absent} if absent else {})
        if line.get("beyond_bound"):
            log.warning(
                "round %d: the clients clipped %d numbers to their bounds; see bound in +fixed_point",
                number,
                line["beyond_bound"],
            )
        return state._replace(kept={}), line

    def _session(self, config: RunConfig, round: int, parts: list[Part]) -> Session:
        cohort = cohort_of(config, round)
        return Session(
            run=self._run,
            round=round,
            attempt=1,
            cohort=tuple(cohort),
            threshold=self._settings.threshold_of(len(cohort)),
            neighbours=self._settings.neighbours_of(len(cohort)),
            roster=roster_mark(self._roster),
            layout=layout_of(self._grid, parts),
            numbers=sum(torch.Size(part.shape).numel() for part in parts) + 1,
            bits=self._grid.bits,
        )

    # ---- the stages ------------------------------------------------------------------------------------

    def _summed(
        self,
        grid: Grid,
        folder: Path,
        session: Session,
        nodes: dict[int, int],
        content: Callable[[int], RecordDict],
        *,
        task: str = "",
        seconds: dict[str, float],
        rules: Rules,
        told: dict[int, str],
        everyone: list[int] | None = None,
        refused: dict[int, str] | None = None,
    ) -> tuple[Words, list[int]]:
        """Return the sum of the survivors' vectors, and who they are. Raise StoppedError if too few clients stay.

        ``everyone`` are clients without whom there must be no sum. ``refused`` gets reasons of those who refuse.
        """
        round = begin_or_resume(folder, session)._replace(task=task)
        write_journal(folder, round)  # so that the next attempt gets another number
        group = "joining" if session.round == JOINING else str(session.round)
        while round.stage != "done":
            stage = round.stage

            def request(u: int, round: secure.Round = round, stage: str = stage) -> RecordDict:
                made = content(u) if stage == "masked" else RecordDict({SERVER: content(u)[SERVER]})
                made[SECURE] = record_of(stage, secure.request(round, u))
                return made

            def receive(u: int, answer: Message, round: secure.Round = round) -> Any:
                return accepted(self._roster, round, u, answer)

            asked = {u: nodes[u] for u in round.members() if u in nodes}
            gathered = gather(
                grid,
                asked,
                request,
                receive,
                kind=KINDS.get(stage, f"{MessageType.QUERY}.{SECURE}"),
                group=group,
                seconds=seconds.get(stage, rules.stage_seconds),
                attempts=rules.attempts,
                told=told,
            )
            if refused is not None:
                refused |= {u: why for u, why in gathered.refused.items() if stage in ("keys", "shares", "masked")}
            lost = sorted(set(everyone or []) - set(gathered.values)) if stage in ("keys", "shares", "masked") else []
            try:
                if lost:
                    raise secure.FewError(f"clients {lost} did not answer stage {stage} of joining")
                following = secure.after(round, gathered.values)
            except secure.FewError as error:
                self._stop(folder, round, gathered, asked, str(error))
            write_journal(folder, following)
            gone = sorted(set(asked) - set(gathered.values))
            if gone and stage != "keys":
                log.warning("%s: clients %s dropped out at stage %s", group, gone, stage)
            round = following
        try:
            return secure.unmasked(round), list(round.survivors)
        except RefusedError as error:
            raise StoppedError(
                f"round {session.round} cannot be unmasked: {error}. Nothing of it is used, and it is never summed "
                "twice; start a new run"
            ) from None

    def _stop(self, folder: Path, round: secure.Round, gathered: Gathered, asked: dict[int, int], why: str) -> None:
        """Raise StoppedError; before a list is signed, the next attempt begins anew."""
        signing = round.stage in ("confirm", "unmask")
        if not signing:
            write_journal(folder, round._replace(stage="keys", keys={}, sealed={}, total=None), failed=True)
        absent = sorted(set(asked) - set(gathered.values) - set(gathered.refused))
        reasons = "".join(f"; client {u}: {gathered.refused[u]}" for u in sorted(gathered.refused))
        remedy = (
            "Nothing of the round was used; mend that, or lower the number of clients that fail, then resume"
            if not signing
            else "Its sum exists only with them, and is never made of others; start them again, then resume"
        )
        raise StoppedError(f"{why}; absent: {absent or 'nobody'}{reasons}. {remedy}")


def _one_task(config: RunConfig, downs: dict[int, Down]) -> str:
    """Return the hash of the server's message, which must be the same for all clients."""
    tasks = {task_of(encode(down)) for down in downs.values()}
    if len(tasks) > 1:
        raise ValueError(
            f"{config.method} sends every client another message; with --{NAME} all must get the same one, or a server "
            "could tell one client's part of a sum from the others'"
        )
    return tasks.pop()


def accepted(roster: Any, round: secure.Round, u: int, answer: Message) -> Any:
    """Return a client's reply to a stage; raise WireError if it is not acceptable."""
    what = f"a reply to stage {round.stage}"
    content = records(answer, SECURE, what=what)
    try:
        if round.stage == "masked":
            found = content[SECURE]
            values = dict(found) if isinstance(found, ConfigRecord) else {}
            return secure.accept(roster, round, u, values)
        reply = stage_of(content)
        if reply.name != round.stage:
            raise WireError(f"{what} is one to another stage")
        return secure.accept(roster, round, u, reply.message)
    except RefusedError as error:
        raise WireError(str(error)) from None


# ---- the journal ------------------------------------------------------------------------------------------


def begin_or_resume(folder: Path, session: Session) -> secure.Round:
    """Return the round as it stood when the server ended, or a new attempt at it."""
    found = read_journal(folder)
    if found is None or found[0].session.round != session.round:
        return secure.Round(session)
    round, failed = found
    same = round.session._replace(attempt=1) == session
    if not failed and (same or round.stage in ("confirm", "unmask", "done")):
        return round
    return secure.Round(session._replace(attempt=round.session.attempt + 1))


def write_journal(folder: Path, round: secure.Round, *, failed: bool = False) -> None:
    """Write the answers so far; of the masked vectors only the sum."""
    data = b"" if round.total is None else pack(round.session.bits, round.total)
    if round.total is not None and round.stage == "confirm":
        store.write_atomically(folder / SUM, data, name="secure sum")
    said = {"round": round.to_json(), "failed": failed, "sum": hashlib.sha256(data).hexdigest() if data else ""}
    store.write_atomically(folder / JOURNAL, json.dumps(said).encode(), name="secure")


def read_journal(folder: Path) -> tuple[secure.Round, bool] | None:
    path = folder / JOURNAL
    if not path.exists():
        return None
    try:
        said = json.loads(path.read_bytes())
        round, total = secure.round_of(said["round"], None), None
        if said["sum"]:
            data = (folder / SUM).read_bytes()
            if hashlib.sha256(data).hexdigest() != said["sum"]:
                raise ValueError(f"{SUM} does not belong to it")
            total = unpack(round.session.bits, data, round.session.numbers)
        return round._replace(total=total), bool(said["failed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it, or start a new run") from None

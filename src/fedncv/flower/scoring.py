"""Federated evaluation: clients that agree to it tell the sum of their scores, never the score of a sample.

    request     the model in use, as in a simulation: it may differ from the one for training; after = 1 asks for more
    reply       sums.before_3, and sums.after_3 if asked: sum of the scores, number of test samples, 1 for this client
    row         before  = (sum over clients of the first) / (sum over clients of the second)
                before_samples, before_by: the other two sums;  scored_among: clients that were asked

It takes place after rounds that ``eval_every`` and ``after_every`` name, and at the end, as in a simulation. There the
numbers are those of the simulation's ``before`` and ``after`` if every client takes part. ``after`` costs a client one
more local training, whose result is thrown away.

All that leaves a client is a vector that is added up, so secure sums can carry it as they carry any field of ``up``:
a client that tells no score then sends zeros, and nobody learns which one.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from torch import Tensor

from fedncv.engine.arithmetic import arithmetic
from fedncv.engine.evaluate import score_after, score_before
from fedncv.engine.problem import Problem, State, messages
from fedncv.engine.sequential import one_thread
from fedncv.flower import handshake
from fedncv.flower.asking import Grid, gather
from fedncv.flower.client import DATA, KEEP, SAMPLES, Client, check_plain, data_of, rounds_to_keep
from fedncv.flower.halves import Down, arrival_of, check_constants, down_template, travelling
from fedncv.flower.handshake import SERVER
from fedncv.flower.own import Own
from fedncv.flower.refusals import REASONS, RefusedError
from fedncv.flower.rules import Rules
from fedncv.flower.wire import ARRAYS, ASK, WireError, arrays, decode, encode, records, whole_numbers
from fedncv.results import ACCURACY
from fedncv.tree import row

AFTER = "after"
NOTHING = torch.zeros(0, dtype=torch.float64)


class Sums(NamedTuple):
    """Sum of the scores, number of test samples, number of clients; empty if not asked for."""

    before_3: Tensor
    after_3: Tensor


def due(problem: Problem, round: int) -> tuple[bool, bool]:
    """Return whether scores are due after this round: before, and after, local training. Settings of 0 mean never."""
    config = problem.config
    last = round == config.rounds
    before = bool(config.eval_every) and (last or round % config.eval_every == 0)
    return before, bool(config.after_every) and (last or (round > 0 and round % config.after_every == 0))


# ---- the client -------------------------------------------------------------------------------------------


def score_round(client: Client, request: Message) -> Message:
    """Reply with the sums of this client's scores, or refuse if its rules do not allow it. Nothing is stored."""
    what = "a request for scores"
    check_plain(client)
    problem, u, rules = client.problem, client.u, client.rules
    content = records(request, ARRAYS, ASK, SERVER, what=what)
    handshake.check(content[SERVER], handshake.identity_of(problem.config))
    samples = len(problem.clients.test[u])
    if not rules.evaluate:
        raise RefusedError("scores", "evaluate in rules.toml is false")
    if samples < rules.min_test_samples:
        raise RefusedError(
            "scores", f"{samples} test samples are fewer than min_test_samples, {rules.min_test_samples}"
        )
    asked = content[ASK]
    if not isinstance(asked, ConfigRecord):
        raise WireError(f"{what}: record {ASK!r} is a {type(asked).__name__}")
    check_constants(problem, asked.get("constants", 0.0))
    keep = rounds_to_keep(asked.get(KEEP))
    names = "round", "counted", "rollbacks", SAMPLES, AFTER
    numbers = whole_numbers(content, *names, beside=["constants", DATA, KEEP], what=what)
    round, counted, rollbacks, held, after = numbers
    if not 1 <= round <= problem.config.rounds + 1:
        raise WireError(f"the server asks for the scores before round {round} of {problem.config.rounds}")
    data_of(client, asked.get(DATA), held)
    message: Down = decode(arrays(content), down_template(problem.in_use), what="the server's message")
    own = Own(client.folder / "runs", client.run)
    with own.locked(), one_thread(), arithmetic(problem.config):
        kept = own.begin(problem, u, round=round, counted=counted, keep=keep, rollbacks=rollbacks)
        arrival = arrival_of(problem, u, message, kept)
        scored = problem.in_use._replace(metrics=())
        totals = [score_before(scored, round - 1, arrival, None)[0].total]
        totals += [score_after(scored, round - 1, arrival).total] if after else []
    if not all(map(math.isfinite, totals)):
        raise RefusedError("scores", "the model's scores here are not finite")
    sums = [torch.tensor([total, samples, 1.0], dtype=torch.float64) for total in totals]
    return Message(RecordDict({ARRAYS: encode(Sums(*sums, *[NOTHING] * (2 - len(sums))))}), reply_to=request)


# ---- the server -------------------------------------------------------------------------------------------


class Scorers:
    """Asks clients for scores. Those that tell none are not asked again until the run is resumed."""

    def __init__(self, problem: Problem, nodes: dict[int, int], rules: Rules, identity: dict[str, str]) -> None:
        self._problem, self._nodes, self._rules, self._identity = problem, nodes, rules, identity
        self._unwilling: set[int] = set()
        self._told: dict[int, str] = {}

    def measure(self, grid: Grid, state: State, standing: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        """Return what the row of the state's round says about scores; nothing if none is due, or nobody tells any.

        ``standing`` returns what a request says about a client, as for training.
        """
        before, after = due(self._problem, state.round)
        asked = {u: node for u, node in self._nodes.items() if u not in self._unwilling}
        if not (before or after) or not asked:
            return {}
        found = self._ask(grid, state, asked, standing, after)
        if not found:
            return {}
        totals = [torch.stack(each).sum(dim=0).tolist() for each in zip(*found, strict=True)]
        line: dict[str, Any] = {}
        for name, wanted, total in zip(("before", "after"), (before, after), totals, strict=True):
            if wanted:
                line |= {name: total[0] / total[1], f"{name}_samples": int(total[1]), f"{name}_by": int(total[2])}
        return line | {"scored_among": len(self._nodes)}

    def _ask(
        self, grid: Grid, state: State, asked: dict[int, int], standing: Callable[[int], dict[str, Any]], after: bool
    ) -> list[Sums]:
        problem, one = self._problem.in_use, torch.zeros(3, dtype=torch.float64)
        template = Sums(one, one if after else NOTHING)

        def request(u: int) -> RecordDict:
            down_S, b_SR = messages(problem, state, torch.tensor([u]).numpy())
            down = Down(row(down_S, 0), travelling(problem, b_SR[0]))
            ask = ConfigRecord(standing(u) | {AFTER: int(after)})
            return RecordDict({ARRAYS: encode(down), ASK: ask, SERVER: ConfigRecord(dict(self._identity))})

        def receive(u: int, answer: Message) -> Sums:
            content = records(answer, ARRAYS, what="a reply about scores")
            sums: Sums = decode(arrays(content), template, what="a reply about scores")
            for sum_3 in (sums.before_3, *[sums.after_3] * after):
                check_sum(sum_3.tolist(), self._rules.max_samples, is_accuracy=problem.task.score_name == ACCURACY)
            return Sums(sums.before_3, sums.after_3 if after else one)

        gathered = gather(
            grid, asked, request, receive, kind=MessageType.EVALUATE, group=f"scores {state.round}",
            seconds=self._rules.score_seconds, attempts=self._rules.attempts, told=self._told,
        )  # fmt: skip
        self._unwilling |= {u for u, why in gathered.refused.items() if why.startswith(REASONS["scores"][0])}
        return [gathered.values[u] for u in sorted(gathered.values)]


def words_of_scores(line: dict[str, Any]) -> str:
    """Return the scores of a row in words, for the log.

    >>> words_of_scores({"before": 0.8125, "before_by": 3, "before_samples": 48, "scored_among": 5})
    'before 0.8125 (48 test samples; scored by 3 of 5 clients)'
    """
    among = line["scored_among"]
    return ", ".join(
        f"{name} {line[name]:.4g} ({line[f'{name}_samples']:,} test samples; scored by {line[f'{name}_by']} of {among} "
        "clients)"
        for name in ("before", "after")
        if name in line
    )


def check_sum(sum_3: list[float], most: int, *, is_accuracy: bool) -> None:
    """Raise WireError unless these can be the sums of one client."""
    total, samples, clients = sum_3
    if not (math.isfinite(total) and 1 <= samples <= most and samples == int(samples) and clients == 1):
        raise WireError(f"its sums are {total:g} over {samples:g} samples of {clients:g} clients")
    if is_accuracy and not (0 <= total <= samples and total == int(total)):
        raise WireError(f"it says that {total:g} of {samples:g} test samples are right")

"""Secure sums over messages made by hand."""

import contextlib
import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedncv import store
from fedncv.config import RunConfig, write_toml
from fedncv.engine.local import train
from fedncv.engine.problem import arrivals, build, start
from fedncv.engine.sequential import run_round
from fedncv.flower import coordinator, members, roster
from fedncv.flower import folder as folders
from fedncv.flower.asking import StoppedError
from fedncv.flower.client import answer, client_of, count_samples, train_round
from fedncv.flower.refusals import RefusedError
from fedncv.flower.rules import Rules
from fedncv.flower.secure_client import Here, answer_stage, cohort_of, stage_of
from fedncv.flower.secure_server import check_secure, with_grid
from fedncv.methods.base import field_of
from fedncv.results import read_rows
from fedncv.secure.client import STAGES
from fedncv.secure.fixed_point import whole

FAST = Rules(round_seconds=5.0, stage_seconds=5.0, join_seconds=5.0, attempts=1)
SECURE = "threshold=3,neighbours=0"


@pytest.fixture
def config(tools):
    return replace(tools.config, clients=4, per_round=4, rounds=2, epochs=1, method="scaffold+fixed_point")


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


METHODS = [slow("fedavg"), "scaffold", "fedncv-sums"]


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_that_of_the_simulation_bit_for_bit(method, by_hand, tools, config):
    config = replace(config, method=f"{method}+fixed_point")
    state, _ = by_hand(config, rules=FAST, secure=SECURE)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    assert [line["counted"] for line in read_rows(by_hand.folder / "server" / "runs" / "run")[1:]] == [[0, 1, 2, 3]] * 2


def run_of(by_hand, name="run"):
    return by_hand.folder / "server" / "runs" / name


def gone(**stages):
    """Clients that say nothing from a stage of a round on, until the next round: round_2_masked=[1]."""
    away = {}

    def spoil(u, group, message, reply):
        stage = stage_of(message.content).name
        away.setdefault(group, set()).update(stages.get(f"round_{group}_{stage}", ()))
        return [] if u in away[group] else [reply]

    return spoil


@pytest.fixture(autouse=True)
def two_are_enough(monkeypatch):
    """Clients that let the server see sums of two, so that few of them can drop out."""
    monkeypatch.setattr(roster, "MINIMUM", 2)


# ---- drop-outs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage",
    [
        slow("keys"),
        slow("shares"),
        "masked",
        slow("confirm"),
        "unmask",
    ],
)
def test_a_client_that_drops_out_at_a_stage_keeps_its_old_memory_unless_it_was_summed(stage, by_hand, tools, config):
    """In round 2 of 3; in round 3 it is back. What it kept follows the last round that counted it."""
    config = replace(config, clients=3, per_round=3, rounds=3)
    rules = replace(FAST, stage_seconds=0.5, round_seconds=0.5)
    state, _ = by_hand(config, rules=rules, secure="threshold=2", spoil=gone(**{f"round_2_{stage}": [1]}))
    absent = {} if stage in ("confirm", "unmask") else {2: [1]}
    assert tools.compare(state, tools.sequential(config, absent=absent)) == "equal"
    rows = read_rows(run_of(by_hand))
    assert [row["counted"] for row in rows[1:]] == [[0, 1, 2], [0, 2] if absent else [0, 1, 2], [0, 1, 2]]
    assert rows[2].get("absent") == ([1] if absent else None)


@pytest.mark.parametrize(
    "stage",
    [
        slow("keys"),
        slow("shares"),
        "masked",
        slow("confirm"),
        "unmask",
    ],
)
def test_fewer_than_the_threshold_stop_the_run_and_it_ends_as_if_they_had_not(stage, by_hand, tools, config):
    config = replace(config, clients=3, per_round=3)
    rules = replace(FAST, stage_seconds=0.5, round_seconds=0.5)
    words = "Nothing of the round was used" if stage in STAGES[:3] else "Its sum exists only with them"
    with pytest.raises(StoppedError, match=rf"stage {stage} of round 2 has 1 replies .*absent: \[1, 2\].*{words}"):
        by_hand(config, rules=rules, secure="threshold=2", spoil=gone(**{f"round_2_{stage}": [1, 2]}))
    assert len(read_rows(run_of(by_hand))) == 2
    state, _ = by_hand(config, rules=FAST, secure="threshold=2")
    assert tools.compare(state, tools.sequential(config)) == "equal"


def test_joining_needs_everybody_who_is_not_left_out(by_hand, tools, config):
    config = replace(config, clients=3, per_round=3, rounds=1)
    rules = replace(FAST, stage_seconds=0.5, join_seconds=0.5)
    with pytest.raises(StoppedError, match=r"clients \[1\] did not answer stage keys of joining"):
        by_hand(config, rules=rules, secure="threshold=2", spoil=gone(round_joining_keys=[1]))
    state, grid = by_hand(config, rules=replace(FAST, leave_out=[1]), secure="threshold=2")
    assert {u for u, _, _ in grid.sent} == {0, 2}
    assert tools.compare(state, tools.sequential(config, absent={1: [1]})) == "equal"
    said = json.loads((run_of(by_hand) / "joined.json").read_text())
    problem = build(config)
    assert said["samples"] == sum(len(problem.clients.train[u]) for u in (0, 2))
    assert read_rows(run_of(by_hand))[0] == {
        "round": 0, "samples_in_all": said["samples"], "barred": {"1": "leave_out in rules.toml names it"},
    }  # fmt: skip


# ---- kills ------------------------------------------------------------------------------------------------


class DiedError(BaseException):
    pass


def points(by_hand, config, monkeypatch):
    visited = []
    monkeypatch.setattr("fedncv.store.write_point", visited.append)
    by_hand(config, rules=FAST, secure="threshold=2", name="watched")
    return visited


@pytest.mark.slow
def test_a_server_or_client_that_dies_at_any_write_goes_on_as_if_it_had_not(by_hand, tools, config, monkeypatch):
    """Every point at which the server or a client writes is the last one: at its first visit, a later one, the last."""
    config = replace(config, clients=3, per_round=3)
    reference = tools.sequential(config)
    visited = points(by_hand, config, monkeypatch)
    files = {name.partition(":")[0] for name in visited}
    assert {"secure", "secure sum", "own secure", "own vector", "joined"} <= files
    counts = {name: visited.count(name) for name in visited if not name.startswith("config")}
    deaths = [(name, k) for name, n in counts.items() for k in sorted({0, n // 2, n - 1})]
    for number, (name, k) in enumerate(deaths):
        visits = 0

        def die(point, name=name, k=k):
            nonlocal visits
            visits += point == name
            if point == name and visits == k + 1:
                raise DiedError(point)

        monkeypatch.setattr("fedncv.store.write_point", die)
        with contextlib.suppress(DiedError):
            by_hand(config, rules=FAST, secure="threshold=2", name=f"run{number}")
        monkeypatch.setattr("fedncv.store.write_point", lambda _point: None)
        state, _ = by_hand(config, rules=FAST, secure="threshold=2", name=f"run{number}")
        assert tools.compare(state, reference) == "equal", (name, k)


@pytest.mark.parametrize(
    "stage",
    [
        slow("keys"),
        slow("shares"),
        "masked",
        slow("confirm"),
        slow("unmask"),
    ],
)
def test_a_server_killed_in_a_stage_goes_on_with_it(stage, by_hand, tools, config):
    """Client 1 has answered, and its reply is lost with the server; its secrets and its vector stay the same."""
    config = replace(config, clients=3, per_round=3)
    seen = []

    def die(u, group, message, reply):
        name = stage_of(message.content).name
        if (u, group, name) == (1, "2", stage):
            seen.append(reply)
            raise DiedError
        return [reply]

    with pytest.raises(DiedError):
        by_hand(config, rules=FAST, secure="threshold=2", spoil=die)
    state, grid = by_hand(config, rules=FAST, secure="threshold=2")
    assert tools.compare(state, tools.sequential(config)) == "equal"
    again = [reply for u, message, reply in grid.sent if (u, stage_of(message.content).name) == (1, stage)]
    assert len(again) == 1
    assert dict(again[0].content["secure"]) == dict(seen[0].content["secure"])
    attempts = {json.loads(m.content["secure"]["message"])["session"]["attempt"] for _, m, _ in grid.sent}
    assert attempts == {1}


# ---- what the server sees ---------------------------------------------------------------------------------


def bytes_of(content):
    """All that a message holds, as texts and as bytes; hexadecimal digits also as what they stand for."""
    texts, data = [], []
    for name, record in content.items():
        for key, value in record.items():
            found = value.data if hasattr(value, "data") else value
            if isinstance(found, bytes):
                data.append(found)
            else:
                texts.append(repr((name, key, found)))
    data += [bytes.fromhex(digits) for text in texts for digits in re.findall(r"(?:[0-9a-f]{2}){8,}", text)]
    return texts, data


def is_told(n, texts, data):
    """Whether the number is written somewhere in digits, or as a word of 8 bytes."""
    words = [n.to_bytes(8, "little"), np.float64(n).tobytes()]
    in_digits = any(re.search(rf"(?<![0-9a-f.]){n}(?![0-9a-f.])", text) for text in texts)
    return in_digits or any(word in each for word in words for each in data)


def traces(problem, u, reply):
    """Forms in which client u's update could be found: floats, rounded floats, whole numbers of both weights."""
    delta_P, n = field_of(reply.up, "delta_P"), len(problem.clients.train[u])
    at = min(int(delta_P.abs().argmax()), len(delta_P) - 4)  # where nothing is zero by itself
    q = whole(problem.method.grid, "delta_P", delta_P)
    forms = [delta_P, delta_P.double(), q, q * n, q.int(), q.double()]
    return [form[at : at + 4].contiguous().numpy().tobytes() for form in forms]


@pytest.mark.parametrize("secure", ["", "threshold=2"], ids=["plain", "secure"])
def test_the_server_sees_no_single_update_and_no_single_count(secure, by_hand, tools, config, monkeypatch):
    """Every message that it receives and every file that it writes; the same search finds all in a plain run."""
    config = replace(config, clients=3, per_round=3, partition="dirichlet:alpha=1", method="fedavg+fixed_point")
    written = []

    def write(path, data, **options):
        if "/server/" in str(path):
            written.append(data)
        return real(path, data, **options)

    real = store.write_atomically
    monkeypatch.setattr(store, "write_atomically", write)
    _, grid = by_hand(config, rules=FAST, secure=secure)
    run = run_of(by_hand)
    messages = [bytes_of(reply.content) for _, _, reply in grid.sent]
    files = [*written, *(path.read_bytes() for path in run.rglob("*") if path.is_file())]
    texts = [text for found, _ in messages for text in found]
    texts += [data.decode() for data in files if data.isascii()]
    everything = [*(each for _, found in messages for each in found), *files]
    problem = build(config)
    state = start(problem)
    updates, counts = 0, 0
    for _ in range(config.rounds):
        for arrival in arrivals(problem, state, np.arange(3)):
            reply = train(problem, state.round, arrival)
            forms = traces(problem, arrival.client, reply)
            updates += any(form in data for form in forms for data in everything)
        state, _ = run_round(problem, state)
    for u in range(3):
        counts += is_told(len(problem.clients.train[u]), texts, everything)
    assert (updates, counts) == ((0, 0) if secure else (3 * config.rounds, 3))


# ---- a server that cheats, on the client's side of Flower ---------------------------------------------------


@pytest.mark.parametrize("handle", [count_samples, train_round])
def test_a_plain_request_in_a_secure_run_is_refused(handle, by_hand, config):
    """A server that asks for the client's own reply, or for its own number of samples."""
    folders.init(by_hand.folder, config, host="127.0.0.1", port=0, listen="127.0.0.1")
    mine = client_of(write_toml(config), "run", 0, by_hand.folder / "clients" / "0", SECURE)
    with pytest.raises(RefusedError, match="the server asks for the client's own reply"):
        handle(mine, None)


class Refusing:
    """Requests to one client, changed as a cheating server would."""

    def __init__(self, by_hand, config, change):
        self.said = []

        def spoil(u, group, message, reply):
            made = change(u, group, stage_of(message.content))
            if made is not None:
                content = RecordDict(dict(message.content.items()))
                content["secure"] = ConfigRecord({"stage": made[0], "message": json.dumps(made[1])})
                asked = Message(content, message.metadata.dst_node_id, message.metadata.message_type)
                asked.metadata.__dict__["_message_id"] = "x"
                here = Here(u, "run", by_hand.folder / "clients" / str(u), write_toml(config), "threshold=2")
                refusal = answer(answer_stage, lambda: here, asked)
                self.said.append(dict(refusal.content["refusal"]) if "refusal" in refusal.content else None)
            return [reply]

        by_hand(config, rules=FAST, secure="threshold=2", spoil=spoil)


def with_session(stage, **changes):
    return stage.name, {**stage.message, "session": {**stage.message["session"], **changes}}


@pytest.mark.parametrize(
    ("stage", "changes", "said"),
    [
        ("keys", {"cohort": [0, 1, 2], "attempt": 2}, "the study has another cohort in round 2"),
        ("keys", {"threshold": 3, "attempt": 2}, "the study has another threshold in round 2"),
        ("keys", {"run": "other", "attempt": 2}, "the study has another run in round 2"),
        ("keys", {"round": 9}, "the study has another cohort in round 9"),
        ("keys", {"roster": "00", "attempt": 2}, "the server's roster of public keys is not the one on this disk"),
        ("unmask", {"attempt": 2}, "a request of another session than this client's latest, round 2"),
    ],
)
def test_a_client_refuses_other_sessions_than_its_study_s(stage, changes, said, by_hand, config):
    """The study draws two of four clients in every round: the server cannot choose others."""
    config = replace(config, clients=4, per_round=2, seed=first_seed_with(config, 0))

    def change(u, group, found):
        return with_session(found, **changes) if (u, group, found.name) == (0, "2", stage) else None

    (found,) = Refusing(by_hand, config, change).said
    assert found["code"] == "secure"
    assert said in found["said"]


def test_a_round_is_not_replayed(by_hand, config):
    config = replace(config, clients=3, per_round=3)

    def change(u, group, found):
        again = {"round": 1, "attempt": 2}
        return with_session(found, **again) if (u, group, found.name) == (0, "2", "keys") else None

    (found,) = Refusing(by_hand, config, change).said
    assert "replay: round 1 is over: this client has been in round 2" in found["said"]


def first_seed_with(config, u):
    """A seed that draws client u in round 2."""
    study = replace(config, clients=4, per_round=2)
    return next(seed for seed in range(99) if u in cohort_of(replace(study, seed=seed), 2))


def test_a_second_unmasking_is_refused_and_a_repeated_one_is_the_same(by_hand, config):
    config = replace(config, clients=3, per_round=3)

    def change(u, group, found):
        if (u, group, found.name) != (0, "2", "unmask"):
            return None
        return found.name, {**found.message, "survivors": [0, 1]}

    (found,) = Refusing(by_hand, config, change).said
    assert "twice: the server asks for unmask of round 2 twice, differently" in found["said"]


def test_a_masked_vector_belongs_to_the_model_that_was_sent(by_hand, config):
    """The same stage with another task: the client neither trains again nor sends another vector."""
    config = replace(config, clients=3, per_round=3)

    def change(u, group, found):
        return (found.name, {**found.message, "task": "00"}) if (u, group, found.name) == (0, "2", "masked") else None

    (found,) = Refusing(by_hand, config, change).said
    assert "twice, differently" in found["said"]


def test_a_client_that_lost_its_record_refuses(by_hand, config):
    config = replace(config, clients=3, per_round=3, rounds=3)

    def spoil(u, group, message, reply):
        if (u, group, stage_of(message.content).name) == (2, "1", "unmask"):
            (by_hand.folder / "clients" / "1" / "runs" / "run" / "secure.json").unlink()
        return [reply]

    by_hand(config, rules=FAST, secure="threshold=2", spoil=spoil)
    rows = read_rows(run_of(by_hand))
    assert [row["counted"] for row in rows[1:]] == [[0, 1, 2], [0, 2], [0, 2]]
    assert "its record of the run's secure sums is missing" in rows[2]["refused"]["1"]


# ---- what is refused before a run -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("threshold=1", "threshold must be at least 2, not 1"),
        ("threshold=2", "threshold is 2; for 4 clients in a round it must be from 3 to 4"),
        ("threshold=5", "threshold is 5; for 4 clients"),
        ("threshold=three", "threshold must be int, not 'three'"),
        ("neighbours=4", "does not give a threshold; write --secure-sums threshold=3"),
        ("threshold=3,neighbours=5", "neighbours must be 0, or an even number of at least 4, not 5"),
        ("threshold=3,neighbors=4", "has no knob 'neighbors'"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(text, said, config):
    with pytest.raises(ValueError, match=re.escape(said)):
        check_secure(config, text)


def test_a_method_without_a_grid_gets_one_and_one_that_needs_single_replies_is_refused(config):
    assert with_grid("fedavg") == "fedavg+fixed_point"
    assert with_grid("fedavg+fixed_point:bits=48+prior") == "fedavg+fixed_point:bits=48+prior"
    with pytest.raises(ValueError, match=r"use scaffold\+fixed_point"):
        check_secure(replace(config, method="scaffold"), SECURE)
    with pytest.raises(ValueError, match="this method needs single ones"):
        check_secure(replace(config, method=with_grid("fedncv")), SECURE)
    with pytest.raises(ValueError, match="sampling=weighted needs each client's size"):
        check_secure(replace(config, sampling="weighted"), SECURE)


def test_rules_about_single_replies_are_refused(by_hand, config):
    with pytest.raises(ValueError, match=r"\[norms\] is about single replies, which --secure-sums hides; remove it"):
        by_hand(config, rules=replace(FAST, norms={"delta_P": 1.0}), secure=SECURE)
    with pytest.raises(ValueError, match=r"\[sizes\] is about single replies"):
        by_hand(config, rules=replace(FAST, sizes={"0": 100}), secure=SECURE)


def test_a_run_with_secure_sums_is_never_rolled_back(by_hand, config):
    config = replace(config, clients=3, per_round=3)
    by_hand(config, rules=FAST, secure="threshold=2")
    with pytest.raises(ValueError, match="never sum a round twice"):
        coordinator.roll_back(by_hand.folder, "run", to=1)


def test_a_client_with_more_samples_than_the_sum_has_room_for_refuses(by_hand, config):
    config = replace(config, clients=3, per_round=3, method="fedavg+fixed_point:samples=10")
    with pytest.raises(StoppedError, match="more training samples than the sums have room for"):
        by_hand(config, rules=FAST, secure="threshold=2")


def test_rosters_follow_the_keys(tmp_path):
    """`init` writes them; a new key, another client and a revoked one change all that are on this machine."""
    place = tmp_path / "federation"
    folders.init(place, RunConfig(clients=3, per_round=3, partition="iid"), host="h", port=0, listen="127.0.0.1")
    first = roster.read_roster(place / "clients" / "0")
    assert {u: " ".join(key.split()[:2]) for u, key in folders.read_keys(place / "server").items()} == first.roster
    text = (place / "clients" / "0" / "roster.toml").read_text()
    (place / "clients" / "0" / "roster.toml").write_text(text.replace("= 2", "= 7"))
    members.rotate(place, 1)
    members.add(place)
    members.revoke(place, 2)
    for part in [place / "server", *(place / "clients" / str(u) for u in (0, 1, 3))]:
        found = roster.read_roster(part)
        assert sorted(found.roster) == [0, 1, 3]
        assert found.roster[0] == first.roster[0]
        assert found.roster[1] != first.roster[1]
        assert found.minimum == (7 if part.name == "0" else 2)
    (place / "server" / "roster.toml").write_text("minimum_cohort = 1\n[clients]\n")
    with pytest.raises(RefusedError, match=r"minimum_cohort must be a whole number of at least 2"):
        roster.read_roster(place / "server")

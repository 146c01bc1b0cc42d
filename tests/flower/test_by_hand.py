"""The translation without processes: every method's numbers, every fault, and what crosses."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

import torch
from federations import FULL_FEDNCV, ROBUST, full_fedncv, model_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from safetensors.torch import load_file

from fedncv.cli import main
from fedncv.config import RunConfig
from fedncv.engine import evaluate
from fedncv.engine.problem import build, start
from fedncv.export import export
from fedncv.flower import server
from fedncv.flower.halves import Up, check, check_constants
from fedncv.flower.rules import Rules, accept
from fedncv.flower.wire import ARRAYS, ASK, STYPE, WireError
from fedncv.methods import METHODS, fedavg, find_method
from fedncv.methods.switches import drift
from fedncv.results import read_rows

ROUNDS = 3


@pytest.fixture
def config(tools):
    return replace(tools.config, clients=3, per_round=2, rounds=ROUNDS, epochs=1)


SERVERLESS = ("d2", "relaysgd")
WITH_SERVER = [name for name in (*METHODS, FULL_FEDNCV) if name not in SERVERLESS]


@pytest.mark.parametrize(
    "method", [*WITH_SERVER, ROBUST[1], *(pytest.param(name, marks=pytest.mark.slow) for name in ROBUST[2:])]
)
def test_every_method_has_the_sequential_engine_s_bits_and_sends_only_what_it_declares(method, by_hand, tools, config):
    """Requests: the method's down, numbers of rounds, what must be equal. Replies: the declared fields of up."""
    config = replace(config, method=method)
    state, grid = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    declared = set(find_method(method).reveals)
    counts = [reply for _, message, reply in grid.sent if message.metadata.message_type == "query"]
    assert len(counts) == config.clients
    assert [sorted(reply.content[ASK].keys()) for reply in counts] == [["data", "samples"]] * len(counts)
    for _, message, reply in grid.sent:
        if message.metadata.message_type == "query":
            assert list(message.content) == ["server"]
            assert list(reply.content) == [ASK]
            continue
        assert sorted(message.content) == [ARRAYS, ASK, "server"]
        assert message.content[ASK].keys() == {"round", "counted", "keep", "rollbacks", "samples", "data"}
        assert list(reply.content) == [ARRAYS]
        sent = reply.content[ARRAYS].keys() - {"buffers_R"}
        assert {name.rpartition(".")[2] for name in sent} == declared
        assert len(sent) == len(declared)
        assert all(array.stype == STYPE for array in reply.content[ARRAYS].values())


@pytest.mark.parametrize("method", SERVERLESS)
def test_methods_for_federations_without_a_server_are_refused(method):
    with pytest.raises(ValueError, match=f"{method} is for federations without a server"):
        check(RunConfig(method=method, clients=4, per_round=4))


def test_a_topology_is_refused():
    with pytest.raises(ValueError, match="topology is 'ring': Flower's clients talk to its server alone"):
        check(RunConfig(topology="ring", per_round=100))


def test_frozen_weights_stay_where_they_are_and_are_compared(by_hand, tools, config):
    config = replace(config, model="federations:frozen_mlp", rounds=2)
    state, grid = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    problem = build(config)
    rounds = [message for _, message, _ in grid.sent if message.metadata.message_type != "query"]
    for message in rounds:
        assert {array.shape for array in message.content[ARRAYS].values()} == {(64 * 10 + 10,)}  # the head alone
    other = build(replace(config, seed=1))
    check_constants(problem, problem.model.constants_mark)
    for mark in (other.model.constants_mark, 0.0, "text"):
        with pytest.raises(ValueError, match=r"frozen weights .* are not the server's"):
            check_constants(problem, mark)


def test_every_client_writes_its_own_scores_and_metrics_into_its_history(by_hand, config):
    """Those of the sequential engine at the initial model; the server's rows have none."""
    config = replace(config, per_round=3, rounds=1, eval_every=1, metrics=("f1_macro", "auroc"))
    by_hand(config)
    problem = build(config)
    row = evaluate.before(problem, start(problem))
    for u in range(3):
        (line,) = (by_hand.folder / "clients" / str(u) / "runs" / "run" / "history.jsonl").read_text().splitlines()
        for name in ("before", "before_f1_macro", "before_auroc"):
            assert json.loads(line)[name] == row[f"{name}_clients"][u]
    assert not any("f1_macro" in key for line in read_rows(by_hand.folder / "server" / "runs" / "run") for key in line)


def test_another_optimizer_has_the_sequential_engine_s_bits(by_hand, tools, config):
    config = replace(config, method="fedavg", optimizer="adamw:beta2=0.9", weight_decay=0.1, lr=0.003)
    assert tools.compare(by_hand(config)[0], tools.sequential(config)) == "equal"


OWN_MODULE = """
import torch
from torch import nn
import fedncv
from fedncv.methods.fedavg import fedavg


def patients():
    x = torch.linspace(-1, 1, 120).reshape(60, 2)
    return fedncv.Dataset("patients", x, (x[:, 0] > 0).long(), 2, owners=torch.arange(60) % 2)


def net(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 4), nn.Tanh(), nn.Linear(4, outputs))


def signed(*, scale: float = 0.05):
    def direction(ask, y_P, batch, down, own, scratch):
        return scale * ask.grad(y_P, batch).sign(), scratch

    return fedavg()._replace(direction=direction)
"""


def test_own_data_method_and_model_by_name_have_the_sequential_engine_s_bits(
    by_hand, tools, config, tmp_path, monkeypatch
):
    (tmp_path / "of_a_clinic.py").write_text(OWN_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {"data": "of_a_clinic:patients", "method": "of_a_clinic:signed:scale=0.2", "model": "of_a_clinic:net"}
    config = replace(config, **names, partition="natural", clients=2, per_round=2, rounds=2, optimizer="rmsprop")
    state, _ = by_hand(config)
    assert state.round == 2
    assert tools.compare(state, tools.sequential(config)) == "equal"


@pytest.mark.parametrize("buffers", ["averaged", "personal"])
def test_running_statistics_travel_only_where_they_are_shared(buffers, by_hand, tools, config):
    config = replace(config, model="lenet5", buffers=buffers, rounds=2, test_share=0.5)
    state, grid = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    crossed = {name for _, message, _ in grid.sent for name in message.content.get(ARRAYS, {})}
    assert ("buffers_R" in crossed) == (buffers == "averaged")


def test_fedncv_averages_models_and_statistics_as_the_sequential_engine_does_with_its_rows_on_disk(
    by_hand, tools, config
):
    config = replace(config, method=full_fedncv("average=2"), model="lenet5", test_share=0.5, rows="disk")
    state, _ = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    assert not torch.equal(state.server.a_P, model_of(state))


def test_the_shared_model_is_exported_from_the_server_s_folder(by_hand, tools, config, capsys):
    """Without the data, which are not there, and without what a client adds to it."""
    by_hand(replace(config, rounds=0))
    config = replace(config, method="fedncv:average=2", model="lenet5", rounds=2)
    by_hand(replace(config, data="custom"), name="real")
    run = by_hand.folder / "server" / "runs" / "real"
    assert main(["export", str(run)]) == 0
    found, expected = load_file(run / "model.safetensors"), export(build(config), tools.sequential(config))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert main(["export", str(run), "--client", "1"]) == 2
    assert "stays on its machine" in capsys.readouterr().err


def test_a_client_reads_its_own_folder_and_no_other(by_hand, config):
    """The others' folders are gone, and what it trains on is what the partition gave it."""
    from fedncv.flower.samples import read

    by_hand(replace(config, rounds=0))
    problem = build(config)
    for u in range(3):
        mine = read(by_hand.folder / "clients" / str(u) / "data")
        index = torch.from_numpy(problem.clients.train[u])
        assert torch.equal(mine.dataset.x[torch.from_numpy(mine.train)], problem.dataset.x[index])
        assert len(mine.dataset.x) == len(problem.clients.train[u]) + len(problem.clients.test[u])


# ---- faults -----------------------------------------------------------------------------------------------


def spoiler(change, *, client, round):
    """Client ``client`` misbehaves in one round."""

    def spoil(u, group, message, reply):
        if (u, group) != (client, str(round)):
            return [reply]
        return change(message, reply)

    return spoil


def arrays_with(reply, **changed):
    record = dict(reply.content[ARRAYS].items())
    for path, array in changed.items():
        record[path.replace("__", ".")] = array
    return record


def replied(message, record, **more):
    return Message(RecordDict({ARRAYS: ArrayRecord(record), **more}), reply_to=message)


def raw(values):
    values = np.asarray(values, dtype=np.float32)
    return Array("float32", values.shape, STYPE, values.tobytes())


def delta(reply):
    return np.frombuffer(reply.content[ARRAYS]["up.delta_P"].data, dtype=np.float32)


def nan(message, reply):
    return [replied(message, arrays_with(reply, up__delta_P=raw(np.full_like(delta(reply), np.nan))))]


def wrong_shape(message, reply):
    return [replied(message, arrays_with(reply, up__delta_P=raw(delta(reply)[:-1])))]


def wrong_type(message, reply):
    values = delta(reply).astype(np.float64)
    array = Array("float64", values.shape, STYPE, values.tobytes())
    return [replied(message, arrays_with(reply, up__delta_P=array))]


def false_size(message, reply):
    array = Array("float32", delta(reply).shape, STYPE, delta(reply).tobytes() * 3)
    return [replied(message, arrays_with(reply, up__delta_P=array))]


def numpy_file(message, reply):
    return [replied(message, arrays_with(reply, up__delta_P=Array(delta(reply).copy())))]


def undeclared(message, reply):
    return [replied(message, arrays_with(reply, up__secret=raw([1.0])))]


def missing(message, reply):
    return [replied(message, {"up.delta_P": reply.content[ARRAYS]["up.delta_P"]})]


def one_record_too_many(message, reply):
    return [replied(message, arrays_with(reply), count=ConfigRecord({"samples": 10**6}))]


WRONG = [nan, wrong_shape, wrong_type, false_size, numpy_file, undeclared, missing, one_record_too_many]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_wrong_reply_is_left_out_and_the_client_takes_its_round_back(change, by_hand, tools, config):
    """The run equals one in which that client never answered that round: no control variate drifts apart."""
    config = replace(config, per_round=3)
    state, _ = by_hand(config, spoil=spoiler(change, client=1, round=2))
    assert tools.compare(state, tools.sequential(config, absent={2: [1]})) == "equal"
    line = read_rows(by_hand.folder / "server" / "runs" / "run")[2]
    assert line["counted"] == [0, 2]
    assert list(line["refused"]) == ["1"]


def test_an_answer_that_comes_twice_counts_once(by_hand, tools, config):
    config = replace(config, per_round=3)
    state, _ = by_hand(config, spoil=lambda _u, _group, _message, reply: [reply, reply])
    assert tools.compare(state, tools.sequential(config)) == "equal"


def test_a_late_answer_is_not_counted_in_any_round(by_hand, tools, config):
    """It comes when the next round is under way; the client was told, and began from its last counted round."""
    config = replace(config, per_round=3)
    late = []

    def spoil(u, group, _message, reply):
        if (u, group) == (1, "2"):
            late.append(reply)
            return []
        return [reply, *(late if group == "3" else [])]

    rules = Rules(round_seconds=1.5, join_seconds=20.0, attempts=1)
    state, _ = by_hand(config, spoil=spoil, rules=rules)
    assert late
    assert tools.compare(state, tools.sequential(config, absent={2: [1]})) == "equal"


def test_a_client_that_fails_is_asked_again(by_hand, tools, config):
    config = replace(config, per_round=3)
    failed = []

    def spoil(u, group, message, reply):
        from flwr.app import Error

        if u == 1 and group == "2" and not failed:
            failed.append(reply)
            return [Message(Error(0, "out of memory"), reply_to=message)]
        return [reply]

    state, _ = by_hand(config, spoil=spoil)
    assert failed
    assert tools.compare(state, tools.sequential(config)) == "equal"


def test_a_client_that_lost_the_request_in_a_restart_is_asked_again(by_hand, tools, config):
    """Its node comes back so soon that nobody saw it gone; only the time of its activation tells."""
    config = replace(config, per_round=3)
    lost = []

    def spoil(u, group, _message, reply):
        if (u, group) == (1, "2") and not lost:
            lost.append(reply)
            by_hand.grid.activated[1] = "later"
            return []
        return [reply]

    state, _ = by_hand(config, spoil=spoil)
    assert lost
    assert tools.compare(state, tools.sequential(config)) == "equal"


def test_a_client_that_cannot_write_is_absent_until_it_can(by_hand, tools, config):
    """An error from the kernel, as of a full disk: in round 2 a folder is where the file of what it keeps belongs."""
    config = replace(config, per_round=3)
    full = []

    def fill(group):
        folder = by_hand.folder / "clients" / "1" / "runs" / "run"
        name = folder / "round-000002.safetensors"
        if group == "1":
            name.mkdir()
            full.append(name)

    def spoil(u, group, _message, reply):
        if u == 1 and group == "2":
            assert dict(reply.content["refusal"]) == {"code": "disk", "said": "EISDIR"}
        if u == 2 and group == "1":
            fill(group)
        if u == 2 and group == "3":
            full[0].rmdir()
        return [reply]

    state, _ = by_hand(config, spoil=spoil)
    reference = tools.sequential(config, absent={2: [1]})
    assert tools.compare(state, reference) == "equal"
    assert read_rows(by_hand.folder / "server" / "runs" / "run")[2]["absent"] == [1]


@pytest.mark.parametrize("count", [0, 10**9, -5])
def test_a_sample_count_outside_the_rules_bars_the_client(count, by_hand, tools, config):
    def spoil(u, group, message, reply):
        if group == "joining" and u == 1:
            return [Message(RecordDict({ASK: ConfigRecord({"samples": count, "data": "0" * 32})}), reply_to=message)]
        return [reply]

    state, grid = by_hand(replace(config, per_round=3), spoil=spoil)
    assert state.round == ROUNDS
    assert read_rows(by_hand.folder / "server" / "runs" / "run")[0]["barred"].keys() == {"1"}
    assert [u for u, message, _ in grid.sent if message.metadata.message_type == "train" and u == 1] == []


def test_norms_hold_for_a_field_that_a_switch_has_wrapped():
    """fedncv sends up.delta_P: the rule still names delta_P."""
    reply = Up(drift.Up(fedavg.Up(torch.full((4,), 3.0)), torch.tensor(0.5)), torch.zeros(0))
    with pytest.raises(WireError, match="norm of delta_P is 6, above 2"):
        accept(Rules(norms={"delta_P": 2.0}), reply)
    clipped, said = accept(Rules(norms={"delta_P": 2.0}, outside="clip"), reply)
    assert torch.allclose(clipped.up.up.delta_P, torch.ones(4))
    assert said == ["delta_P from 6 to 2"]
    assert float(clipped.up.total_step) == 0.5


def test_norms_reject_or_clip_and_are_counted(by_hand, config):
    config = replace(config, per_round=3, rounds=1, method="fedavg")
    _, grid = by_hand(config, name="free")
    norms = [np.linalg.norm(delta(r).astype(np.float64)) for _, m, r in grid.sent if m.metadata.message_type == "train"]
    limit = float(np.sort(norms)[1]) * 1.0001  # one of three is outside
    outside = int(np.argmax(norms))
    for action, key in (("reject", "refused"), ("clip", "clipped")):
        rules = Rules(round_seconds=20.0, join_seconds=20.0, norms={"delta_P": limit}, outside=action)
        by_hand(config, rules=rules, name=action)
        line = read_rows(by_hand.folder / "server" / "runs" / action)[1]
        assert list(line[key]) == [str(outside)]
        assert line["replies"] == (2 if action == "reject" else 3)


# ---- durability -------------------------------------------------------------------------------------------


class ServerDied(BaseException):
    pass


def points_of(by_hand, config, monkeypatch):
    visited = []
    monkeypatch.setattr("fedncv.store.write_point", visited.append)
    by_hand(config, name="watched")
    return visited


def test_a_server_that_dies_at_any_write_goes_on_as_if_it_had_not(by_hand, tools, config, monkeypatch):
    """Every point at which the server or a client writes is the last one once."""
    config = replace(config, per_round=3, rounds=2, model="mlp")
    reference = tools.sequential(config)
    names = [p for p in dict.fromkeys(points_of(by_hand, config, monkeypatch)) if not p.startswith(("own", "config"))]
    for number, name in enumerate(names):
        visits = 0

        def die(point, name=name):
            nonlocal visits
            visits += point == name
            if point == name and visits == 2:
                raise ServerDied(point)

        monkeypatch.setattr("fedncv.store.write_point", die)
        with contextlib.suppress(ServerDied):
            by_hand(config, name=f"run{number}")
        monkeypatch.setattr("fedncv.store.write_point", lambda _point: None)
        state, _ = by_hand(config, name=f"run{number}")
        assert tools.compare(state, reference) == "equal", name


def test_a_server_set_back_further_than_its_clients_is_stopped_and_no_client_begins_anew(by_hand, config):
    """An old copy of the server's disk asks for round 2 again, when clients have been asked for round 3."""
    config = replace(config, per_round=3)
    run = by_hand.folder / "server" / "runs" / "run"
    saved = {}

    def spoil(u, group, _message, reply):
        if group == "2" and u == 0:
            saved.update({p.name: p.read_bytes() for p in run.iterdir() if p.is_file()})
        if group == "3" and not saved.get("again"):
            raise ServerDied
        return [reply]

    with pytest.raises(ServerDied):
        by_hand(config, spoil=spoil)
    for name in ("metrics.jsonl", "state.safetensors"):
        (run / name).write_bytes(saved[name])
    with pytest.raises(server.StoppedError, match="min_replies"):
        by_hand(config, rules=Rules(round_seconds=1.0, join_seconds=1.0, attempts=1, min_replies=3))


def test_joined_counts_are_asked_once_even_over_a_restart(by_hand, config):
    with pytest.raises(ServerDied):
        by_hand(config, spoil=lambda _u, group, _m, reply: [reply] if group != "2" else _raise())
    _, grid = by_hand(config)
    assert all(message.metadata.message_type == "train" for _, message, _ in grid.sent)
    said = json.loads((by_hand.folder / "server" / "runs" / "run" / "joined.json").read_text())
    assert said["barred"] == {}


def _raise():
    raise ServerDied

"""Federated evaluation: the numbers of a simulation, from the clients that agree to it, as sums."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from federations import FULL_FEDNCV
from flwr.app import Array, ArrayRecord, Message, RecordDict

import fedncv
from fedncv.cli import main
from fedncv.cli.federation.following import Following, words_of_now
from fedncv.data import divide, load, split, standardised
from fedncv.flower import samples
from fedncv.flower.audit import AUDIT
from fedncv.flower.consent import RULES, ClientRules, write_client_rules
from fedncv.flower.record import PROGRESS, Progress, read_progress
from fedncv.flower.rules import Rules
from fedncv.flower.scoring import check_sum
from fedncv.flower.wire import ARRAYS, STYPE, WireError
from fedncv.results import read_rows, read_run

CHANGES = {"clients": 3, "per_round": 2, "rounds": 3, "epochs": 1, "eval_every": 2, "after_every": 3}
FAST = Rules(round_seconds=20.0, join_seconds=20.0, score_seconds=20.0, attempts=2)


@pytest.fixture
def config(tools):
    return replace(tools.config, **CHANGES)


def agree(by_hand, config, clients, **more):
    """Make the folder; let these clients tell scores."""
    from fedncv.flower import folder as folders

    folders.init(by_hand.folder, config, host="127.0.0.1", port=0, listen="127.0.0.1")
    for u in clients:
        rules = write_client_rules(ClientRules(evaluate=True, **more))
        (by_hand.folder / "clients" / str(u) / RULES).write_text(rules)


def run_of(by_hand):
    return by_hand.folder / "server" / "runs" / "run"


def simulated(config):
    """The rows of the same run as a simulation; at its end it always measures both."""
    names = ("method", "model", "partition", *CHANGES, "batch_size", "lr")
    return fedncv.simulate(**{name: getattr(config, name) for name in names}).rows


@pytest.mark.parametrize("method", ["scaffold", pytest.param(FULL_FEDNCV, marks=pytest.mark.slow)])
def test_if_every_client_agrees_the_scores_are_those_of_the_simulation(method, by_hand, tools, config):
    """Of the model in use, which is another one than that for training in one of the methods."""
    config = replace(config, method=method)
    agree(by_hand, config, range(3))
    state, _ = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"  # scoring changes nothing
    rows, reference = read_rows(run_of(by_hand)), simulated(config)
    assert [row.get("before") for row in rows] == [row.get("before") for row in reference]
    assert [row.get("after") for row in rows] == [row.get("after") for row in reference]
    assert [("before" in row, "after" in row) for row in rows] == [
        (True, False), (False, False), (True, False), (True, True),
    ]  # fmt: skip
    tested = sum(len(samples.read(by_hand.folder / "clients" / str(u) / "data").test) for u in range(3))
    assert {(rows[i]["before_by"], rows[i]["scored_among"], rows[i]["before_samples"]) for i in (0, 2, 3)} == {
        (3, 3, tested)
    }


def test_only_sums_of_those_who_agree_cross_and_the_others_are_counted(by_hand, config):
    agree(by_hand, config, [0, 2])
    _, grid = by_hand(config)
    crossed = {}
    for u, message, reply in grid.sent:
        if message.metadata.message_type == "evaluate":
            crossed.setdefault(u, []).append(reply)
    assert [len(crossed[u]) for u in range(3)] == [3, 1, 3]  # who refuses is not asked again
    assert dict(crossed[1][0].content["refusal"]) == {"code": "scores", "said": ""}
    log = [json.loads(line) for line in (by_hand.folder / "server" / AUDIT).read_text().splitlines()]
    told = [line for line in log if (line["event"], line.get("kind")) == ("received", "scoring")]
    assert len(told) == 7
    assert not any("norm" in field for line in told for field in line["fields"].values())  # no client's score is kept
    for reply in (*crossed[0], *crossed[2]):
        assert list(reply.content) == [ARRAYS]
        assert {array.shape for array in reply.content[ARRAYS].values()} == {(3,)}
        assert reply.content[ARRAYS].keys() <= {"before_3", "after_3"}
    dataset = load("digits", None)
    parts = divide(dataset, "iid", num_clients=3, seed=0)
    clients = split(parts, config.test_share, 0)
    row, reference = read_rows(run_of(by_hand))[0], simulated(config)[0]
    each, sizes = np.array(reference["before_clients"]), clients.test_sizes
    assert row["before"] == pytest.approx((each * sizes)[[0, 2]].sum() / sizes[[0, 2]].sum(), rel=1e-12)
    assert (row["before_by"], row["scored_among"], row["before_samples"]) == (2, 3, sizes[[0, 2]].sum())
    assert standardised(dataset, clients).num_classes == 10


@pytest.mark.slow
def test_if_nobody_agrees_clients_are_asked_once(by_hand, tools, config):
    state, grid = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    assert sum(message.metadata.message_type == "evaluate" for _, message, _ in grid.sent) == 3
    assert not any("before" in row or "scored_among" in row for row in read_rows(run_of(by_hand)))


@pytest.mark.slow
def test_few_test_samples_are_never_scored(by_hand, config):
    """One below the rule's number, and exactly that number."""
    agree(by_hand, config, [0, 1])
    sizes = [len(samples.read(by_hand.folder / "clients" / str(u) / "data").test) for u in range(2)]
    for u, least in ((0, sizes[0]), (1, sizes[1] + 1)):
        rules = ClientRules(evaluate=True, min_test_samples=least)
        (by_hand.folder / "clients" / str(u) / RULES).write_text(write_client_rules(rules))
    by_hand(config)
    row = read_rows(run_of(by_hand))[0]
    assert (row["before_by"], row["before_samples"]) == (1, sizes[0])


REGRESSION = """
import torch
import fedncv


def load():
    x = torch.linspace(-1, 1, 240).reshape(120, 2)
    return fedncv.Dataset("line", x, x.sum(1, keepdim=True), 1)
"""


@pytest.mark.slow
def test_another_score_than_accuracy_is_a_sum_too(by_hand, tools, tmp_path, monkeypatch):
    (tmp_path / "of_tests.py").write_text(REGRESSION)
    monkeypatch.syspath_prepend(tmp_path)
    config = replace(
        tools.config, data="of_tests:load", task="regression", clients=2, per_round=2, rounds=1, eval_every=1
    )
    agree(by_hand, config, range(2))
    by_hand(config)
    rows = read_rows(run_of(by_hand))
    assert rows[0]["score_name"] == "minus squared error"
    assert all(row["before"] < 0 for row in rows)


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        ([11.0, 10.0, 1.0], "11 of 10 test samples are right"),
        ([2.5, 10.0, 1.0], "2.5 of 10 test samples are right"),
        ([-1.0, 10.0, 1.0], "-1 of 10"),
        ([1.0, 0.0, 1.0], "over 0 samples"),
        ([1.0, 10.5, 1.0], "over 10.5 samples"),
        ([1.0, 101.0, 1.0], "over 101 samples"),
        ([1.0, 10.0, 2.0], "of 2 clients"),
        ([float("nan"), 10.0, 1.0], "sums are nan"),
        ([1.0, float("inf"), 1.0], "over inf samples"),
    ],
)
def test_sums_that_cannot_be_are_rejected(sums, said):
    with pytest.raises(WireError, match=said):
        check_sum(sums, 100, is_accuracy=True)


@pytest.mark.slow
def test_a_false_sum_is_left_out_of_the_row(by_hand, config, caplog):
    def spoil(u, group, message, answer):
        if u != 1 or not group.startswith("scores"):
            return [answer]
        array = Array("float64", (3,), STYPE, np.array([1e9, 1.0, 1.0]).tobytes())
        names = answer.content[ARRAYS].keys()
        return [Message(RecordDict({ARRAYS: ArrayRecord(dict.fromkeys(names, array))}), reply_to=message)]

    agree(by_hand, config, range(3))
    by_hand(config, spoil=spoil)
    assert {row["before_by"] for row in read_rows(run_of(by_hand)) if "before" in row} == {2}
    assert "1e+09 of 1 test samples are right" in caplog.text


@pytest.mark.slow
def test_a_killed_server_scores_again_and_ends_with_the_same_rows(by_hand, tools, config):
    class ServerDied(BaseException):
        pass

    died = []

    def die(u, group, _message, answer):
        if group == "scores 2" and u == 2 and not died:
            died.append(u)
            raise ServerDied
        return [answer]

    agree(by_hand, config, range(3))
    with pytest.raises(ServerDied):
        by_hand(config, spoil=die)
    state, _ = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    assert [row.get("before") for row in read_rows(run_of(by_hand))] == [row.get("before") for row in simulated(config)]


# ---- who reads them ---------------------------------------------------------------------------------------


def test_show_report_and_watch_say_who_scored(by_hand, config, capsys, tmp_path):
    agree(by_hand, config, [0, 2])
    by_hand(config)
    run = read_run(run_of(by_hand))
    assert run.scorers == "scored by 2 of 3 clients"
    assert main(["show", str(run.folder)]) == 0
    assert "scored by 2 of 3 clients" in capsys.readouterr().out
    assert main(["report", str(run.folder), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.html").read_text()
    assert "Scored by 2 of 3 clients." in text
    assert f"{100 * run.last('before'):.1f}" in text


def test_a_waiting_command_says_phase_replies_time_and_score(by_hand, config, capsys):
    agree(by_hand, config, range(3))
    by_hand(replace(config, rounds=2, after_every=0))
    folder = run_of(by_hand)
    shown = Following(folder)
    shown._seen = shown._first = -1
    with shown:
        shown.look()
    said = capsys.readouterr().err.splitlines()
    before = [f"{100 * row['before']:.1f}" for row in read_rows(folder) if "before" in row]
    assert said == [
        f"round 0 of 2: all clients have joined; accuracy before {before[0]} % (scored by 3 of 3 clients)",
        said[1],
        f"round 2 of 2: 2 of 2 clients counted; accuracy before {before[1]} % (scored by 3 of 3 clients)",
    ]
    assert said[1].startswith("round 1 of 2: 2 of 2 clients counted; about ")
    assert read_progress(folder).phase == "done"
    assert words_of_now(folder, 0.0) == ""
    for phase, words in (
        ("joining", "joining: 1 of 3 clients replied, 30 s"),
        ("training", "round 2 of 50: training, 1 of 3 clients replied, 30 s"),
    ):
        (folder / PROGRESS).write_text(json.dumps(Progress(phase, 2, 50, 3, 1, 70.0)._asdict()))
        assert words_of_now(folder, 100.0) == words
    (folder / PROGRESS).write_text("{")
    assert words_of_now(folder, 100.0) == ""

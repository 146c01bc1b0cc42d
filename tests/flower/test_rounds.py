"""What the server accepts by default, what must be equal on both sides, and the way back to an earlier round."""

import json
import logging
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fedncv.flower import checkpoints, coordinator, handshake, joining, refusals
from fedncv.flower.absences import absences
from fedncv.flower.asking import StoppedError
from fedncv.flower.foreign import quoted
from fedncv.flower.halves import Down, Up
from fedncv.flower.rules import Rules, outliers, read_rules, too_many, write_rules
from fedncv.flower.samples import FILE, read, write
from fedncv.flower.wire import ARRAYS, ASK, STYPE, WireError
from fedncv.results import read_rows

FAST = {"round_seconds": 20.0, "join_seconds": 20.0, "attempts": 2}


@pytest.fixture
def config(tools):
    return replace(tools.config, clients=3, per_round=3, rounds=3, epochs=1)


@pytest.fixture(autouse=True)
def everything_logged(caplog):
    caplog.set_level(logging.INFO, "fedncv.flower")


def run_of(by_hand, name="run"):
    return by_hand.folder / "server" / "runs" / name


def log_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "fedncv.flower"]


# ---- norms ------------------------------------------------------------------------------------------------

Field = namedtuple("Field", "delta_P")


def reply(*numbers, statistics=()):
    return Up(Field(torch.tensor(numbers)), torch.tensor(statistics))


def sent(*numbers):
    return [Down(Field(torch.tensor(numbers)), torch.tensor([]))]


def test_a_limit_is_a_multiple_of_the_median_and_never_below_what_was_sent():
    """Norms 5, 10 and 500: the median is 10, so the limit of 100 medians is 1000, and that of 49 is 490."""
    replies = {0: reply(3.0, 4.0), 1: reply(6.0, 8.0), 2: reply(300.0, 400.0)}
    assert outliers(Rules(), replies, sent(1.0)) == {}
    refused = outliers(Rules(times_median=49.0), replies, sent(1.0))
    assert refused == {2: "norm of delta_P is 500, above 49 times the round's median 10 and what was sent, 1"}
    assert outliers(Rules(times_median=49.0), replies, sent(500.0)) == {}
    assert outliers(Rules(times_median=49.0), replies, sent(300.0, 399.0)).keys() == {2}


def test_the_order_of_replies_makes_no_difference():
    replies = {0: reply(1.0), 1: reply(1e30), 2: reply(2.0), 3: reply(0.5)}
    backwards = dict(reversed(replies.items()))
    assert outliers(Rules(), replies, sent(1.0)) == outliers(Rules(), backwards, sent(1.0))
    assert outliers(Rules(), backwards, sent(1.0)).keys() == {1}


def test_of_four_replies_two_huge_ones_are_left_out():
    """The smaller of the two norms in the middle is taken."""
    replies = {0: reply(1.0), 1: reply(1e30), 2: reply(1e30), 3: reply(2.0)}
    assert outliers(Rules(), replies, sent(1.0)).keys() == {1, 2}


@pytest.mark.parametrize("others", [0, 1])
def test_one_or_two_replies_have_a_ceiling_only(others):
    """A million times what was sent, 3: whoever is alone may be honest at a thousand."""
    replies = {u: reply(1.0) for u in range(others)}
    assert outliers(Rules(), replies | {7: reply(2.9e6)}, sent(3.0)) == {}
    assert outliers(Rules(), replies | {7: reply(3.1e6)}, sent(3.0)).keys() == {7}
    assert outliers(Rules(), replies | {7: reply(1e30)}, sent(3.0)).keys() == {7}


def test_a_median_of_zero_leaves_replies_up_to_what_was_sent():
    """Clients that have nothing to report do not shut out the one that has."""
    zeros = {0: reply(0.0), 1: reply(0.0)}
    assert outliers(Rules(), zeros | {2: reply(0.9)}, sent(0.0)) == {}
    assert outliers(Rules(), zeros | {2: reply(4.0)}, sent(5.0)) == {}
    assert outliers(Rules(), zeros | {2: reply(6.0)}, sent(5.0)).keys() == {2}


def test_a_majority_of_huge_replies_is_left_out_by_the_ceiling():
    replies = {0: reply(1.0), 1: reply(1e30), 2: reply(1e30)}
    assert outliers(Rules(), replies, sent(1.0)).keys() == {1, 2}


def test_every_field_is_compared_and_a_limit_in_norms_takes_its_place():
    replies = {u: reply(1.0, statistics=(1.0,)) for u in range(2)}
    replies |= {2: reply(1e5, statistics=(1.0,)), 3: reply(1.0, statistics=(1e5,))}
    assert outliers(Rules(), replies, sent(1.0)).keys() == {2, 3}
    assert outliers(Rules(norms={"delta_P": 1e9}), replies, sent(1.0)).keys() == {3}
    assert outliers(Rules(norms={"buffers_R": 1e9}), replies, sent(1.0)).keys() == {2}


def test_numbers_whose_squares_overflow_are_left_out():
    """3e38 is finite in float32, and 1e300 in float64; the norm of many of them is not."""
    huge = Up(Field(torch.full((4,), 1e308, dtype=torch.float64)), torch.tensor([]))
    assert outliers(Rules(), {0: reply(1.0), 1: reply(1.0), 2: huge}, sent(1.0)).keys() == {2}
    assert outliers(Rules(), {2: huge}, sent(1.0)).keys() == {2}


def with_delta(change, *, clients, rounds=("2",)):
    """Clients multiply or replace their update in some rounds."""

    def spoil(u, group, message, answer):
        if u not in clients or group not in rounds:
            return [answer]
        record = dict(answer.content[ARRAYS].items())
        path = next(path for path in record if path.endswith(".delta_P"))
        array = record[path]
        values = change(np.frombuffer(array.data, dtype=np.float32)).astype(np.float32)
        record[path] = Array("float32", values.shape, STYPE, values.tobytes())
        return [Message(RecordDict({ARRAYS: ArrayRecord(record)}), reply_to=message)]

    return spoil


SLOW = pytest.mark.slow


@pytest.mark.parametrize("value", [1e30, pytest.param(3e38, marks=SLOW), pytest.param(-1e30, marks=SLOW)])
def test_a_huge_finite_reply_never_reaches_the_model(value, by_hand, tools, config, caplog):
    """It used to be counted, and every honest reply after it was NaN."""
    state, _ = by_hand(config, spoil=with_delta(lambda v: np.full_like(v, value), clients=[1]))
    assert tools.compare(state, tools.sequential(config, absent={2: [1]})) == "equal"
    line = read_rows(run_of(by_hand))[2]
    assert line["counted"] == [0, 2]
    assert "norm of delta_P is " in line["refused"]["1"]
    assert sum("reply of client 1 rejected: norm of delta_P" in said for said in log_of(caplog)) == 1
    assert log_of(caplog)[0].startswith("rules: a reply is left out if a field's norm is above 100 times the round's")


def test_a_cohort_of_one_is_held_to_the_ceiling(by_hand, config):
    config = replace(config, per_round=1, rounds=1)
    with pytest.raises(StoppedError, match=r"norm of delta_P is .*, above 1e\+06 times the norm of what was sent"):
        by_hand(config, spoil=with_delta(lambda v: np.full_like(v, 1e30), clients=[0, 1, 2], rounds=("1",)))


def test_an_honest_client_with_twenty_times_the_steps_is_counted(by_hand, tools, config):
    """Its update is far longer than the others', and far from a hundred times."""
    config = replace(config, method="fedavg", rounds=1)
    state, _ = by_hand(config, spoil=with_delta(lambda v: 20 * v, clients=[2], rounds=("1",)))
    assert read_rows(run_of(by_hand))[1]["counted"] == [0, 1, 2]
    assert state.round == 1


# ---- sample counts ----------------------------------------------------------------------------------------


def claims(counts):
    """Clients that report other numbers of samples than they have."""

    def spoil(u, group, message, answer):
        if group != "joining" or u not in counts:
            return [answer]
        found = {"samples": counts[u], "data": answer.content[ASK]["data"]}
        return [Message(RecordDict({ASK: ConfigRecord(found)}), reply_to=message)]

    return spoil


def test_a_count_is_compared_with_the_median_of_all():
    assert too_many(Rules(), {0: 200, 1: 200, 2: 200_000}) == {}
    refused = too_many(Rules(), {0: 200, 1: 200, 2: 200_001})
    assert refused.keys() == {2}
    assert "it reports 200001 samples, above 1000 times the median of all, 200" in refused[2]
    assert too_many(Rules(), {0: 200, 1: 9_999_999}).keys() == {1}
    assert too_many(Rules(), {0: 9_999_999}) == {}
    assert too_many(Rules(samples_times_median=2.0), {0: 1, 1: 2, 2: 4, 3: 4}) == {}
    assert too_many(Rules(samples_times_median=1.9), {0: 1, 1: 2, 2: 4, 3: 4}).keys() == {2, 3}


def test_an_absurd_claim_bars_the_client_and_the_others_train(by_hand, tools, config):
    state, grid = by_hand(config, spoil=claims({1: 9_999_999}))
    assert state.round == config.rounds
    barred = read_rows(run_of(by_hand))[0]["barred"]
    assert list(barred) == ["1"]
    assert "9999999" in barred["1"]
    assert not [u for u, message, _ in grid.sent if message.metadata.message_type == "train" and u == 1]


def test_a_known_size_holds_a_client_to_it(by_hand, config):
    by_hand(replace(config, rounds=0), name="first")
    size = json.loads((run_of(by_hand, "first") / "joined.json").read_text())["sizes"]["1"]
    by_hand(config, rules=Rules(**FAST, sizes={"1": size}), name="fits")
    assert "barred" not in read_rows(run_of(by_hand, "fits"))[0]
    by_hand(config, rules=Rules(**FAST, sizes={"1": size + 1}), name="other")
    barred = read_rows(run_of(by_hand, "other"))[0]["barred"]
    assert barred == {"1": f"it reports {size} samples, and sizes in rules.toml says {size + 1}"}


def test_a_client_whose_count_is_no_longer_what_the_server_holds_refuses(by_hand, config):
    """Another count than at joining, under the same mark."""
    by_hand(config, spoil=claims({1: 17}))
    for line in read_rows(run_of(by_hand))[1:]:
        assert line["counted"] == [0, 2]
        assert 'number of training samples is not the one that the server holds (it says "' in line["refused"]["1"]


# ---- enough replies ---------------------------------------------------------------------------------------


def test_by_default_more_than_half_of_the_clients_must_reply():
    assert [Rules().least(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]
    assert Rules(min_replies=1).least(5) == 1


def silent(*clients):
    return lambda u, group, _message, answer: [] if u in clients and group != "joining" else [answer]


def test_a_run_with_one_client_of_three_stops(by_hand, config):
    rules = Rules(round_seconds=0.1, join_seconds=20.0, attempts=1)
    with pytest.raises(StoppedError, match=r"round 1 has 1 replies of 3 clients .* fewer than min_replies = 2"):
        by_hand(config, spoil=silent(1, 2), rules=rules)
    state, _ = by_hand(config, spoil=silent(1, 2), rules=replace(rules, min_replies=1))
    assert state.round == config.rounds


def test_clients_that_are_left_out_are_neither_asked_nor_waited_for(by_hand, tools, config):
    """Also from the middle of a run on; then they do not count as the round's clients."""
    rules = Rules(round_seconds=0.1, join_seconds=20.0, attempts=1)
    with pytest.raises(StoppedError):
        by_hand(config, spoil=silent(1, 2), rules=rules)
    state, grid = by_hand(config, rules=replace(rules, leave_out=[1, 2], round_seconds=20.0))
    assert tools.compare(state, tools.sequential(config, absent={t: [1, 2] for t in (1, 2, 3)})) == "equal"
    assert {u for u, _, _ in grid.sent} == {0}
    by_hand(config, rules=Rules(**FAST, leave_out=[0]), name="start")
    rows = read_rows(run_of(by_hand, "start"))
    assert rows[0]["barred"] == {"0": "leave_out in rules.toml names it"}
    assert rows[0]["sizes"][0] == 0
    assert rows[3]["counted"] == [1, 2]


def test_the_end_of_a_run_says_who_was_not_counted():
    rows = [
        {"round": 0, "barred": {"4": "it reports 0 samples"}},
        {"round": 1, "counted": [0, 1], "absent": [2, 4]},
        {"round": 2, "counted": [0], "absent": [2], "refused": {"1": "not finite"}},
        {"round": 3, "counted": [0, 1, 2]},
        {"round": 4, "counted": [0, 1], "absent": [2]},
    ]
    assert absences(rows) == [
        "client 1 was not counted in 1 of 4 rounds: refused in 2 (not finite)",
        "client 2 was not counted in 3 of 4 rounds: absent in 1-2, 4",
        "client 4 was excluded from the run: it reports 0 samples",
    ]
    assert absences([rows[3]]) == []


def test_the_exit_code_says_whether_every_client_was_counted(by_hand, config, monkeypatch, capsys):
    from fedncv.cli import main

    by_hand(config, name="all")
    by_hand(config, name="some", spoil=with_delta(lambda v: np.full_like(v, 1e30), clients=[1]))
    monkeypatch.setattr("fedncv.cli.federation.resume.check_server", lambda _folder: None)
    assert main(["federation", "resume", str(by_hand.folder), "--name", "all"]) == 0
    assert "client" not in capsys.readouterr().out
    assert main(["federation", "resume", str(by_hand.folder), "--name", "some"]) == 3
    assert "client 1 was not counted in 1 of 3 rounds: refused in 2 (norm of delta_P" in capsys.readouterr().out


# ---- what must be equal on both sides ---------------------------------------------------------------------


def other(monkeypatch, **values):
    """The clients have other values than the server, from now on; returns what undoes it."""
    real = handshake.check
    monkeypatch.setattr(
        handshake, "check", lambda theirs, ours: real(theirs, {n: values.get(n, v) for n, v in ours.items()})
    )


@pytest.mark.parametrize("name", ["fedncv", "source", "method", "code", "settings"])
def test_a_client_with_something_else_refuses_to_join_by_name(name, by_hand, config, monkeypatch, caplog):
    other(monkeypatch, **{name: "9.9\n9"})
    rules = Rules(round_seconds=1.0, join_seconds=1.0)
    with pytest.raises(StoppedError) as stopped:
        by_hand(config, rules=rules)
    words, remedy = refusals.REASONS[name]
    assert f'client 2: {words} (it says "9.9\\n9")' in str(stopped.value)
    assert sum(remedy in said for said in log_of(caplog)) == 3


def test_another_version_in_mid_run_is_refused_and_said_once(by_hand, tools, config, monkeypatch, caplog):
    """Client 1's machine gets another version after round 1, and the old one back for round 4."""
    config = replace(config, rounds=5)
    real = handshake.check
    asked = []

    def check(theirs, ours):
        if asked and asked[-1] in ("2", "3"):
            ours = ours | {"fedncv": "9.9"}
        real(theirs, ours)

    hand_made = by_hand.__globals__["HandMade"]
    send = hand_made.push_messages

    def push_messages(self, messages):
        messages = list(messages)
        asked.append(messages[0].metadata.group_id if messages[0].metadata.dst_node_id == 1001 else "")
        return send(self, messages)

    monkeypatch.setattr(hand_made, "push_messages", push_messages)
    monkeypatch.setattr(handshake, "check", check)
    state, _ = by_hand(config)
    assert tools.compare(state, tools.sequential(config, absent={2: [1], 3: [1]})) == "equal"
    said = log_of(caplog)
    (line,) = [each for each in said if "another version of fedncv" in each]
    assert line.startswith('2: client 1: it runs another version of fedncv than the server (it says "9.9")')
    assert "install the same fedncv on both machines" in line
    assert "4: client 1 takes part again" in said


def test_a_server_of_another_version_resumes_only_when_the_operator_accepts_it(by_hand, tools, config, monkeypatch):
    class ServerDied(BaseException):
        pass

    def die(_u, group, _message, answer):
        if group == "2":
            raise ServerDied
        return [answer]

    with pytest.raises(ServerDied):
        by_hand(config, spoil=die)
    monkeypatch.setattr(handshake, "installed", lambda: {"fedncv": "9.9", "source": "abcdef"})
    with pytest.raises(ValueError, match=r"begun with another version of fedncv \(.*, now 9.9\).*--accept-version"):
        by_hand(config)
    joining.accept_version(run_of(by_hand))
    assert tools.compare(by_hand(config)[0], tools.sequential(config)) == "equal"


def test_another_method_than_the_run_s_is_never_accepted(tmp_path):
    ours = {"fedncv": "1", "source": "a", "method": "fedavg:server_lr=1.0", "code": "", "settings": "s", "secure": ""}
    handshake.compare(ours, dict(ours), "run")
    with pytest.raises(ValueError, match=r"begun with another method .*fedavg:server_lr=1\.0, now x") as refused:
        handshake.compare(ours, ours | {"method": "x"}, "run")
    assert "--accept-version" not in str(refused.value)


def test_another_data_file_in_mid_run_is_refused_and_the_old_one_taken_again(by_hand, tools, config, caplog):
    config = replace(config, rounds=4)
    place = {}

    def spoil(u, group, _message, answer):
        data = by_hand.folder / "clients" / "1" / "data"
        if (u, group) == (2, "1"):
            place["before"] = (data / FILE).read_bytes()
            samples = read(data)
            changed = samples.dataset._replace(y=samples.dataset.y.roll(1))
            write(data, samples._replace(dataset=changed))
        if (u, group) == (2, "3"):
            (data / FILE).write_bytes(place["before"])
        return [answer]

    state, _ = by_hand(config, spoil=spoil)
    assert tools.compare(state, tools.sequential(config, absent={2: [1], 3: [1]})) == "equal"
    assert "data file" in read_rows(run_of(by_hand))[2]["refused"]["1"]
    (line,) = [said for said in log_of(caplog) if "data file" in said]
    assert "leave it out (leave_out = [1] in the server's rules.toml, then resume)" in line


def test_the_mark_of_data_says_nothing_beyond_this_client_and_run(tmp_path):
    """Equal files: other marks at another client and in another run, the same again at the same one."""
    marks = []
    for name in ("a", "b"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / FILE).write_bytes(b"tiny")
        marks += [handshake.data_mark(tmp_path / name, run) for run in ("first", "second")]
    assert len(set(marks)) == 4
    assert handshake.data_mark(tmp_path / "a", "first") == marks[0]
    assert all(map(handshake.is_mark, marks))
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "a" / "data" / FILE).write_bytes(b"tinier")
    assert handshake.data_mark(tmp_path / "a", "first") != marks[0]
    (tmp_path / "a" / "secret").write_bytes(b"cut")
    with pytest.raises(refusals.RefusedError, match="must have 32 bytes, not 3"):
        handshake.data_mark(tmp_path / "a", "first")


# ---- foreign text -----------------------------------------------------------------------------------------

FORGED = "ok\nround 99 of 99: counted [0, 1, 2]\n\x1b[2J\u202e" + "A" * 5000


def test_foreign_text_is_one_short_line_in_quotes():
    said = quoted(FORGED)
    assert said.startswith('"ok\\nround 99 of 99: counted [0, 1, 2]\\n\\x1b[2J\\u202eAAA')
    assert said.endswith('" (and 4882 more characters)')
    assert said.isprintable()
    assert quoted('say "yes" \\ Grüße') == '"say \\"yes\\" \\\\ Grüße"'
    assert quoted("\udc80") == '"\\udc80"'


def test_an_error_s_text_is_marked_as_the_client_s_in_the_log(by_hand, config, caplog):
    def spoil(u, group, message, answer):
        return [Message(Error(0, FORGED), reply_to=message)] if (u, group) == (1, "2") else [answer]

    by_hand(config, spoil=spoil)
    lines = [said for said in log_of(caplog) if "99 of 99" in said]
    assert len(lines) == 1
    assert lines[0].startswith('2: client 1: failed; it says "ok\\nround 99')
    assert len(lines[0]) < 300
    assert all(said.isprintable() for said in log_of(caplog))


FORGING = [
    {"refusal": ConfigRecord({"code": FORGED, "said": ""})},
    {"refusal": ConfigRecord({"code": "data", "said": FORGED})},
    {"refusal": ConfigRecord({"code": "data"})},
    {"refusal": ConfigRecord({"code": "data", "said": ""}), ARRAYS: ArrayRecord()},
    {FORGED: ConfigRecord()},
    {ARRAYS: ArrayRecord({FORGED: Array("float32", (1,), STYPE, b"1234")})},
    {ARRAYS: ConfigRecord()},
]


def test_names_and_values_in_a_reply_cannot_forge_a_line(by_hand, config, caplog):
    """Another one in every round."""

    def spoil(u, group, message, answer):
        if u != 1 or group == "joining":
            return [answer]
        return [Message(RecordDict(FORGING[int(group) - 1]), reply_to=message)]

    by_hand(replace(config, rounds=len(FORGING)), spoil=spoil)
    rows = read_rows(run_of(by_hand))[1:]
    assert len(rows) == len(FORGING)
    for line in rows:
        assert line["refused"]["1"].isprintable()
        assert len(line["refused"]["1"]) < 600
    assert all(said.isprintable() and len(said) < 1000 for said in log_of(caplog))


@SLOW
def test_types_and_shapes_in_a_reply_cannot_forge_a_line(by_hand, config, caplog):
    def spoil(u, group, message, answer):
        if (u, group) != (1, "2"):
            return [answer]
        record = dict(answer.content[ARRAYS].items())
        record["up.delta_P"] = Array(FORGED, (1,) * 1000, FORGED, b"")
        return [Message(RecordDict({ARRAYS: ArrayRecord(record)}), reply_to=message)]

    by_hand(config, spoil=spoil)
    (why,) = read_rows(run_of(by_hand))[2]["refused"].values()
    assert why.isprintable()
    assert len(why) < 600


def test_a_client_s_own_errors_cross_as_codes_without_text_or_path(by_hand, config):
    """Its folder of states is a file: the text of the error names it, the reply does not."""
    answers = []

    def spoil(u, group, _message, answer):
        if (u, group) == (2, "1"):
            folder = by_hand.folder / "clients" / "1" / "runs" / "run"
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
            folder.write_text("")
        if (u, group) == (1, "2"):
            answers.append(answer)
        return [answer]

    by_hand(config, spoil=spoil)
    assert [dict(answer.content["refusal"]) for answer in answers] == [{"code": "disk", "said": "ENOTDIR"}] * 2


# ---- a client's old disk, and the way back ------------------------------------------------------------------


def test_a_client_set_back_to_an_old_copy_is_said_once_with_what_to_do(by_hand, tools, config, caplog):
    config = replace(config, rounds=5)
    folder = by_hand.folder / "clients" / "1" / "runs" / "run"
    saved = {}

    def spoil(u, group, _message, answer):
        if (u, group) == (2, "1"):
            saved.update({path.name: path.read_bytes() for path in folder.iterdir()})
        if (u, group) == (2, "3"):
            for path in folder.iterdir():
                path.unlink()
            for name, data in saved.items():
                (folder / name).write_bytes(data)
        return [answer]

    state, _ = by_hand(config, spoil=spoil)
    assert tools.compare(state, tools.sequential(config, absent={4: [1], 5: [1]})) == "equal"
    (line,) = [said for said in log_of(caplog) if "client 1" in said]
    assert 'set back to an old one (it says "it has states of 1")' in line
    for remedy in ("restore its folder", "leave_out = [1]", "--from-round N", "start a new run"):
        assert remedy in line


def test_a_method_without_memory_at_its_clients_loses_nothing_with_their_disks(by_hand, tools, config):
    config = replace(config, method="fedavg")

    def spoil(u, group, _message, answer):
        if (u, group) == (2, "2"):
            for path in (by_hand.folder / "clients" / "1" / "runs" / "run").iterdir():
                path.unlink()
        return [answer]

    state, _ = by_hand(config, spoil=spoil)
    assert tools.compare(state, tools.sequential(config)) == "equal"


def files(by_hand, u, name="run"):
    folder = by_hand.folder / "clients" / str(u) / "runs" / name
    return sorted(int(path.stem[6:]) for path in folder.glob("round-*"))


@pytest.mark.parametrize("method", ["scaffold", *(pytest.param(name, marks=SLOW) for name in ("fedncv", "fedper"))])
def test_a_run_rolled_back_ends_as_one_that_never_had_the_dropped_rounds(method, by_hand, tools, config):
    """A poisoned run of five rounds goes back to round 3; clients with memory of theirs go back with it."""
    config = replace(config, method=method, rounds=5, per_round=2)
    spoil = with_delta(lambda v: 5 * v, clients=[0, 1, 2], rounds=("4", "5"))
    if method == "fedper":
        spoil = None
    state, _ = by_hand(config, spoil=spoil)
    assert checkpoints.rounds(run_of(by_hand)) == [3, 4, 5]
    rows = read_rows(run_of(by_hand))
    coordinator.roll_back(by_hand.folder, "run", to=3)
    assert checkpoints.rounds(run_of(by_hand)) == [3]
    assert read_rows(run_of(by_hand)) == rows[:4]
    state, _ = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"
    assert json.loads((run_of(by_hand) / "rollbacks.json").read_text()) == [[5, 3]]
    assert checkpoints.rounds(run_of(by_hand)) == [3, 4, 5]
    coordinator.roll_back(by_hand.folder, "run", to=4)
    coordinator.roll_back(by_hand.folder, "run", to=3)
    state, _ = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"


@SLOW
def test_a_run_with_its_rows_on_disk_is_rolled_back_before_it_is_resumed(by_hand, tools, config):
    config = replace(config, method="fedncv", rounds=4, rows="disk")
    by_hand(config)
    coordinator.roll_back(by_hand.folder, "run", to=2)
    state, _ = by_hand(config)
    assert tools.compare(state, tools.sequential(config)) == "equal"


def test_clients_keep_what_the_checkpoints_need_and_no_more(by_hand, config):
    """Checkpoints of rounds 2, 3, 4 at the last request (round 5): a client keeps those that it was counted in."""
    by_hand(replace(config, rounds=5), rules=Rules(**FAST, checkpoints=3))
    assert [files(by_hand, u) for u in range(3)] == [[2, 3, 4, 5]] * 3
    by_hand(config, rules=Rules(**FAST, checkpoints=1), name="one")
    assert [files(by_hand, u, "one") for u in range(3)] == [[2, 3]] * 3


def test_going_back_further_than_the_checkpoints_is_refused(by_hand, config):
    by_hand(config, rules=Rules(**FAST, checkpoints=2))
    for to in (0, 1, 4, 99):
        with pytest.raises(ValueError, match=f"no checkpoint of round {to}; it has those of rounds 2, 3"):
            coordinator.roll_back(by_hand.folder, "run", to=to)
    assert len(read_rows(run_of(by_hand))) == 4
    with pytest.raises(ValueError, match="there is no run 'other'"):
        coordinator.roll_back(by_hand.folder, "other", to=1)


def test_a_server_that_forgot_a_rollback_is_refused_by_its_clients(by_hand, config):
    """Its disk was set back to an old copy: the clients know of a roll-back that it does not know of."""
    by_hand(config)
    coordinator.roll_back(by_hand.folder, "run", to=1)
    by_hand(config)
    (run_of(by_hand) / "rollbacks.json").unlink()
    state = (checkpoints.path_of(run_of(by_hand), 2)).read_bytes()
    (run_of(by_hand) / "state.safetensors").write_bytes(state)
    with pytest.raises(StoppedError, match="the server's folder was set back to an old copy"):
        by_hand(config)


def test_a_run_that_is_being_served_is_not_rolled_back(by_hand, config):
    from fedncv.flower.serving import only_one

    by_hand(config)
    with only_one(run_of(by_hand)), pytest.raises(ValueError, match="another process serves"):
        coordinator.roll_back(by_hand.folder, "run", to=2)


# ---- rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("times_median = 0.5", "times_median must be at least 1, not 0.5"),
        ("times_median = nan", "times_median must be at least 1, not nan"),
        ('times_median = "100"', "times_median must be at least 1, not '100'"),
        ('round_seconds = "10"', "round_seconds must be above 0 and finite, not '10'"),
        ("samples_times_median = true", "samples_times_median must be at least 1, not True"),
        ("min_replies = -1", "min_replies must be a whole number of at least 0, not -1"),
        ("checkpoints = 0", "checkpoints must be a whole number of at least 1, not 0"),
        ("leave_out = 2", "leave_out must be a list of clients, as in [2], not 2"),
        ("leave_out = [7]", "names client 7, but the clients are 0 to 2"),
        ("[sizes]\n9 = 10", "names client 9, but the clients are 0 to 2"),
        ("[sizes]\n1 = 0", "sizes.1 must give a client's samples"),
        ("norms = 3.0", "norms must be a table, as in [norms], not 3.0"),
        ("[norms]\ndelta_P = nan", "norms.delta_P must be above 0, not nan"),
        ("[norms]\ndelta_Q = 1.0", "delta_Q"),
    ],
)
def test_a_mistake_in_the_rules_gets_its_name_and_value(text, said, tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"rules\.toml") as refused:
        read_rules(path, reveals=("delta_P",), clients=3)
    assert said in str(refused.value)


def test_written_rules_are_read_again_and_offer_the_known_sizes(tmp_path):
    path = tmp_path / "rules.toml"
    rules = Rules(leave_out=[1], norms={"buffers_R": 2.5}, min_replies=2, times_median=float("inf"))
    path.write_text(write_rules(rules, sizes={0: 1200, 1: 300}))
    assert read_rules(path, reveals=("delta_P",), clients=2) == rules
    assert "# 0 = 1200\n# 1 = 300\n" in path.read_text()
    path.write_text(path.read_text().replace("# 0 = 1200", "0 = 1200"))
    assert read_rules(path, clients=2).sizes == {"0": 1200}


@pytest.mark.parametrize(
    ("said", "shown"), [("ENOSPC", "(No space left on device)"), ("__doc__", '(it says "__doc__")'), ("", "a file")]
)
def test_a_file_error_is_shown_by_its_errno_and_nothing_else_is_looked_up(said, shown):
    class Answer:
        content = RecordDict({"refusal": ConfigRecord({"code": "disk", "said": said})})

    assert refusals.read(Answer, 0).words.endswith(shown)


def test_a_refusal_in_another_form_is_rejected():
    class Answer:
        content = RecordDict({"refusal": ConfigRecord({"code": "failed", "said": "", "more": 1})})

    with pytest.raises(WireError, match="in a form that is not known"):
        refusals.read(Answer, 0)

"""The audit log: every change is found and named, kills leave it whole, and it says what crossed."""

import contextlib
import json
import multiprocessing
import os
import signal
from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from fedncv.cli import main
from fedncv.flower import audit, refusals
from fedncv.flower.asking import StoppedError
from fedncv.flower.audit import AUDIT, append, check, verify
from fedncv.flower.wire import ARRAYS
from fedncv.results import read_rows


@pytest.fixture
def log(tmp_path):
    """A log of five lines."""
    path = tmp_path / AUDIT
    for i in range(5):
        append(path, "sent", client=i, fields={"up.delta_P": {"bytes": 4, "norm": 0.1 + i}})
    return path


def edited(path, number, change):
    """Change one line, counted from 1."""
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = change(lines[number - 1])
    path.write_bytes(b"\n".join(lines))


def test_a_log_that_nobody_changed_is_whole(log):
    found = verify(log)
    assert (found.lines, found.torn) == (5, 0)
    assert found.head == json.loads(log.read_text().splitlines()[-1])["hash"]
    assert audit.head_of(log) == found.head
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_changed_line_is_named(log, number):
    edited(log, number, lambda line: line.replace(b'"bytes": 4', b'"bytes": 5'))
    with pytest.raises(ValueError, match=rf"audit\.jsonl, line {number}, was changed or is damaged: its hash"):
        verify(log)


def test_every_single_byte_counts(log):
    whole = log.read_bytes()
    for place in range(0, len(whole), 41):
        log.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=rf"line {whole[:place].count(10) + 1}, "):
            verify(log)


def test_a_line_that_was_changed_and_given_a_new_hash_breaks_the_chain_after_it(log):
    def change(text):
        line = json.loads(text) | {"client": 7}
        return json.dumps(line | {"hash": audit._hash(line)}).encode()

    edited(log, 2, change)
    with pytest.raises(ValueError, match="line 3, does not follow the line before it"):
        verify(log)


def test_a_line_taken_out_put_in_or_moved_is_named(log):
    a, b, c, d, e = log.read_bytes().splitlines(keepends=True)
    for lines, said in (
        ([a, b, d, e], "line 3, has number 4 and follows number 2: lines between them were taken out"),
        ([a, b, c, c, d, e], "line 4, has number 3 and follows number 3: it was put in, or moved"),
        ([b, a, c, d, e], "line 1, has number 2 and follows number 0"),
    ):
        log.write_bytes(b"".join(lines))
        with pytest.raises(ValueError, match=said):
            verify(log)


def test_a_cut_end_is_found_by_the_heads_that_runs_note(log, tmp_path):
    """The chain of what is left fits itself."""
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    heads = [json.loads(line)["hash"] for line in log.read_text().splitlines()]
    (run / "timing.jsonl").write_text("".join(json.dumps({"round": i, "audit": h}) + "\n" for i, h in enumerate(heads)))
    assert check(tmp_path)[1] == 5
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    assert verify(log).lines == 3
    with pytest.raises(
        ValueError, match=r"ends with number 3, and lacks .*timing.jsonl notes in round 3: its end was cut"
    ):
        check(tmp_path)
    log.unlink()
    with pytest.raises(ValueError, match=r"there is no .*audit.jsonl, and .*timing.jsonl notes its lines"):
        check(tmp_path)


def test_a_log_that_was_renamed_is_counted_for_what_runs_note(log, tmp_path):
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "history.jsonl").write_text(json.dumps({"round": 1, "audit": verify(log).head}) + "\n")
    log.rename(tmp_path / "audit-old.jsonl")
    append(log, "sent")
    assert check(tmp_path)[1] == 1
    (tmp_path / "audit-old.jsonl").unlink()
    with pytest.raises(ValueError, match="its end was cut"):
        check(tmp_path)


def test_a_head_that_was_noted_must_still_be_there(log, tmp_path):
    head = verify(log).head
    append(log, "sent")
    assert check(tmp_path, head=head[:16])[0].lines == 6
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:4]))
    with pytest.raises(ValueError, match=f"has no line with hash {head[:16]}: its end was cut"):
        check(tmp_path, head=head[:16])


@pytest.mark.parametrize("left", [1, 20, -2])
def test_the_beginning_of_a_line_stays_and_is_explained(log, left):
    """As a kill, or a power cut, in the middle of a write leaves it."""
    whole = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(whole[:-1]) + whole[-1][:left])
    assert (verify(log).lines, verify(log).torn) == (4, 1)
    append(log, "sent", client=9)
    found = verify(log)
    assert (found.lines, found.torn) == (6, 1)
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()[-2:]] == ["torn", "sent"]
    edited(log, 5, lambda line: line + b"x")
    with pytest.raises(ValueError, match="line 5, was changed"):
        verify(log)


def test_a_line_that_lacks_only_its_end_is_whole(log):
    log.write_bytes(log.read_bytes()[:-1])
    assert (verify(log).lines, verify(log).torn) == (5, 0)
    append(log, "sent")
    assert (verify(log).lines, verify(log).torn) == (6, 0)


def test_nothing_is_appended_to_a_log_whose_end_was_changed(log):
    edited(log, 5, lambda line: line.replace(b"sent", b"none"))
    before = log.read_bytes()
    with pytest.raises(ValueError, match="its last whole line was changed or is damaged"):
        append(log, "sent")
    assert log.read_bytes() == before


def test_a_full_disk_leaves_no_part_of_a_line(log, monkeypatch):
    before, write = log.read_bytes(), os.write
    monkeypatch.setattr(audit.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        append(log, "sent")
    monkeypatch.undo()
    assert os.write is write
    assert log.read_bytes() == before


def _write_for_ever(path):
    for i in range(10**9):
        append(path, "sent", client=i, text="x" * 500)


def test_processes_take_turns_and_kills_leave_the_log_whole(tmp_path):
    path, context = tmp_path / AUDIT, multiprocessing.get_context("fork")
    for _ in range(2):
        writers = [context.Process(target=_write_for_ever, args=(path,)) for _ in range(2)]
        for each in writers:
            each.start()
        while not path.exists() or path.stat().st_size < 20_000:
            pass
        for each in writers:
            os.kill(each.pid, signal.SIGKILL)
            each.join()
        path_size = verify(path)
        assert path_size.lines > 10
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)  # what a power cut may leave


# ---- a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tools):
    return replace(tools.config, method="fedavg", clients=2, per_round=2, rounds=2)


def lines_of(part):
    return [json.loads(line) for line in (part / AUDIT).read_text().splitlines()]


def test_both_sides_say_what_crossed_and_the_command_verifies_them(by_hand, config, capsys):
    """Sizes and norms of the fields, whom a round counted, and who refused: a client whose data file was changed."""

    def spoil(u, group, _message, answer):
        if (u, group) == (0, "1"):
            (by_hand.folder / "clients" / "1" / "secret").write_bytes(b"x" * 32)
        return [answer]

    with contextlib.suppress(StoppedError):
        by_hand(config, spoil=spoil)
    server = by_hand.folder / "server"
    said = lines_of(server)
    assert said[0]["event"] == "begun"
    assert said[0]["code"].keys() == {"fedncv", "source"}
    assert {len(key) for key in said[0]["clients"].values()} == {16}
    about = {(line["event"], line.get("client"), line.get("kind")): line for line in reversed(said)}
    sent, got = about["sent", 0, "training"], about["received", 0, "training"]
    assert sent["fields"]["ask.round"] == 1
    assert sent["fields"]["arrays.down.x_P"]["bytes"] == got["fields"]["arrays.up.delta_P"]["bytes"]
    assert got["fields"]["arrays.up.delta_P"]["norm"] > 0
    refused = next(line for line in said if line.get("refused"))
    assert (refused["client"], refused["refused"]["code"]) == (1, "data")

    mine = lines_of(by_hand.folder / "clients" / "1")
    assert [line["event"] for line in mine] == ["asked", "answered"] * 2
    assert mine[-1]["refused"]["code"] == "data"
    assert "is not the one with which the client joined" in mine[-1]["why"]
    theirs = lines_of(by_hand.folder / "clients" / "0")
    assert theirs[3]["fields"] == got["fields"]  # what left is what arrived

    assert main(["federation", "audit", str(by_hand.folder)]) == 0
    out = capsys.readouterr().out
    assert out.count(": whole, ") == 3
    assert f"head {said[-1]['hash']}" in out
    edited(by_hand.folder / "clients" / "1" / AUDIT, 2, lambda line: line.replace(b"joining", b"training"))
    assert main(["federation", "audit", str(by_hand.folder)]) == 2
    out, error = capsys.readouterr()
    assert "clients/1/audit.jsonl, line 2, was changed" in error
    assert error.count("\n") == 1
    assert out.count(": whole, ") == 2
    assert main(["federation", "audit", str(server), "--head", said[0]["hash"]]) == 0


def test_the_server_notes_a_head_in_every_round_and_a_client_in_its_history(by_hand, config):
    by_hand(config)
    assert len(audit.anchors(by_hand.folder / "server")) == 3
    assert len(audit.anchors(by_hand.folder / "clients" / "0")) == 2
    rows = read_rows(by_hand.folder / "server" / "runs" / "run")
    assert not any("audit" in row for row in rows)  # equal runs have equal rows
    path = by_hand.folder / "server" / AUDIT
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # nothing more than the line of the last round
    with pytest.raises(ValueError, match=r"notes in round 2: its end was cut"):
        check(by_hand.folder / "server")


@pytest.mark.slow
def test_a_client_whose_log_was_changed_refuses_before_it_trains(by_hand, tools, config, caplog):
    def spoil(u, group, _message, answer):
        if (u, group) == (1, "1"):
            edited(by_hand.folder / "clients" / "1" / AUDIT, 4, lambda line: line.replace(b"training", b"trainers"))
        return [answer]

    config = replace(config, clients=3, per_round=3)
    state, grid = by_hand(config, spoil=spoil)
    assert tools.compare(state, tools.sequential(config, absent={2: [1]})) == "equal"
    assert refusals.REASONS["audit"][0] in read_rows(by_hand.folder / "server" / "runs" / "run")[2]["refused"]["1"]
    assert sum(ARRAYS in reply.content for u, _, reply in grid.sent if u == 1) == 1


@pytest.mark.slow
def test_a_hostile_reply_makes_one_short_line(by_hand, config):
    """Thousands of fields, names of a page, bytes that are no numbers."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

    def spoil(u, group, message, answer):
        if (u, group) != (1, "1"):
            return [answer]
        bad = ArrayRecord({f"{i}\n" * 500: Array("float32", (1,), "x", b"abc") for i in range(200)})
        return [Message(RecordDict({"arrays": bad, "\x1b[2J": ConfigRecord({"a": [1.0] * 5000})}), reply_to=message)]

    by_hand(replace(config, clients=3, per_round=3, rounds=1), spoil=spoil)
    path = by_hand.folder / "server" / AUDIT
    assert max(map(len, path.read_text().splitlines())) < 20_000
    assert path.read_text().isascii()
    assert verify(path).torn == 0

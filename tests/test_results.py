"""Reading results: whatever is wrong with a file is said in one line, with the place, the value and the remedy."""

import json

import pytest

from fedncv import store
from fedncv.config import RunConfig
from fedncv.results import CONFIG, METRICS, read_rows, read_runs

ROWS = [
    {"round": 0, "label_prior": 0.4, "score_name": "accuracy", "sizes": [3, 4], "barred": {"1": "late"}},
    {"round": 1, "counted": [0], "absent": [1], "refused": {"1": "a shape"}, "clipped": {"0": ["delta"]}},
    {"round": 1, "loss": None, "before": 0.5, "before_clients": [0.5, None], "skipped": [1]},
    {"round": 2, "failed": "client 1 diverged"},
]


def written(folder, content):
    store.create(folder, RunConfig())
    (folder / METRICS).write_bytes(content)
    return folder


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_every_kind_of_value_that_a_run_writes_is_read(tmp_path):
    assert read_rows(written(tmp_path / "run", lines(ROWS))) == ROWS


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("before", "0.5", 'before "0.5" instead of a finite number'),
        ("before", [0.5], "before [0.5] instead of a finite number"),
        ("before", {"a": 1}, 'before {"a": 1} instead of a finite number'),
        ("before", True, "before true instead of a finite number"),
        ("before", float("nan"), "before NaN instead of a finite number"),
        ("bytes_up", float("inf"), "bytes_up Infinity instead of a finite number"),
        ("samples", 10**400, "samples 1000000000000000000000000000000000000000000… instead of a finite number"),
        ("before_clients", 0.5, "before_clients 0.5 instead of a list of numbers"),
        ("before_clients", [0.5, "x"], 'before_clients [0.5, "x"] instead of a list of numbers'),
        ("round", "1", 'round "1" instead of a whole number, at least 0'),
        ("round", None, "round null instead of a whole number, at least 0"),
        ("round", 1.5, "round 1.5 instead of a whole number, at least 0"),
        ("round", -1, "round -1 instead of a whole number, at least 0"),
        ("failed", 3, "failed 3, a value of the wrong type"),
        ("score_name", 3, "score_name 3, a value of the wrong type"),
    ],
)
def test_a_value_of_a_wrong_kind_is_named_with_its_line(name, value, message, tmp_path):
    folder = written(tmp_path / "run", lines([ROWS[0], ROWS[1] | {name: value}]))
    with pytest.raises(ValueError, match="restore it, or run `fedncv resume") as error:
        read_rows(folder)
    assert str(error.value).startswith(f"{folder / METRICS}, line 2, has {message}; ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "number", "fault"),
    [
        (b"[1, 2]\n", 1, "is not a row of metrics: it has no round"),
        (b"7\n", 1, "is not a row of metrics: it has no round"),
        (b'{"before": 0.5}\n', 1, "is not a row of metrics: it has no round"),
        (lines(ROWS[:1]) + b"\n" + lines(ROWS[1:]), 2, "is not a row of metrics: it is not JSON"),
        (b"\xff\xfe\n", 1, "is not a row of metrics: it is not JSON"),
        (b"[" * 100_000 + b"\n", 1, "is not a row of metrics: it is not JSON"),
        (b"\xff\xfe\x00", 1, "is not the beginning of a row"),
        (lines(ROWS[:2]) + b"\0" * 100, 3, "is not the beginning of a row"),  # as a power cut leaves it
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value),
)
def test_what_is_no_row_is_named_with_its_line(content, number, fault, tmp_path):
    folder = written(tmp_path / "run", content)
    with pytest.raises(ValueError, match="restore it") as error:
        read_rows(folder)
    assert str(error.value).startswith(f"{folder / METRICS}, line {number}, {fault}; ")


def test_wherever_the_last_line_is_cut_the_rows_before_it_are_read(tmp_path):
    whole = lines(ROWS)
    folder = written(tmp_path / "run", whole)
    for length in range(len(whole)):
        (folder / METRICS).write_bytes(whole[:length])
        assert read_rows(folder) == ROWS[: whole[:length].count(b"\n")]


def test_damaged_runs_keep_no_other_from_being_read(tmp_path):
    good, no_rows, no_config = (written(tmp_path / name, lines(ROWS)) for name in ("a", "b", "c"))
    (no_rows / METRICS).write_bytes(b"?\n")
    (no_config / CONFIG).write_text("rounds = many")
    runs, unreadable = read_runs([good, no_rows, no_config])
    assert [run.folder for run in runs] == [good]
    assert list(unreadable) == [no_rows, no_config]
    assert "line 1" in unreadable[no_rows]
    assert f"{no_config / CONFIG} is not valid TOML" in unreadable[no_config]

"""Rows read a little at a time are those of the ordinary reader, whatever was written when."""

import json
import os

import pytest

from fedncv.results import check_cut, parse_row, read_rows
from fedncv.watch import tail
from fedncv.watch.tail import Tail

ROWS = [
    {"round": 0, "label_prior": 0.5},
    {"round": 1, "loss": 1.25, "before": 0.5, "before_clients": [0.25, None]},
    {"round": 2, "loss": 1.0},
    {"round": 3, "failed": "the loss is not finite: ünïcode"},
]
WHOLE = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
DAMAGED = WHOLE.replace(b'{"round": 2', b'{"round": "2"')


def metrics(folder):
    return Tail(folder / "metrics.jsonl", parse_row, check_cut)


def ordinary(folder):
    """Rows and error of the ordinary reader."""
    try:
        return read_rows(folder), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("content", [WHOLE, DAMAGED, b"[]\n" + WHOLE, WHOLE + b"xyz"], ids=range(4))
def test_at_every_prefix_of_a_growing_file_the_rows_are_those_of_the_ordinary_reader(tmp_path, content):
    growing = metrics(tmp_path)
    for end in range(len(content) + 1):
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(content[max(0, end - 1) : end])
        growing.look()
        rows, error = ordinary(tmp_path)
        assert growing.error == error
        assert error or growing.rows == rows


def test_two_looks_at_every_pair_of_prefixes_give_the_rows_of_one(tmp_path):
    """Also those of a file that was cut: a resume truncates it."""
    path = tmp_path / "metrics.jsonl"
    ends = [i for i in range(len(WHOLE) + 1) if i % 7 == 0 or WHOLE[max(0, i - 2) : i + 2].count(b"\n")]
    for first in ends:
        for second in ends:
            followed = metrics(tmp_path)
            for end in (first, second):
                with path.open("r+b" if path.exists() else "wb") as file:
                    file.truncate(min(end, len(file.read()) if file.readable() else 0))
                    file.seek(0, os.SEEK_END)
                    file.write(WHOLE[file.tell() : end])
                followed.look()
            assert followed.rows == read_rows(tmp_path), (first, second)


def test_a_row_is_parsed_once(tmp_path):
    parsed = []
    followed = Tail(
        tmp_path / "metrics.jsonl", lambda path, number, line: parsed.append(number) or parse_row(path, number, line)
    )
    for row in ROWS:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        assert followed.look()
        assert not followed.look()
    assert parsed == [1, 2, 3, 4]
    assert followed.rows == ROWS


def test_rows_that_were_exchanged_are_read_again_though_the_file_has_grown(tmp_path):
    """A resume truncates, and trains more rounds than it has cut before the next look; one row in between differs."""
    path, followed = tmp_path / "metrics.jsonl", metrics(tmp_path)
    path.write_bytes(b"".join(b'{"round": %d, "counted": [0, 1]}\n' % t for t in range(10)))
    followed.look()
    with path.open("r+b") as file:
        file.truncate(path.read_bytes().index(b'{"round": 8'))
        file.seek(0, os.SEEK_END)
        file.write(b'{"round": 8, "counted": [0, 2]}\n{"round": 9, "counted": [0, 1]}\n{"round": 10, "counted": [0]}\n')
    assert followed.look()
    assert followed.rows == read_rows(tmp_path)
    assert followed.rows[8]["counted"] == [0, 2]


def test_a_file_of_the_same_size_that_takes_the_place_of_another_is_read_again(tmp_path):
    path, followed = tmp_path / "metrics.jsonl", metrics(tmp_path)
    path.write_bytes(b'{"round": 0, "loss": 1}\n')
    followed.look()
    (tmp_path / "new").write_bytes(b'{"round": 0, "loss": 2}\n')
    (tmp_path / "new").replace(path)
    assert followed.look()
    assert followed.rows == [{"round": 0, "loss": 2}]
    path.unlink()
    assert followed.look()
    assert followed.rows == []
    assert not followed.look()


def test_a_damaged_file_that_is_restored_is_read_again(tmp_path):
    path, followed = tmp_path / "metrics.jsonl", metrics(tmp_path)
    path.write_bytes(DAMAGED)
    followed.look()
    assert "line 3, has round" in followed.error
    assert followed.rows == ROWS[:2]  # what was there before the damage
    path.write_bytes(WHOLE)
    followed.look()
    assert (followed.rows, followed.error) == (ROWS, "")


def test_lines_longer_than_a_look_are_refused_and_a_longer_file_takes_several_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "MOST", 100)
    monkeypatch.setattr(tail, "CHECKED", 30)
    path, followed = tmp_path / "metrics.jsonl", metrics(tmp_path)
    path.write_bytes(WHOLE)
    looks = 0
    while followed.look():
        looks += 1
    assert followed.rows == ROWS
    assert looks >= len(WHOLE) // 100
    path.write_bytes(b'{"round": 0, "loss": ' + b"1" * 200)
    followed.look()
    assert "has more than 100 bytes" in followed.error


def test_links_and_pipes_are_not_read(tmp_path):
    (tmp_path / "secret").write_bytes(b'{"round": 0}\n')
    for make in (lambda path: path.symlink_to(tmp_path / "secret"), os.mkfifo, os.mkdir):
        path = tmp_path / "metrics.jsonl"
        make(path)
        followed = metrics(tmp_path)
        followed.look()
        assert followed.rows == []
        assert "is a symbolic link" in followed.error or "is not an ordinary file" in followed.error
        path.rmdir() if path.is_dir() else path.unlink()


def test_damaged_lines_of_other_files_are_passed_over(tmp_path):
    path = tmp_path / "timing.jsonl"
    path.write_bytes(b'{"seconds": 1}\nxyz\n[1]\n' + b"[" * 100_000 + b'\n{"seconds": 2}\n{"sec')
    followed = Tail(path)
    followed.look()
    assert (followed.rows, followed.error) == ([{"seconds": 1}, {"seconds": 2}], "")

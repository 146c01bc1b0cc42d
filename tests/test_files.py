"""Files: complete or not at all, never through links, and damage is recognised."""

import os

import pytest

from fedncv.files import checksum, is_intact, open_here, parse, records, sealed, write_atomically


def test_a_file_is_replaced_with_the_usual_permissions_and_nothing_stays_beside_it(tmp_path):
    path = tmp_path / "a"
    for data in (b"", b"1", b"second"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    before = os.umask(0)
    os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~before
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_share_a_temporary_one(tmp_path):
    """The second writes the whole file while the first is in the middle."""
    path = tmp_path / "a"

    def meanwhile(moment):
        if moment == "half written":
            write_atomically(path, b"second")

    write_atomically(path, b"first", mark=meanwhile)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_alone_and_names_it(tmp_path):
    path = tmp_path / "a"
    write_atomically(path, b"old")

    def fail(moment):
        if moment == "written, not renamed":
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(path, b"new", mark=fail)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_or_folder_is_not_replaced(tmp_path):
    """As root, a device such as /dev/null would be gone."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="pipe is not a file; choose another path"):
        write_atomically(tmp_path / "pipe", b"")
    with pytest.raises(IsADirectoryError, match="folder"):
        write_atomically(tmp_path / "folder", b"")
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "folder"}


def test_a_link_is_replaced_by_writing_and_refused_for_opening(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_bytes(b"precious")
    link.symlink_to(victim)
    with pytest.raises(ValueError, match="link is a symbolic link, and fedncv does not write through it"):
        open_here(link, os.O_WRONLY)
    write_atomically(link, b"new")
    assert not link.is_symlink()
    assert victim.read_bytes() == b"precious"


def test_the_checksum_of_a_beginning_is_that_of_its_bytes(tmp_path):
    """CRC-32 of "123456789" is 0xCBF43926, the check value of its definition (ISO 3309)."""
    path = tmp_path / "a"
    path.write_bytes(b"123456789 and more")
    assert checksum(path, 9) == 0xCBF43926
    assert checksum(path, 0) == 0
    assert checksum(path, 19) is None
    path.write_bytes(b"123456789")
    assert checksum(path) == checksum(path, 9) == 0xCBF43926


def test_every_changed_digit_of_a_record_breaks_its_seal():
    record = sealed({"round": 12, "seconds": 0.75, "words": ["a", None, True], "inner": {"x": 1e-9}})
    assert is_intact(record)
    for name, value in {"round": 13, "seconds": 0.76, "words": ["a"], "inner": {"x": 1e-8}, "seal": 5}.items():
        assert not is_intact(record | {name: value}), name
    assert not is_intact(record | {"seconds": float("nan")})
    assert not is_intact(record | {"more": 1})
    assert not is_intact({name: record[name] for name in record if name != "round"})
    assert is_intact({"round": 12})  # of an earlier version


def test_records_are_those_of_complete_lines_or_none(tmp_path):
    path = tmp_path / "a.jsonl"
    assert records(path) == []
    path.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert records(path) == [{"round": 1}, {"round": 2}]
    for line in ("3", "[" * 100_000, "nonsense", '{"round": 3, "seal": 1}'):
        path.write_text('{"round": 1}\n' + line + "\n")
        assert records(path) is None, line[:20]


def test_json_that_is_nested_without_end_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse("[" * 100_000)

"""What a client keeps: counted rounds only, repeated rounds to the byte, and never anew by itself."""

import errno
import os

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")

from federations import tiny

from fedncv import store
from fedncv.engine.problem import Kept
from fedncv.flower.own import Own, OwnError


@pytest.fixture
def problem():
    return tiny("scaffold")


@pytest.fixture
def own(tmp_path):
    return Own(tmp_path, "run")


def kept(problem, value):
    return Kept(torch.full_like(problem.model.start_P, value), problem.model.start_R[:0])


def value(kept):
    return float(kept.own[0])


def files(own):
    return sorted(path.name for path in own._folder.glob("round-*"))


def test_a_client_never_counted_begins_as_init_own_makes_it(own, problem):
    assert value(own.begin(problem, 0, round=1, counted=0)) == 0
    own.write(1, kept(problem, 1.0))
    assert value(own.begin(problem, 0, round=2, counted=0)) == 0  # round 1 was lost on the way
    assert files(own) == []


def test_it_begins_from_the_round_that_was_counted(own, problem):
    for round in (1, 2):
        own.begin(problem, 0, round=round, counted=round - 1)
        own.write(round, kept(problem, float(round)))
    assert value(own.begin(problem, 0, round=3, counted=1)) == 1  # round 2 was refused
    own.write(3, kept(problem, 3.0))
    assert value(own.begin(problem, 0, round=7, counted=3)) == 3  # absent for some rounds
    assert files(own) == ["round-000003.safetensors"]


def test_a_repeated_round_begins_from_the_same_and_writes_the_same_bytes(own, problem):
    own.write(1, kept(problem, 1.0))
    seen = []
    for _ in range(3):
        begun = own.begin(problem, 0, round=2, counted=1)
        own.write(2, begun._replace(own=begun.own * 3))
        seen.append((own._path(1).read_bytes(), own._path(2).read_bytes()))
    assert seen[0] == seen[1] == seen[2]


def test_an_old_request_is_refused_and_destroys_nothing(own, problem):
    for round in (1, 2, 3):
        own.begin(problem, 0, round=round, counted=round - 1)
        own.write(round, kept(problem, float(round)))
    for round, counted in ((1, 0), (2, 1)):
        with pytest.raises(OwnError, match="is over"):
            own.begin(problem, 0, round=round, counted=counted)
    assert value(own.begin(problem, 0, round=4, counted=3)) == 3


@pytest.mark.parametrize("counted", [-1, 2, 5])
def test_a_round_cannot_follow_itself(counted, own, problem):
    with pytest.raises(OwnError, match="cannot follow"):
        own.begin(problem, 0, round=2, counted=counted)


def test_a_missing_or_damaged_file_stops_the_client(own, problem):
    with pytest.raises(OwnError, match="silently reset"):
        own.begin(problem, 0, round=2, counted=1)
    own.write(1, kept(problem, 1.0))
    good = own._path(1).read_bytes()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for damaged in (good[:-8], b"", bytes(flipped)):
        own._path(1).write_bytes(damaged)
        with pytest.raises(OwnError, match="silently reset"):
            own.begin(problem, 0, round=2, counted=1)


def test_another_run_s_file_is_refused(own, problem, tmp_path):
    other = Own(tmp_path, "other")
    other.write(1, kept(problem, 1.0))
    own._path(1).write_bytes(other._path(1).read_bytes())
    with pytest.raises(OwnError, match="another run"):
        own.begin(problem, 0, round=2, counted=1)


def no_space(_descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_dying_at_any_moment_of_a_write_leaves_the_counted_round(own, problem, monkeypatch):
    own.write(1, kept(problem, 1.0))
    visited = []
    monkeypatch.setattr(store, "write_point", visited.append)
    own.write(2, kept(problem, 2.0))
    for name in visited:

        def die(point, name=name):
            if point == name:
                raise KeyboardInterrupt

        monkeypatch.setattr(store, "write_point", die)
        with pytest.raises(KeyboardInterrupt):
            own.write(3, kept(problem, 3.0))
        monkeypatch.setattr(store, "write_point", lambda _point: None)
        assert value(own.begin(problem, 0, round=3, counted=1)) == 1
    assert visited


def test_a_full_disk_is_an_error_and_the_counted_round_stays(own, problem, monkeypatch):
    own.write(1, kept(problem, 1.0))
    monkeypatch.setattr("fedncv.files.os.fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        own.write(2, kept(problem, 2.0))
    monkeypatch.undo()
    assert value(own.begin(problem, 0, round=2, counted=1)) == 1

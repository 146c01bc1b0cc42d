"""What is followed, and that it is read once."""

import json
import os
from dataclasses import replace

import pytest
from made_up_runs import made_up_study, write_run, write_study

from fedncv.config import RunConfig
from fedncv.results import read_run
from fedncv.watch import follow, tail
from fedncv.watch.follow import FollowedFolder
from fedncv.watch.overview import overview

CONFIG = RunConfig(clients=20, per_round=5, rounds=20, eval_every=2)


def touched(path):
    """Give the file another time of change, as any write at another moment does."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000))


@pytest.fixture
def opened(monkeypatch):
    """The files that were opened to be read."""
    found = []
    real = tail.open_plain
    monkeypatch.setattr(tail, "open_plain", lambda path: found.append(path.name) or real(path))
    return found


def test_a_look_at_what_has_not_changed_opens_no_file(tmp_path, opened):
    write_study(tmp_path, made_up_study(), skip=("cifar10/fedavg-seed1",))
    write_run(tmp_path / "cifar10/fedavg-seed1", CONFIG, 0.5, until=7)
    folder = FollowedFolder(tmp_path)
    assert folder.look()
    assert len(opened) == 18  # metrics and clocks of nine runs
    opened.clear()
    assert not folder.look()
    assert opened == []
    with (tmp_path / "cifar10/fedavg-seed1/metrics.jsonl").open("a") as file:
        file.write('{"round": 8}\n{"rou')
    assert folder.look()
    assert opened == ["metrics.jsonl"]
    assert folder.runs[tmp_path / "cifar10/fedavg-seed1"].run.rounds == 8


def test_a_run_that_was_resumed_is_read_again_from_its_start(tmp_path, monkeypatch):
    """Truncated far back and grown beyond it between two looks, with one number changed where nothing compares."""
    monkeypatch.setattr(tail, "CHECKED", 10)
    write_run(tmp_path, CONFIG, 0.5, until=19)
    machine, metrics = tmp_path / "machine.jsonl", tmp_path / "metrics.jsonl"
    machine.write_text('{"date": "2026-01-01"}\n')
    folder = FollowedFolder(tmp_path)
    folder.look()
    text = metrics.read_text()
    changed = text.replace('"round": 2, "samples": 1000', '"round": 2, "samples": 1001')
    assert len(changed) == len(text)
    metrics.write_text(changed + '{"round": 20}\n')
    machine.write_text('{"date": "2026-01-01"}\n{"date": "2026-01-02"}\n')
    touched(metrics)
    folder.look()
    assert folder.runs[tmp_path].run == read_run(tmp_path)
    assert folder.runs[tmp_path].run.rows[2]["samples"] == 1001


def test_rounds_that_repeat_in_the_clocks_tell_a_resume_too(tmp_path, monkeypatch):
    """A federation's server writes no line about its machine."""
    monkeypatch.setattr(tail, "CHECKED", 10)  # so that the bytes before the end tell nothing
    write_run(tmp_path, CONFIG, 0.5, until=9)
    folder = FollowedFolder(tmp_path)
    folder.look()
    metrics = tmp_path / "metrics.jsonl"
    changed = metrics.read_text().replace('"round": 2, "samples": 1000', '"round": 2, "samples": 1001')
    metrics.write_text(changed)
    touched(metrics)
    with (tmp_path / "timing.jsonl").open("a") as file:
        file.write('{"round": 2, "seconds": 1.0}\n')
    folder.look()
    assert folder.runs[tmp_path].run.rows[2]["samples"] == 1001


def test_runs_come_and_go_and_come_back(tmp_path):
    study = made_up_study(methods=("fedavg",), seeds=(0, 1))
    write_study(tmp_path, study, skip=("cifar10/fedavg-seed1",))
    folder = FollowedFolder(tmp_path)
    folder.look()
    assert [line.condition.state for line in overview(folder).lines] == ["finished", "waiting"]
    cell = study.cells()[1]
    write_run(tmp_path / cell.folder, cell.config, 0.5, until=3)
    assert folder.look()
    assert [line.round for line in overview(folder).lines] == [20, 3]
    (tmp_path / cell.folder).rename(tmp_path / "away")
    folder.look()
    assert folder.deleted == ["cifar10/fedavg-seed1"]  # "away" is a run as well, of no plan
    (tmp_path / "away").rename(tmp_path / cell.folder)
    folder.look()
    assert folder.deleted == ["away"]
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    folder.look()
    assert "there is no folder" in folder.error
    assert not folder.runs
    tmp_path.with_name("elsewhere").rename(tmp_path)
    folder.look()
    assert not folder.error
    assert len(folder.runs) == 2


def test_a_config_that_changes_is_read_again(tmp_path):
    write_run(tmp_path, CONFIG, 0.5)
    folder = FollowedFolder(tmp_path)
    folder.look()
    assert overview(folder).share == 1
    from fedncv.config import write_toml

    (tmp_path / "config.toml").write_text(write_toml(replace(CONFIG, rounds=40)))  # fedncv resume --rounds 40
    folder.look()
    (line,) = overview(folder).lines
    assert (line.round, line.rounds, line.share) == (20, 40, 0.5)


def test_links_are_not_followed(tmp_path):
    write_run(tmp_path / "outside", CONFIG, 0.5)
    inside = tmp_path / "inside"
    write_run(inside / "good", CONFIG, 0.5)
    (inside / "linked").symlink_to(tmp_path / "outside")
    for name in ("config.toml", "metrics.jsonl"):
        write_run(inside / name[:-5], CONFIG, 0.5)
        (inside / name[:-5] / name).unlink()
        (inside / name[:-5] / name).symlink_to(tmp_path / "outside" / name)
    folder = FollowedFolder(inside)
    folder.look()
    assert folder.found.links == 1
    assert inside / "linked" not in folder.runs
    for name in ("config.toml", "metrics.jsonl"):
        assert "is a symbolic link" in folder.runs[inside / name[:-5]].error
    folder.given(inside)
    (inside / "good/machine.jsonl").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"machine\.jsonl is a symbolic link"):
        folder.given(inside)


def test_a_study_of_too_many_runs_is_not_listed(tmp_path):
    write_study(tmp_path, made_up_study(), skip=())
    path = tmp_path / "study.toml"
    path.write_text(path.read_text().replace("seeds = [0, 1, 2]", f"seeds = {list(range(50_000))}"))
    folder = FollowedFolder(tmp_path)
    folder.look()
    assert "plans 150,000 runs" in folder.error


def test_share_rate_and_time_left_are_those_of_the_definition(tmp_path, monkeypatch):
    """Two of four runs of 10 rounds train together: 3 rounds at 2 s each, 100 samples a round; one is done at 1 s."""
    monkeypatch.setattr(follow.heartbeat, "is_locked", lambda folder: folder.name.endswith(("seed1", "seed2")))
    config = RunConfig(rounds=10, method="fedavg")
    study = made_up_study(
        methods=("fedavg",), seeds=(0, 1, 2, 3), settings=replace(made_up_study().settings, rounds=10)
    )
    write_study(tmp_path, study, skip=[f"cifar10/fedavg-seed{seed}" for seed in (0, 1, 2, 3)])
    for seed, until, each in ((0, 10, 1.0), (1, 3, 2.0), (2, 3, 2.0)):
        run = tmp_path / f"cifar10/fedavg-seed{seed}"
        write_run(run, replace(config, seed=seed, clients=20, per_round=5), 0.5, until=until)
        rows = [{"round": t} | ({"samples": 100 * t} if t else {}) for t in range(until + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        clocks = [{"round": t, "seconds": each if t else 50.0} for t in range(until + 1)]
        (run / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in clocks))
    folder = FollowedFolder(tmp_path)
    folder.look()
    found = overview(folder)
    # weights: 10·1, 10·2, 10·2, and the mean pace of the method, 5/3 s, for the run that has not begun
    assert found.share == pytest.approx((10 + 6 + 6) / (10 + 20 + 20 + 50 / 3))
    assert found.left == pytest.approx(14 + 14 + 50 / 3)  # one process
    assert found.rate == pytest.approx(50.0)  # 600 samples in the 12 s of their process
    assert [line.left for line in found.lines] == [None, pytest.approx(28), pytest.approx(28), None]  # they share time
    assert found.processes == 1

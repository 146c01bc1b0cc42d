"""Probes in a run: where they stand, what they write, and that nothing else notices them."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import FULL_FEDNCV, Tiny, tiny, tiny_dataset
from made_up_runs import made_up_study, write_study

import fedncv
from fedncv.cli import main
from fedncv.config import RunConfig
from fedncv.engine.problem import start
from fedncv.flower.halves import check
from fedncv.observatory import at_model
from fedncv.probe import Probe, find_probe
from fedncv.report.gather import gather
from fedncv.report.series import VARIANCE
from fedncv.results import read_rows
from fedncv.runner import LiveRun, train
from fedncv.study import Tuning, extend
from fedncv.tree import leaves

NUMBERS = ("signal", "within", "between", "snr", "sampling", "batches")
KEYS = {f"variance_{name}{end}" for name in NUMBERS for end in ("", "_low", "_high")}
QUICK = {"clients": 4, "per_round": 2, "rounds": 3, "epochs": 1, "partition": "iid"}
SMALL = {"data": tiny_dataset(), "model": Tiny}
methods = pytest.mark.parametrize("method", [FULL_FEDNCV, pytest.param("fedper", marks=pytest.mark.slow)])


def split_row(row):
    """What the probe wrote, and the rest."""
    mine = {key: value for key, value in row.items() if key.startswith(VARIANCE)}
    return mine, {key: value for key, value in row.items() if key not in mine}


def run(method, **config):
    """Two seeds, three rounds, with all that makes clients unequal."""
    problems = [
        tiny(method, sizes=(20, 1, 9, 18), per_round=3, rounds=3, dropout=0.2, eval_every=1, seed=seed, **config)
        for seed in (0, 1)
    ]
    runs = [LiveRun(problem, start(problem)) for problem in problems]
    train(runs)
    return runs


@pytest.mark.parametrize("engine", ["sequential", "processes", "stacked"])
@methods
def test_with_and_without_probes_a_run_has_the_same_digits(method, engine):
    probed, plain = run(method, engine=engine, probe="every=2"), run(method, engine=engine)
    for ours, theirs in zip(probed, plain, strict=True):
        assert [split_row(row)[1] for row in ours.rows] == theirs.rows
        assert [bool(split_row(row)[0]) for row in ours.rows] == [True, False, True, True]
        for (path, a), (_, b) in zip(leaves(ours.state), leaves(theirs.state), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


@methods
def test_every_engine_measures_the_same(method):
    """Processes to the last bit, stacked to rounding."""
    one, forked, stacked = (run(method, engine=e, probe="every=3") for e in ("sequential", "processes", "stacked"))
    for a, b, c in zip(one, forked, stacked, strict=True):
        assert a.rows == b.rows
        for t in (0, 3):
            ours, theirs = split_row(a.rows[t])[0], split_row(c.rows[t])[0]
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                assert value == (None if theirs[key] is None else pytest.approx(theirs[key], rel=1e-8)), key


def test_a_row_holds_the_split_of_the_state_that_the_round_left():
    result = fedncv.simulate(probe="every=2", dtype="float64", **QUICK, **SMALL)
    assert [set(split_row(row)[0]) for row in result.rows] == [KEYS, set(), KEYS, KEYS]
    measured = at_model.measure(result.problem, result.state)
    assert split_row(result.rows[-1])[0] == at_model.row(measured)
    assert measured.between.low < measured.between.value < measured.between.high


def test_samples_that_arrive_are_measured_as_they_stand():
    """At the start of the stream a client holds few samples; the numbers are of those."""
    stream = "arrivals:start=0.2,rate=0.1"
    result = fedncv.simulate(probe="every=1", stream=stream, **QUICK, **SMALL)
    for t in (0, 3):
        sizes = result.problem.at(t).clients.sizes
        assert sizes.sum() < result.problem.clients.sizes.sum()
        assert np.isfinite(result.rows[t]["variance_within"])
    assert split_row(result.rows[3])[0] == at_model.row(at_model.measure(result.problem, result.state))


def test_a_probed_run_that_was_stopped_ends_with_the_same_bytes(tmp_path):
    class StopError(Exception):
        pass

    def stop(row):
        if row["round"] == 2:
            raise StopError

    settings = {**QUICK, **SMALL, "probe": "every=1", "checkpoint_every": 1}
    fedncv.simulate(out=tmp_path / "whole", **settings)
    with pytest.raises(StopError):
        fedncv.simulate(out=tmp_path / "stopped", on_round=stop, **settings)
    fedncv.resume(tmp_path / "stopped", **SMALL)
    whole, stopped = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "stopped"))
    assert whole == stopped
    assert set(split_row(json.loads(whole.splitlines()[-1]))[0]) == KEYS


def test_a_run_from_before_there_were_probes_can_be_resumed(tmp_path):
    fedncv.simulate(out=tmp_path / "run", **QUICK, **SMALL)
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text().replace('probe = ""\n', ""))
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    fedncv.resume(tmp_path / "old", **SMALL)
    config.write_text(config.read_text() + 'probe = "every=1"\n')
    fedncv.resume(tmp_path / "run", **SMALL)  # probes change no state: switched on later is no other config


def test_the_command_line_takes_it(tmp_path, capsys):
    words = ["run", "--model", "mlp", "--clients", "4", "--per-round", "2", "--rounds", "1", "--epochs", "1"]
    assert main([*words, "--probe", "every=1", "--out", str(tmp_path / "runs")]) == 0
    (folder,) = (path.parent for path in (tmp_path / "runs").rglob("metrics.jsonl"))
    assert [set(split_row(row)[0]) for row in read_rows(folder)] == [KEYS, KEYS]
    assert main([*words, "--probe", "10", "--out", str(tmp_path / "more")]) != 0
    assert "write it as every=10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10", "probe is '10'; write it as every=10"),
        ("every=0", "every must be at least 1, not 0"),
        ("every=often", "every must be int, not 'often'"),
        ("evry=10", "no knob 'evry'"),
    ],
)
def test_a_wrong_probe_is_named_with_its_remedy(text, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(probe=text).check()


def test_a_probe_is_due_at_the_start_at_its_rounds_and_at_the_end():
    assert find_probe("") is None
    assert [t for t in range(8) if Probe(every=3).due(t, 7)] == [0, 3, 6, 7]


def test_a_federation_of_real_machines_has_no_probe():
    with pytest.raises(ValueError, match="probe is 'every=10'"):
        check(RunConfig(probe="every=10", data="custom"))


def test_a_study_probes_its_runs_and_not_those_that_tune():
    study = made_up_study()
    study = replace(study, settings=replace(study.settings, probe="every=5"), tuning=Tuning())
    assert {cell.config.probe for cell in study.cells()} == {"every=5"}
    assert {cell.config.probe for cell in study.tuning_cells("cifar10", "fedavg", {"lr": 0.1}, "lr-0.1")} == {""}


def test_runs_with_and_without_probes_are_of_one_study(tmp_path):
    study = made_up_study()
    write_study(tmp_path, study)
    probed = replace(study, settings=replace(study.settings, probe="every=5"), seeds=(3,))
    extended = extend(study, probed, where=tmp_path)
    assert (extended.seeds, extended.settings.probe) == ((0, 1, 2, 3), "every=5")
    write_study(tmp_path, extended, skip=[str(cell.folder) for cell in study.cells()])
    assert gather(tmp_path).differing == []

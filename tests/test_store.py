"""Runs on disk: killed anywhere and resumed, they end with the same bytes; damage is recognised and named."""

import json
import subprocess
import sys
from dataclasses import make_dataclass, replace
from pathlib import Path

import pytest
import torch
from federations import FULL_FEDNCV
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedncv
from fedncv import store
from fedncv.cli import main
from fedncv.config import write_toml
from fedncv.engine.problem import build, start
from fedncv.files import sealed
from fedncv.methods import METHODS, in_full
from fedncv.results import read_rows, read_run, runs_in
from fedncv.tree import leaves

QUICK = {"model": "mlp", "clients": 5, "per_round": 2, "rounds": 4, "epochs": 1, "checkpoint_every": 2}


def dying(*arguments):
    """tests/dying.py's verdicts."""
    script = Path(__file__).with_name("dying.py")
    done = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_at_every_write_point_a_run_ends_with_the_same_bytes(tmp_path):
    verdicts = dying("points", tmp_path)
    names = {name.rpartition(" (")[0] for name in verdicts}
    atomic, appended = ("half written", "written, not renamed", "renamed"), ("half a row", "a row")
    files = {"config": atomic, "state": atomic, "partition": atomic}
    files |= dict.fromkeys(("metrics.jsonl", "timing.jsonl", "machine.jsonl"), appended)
    assert names == {f"{file}: {moment}" for file, moments in files.items() for moment in moments}
    assert set(verdicts.values()) == {"equal"}, verdicts


@pytest.mark.slow
def test_killed_at_three_random_moments_a_run_ends_with_the_same_bytes(tmp_path):
    verdicts = dying("moments", tmp_path, 3, 0)
    assert set(verdicts.values()) == {"equal"}, verdicts


@pytest.mark.slow
def test_killed_at_twenty_random_moments_a_run_ends_with_the_same_bytes(tmp_path):
    verdicts = dying("moments", tmp_path, 20, 1)
    assert len(verdicts) == 20
    assert set(verdicts.values()) == {"equal"}, verdicts


QUICK_TO_CHECK = {"fedavg", "scaffold", "pfedsim", "fedgen", FULL_FEDNCV}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[pytest.mark.slow] * (method not in QUICK_TO_CHECK))
        for method in [*METHODS, FULL_FEDNCV, "fedncv+memory"]
    ],
)
def test_every_methods_state_survives_the_disk_to_the_last_bit(method, tmp_path):
    everyone = {"per_round": QUICK["clients"]} if method == "d2" else {}
    result = fedncv.simulate(out=tmp_path / "run", method=method, **QUICK | everyone)
    stored = store.read_state(tmp_path / "run", result.problem)
    ours, theirs = dict(leaves(result.state)), dict(leaves(stored))
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(leaf, theirs[path]), path
            assert leaf.dtype == theirs[path].dtype, path
        else:
            assert leaf == theirs[path], path


def test_two_runs_of_one_config_have_the_same_bytes(tmp_path):
    for name in "ab":
        fedncv.simulate(out=tmp_path / name, **QUICK)
    for file in ("config.toml", "metrics.jsonl", "state.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_metrics_hold_no_clock_and_timing_does(tmp_path):
    fedncv.simulate(out=tmp_path / "run", **QUICK)
    assert not any("seconds" in row for row in read_rows(tmp_path / "run"))
    timing = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert [row["round"] for row in timing] == [0, 1, 2, 3, 4]
    assert all(row["seconds"] > 0 for row in timing)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    fedncv.simulate(out=tmp_path / "run", **QUICK)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    result = fedncv.resume(tmp_path / "run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert [row["round"] for row in result.rows] == [0, 1, 2, 3, 4]


# ---- damage --------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    fedncv.simulate(out=tmp_path / "run", method="fedper", **(QUICK | {"clients": 3, "rounds": 2}))
    return tmp_path / "run"


def test_a_checkpoint_cut_at_any_byte_is_recognised(run):
    """At every seventh byte of the header and around it, and at a few hundred places in the numbers."""
    path = run / "state.safetensors"
    whole = path.read_bytes()
    problem = build(fedncv.RunConfig(**vars(read_run(run).config)))
    header = 8 + int.from_bytes(whole[:8], "little")
    cuts = {*range(0, header + 64, 7), *range(header, len(whole), max(1, len(whole) // 300)), len(whole) - 1}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"state.safetensors cannot be used \(.+\); restore it, or delete it"):
            store.load_state(run, problem)
    path.write_bytes(whole)
    store.load_state(run, problem)


def test_a_checkpoint_with_a_flipped_bit_is_recognised(run):
    path = run / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="its checksum differs"):
        store.load_state(run, build(read_run(run).config))


def test_a_foreign_checkpoint_is_recognised(run, capsys):
    save_file({"x": torch.zeros(3)}, run / "state.safetensors")
    assert main(["resume", str(run)]) == 2
    assert "not a fedncv checkpoint" in capsys.readouterr().err


def test_a_checkpoint_of_another_config_is_refused(run):
    config = read_run(run).config
    text = write_toml(config).replace("lr = 0.01", "lr = 0.02")
    assert text != write_toml(config)
    (run / "config.toml").write_text(text)
    with pytest.raises(ValueError, match=r"state\.safetensors does not match"):
        fedncv.resume(run)


@pytest.mark.parametrize(("name", "value"), [("lr", 0.02), ("seed", 7), ("batch_size", 9), ("eval_every", 3)])
def test_a_changed_protocol_is_refused_on_resume_in_one_line_that_names_it(run, name, value, capsys):
    config = read_run(run).config
    (run / "config.toml").write_text(write_toml(replace(config, **{name: value})))
    assert main(["resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"does not match {run / 'config.toml'} ({name} {getattr(config, name)!r}, now {value!r});" in said
    assert said.count("fedncv: ") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", "sequential"),
        ("device", "cuda"),
        ("rows", "disk"),
        ("checkpoint_every", 3),
        ("data_dir", "elsewhere"),
    ],
)
def test_another_machine_may_go_on_with_a_run(tmp_path, monkeypatch, name, value):
    """Stopped after two rounds of four, the run ends with the rows of one that was never stopped.

    With engine=auto another device means another engine, which agrees to rounding only.
    """
    monkeypatch.setattr("fedncv.engine.problem.find_device", lambda _name: torch.device("cpu"))
    settings = QUICK if name == "engine" else QUICK | {"engine": "sequential"}
    whole, folder = fedncv.simulate(out=tmp_path / "whole", **settings), tmp_path / "run"
    _stopped_after(2, folder, settings)
    config = read_run(folder).config
    (folder / "config.toml").write_text(write_toml(replace(config, **{name: value})))
    fedncv.resume(folder)
    assert read_run(folder).rows == whole.rows


def _stopped_after(rounds, folder, settings=QUICK):
    def stop(row):
        if row["round"] == rounds:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fedncv.simulate(out=folder, on_round=stop, **settings)


def test_a_run_goes_on_as_what_it_was_begun_as_or_not_at_all(tmp_path, monkeypatch):
    """A later version may take other knobs for granted: here one whose FedProx pulls ten times as much."""
    folder, whole = tmp_path / "run", fedncv.simulate(method="fedprox", out=tmp_path / "whole", **QUICK)
    _stopped_after(2, folder, QUICK | {"method": "fedprox"})
    begun, entry = in_full("fedprox"), METHODS["fedprox"]
    assert begun == "fedprox:mu=0.01"
    changed = make_dataclass("Config", [("mu", float, 0.1)], bases=(entry.config,), frozen=True, kw_only=True)
    monkeypatch.setitem(METHODS, "fedprox", entry._replace(config=changed))
    with pytest.raises(ValueError, match=r"started as fedprox:mu=0.01, but 'fedprox' means fedprox:mu=0.1 in"):
        fedncv.resume(folder)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('method = "fedprox"', f'method = "{begun}"'))
    resumed = fedncv.resume(folder)
    for (path, a), (_, b) in zip(leaves(whole.state.server), leaves(resumed.state.server), strict=True):
        assert torch.equal(a, b), path


def _change_header(run, change):
    """Write the checkpoint anew with another header."""
    path = run / "state.safetensors"
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["fedncv"])
    header.pop("seal")
    change(header)
    save_file(load_file(path), path, {"fedncv": json.dumps(sealed(header))})


def test_a_knob_that_a_version_did_not_know_has_its_default(tmp_path):
    folder = tmp_path / "run"
    fedncv.simulate(out=folder, method="fedavg+momentum", **QUICK)
    _change_header(folder, lambda header: header.update(method="fedavg:server_lr=1.0+momentum:beta=0.5"))
    store.load_state(folder, build(read_run(folder).config))


def test_a_run_of_a_version_that_cannot_be_resumed_says_so_in_one_line(tmp_path, capsys):
    """FedNCV before it was a chain; and a method whose server kept its state in another form."""
    for method, change in {
        "fedncv": lambda header: header.update(method="fedncv:memory=off,drift=fixed,tau=1.0,momentum=0.5"),
        "fedvarp": lambda header: None,
    }.items():
        folder = tmp_path / method
        fedncv.simulate(out=folder, method=method, **QUICK)
        _change_header(folder, change)
        if method == "fedvarp":
            tensors = load_file(folder / "state.safetensors")
            with safe_open(folder / "state.safetensors", framework="pt") as file:
                header = json.loads(file.metadata()["fedncv"])
            tensors["state.server.x_P"] = tensors.pop("state.server.server.x_P")
            header.pop("seal")
            header["check"] = store._checksum(tensors)
            save_file(tensors, folder / "state.safetensors", {"fedncv": json.dumps(sealed(header))})
        assert main(["resume", str(folder), "--rounds", "9"]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedncv: ")]
        assert "version of fedncv" in line
        assert "--overwrite" in line


def test_a_setting_that_a_version_did_not_know_has_its_default(run):
    def forget(header):
        before = header["config"]
        header["config"] = before.replace('diverged = "stop"\n', "")
        assert header["config"] != before

    _change_header(run, forget)
    store.load_state(run, build(read_run(run).config))


def test_lost_metrics_are_noticed(run):
    (run / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match="lacks rows"):
        fedncv.resume(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [("rounds = ", "is not valid TOML"), ("round = 3", "unknown key 'round'"), ('rounds = "3"', "rounds must be int")],
)
def test_a_damaged_config_is_named(run, text, message, capsys):
    (run / "config.toml").write_text(text)
    assert main(["show", str(run)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "config.toml" in error or "must be" in error


def test_metrics_cut_in_the_middle_of_a_line_are_read_up_to_it(run):
    """As by a process that was killed; a row that the checkpoint refers to cannot be cut so."""
    path = run / "metrics.jsonl"
    rows = read_rows(run)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"lacks rows that state\.safetensors refers to"):
        read_rows(run)
    (run / "state.safetensors").unlink()
    assert read_rows(run) == rows[:-1]
    path.write_bytes(b"nonsense\n")
    with pytest.raises(ValueError, match="line 1, is not a row"):
        read_rows(run)


def test_folders_that_are_no_runs_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="exists and is not a run"):
        fedncv.simulate(out=tmp_path / "mine", overwrite=True, **QUICK)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"
    with pytest.raises(ValueError, match="holds no run"):
        runs_in(tmp_path / "mine")
    with pytest.raises(ValueError, match="there is no folder"):
        runs_in(tmp_path / "nowhere")


def test_a_run_is_not_overwritten_by_accident(run):
    with pytest.raises(
        ValueError, match=r"already holds a run; go on with fedncv.resume\('.*'\), repeat it with overwrite=True, or"
    ):
        fedncv.simulate(out=run, **QUICK)
    fedncv.simulate(out=run, overwrite=True, **(QUICK | {"rounds": 1}))
    assert len(read_rows(run)) == 2


def test_a_full_disk_leaves_the_old_checkpoint(run, monkeypatch):
    old = (run / "state.safetensors").read_bytes()
    monkeypatch.setattr(store.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    problem = build(read_run(run).config)
    with pytest.raises(OSError, match="No space left"):
        store.Journal(run, problem.config, start(problem)).checkpoint()
    assert (run / "state.safetensors").read_bytes() == old


def test_a_checkpoint_whose_vector_has_another_order_is_refused(run, monkeypatch):
    """Sizes are equal, so only the header can tell: filters with channels last, for precision=bf16."""
    problem = build(read_run(run).config)
    store.load_state(run, problem)
    monkeypatch.setattr(type(problem.model.layout), "order", "channels last")
    with pytest.raises(ValueError, match=r"another version of fedncv wrote .* in another order; resume it with that"):
        store.load_state(run, problem)


def test_a_diverged_run_is_kept_up_to_its_last_good_round(tmp_path):
    settings = QUICK | {"lr": 1e30, "rounds": 5}
    with pytest.raises(ArithmeticError, match="diverged in round"):
        fedncv.simulate(out=tmp_path / "run", **settings)
    run = read_run(tmp_path / "run")
    assert run.status == "failed"
    failed = run.rows[-1]
    assert "diverged" in failed["failed"]
    assert failed["round"] == run.rounds + 1
    state = store.load_state(tmp_path / "run", build(run.config))
    assert state.round == run.rounds
    assert "failed" not in read_rows(tmp_path / "run")[-1]


def test_an_exported_model_is_an_ordinary_state_dict(run, tmp_path, capsys):
    assert main(["export", str(run), "--client", "1", "--to", str(tmp_path / "m.safetensors")]) == 0
    from fedncv.models import MLP

    MLP((1, 28, 28), 10).load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert main(["export", str(run)]) == 2
    assert "name a client with --client" in capsys.readouterr().err
    assert main(["export", str(run), "--client", "99"]) == 2
    assert "numbered 0 to 2" in capsys.readouterr().err


def test_a_run_is_trained_by_one_process_at_a_time(run):
    code = """
import sys, time
from pathlib import Path
from fedncv import store
store.hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code, run], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        try:
            with pytest.raises(ValueError, match="is being trained by another process"):
                fedncv.resume(run)
            with pytest.raises(ValueError, match="is being trained by another process"):
                fedncv.simulate(out=run, overwrite=True, **QUICK)
        finally:
            other.kill()
    fedncv.resume(run)


def test_overwriting_leaves_nothing_of_the_old_run(run):
    assert main(["export", str(run), "--client", "0"]) == 0
    fedncv.simulate(out=run, overwrite=True, **QUICK)
    assert not (run / "model.safetensors").exists()


def test_a_callback_that_raises_loses_no_round(tmp_path):
    def stop(row):
        if row["round"] == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fedncv.simulate(out=tmp_path / "run", on_round=stop, **(QUICK | {"checkpoint_every": 1000}))
    state = store.load_state(tmp_path / "run", build(read_run(tmp_path / "run").config))
    assert state.round == 3


def test_a_state_of_another_method_is_refused_on_export(run, capsys):
    path = run / "config.toml"
    path.write_text(path.read_text().replace('method = "fedper"', 'method = "scaffold"'))
    assert main(["export", str(run), "--client", "0"]) == 2
    assert "state.safetensors does not match" in capsys.readouterr().err


def test_one_damaged_run_does_not_keep_the_others_from_going_on(tmp_path, capsys):
    words = [
        "run",
        "--model",
        "mlp",
        "--clients",
        "3",
        "--per-round",
        "2",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--seeds",
        "0",
        "1",
    ]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "fedavg-seed0" / "state.safetensors").write_bytes(b"")
    (tmp_path / "out" / "fedavg-seed1" / "state.safetensors").unlink()
    assert main(["resume", str(tmp_path / "out")]) == 2
    assert "cannot be used" in capsys.readouterr().err
    assert (tmp_path / "out" / "fedavg-seed1" / "state.safetensors").exists()

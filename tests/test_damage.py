"""Damaged runs: every command ends with the numbers of an undamaged run, or with code 2 and the reason."""

import json
import random
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedncv
from fedncv import store
from fedncv.cli import main
from fedncv.engine.problem import build
from fedncv.files import sealed
from fedncv.results import read_config, read_header

SETTINGS = {
    "model": "mlp", "clients": 5, "per_round": 2, "rounds": 4, "epochs": 1, "checkpoint_every": 2, "eval_every": 1,
    "engine": "sequential", "rows": "disk", "method": "scaffold",
}  # fmt: skip


class StopError(Exception):
    pass


def stop(row):
    if row["round"] == 2:
        raise StopError


def printed(words, capsys):
    """The exit code of a command, and what it printed."""
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A run that was stopped after two of four rounds, the same run when it has ended, and two others."""
    base = tmp_path_factory.mktemp("originals")
    fedncv.simulate(out=base / "ended" / "run", **SETTINGS)
    with pytest.raises(StopError):
        fedncv.simulate(out=base / "stopped" / "run", on_round=stop, **SETTINGS)
    fedncv.simulate(out=base / "other seed", seed=1, **SETTINGS)
    fedncv.simulate(out=base / "other method", **SETTINGS | {"method": "fedvarp"})
    return base


# ---- one kind of damage at a time ------------------------------------------------------------------------


@pytest.fixture
def run(originals, tmp_path):
    shutil.copytree(originals / "stopped" / "run", tmp_path / "run")
    return tmp_path / "run"


def refused(words, capsys):
    """The line with which every one of these commands is refused, beside its progress."""
    code, _, said = printed(words, capsys)
    assert code == 2
    (line,) = [line for line in said.splitlines() if line.startswith("fedncv: ")]
    return line


def replace(path, before, after):
    text = path.read_bytes()
    assert text.count(before) >= 1
    path.write_bytes(text.replace(before, after, 1))


def test_a_round_that_was_changed_in_the_checkpoint_is_noticed(run, capsys):
    """It would skip a round."""
    replace(run / "state.safetensors", rb"state.round\": 2", rb"state.round\": 3")
    assert "state.safetensors cannot be used (its checksum differs)" in refused(["resume", run], capsys)


def test_a_digit_that_was_changed_in_the_metrics_is_noticed_by_all_who_read_them(run, capsys):
    text = (run / "metrics.jsonl").read_text()
    digit = re.search(r'"before": 0\.(\d)', text)
    changed = text[: digit.start(1)] + str((int(digit[1]) + 1) % 10) + text[digit.end(1) :]
    (run / "metrics.jsonl").write_text(changed)
    for words in (["resume", run], ["show", run]):
        assert "metrics.jsonl was edited or is damaged" in refused(words, capsys)


def test_a_setting_that_was_changed_is_noticed_by_all_who_read_it(run, capsys):
    replace(run / "config.toml", b"lr = 0.01", b"lr = 0.02")
    for words in (["resume", run], ["show", run], ["export", run]):
        assert "(lr 0.01, now 0.02); restore one of them" in refused(words, capsys)


NAMES = ["config", "metrics_bytes", "metrics_check", "check", "numbers", "seal"]


def test_a_header_with_another_type_is_one_line(run):
    """Not damage, which the seal tells, but a file that somebody wrote."""
    path = run / "state.safetensors"
    with safe_open(path, framework="pt") as file:
        whole = json.loads(file.metadata()["fedncv"])
    tensors = load_file(path)
    for name in NAMES:
        for value in ("gone", None, -1, "text", [], {}, True, 0.5):
            header = {key: each for key, each in whole.items() if key != "seal" or name == "seal"}
            header |= {name: value}
            if value == "gone":
                header.pop(name)
            save_file(tensors, path, {"fedncv": json.dumps(header if name == "seal" else sealed(header))})
            with pytest.raises(ValueError, match=r"state\.safetensors") as caught:
                store.load_state(run, build(read_config(run)))
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "partition.json"])
def test_text_that_is_nested_without_end_is_one_line(originals, tmp_path, capsys, name):
    shutil.copytree(originals / "ended" / "run", tmp_path / "run")
    (tmp_path / "run" / name).write_text(("rounds = " if name.endswith("toml") else "") + "[" * 100_000 + "\n")
    code, _, said = printed(["report", tmp_path / "run"], capsys)
    assert code == 2
    assert name in said


def test_timing_and_machine_lines_of_any_kind_break_nothing(originals, run, capsys):
    reference = (originals / "ended" / "run" / "metrics.jsonl").read_bytes()
    for name in ("timing.jsonl", "machine.jsonl"):
        (run / name).write_bytes(
            b"[" * 100_000 + b"\n\xff\n3\nnull\n" + b'{"round": [], "extended": {}, "planned": 1}\n{"la'
        )
    assert printed(["resume", run], capsys)[0] == 0
    assert (run / "metrics.jsonl").read_bytes() == reference
    assert printed(["show", run], capsys)[0] == 0
    assert printed(["report", run], capsys)[0] == 0


def test_a_run_of_an_earlier_version_goes_on_and_says_that_it_has_no_checksum(originals, run, capsys):
    """Its checkpoint knew the checksum of the tensors' values only, and its lines had none."""
    path = run / "state.safetensors"
    header = read_header(path)
    tensors = load_file(path)
    for name in ("metrics_check", "layers"):
        header.pop(name)
    header["check"] = store._checksum(tensors, forms=False)
    save_file(tensors, path, {"fedncv": json.dumps(header)})
    for name in ("timing.jsonl", "machine.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        (run / name).write_text("".join(json.dumps({k: v for k, v in x.items() if k != "seal"}) + "\n" for x in lines))
    code, _, said = printed(["resume", run], capsys)
    assert code == 0
    assert "of an earlier version of fedncv and has no checksum of metrics.jsonl" in said
    for name in ("metrics.jsonl", "state.safetensors"):
        assert (run / name).read_bytes() == (originals / "ended" / "run" / name).read_bytes()


def test_a_round_that_was_changed_in_a_checkpoint_of_an_earlier_version_is_noticed(run, capsys):
    path = run / "state.safetensors"
    header = read_header(path)
    tensors = load_file(path)
    header.pop("metrics_check")
    header["check"] = store._checksum(tensors, forms=False)
    header["numbers"]["state.round"] = 3
    save_file(tensors, path, {"fedncv": json.dumps(header)})
    assert "is of round 3, but metrics.jsonl ends with round 2" in refused(["resume", run], capsys)


# ---- links -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl", "machine.jsonl", ".lock"])
def test_what_is_appended_to_is_never_a_link(run, tmp_path, capsys, name):
    victim = tmp_path / "victim"
    shutil.copy(run / name, victim)
    before = victim.read_bytes()
    (run / name).unlink()
    (run / name).symlink_to(victim)
    assert f"{run / name} is a symbolic link, and fedncv does not write through it" in refused(["resume", run], capsys)
    assert victim.read_bytes() == before


def test_rows_of_clients_are_never_a_link(run, tmp_path, capsys):
    (rows,) = run.glob("rows-*.bin")
    victim = tmp_path / "victim"
    shutil.move(rows, victim)
    rows.symlink_to(victim)
    before = victim.read_bytes()
    assert "is a symbolic link" in refused(["resume", run], capsys)
    assert victim.read_bytes() == before


def test_what_is_replaced_may_be_a_link_and_its_target_stays(originals, tmp_path, capsys):
    folder, victim = tmp_path / "run", tmp_path / "victim"
    shutil.copytree(originals / "ended" / "run", folder)
    victim.write_text("precious")
    new = ["model.safetensors", "curves.png", "report.html"]
    old = [f"{name}.new" for name in ("state.safetensors", "model.safetensors", "report.html", "config.toml")]
    for name in (*new, *old):
        (folder / name).symlink_to(victim)
    for words in (["export", folder], ["report", folder], ["resume", folder, "--rounds", "5"], ["resume", folder]):
        code, _, said = printed(words, capsys)
        assert code == 0, said
    assert victim.read_text() == "precious"
    assert not any((folder / name).is_symlink() for name in new)


def test_a_folder_for_the_reports_files_is_never_a_link(originals, tmp_path, capsys):
    folder, victim = tmp_path / "run", tmp_path / "victim"
    shutil.copytree(originals / "ended" / "run", folder)
    victim.mkdir()
    (folder / "report").symlink_to(victim)
    assert f"{folder / 'report'} is a symbolic link" in refused(["report", folder], capsys)
    assert list(victim.iterdir()) == []
    (folder / "report").unlink()
    (folder / "report").mkdir()
    (folder / "report" / "table.csv").symlink_to(victim / "table.csv")
    assert printed(["report", folder], capsys)[0] == 0
    assert list(victim.iterdir()) == []


def test_a_run_whose_whole_folder_is_a_link_works_as_any_other(originals, run, tmp_path, capsys):
    """On another disk, say; also if all runs are in a folder that is a link."""
    (tmp_path / "linked").symlink_to(run)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "elsewhere")
    for words in (["resume", "linked"], ["show", "linked"], ["export", "linked"], ["report", "linked"]):
        assert printed([words[0], tmp_path / words[1]], capsys)[0] == 0, words
    assert (run / "metrics.jsonl").read_bytes() == (originals / "ended" / "run" / "metrics.jsonl").read_bytes()
    fedncv.simulate(out=tmp_path / "runs" / "new", **SETTINGS)
    assert (tmp_path / "elsewhere" / "new" / "state.safetensors").exists()


def test_what_a_killed_process_was_writing_is_removed(run, capsys):
    (run / "state.safetensors.0123456789abcdef.new").write_bytes(b"half")
    assert printed(["resume", run], capsys)[0] == 0
    assert not list(run.glob("*.new"))


# ---- at random -------------------------------------------------------------------------------------------


def flip(rng, data):
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def digit(rng, data):
    places = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return flip(rng, data)
    place = rng.choice(places)
    return data[:place] + bytes([rng.choice([b for b in range(48, 58) if b != data[place]])]) + data[place + 1 :]


def cut(rng, data):
    return data[: rng.randrange(len(data))]


def zeros(rng, data):
    place = rng.randrange(len(data))
    length = min(len(data) - place, rng.choice([1, 8, 512, 4096]))
    return data[:place] + bytes(length) + data[place + length :]


def more(rng, data):
    return data + rng.choice([b"\n", b"\0" * 100, b'{"round": 9}\n', rng.randbytes(50), data[-200:]])


def lost_line(rng, data):
    lines = data.splitlines(keepends=True)
    lines.pop(rng.randrange(len(lines)))
    return b"".join(lines)


DAMAGE = [flip, flip, digit, digit, cut, zeros, more, lost_line]


def damage(rng, folder, others):
    """Damage a file of the run, remove it, or put that of another run in its place; return what was done."""
    path = rng.choice(sorted(folder.iterdir()))
    other = rng.choice(others) / path.name
    if path.name in ("timing.jsonl", "machine.jsonl"):  # those of another run are not recognised (docs/runs.md)
        other = folder / "nothing"
    kind = rng.choice([*DAMAGE, "remove", "swap"])
    if kind == "swap" and other.exists():
        shutil.copy(other, path)
        return f"{path.name} of {other.parent}"
    if isinstance(kind, str) or not path.stat().st_size:
        path.unlink()
        return f"{path.name} removed"
    path.write_bytes(kind(rng, path.read_bytes()))
    return f"{path.name} {kind.__name__}"


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def numbers(path):
    """The numbers that a report shows: those of its page and of its tables."""
    found = set()
    for each in (path / "report.html", *sorted((path / "report").glob("*.[ct]*"))):
        found |= set(NUMBER.findall(re.sub(r"base64,[^\"']*|<script.*?</script>", "", each.read_text(), flags=re.S)))
    return found


class Reference:
    """What the commands print and write for undamaged runs, by the state of the run."""

    def __init__(self, originals, base, capsys):
        self.tensors = load_file(originals / "ended" / "run" / "state.safetensors")
        self.metrics = (originals / "ended" / "run" / "metrics.jsonl").read_bytes()
        self.show, self.model = {}, {}
        for name in ("ended", "stopped"):
            folder = copied(originals, name, base)
            self.show[name] = printed(["show", "run"], capsys)[1]
            assert printed(["export", "run"], capsys)[0] == 0
            self.model[name] = (folder / "model.safetensors").read_bytes()
        copied(originals, "ended", base)
        assert printed(["report", "run"], capsys)[0] == 0
        self.report = numbers(base / "run")


def copied(originals, name, base):
    shutil.rmtree(base / "run", ignore_errors=True)
    shutil.copytree(originals / name / "run", base / "run")
    return base / "run"


def ends_well(words, state, folder, reference, capsys):
    """What is wrong with how the command ends; empty: nothing."""
    try:
        code, out, said = printed(words, capsys)
    except Exception as error:
        capsys.readouterr()
        return f"{type(error).__name__}: {error}"
    if code == 2:
        reasons = [line for line in said.splitlines() if line.startswith("fedncv: ")]
        return "" if reasons and "Traceback" not in said else f"no reason: {said}"
    if code != 0:
        return f"code {code}: {said}"
    if words[0] == "show":
        return "" if out == reference.show[state] else f"other numbers: {out}"
    if words[0] == "export":
        model = (folder / "model.safetensors").read_bytes()  # with an older checkpoint of the run, the model of that
        known = reference.model.values() if "after round 2" in out else [reference.model[state]]
        return "" if model in known else "another model"
    if words[0] == "report":
        new = numbers(folder) - reference.report
        return f"other numbers: {sorted(new)[:20]}" if new else ""
    if (folder / "metrics.jsonl").read_bytes() != reference.metrics:
        return "other metrics"
    theirs = load_file(folder / "state.safetensors")
    same = theirs.keys() == reference.tensors.keys() and all(
        map(torch.equal, theirs.values(), reference.tensors.values())
    )
    return "" if same else "another state"


def survive(seed, cases, originals, base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    reference, rng, failed = Reference(originals, base, capsys), random.Random(seed), []
    others = [originals / "other seed", originals / "other method"]
    for case in range(cases):
        state = rng.choice(["ended", "stopped"])
        folder = copied(originals, state, base)
        done = [damage(rng, folder, [*others, originals / "stopped" / "run", originals / "ended" / "run"])]
        commands = ["report"] * (state == "ended" and rng.random() < 0.3) + ["show", "export", "resume"]
        for command in commands:
            if why := ends_well([command, "run"], state, folder, reference, capsys):
                failed.append(f"seed {seed}, case {case}, {state}, {', '.join(done)}, {command}: {why:.500}")
                break
        store.release(folder)
    if failed:
        pytest.fail("\n".join(failed))


def test_a_dozen_damaged_runs_end_with_the_same_numbers_or_a_reason(originals, tmp_path, monkeypatch, capsys):
    survive(0, 12, originals, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_five_hundred_damaged_runs_end_with_the_same_numbers_or_a_reason(originals, tmp_path, monkeypatch, capsys):
    survive(1, 500, originals, tmp_path, monkeypatch, capsys)

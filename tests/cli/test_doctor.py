"""fedncv doctor: what is there, what is missing, what to do; and an exit status that a script can use."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest
import torch

from fedncv.cli import doctor, main
from fedncv.cli.doctor import Finding, diagnosis, lines
from fedncv.engine import cpu_library


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDNCV_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDNCV_DATA", raising=False)
    monkeypatch.setattr(doctor, "compiler", lambda: iter(()))  # its own test compiles


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_this_environment_is_sound_and_json_says_the_same_as_the_lines(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["broken"] is False
    assert "\n".join(lines([Finding(**each) for each in found["findings"]])) + "\n" == text
    names = {each["name"] for each in found["findings"]}
    assert {"system", "machine", "torch", "numpy", "device cpu", "cache", "data complete", "extra flower"} <= names
    assert not {name for name in names if name.startswith(("extra test", "extra release"))}


def test_a_package_that_is_missing_or_too_old_is_broken_and_an_extra_is_only_a_note(monkeypatch, capsys):
    asked = [
        "torch>=99",
        "no-such-package>=1",
        "numpy>=1",
        'no-such-extra>=2; extra == "hub"',
        'numpy<1; extra == "ray"',
    ]
    monkeypatch.setattr(doctor, "requires", lambda _name: asked)
    assert main(["doctor"]) == 1
    capsys.readouterr()
    found = by_name(diagnosis())
    assert found["torch"] == (
        "torch", "broken", f"{version('torch')}, but fedncv needs torch>=99", "pip install 'torch>=99'",
    )  # fmt: skip
    assert found["no-such-package"][1:] == ("broken", "not installed", "pip install 'no-such-package>=1'")
    assert found["numpy"].state == "ok"
    assert found["extra hub"][1:] == ("note", "no-such-extra not installed", "pip install 'fedncv[hub]'")
    assert found["extra ray"].state == "note"
    assert "but fedncv needs numpy<1" in found["extra ray"].found


def test_without_torch_the_doctor_still_answers_and_other_commands_name_it(tmp_path):
    """A process in which torch cannot be imported, as in an environment without it."""
    code = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: None if name == "torch" else find(name, path, target)
from fedncv.cli import main
print(main(["doctor"]), main(["run"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.endswith("1 2\n")
    assert "broken  torch" in done.stdout
    assert "cores" in done.stdout
    assert done.stderr == "fedncv: the package torch is not installed; fedncv doctor says what is missing\n"


def test_torch_that_is_not_installed_comes_with_the_build_for_the_cpu(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", version)
    found = by_name(doctor.packages())
    assert found["torch"][1:3] == ("broken", "not installed")
    assert found["torch"].remedy == "pip install torch --index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("driver", "built", "state", "words"),
    [
        (False, None, "ok", "none, and torch is the build for the CPU"),
        (False, "13.0", "note", "built for CUDA 13.0, and there is no GPU"),
        (True, None, "note", "there is an NVIDIA driver, but torch"),
        (True, "13.0", "note", "there is an NVIDIA driver, but torch is built for CUDA 13.0 and sees no GPU"),
    ],
)
def test_a_gpu_that_torch_does_not_see_and_a_build_that_no_gpu_uses_are_named(driver, built, state, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: driver)
    found = by_name(doctor.torch_())["device cuda"]
    assert found.state == state
    assert words in found.found
    assert bool(found.remedy) == (state == "note")


def test_every_gpu_is_named_with_its_precisions(monkeypatch):
    about = [SimpleNamespace(name="new", total_memory=80e9), SimpleNamespace(name="old", total_memory=16e9)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: about[k])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 if device.index == 0 else 7, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = by_name(doctor.torch_())
    assert found["device cuda:0"].found == "new, 80.0 GB, CUDA 13.0; float32, float64, tf32, bf16"
    assert found["device cuda:1"].found == "old, 16.0 GB, CUDA 13.0; float32, float64, neither tf32 nor bf16"


def test_data_that_are_complete_partial_and_missing_are_told_apart(tmp_path):
    for name, files in (("SVHN", ("train_32x32.mat", "test_32x32.mat")), ("cifar-100-python", ("train",))):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    found = by_name(doctor.data(str(tmp_path)))
    assert {"digits", "svhn"} <= set(found["data complete"].found.split(", "))
    assert "cifar100" not in found["data complete"].found.split(", ")
    assert found["data cifar100"].found == f"{tmp_path / 'cifar-100-python'} lacks test"
    assert "mnist" in found["data missing"].found.split(", ")


def test_a_cache_that_cannot_be_written_is_broken_and_a_full_disk_is_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _folder: SimpleNamespace(free=1_999_999_999))
    assert by_name(doctor.cache())["cache"].state == "note"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _folder: SimpleNamespace(free=2_000_000_000))
    assert by_name(doctor.cache())["cache"].state == "ok"
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDNCV_CACHE", str(tmp_path / "file"))
    assert by_name(doctor.cache())["cache"].state == "broken"
    assert main(["doctor"]) == 1
    assert "-> set FEDNCV_CACHE to a folder where you may write" in capsys.readouterr().out


def test_a_compiler_that_is_missing_is_a_note_with_the_package_that_has_one(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cpu_library, "why_not", lambda _dtype: "no C compiler (cc, gcc, clang) was found")
    (found,) = doctor.compiler()
    assert found[:3] == ("compiled layers", "note", "no C compiler (cc, gcc, clang) was found")
    assert "apt install gcc" in found.remedy
    monkeypatch.setattr(cpu_library, "why_not", lambda _dtype: "")
    assert [each.state for each in doctor.compiler()] == ["ok"]


def test_other_systems_are_told_what_they_lack(monkeypatch):
    for platform, words in (("win32", "no federation, no Ray cluster"), ("darwin", "Apple's GPUs are not supported")):
        monkeypatch.setattr(doctor.sys, "platform", platform)
        system = by_name(doctor.system())["system"]
        assert system.state == "note"
        assert words in system.remedy

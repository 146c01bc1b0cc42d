"""Completion in shells: the words that a shell offers, asked from the shell itself."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedncv import catalogue
from fedncv.cli import COMMANDS, completion, main
from fedncv.cli.federation import ACTIONS
from fedncv.studies import STUDIES

ROOT = Path(__file__).parents[2]
METHODS, SWITCHES = list(catalogue.methods()), list(catalogue.switches())
EVERYWHERE = ["--help", "--quiet", "--verbose"]
DRIVER = """
complete() {{ :; }}
compopt() {{ echo "compopt $*" >> options; }}
source ./script
COMP_WORDBREAKS={breaks}
while IFS= read -r COMP_LINE; do
  COMP_POINT=${{#COMP_LINE}}
  _fedncv
  printf '%s\\n' "${{COMPREPLY[*]}}"
done < lines
"""


def test_the_index_is_up_to_date():
    tool = runpy.run_path(str(ROOT / "tools" / "command_index.py"))
    assert completion.INDEX.read_text(encoding="utf-8") == tool["index"](), "run python tools/command_index.py"


def script(shell, capsys):
    capsys.readouterr()
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def offered(tmp_path, capsys):
    """What bash offers for command lines, each with the cursor at its end."""
    (tmp_path / "script").write_text(script("bash", capsys))
    (tmp_path / "mine.toml").touch()
    (tmp_path / "my runs").mkdir()

    def ask(*lines, breaks="$' \\t\\n\"\\'><=;|&(:'"):
        (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
        command = ["bash", "--norc", "-u", "-c", DRIVER.format(breaks=breaks)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return [line.split() for line in done.stdout.splitlines()]

    return ask


def test_bash_offers_commands_options_and_names(offered):
    """Each line is what a person has typed before pressing Tab."""
    cases = {
        "fedncv ": [*COMMANDS, "--version", *EVERYWHERE],
        "fedncv re": ["report", "resume"],
        "fedncv --quiet ex": ["export"],
        "fedncv run --per": ["--per-round"],
        "fedncv run --q": ["--quiet"],
        "fedncv run --print": ["--print-config"],
        "fedncv run --no-o": ["--no-overwrite"],
        "fedncv run --method ": METHODS,
        "fedncv run --method fedavg fedn": ["fedncv", "fedncv-sums", "fedncv-paper", "fednova"],
        "fedncv run --method=fedpr": ["fedprox"],
        "fedncv run --method fedavg+": [f"fedavg+{name}" for name in SWITCHES],
        "fedncv run --method fedavg+drift+pr": ["fedavg+drift+prior"],
        "fedncv run --engine s": ["sequential", "stacked", "streams"],
        "fedncv run --rounds 3 --engine=st": ["stacked", "streams"],
        "fedncv run --model res": ["resnet18", "resnet18_bn"],
        "fedncv run --metrics f1_macro au": ["auroc"],
        "fedncv run --rounds ": [],
        "fedncv run --config mi": ["mine.toml"],
        "fedncv study ": list(STUDIES),
        "fedncv study table1 --datasets cifar10 cif": ["cifar10", "cifar100"],
        "fedncv study --config mi": ["mine.toml"],
        "fedncv study --seeds 2 tab": ["table1", "table2"],
        "fedncv variance fedavg sc": ["scaffold"],
        "fedncv variance --reference scaf": ["scaffold"],
        "fedncv variance --reference scaffold scaf": ["scaffold"],
        "fedncv methods +ca": ["+calibrated"],
        "fedncv datasets em": ["emnist", "emnist_balanced", "emnist_letters"],
        "fedncv federation ": list(ACTIONS),
        "fedncv federation resu": ["resume"],
        "fedncv federation init trial --par": ["--partition"],
        "fedncv federation run trial --method scaf": ["scaffold"],
        "fedncv federation run trial --device": [],
        "fedncv doctor --j": ["--json"],
        "fedncv nonsense --": [],
    }
    assert dict(zip(cases, offered(*cases), strict=True)) == cases


def test_bash_replaces_only_what_follows_its_own_word_breaks(offered, tmp_path):
    """readline ends a word at ":" and "=", and keeps what stands before."""
    with_breaks = {
        "fedncv run --method fedprox:": ["mu="],
        "fedncv run --method fedavg scaffold+momentum:be": ["beta="],
        "fedncv run --method=fedprox:m": ["mu="],
        "fedncv run --method fedncv:momentum=0.9,": [f"0.9,{knob}=" for knob in completion.knobs()["fedncv"]],
    }
    without = {
        "fedncv run --method fedprox:": ["fedprox:mu="],
        "fedncv run --method=fedpr": ["--method=fedprox"],
        "fedncv run --method fedavg+momentum:be": ["fedavg+momentum:beta="],
    }
    assert dict(zip(with_breaks, offered(*with_breaks), strict=True)) == with_breaks
    assert "compopt -o nospace" in (tmp_path / "options").read_text()
    assert dict(zip(without, offered(*without, breaks="$' \\t\\n'"), strict=True)) == without


def test_every_option_of_every_command_is_offered(offered):
    """From the help of the commands themselves, not from the index."""
    lines, expected = [], []
    for command in ("run", "study", "report", "federation up", "federation run"):
        for option in completion.options(command):
            lines.append(f"fedncv {command} {option}")
            expected.append(option)
    assert all(option in words for option, words in zip(expected, offered(*lines), strict=True))


def test_files_are_offered_for_folders_of_runs_and_keep_their_blanks(offered):
    (words,) = offered("fedncv show my")
    assert words == ["my", "runs"]  # one candidate, shown by its parts


def zsh(code, capsys, tmp_path):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "_fedncv").write_text(script("zsh", capsys))
    done = subprocess.run(["zsh", "-f", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_zsh_reads_the_script_and_offers_the_same_words(tmp_path, capsys):
    assert zsh("zsh -n _fedncv", capsys, tmp_path) == ""
    code = """
compdef() { echo "compdef $*"; }
compadd() { print -r -- "${(@P)@[-1]}"; }
_files() { echo files; }
source ./_fedncv
ask() { words=("$@"); CURRENT=$#words; _fedncv; }
ask fedncv run --method fedavg+drift+pr
ask fedncv federation resu
ask fedncv run --engine s
ask fedncv show ""
"""
    said = zsh(code, capsys, tmp_path).splitlines()
    assert said[0] == "compdef _fedncv fedncv"
    assert "fedavg+drift+prior" in said[1].split()
    assert said[2].split() == list(ACTIONS)  # zsh itself leaves those that begin with "re"
    assert said[3].split() == ["auto", "sequential", "stacked", "streams", "processes", "ray"]
    assert said[4] == "files"


def test_fish_reads_the_script_and_offers_the_same_words(tmp_path, capsys):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (tmp_path / "script").write_text(script("fish", capsys))
    asked = ["fedncv re", "fedncv run --method fedn", "fedncv run --eng", "fedncv federation resu", "fedncv study tab"]
    code = "source script; " + "".join(f"complete -C '{line}'; echo =; " for line in asked)
    env = os.environ | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    command = ["fish", "--no-config", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = [{line.split("\t")[0] for line in part.split("\n") if line} for part in done.stdout.split("=\n")[:-1]]
    assert found == [
        {"report", "resume"}, {"fedncv", "fedncv-paper", "fedncv-sums", "fednova"}, {"--engine"}, {"resume"},
        {"table1", "table2"},
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_installing_writes_the_file_that_the_shell_reads(shell, tmp_path, capsys, monkeypatch):
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    text = script(shell, capsys)
    assert main(["completion", shell, "--install"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.is_relative_to(tmp_path)
    assert path.name in ("fedncv", "_fedncv", "fedncv.fish")
    assert path.read_text() == text


def test_a_shell_that_is_not_known_is_refused(capsys):
    for words, message in (
        (["bsh"], "unknown shell 'bsh'; did you mean 'bash'"),
        ([], "name a shell: bash, zsh or fish"),
    ):
        assert main(["completion", *words]) == 2
        assert message in capsys.readouterr().err


def test_completion_loads_no_torch():
    code = "import sys; from fedncv.cli import main; main(['completion', 'bash']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(completion.INDEX.read_text())["commands"]

"""Random command lines: each ends, with code 0, 2 or 130, and a mistake is a line that says what to do."""

import errno
import json
import os
import random
import resource
import signal
import traceback
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import pytest
from fuzzing import argv, commands

import fedncv
from fedncv.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flower's dependencies

SECONDS = 30  # for a command that trains nothing
BYTES = 8 << 30  # that it may add to the memory of this process
CRYPTIC = [
    "Traceback", "Errno", "NoneType", "KeyError", "float division", "division by zero", "int too large", "too large to",
    "embedded null", "too many values", "not enough values", "object is not", "has no attribute", "list index",
    "cannot convert float", "allocate memory", "unsupported operand", "codec can't", "unhashable", "invalid literal",
    "without overflow",
]  # fmt: skip
"""Words of Python and its libraries that say neither which value was wrong nor what to do."""


class EndlessError(Exception):
    pass


@contextmanager
def bounded():
    """Raise EndlessError after some seconds, and MemoryError instead of filling the machine."""

    def ring(_signal, _frame):
        raise EndlessError

    before = signal.signal(signal.SIGALRM, ring)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, limit[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limit)
        signal.signal(signal.SIGALRM, before)


def stop(*_arguments, **_options):
    """In place of training and of other processes: as if the user pressed Ctrl-C at once."""
    raise KeyboardInterrupt


def refuse(*_arguments):
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    """A folder with one of everything that commands read. Nothing trains, and nothing starts a process."""
    from PIL import Image

    monkeypatch.setenv("FEDNCV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDNCV_DATA", raising=False)
    here = tmp_path / "here"
    (here / "empty").mkdir(parents=True)
    monkeypatch.chdir(here)
    for kind in ("cat", "dog"):
        (here / "pictures" / kind).mkdir(parents=True)
        for i in range(30):
            pixels = np.full((20, 20), 8 * i + len(kind), np.uint8)
            Image.fromarray(pixels).save(here / "pictures" / kind / f"{i}.png")
    rows = [f"{i},{i % 7},{'abc'[i % 3]}" for i in range(90)]
    (here / "table.csv").write_text("\n".join(["x,a,label", *rows]) + "\n")
    quick = {"model": "mlp", "clients": 5, "per_round": 2, "epochs": 1}
    fedncv.simulate(out=here / "run", rounds=2, **quick)
    for seed in (0, 1):
        fedncv.simulate(out=here / "runs" / f"fedavg-seed{seed}", rounds=1, seed=seed, **quick)
    (here / "config.toml").write_text('rounds = 2\nmodel = "mlp"\nmethod = ["fedavg"]\n')
    (here / "broken.toml").write_text('rounds = "many\n')
    (here / "deep.toml").write_text("rounds = " + "[" * 50_000)
    (here / "rows.jsonl").write_text(json.dumps({"round": 1}) + "\n")
    (here / "words").write_bytes(bytes(range(256)))
    (here / "link").symlink_to("run")
    words = ["study", "smoke", "--methods", "fedavg", "--rounds", "1", "--seeds", "1", "--model", "mlp"]
    assert main([*words, "--out", "study"]) == 0
    if find_spec("flwr"):
        assert main(["federation", "init", "federation", "--clients", "2"]) == 0
    if find_spec("ray"):
        import ray  # noqa: F401  (before processes are refused: it asks another one for the machine's)
    capsys.readouterr()
    for name in (
        "fedncv.runner.engine_for", "fedncv.cli.variance.rows_of", "fedncv.cli.study.costs", "fedncv.cli.study.joined",
        "fedncv.cli.study.run_groups", "fedncv.cli.theory.evaluate", "subprocess.Popen.__init__", "os.fork",
        "os.posix_spawn", "socketserver.BaseServer.serve_forever", "webbrowser.open",
    ):  # fmt: skip
        monkeypatch.setattr(name, stop)
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("fedncv.cli.federation.shared.ANSWER_SECONDS", 0.01)
    return here


def fault(words, capsys):
    """What is wrong with how a command line ends; empty: nothing."""
    try:
        with bounded():
            code = main(list(words))
    except SystemExit as leaving:
        code = leaving.code
    except BaseException as error:
        capsys.readouterr()
        return "".join(traceback.format_exception(error)[-3:])
    said = capsys.readouterr().err
    if code not in (0, 2, 130, None):
        return f"code {code}"
    if code == 2 and not said.splitlines()[-1:][0].startswith("fedncv: "):
        return f"no reason: {said}"
    found = [word for word in CRYPTIC if word in said]
    return f"cryptic {found}: {said}" if found else ""


def survive(seed, number, capsys):
    """Try so many command lines and fail with all that end badly; each is repeated by seed and number."""
    rng, known, failed = random.Random(seed), commands(), []
    for i in range(number):
        words = argv(rng, known, i)
        if why := fault(words, capsys):
            failed.append(f"seed {seed}, number {i}: {words!r:.600}\n{why}")
    if failed:
        pytest.fail("\n\n".join(failed))


def test_fifty_command_lines_end_well(place, capsys):
    survive(0, 50, capsys)


@pytest.mark.slow
def test_two_thousand_command_lines_end_well(place, capsys):
    survive(1, 2000, capsys)


ABSURD = [
    (["run", "--rounds", "9223372036854775808"], "rounds must be at most 10,000,000, not 9223372036854775808"),
    (["run", "--epochs", "18446744073709551615"], "epochs must be at most 1,000,000, not 18446744073709551615"),
    (["run", "--clients", "100000000"], "clients must be at most 10,000,000"),
    (["run", "--data", "folder:path=pictures,size=100000000"], "size is 100000000; it must be from 1 to 2,048 pixels"),
    (["run", "--data", "synthetic:clients=9223372036854775807"], "more than half of this machine's memory"),
    (["partition", "--data", "synthetic:features=1000000000"], "more than half of this machine's memory"),
    (["run", "--device", "cuda:99999999999999999999"], "unknown device 'cuda:99999999999999999999'; use cpu, cuda, or"),
    (["run", "--model", "..:x"], "'..:x'"),
    (["run", "--data", "folder:path=~nosuchuser/x"], "'~nosuchuser/x' names the home of a user who is not on this"),
    (["run", "--data", "table:path=~nosuchuser/x,y=a"], "names the home of a user who is not on this machine"),
    (["run", "--data-dir", "~nosuchuser/x"], "names the home of a user who is not on this machine"),
    (["datasets", "--data-dir", "~nosuchuser/x"], "names the home of a user who is not on this machine"),
    (["study", "smoke", "--seeds", "18446744073709551616"], "must be at most 10,000, not 18446744073709551616"),
    (["run", "--config", "deep.toml"], "deep.toml is not valid TOML: it is nested too deeply"),
    (["run", "--config", "words"], "words is not a text in UTF-8"),
    (["run", "--data", "a\nb"], "'a\\nb' holds a control character"),
    (["run", "--optimizer", "adagrad:initial=1e308"], "initial must be at least 0 and at most 1e30, not 1e+308"),
]  # fmt: skip


def test_absurd_values_are_refused_with_what_is_sensible_and_a_study_of_pictures_is_not(place, capsys):
    for words, message in ABSURD:
        assert main([*words, *(["--out", "new"] if words[0] in ("run", "study") else [])]) == 2, words
        said = capsys.readouterr().err
        assert message in said, words
        assert said.startswith("fedncv: "), words
        assert said.count("\n") == 1, words
        assert not (place / "new").exists(), words
    words = ["study", "smoke", "--datasets", "folder:path=pictures", "--methods", "fedavg", "--seeds", "1"]
    assert main([*words, "--clients", "3", "--per-round", "2", "--model", "mlp", "--out", "new"]) == 130  # trains not
    assert (place / "new" / "study.toml").exists()

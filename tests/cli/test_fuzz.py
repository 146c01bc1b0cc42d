"""Random command lines: each ends, with code 0, 2 or 130, and a mistake is one line that says what to do."""

import json
import os
import random
import resource
import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from fuzzing import argv, commands

import fedncv
from fedncv.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flower's dependencies

SECONDS = 30  # for a command that trains nothing
BYTES = 8 << 30  # that it may add to the memory of this process
CRYPTIC = ["Traceback", "float division", "division by zero", "too large to convert", "embedded null", "NoneType", "too many values",
           "object is not", "list index", "out of bounds", "cannot convert float", "not enough values", "allocate memory",
           "unsupported operand", "codec can't", "Errno", "unhashable", "int too large", "has no attribute", "KeyError"]  # fmt: skip


class EndlessError(Exception):
    pass


@contextmanager
def bounded():
    """Raise EndlessError after some seconds, and MemoryError instead of filling the machine."""

    def ring(_signal, _frame):
        raise EndlessError

    before = signal.signal(signal.SIGALRM, ring)
    limit = resource.getrlimit(resource.RLIMIT_AS)
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
    """In place of training, of other processes and of connections: as if the user pressed Ctrl-C at once."""
    raise KeyboardInterrupt


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    """A folder with one of everything that commands read. Nothing trains, and nothing starts a process."""
    from PIL import Image

    monkeypatch.setenv("FEDNCV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FEDNCV_DATA", raising=False)
    here = tmp_path / "here"
    here.mkdir()
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
    (here / "runs").mkdir()
    for seed in (0, 1):
        fedncv.simulate(out=here / "runs" / f"fedavg-seed{seed}", rounds=1, seed=seed, **quick)
    (here / "config.toml").write_text('rounds = 2\nmodel = "mlp"\nmethod = ["fedavg"]\n')
    (here / "broken.toml").write_text('rounds = "many\n')
    (here / "deep.toml").write_text("rounds = " + "[" * 50_000)
    (here / "rows.jsonl").write_text(json.dumps({"round": 1}) + "\n")
    (here / "words").write_bytes(bytes(range(256)))
    (here / "empty").mkdir()
    (here / "link").symlink_to("run")
    words = [
        "study",
        "smoke",
        "--methods",
        "fedavg",
        "--rounds",
        "1",
        "--seeds",
        "1",
        "--model",
        "mlp",
        "--out",
        "study",
    ]
    assert main(words) == 0
    if "flwr" in sys.modules or __import__("importlib.util").util.find_spec("flwr"):
        assert main(["federation", "init", "federation", "--clients", "2"]) == 0
    capsys.readouterr()
    for name in ("fedncv.runner.engine_for", "fedncv.cli.variance.rows_of", "fedncv.cli.study.costs",
                 "fedncv.cli.study.joined", "fedncv.cli.study.run_groups", "subprocess.Popen.__init__", "os.fork",
                 "fedncv.cli.theory.evaluate", "socket.socket.connect"):  # fmt: skip
        monkeypatch.setattr(name, stop)
    return here


def outcome(words, capsys):
    """What is wrong with how a command line ends; empty: nothing."""
    try:
        with bounded():
            code = main(list(words))
    except SystemExit as leaving:
        code = leaving.code
    except BaseException as error:
        import traceback

        capsys.readouterr()
        return "".join(traceback.format_exception(error)[-3:])
    said = capsys.readouterr().err
    lines = said.splitlines()
    if os.environ.get("FUZZ_SHOW"): open(os.environ["FUZZ_SHOW"],"a").write(f"{code} {list(words)!r:.250}\n      {said!r:.400}\n")
    if code not in (0, 2, 130, None):
        return f"code {code}"
    if code == 2 and not (lines and lines[-1].startswith("fedncv: ")):
        return f"no reason: {said}"
    if found := [word for word in CRYPTIC if word in said]:
        return f"cryptic {found}: {said}"
    return ""


def survive(seed, number, capsys):
    rng, known = random.Random(seed), commands()
    failed = {}
    for i in range(number):
        words = argv(rng, known, i)
        if why := outcome(words, capsys):
            failed[f"{i}: {words!r:.600}"] = why
    return "\n\n".join(f"{words}\n{why}" for words, why in failed.items())


def test_fifty_command_lines_end_well(place, capsys):
    if failed := survive(0, 50, capsys):
        pytest.fail(failed)


@pytest.mark.slow
def test_two_thousand_command_lines_end_well(place, capsys):
    if failed := survive(1, 2000, capsys):
        pytest.fail(failed)

""" "Repeat it" runs as it is printed, and makes the same configs. What the runs ran on is on the page."""

import getpass
import html
import json
import platform
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_runs import made_up_study, write_run, write_study

import fedncv
from fedncv.cli import main
from fedncv.config import RunConfig, own_object
from fedncv.methods.fedavg import fedavg
from fedncv.report.gather import gather
from fedncv.report.page import page
from fedncv.report.repeat import again, machines
from fedncv.report.table import main_table
from fedncv.results import read_config
from fedncv.studies import STUDIES
from fedncv.studies.command import command
from fedncv.study import Tuning

TINY = ["--model", "mlp", "--clients", "4", "--per-round", "2", "--rounds", "1", "--epochs", "1"]


def configs(folder):
    """The configs of all runs below a folder, whatever the runs are called."""
    found = [read_config(path.parent) for path in Path(folder).rglob("config.toml")]
    return sorted(found, key=lambda config: (config.method, config.seed, config.lr))


def printed(folder):
    """The blocks of "Repeat it", as they are on the page."""
    results = gather(folder)
    text = page(results, main_table(results), [])
    section = text.split('id="repeat"')[1].split("</section>")[0]
    return [html.unescape(block) for block in re.findall(r"<pre><code>(.*?)</code></pre>", section, re.S)]


def run(blocks):
    for line in "\n".join(blocks).splitlines():
        words = shlex.split(line)
        assert words[0] == "fedncv"
        assert main(words[1:]) == 0, line


def test_the_command_of_a_study_makes_the_same_runs(tmp_path, monkeypatch):
    """Also of one that several commands made, in a folder with a difficult name."""
    monkeypatch.chdir(tmp_path)
    out = 'my "study", =1'
    assert main(["study", "smoke", *TINY, "--methods", "fedavg", "--seeds", "1", "--lr", "0.05", "--out", out]) == 0
    more = ["--methods", "fedavg+prior:tau=0.5", "--seeds", "2", "--lr", "0.05"]
    assert main(["study", "smoke", *TINY, *more, "--out", out]) == 0
    *blocks, last = printed(tmp_path / out)
    run(blocks)
    (repeated,) = (tmp_path / "runs").iterdir()
    assert shlex.split(last) == ["fedncv", "report", f"runs/{repeated.name}"]
    assert configs(repeated) == configs(tmp_path / out)
    assert len(configs(repeated)) == 4


def test_the_command_of_runs_makes_the_same_runs(tmp_path, monkeypatch):
    """Runs of several settings and of different seeds need several commands."""
    monkeypatch.chdir(tmp_path)
    for where, words in {
        "a": ["--method", "fedavg", "fedprox:mu=0.1", "--seeds", "3"],
        "b": ["--method", "fedavg+prior", "--seeds", "7", "--lr", "0.3"],
    }.items():
        assert main(["run", *TINY, *words, "--partition", "iid", "--out", f"it's/{where}"]) == 0
    results = gather(tmp_path / "it's", allow=("lr",))
    *blocks, _ = [each.text for each in again(results)]
    run(blocks)
    assert len(blocks) == 2
    assert configs(tmp_path / "runs") == configs(tmp_path / "it's")


def test_runs_with_objects_say_the_call_and_it_makes_the_same_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gentle = fedavg()._replace(broadcast=fedavg().broadcast)

    def spread(outputs, _targets):
        return float(outputs.std())

    settings = {"model": "mlp", "clients": 4, "per_round": 2, "rounds": 1, "epochs": 1, "metrics": ["ece"]}
    fedncv.simulate_many(seeds=[0, 2], method=gentle, name="gentle", out=tmp_path / "own/gentle", **settings)
    fedncv.simulate(seed=5, out=tmp_path / "own/spread", **settings | {"metrics": ["ece", spread]})
    fedncv.simulate(method="fedavg", out=tmp_path / "own/plain", **settings)
    command, code, _ = printed(tmp_path / "own")
    run([command])
    exec(code, {"gentle": gentle, "spread": spread})
    assert configs(tmp_path / "runs") == configs(tmp_path / "own")


def test_two_objects_of_one_name_are_told_apart_by_their_fingerprints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"model": "mlp", "clients": 4, "per_round": 2, "rounds": 1, "epochs": 1}
    methods = {}
    for i in range(2):
        method = fedavg()._replace(shared=lambda server, i=i: server.x_P + 0 * i)
        config = fedncv.simulate(method=method, name="a", out=tmp_path / f"own/{i}", **settings).config
        methods[f"a_{own_object(config.method).fingerprint}"] = method
    code, _ = printed(tmp_path / "own")
    words = next(each.words for each in again(gather(tmp_path / "own")) if each.words)
    for name in methods:
        assert f"method={name}, " in code
        assert f"method {name}" in words
    exec(code, methods)
    assert configs(tmp_path / "runs") == configs(tmp_path / "own")


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "table2"])
def test_a_named_study_needs_no_options(name):
    assert command(STUDIES[name]()) == f"fedncv study {name}"


def test_only_what_differs_is_an_option():
    study = STUDIES["fig2"]()
    changed = replace(study, clients=(10, 20), seeds=(0, 1), tuning=Tuning(grid=(0.1,), seeds=(1000,)))
    changed = replace(changed, datasets=('folder:path="/a b"',), settings=replace(study.settings, per_round=3))
    assert shlex.split(command(changed))[2:] == [
        "fig2", "--datasets", 'folder:path="/a b"', "--seeds", "2", "--clients", "10", "20", "--per-round", "3",
        "--tune", "--tuning-lr", "0.1", "--tuning-seeds", "1",
    ]  # fmt: skip


def test_a_study_of_an_earlier_version_keeps_its_command_but_not_its_folder(tmp_path):
    write_study(tmp_path / "study", made_up_study())
    path = tmp_path / "study/study.toml"
    typed = "fedncv study table1 --out runs/x --seeds 3"
    path.write_text(path.read_text().replace("fedncv study table1", typed))
    first, _ = again(gather(tmp_path / "study"))
    assert first.text == "fedncv study table1 --seeds 3 --out runs/study-again"


# ---- the machine ---------------------------------------------------------------------------------------


def test_a_run_records_its_machine_and_no_name_of_host_user_or_folder(tmp_path):
    fedncv.simulate(model="mlp", clients=4, per_round=2, rounds=1, epochs=1, out=tmp_path / "run")
    text = (tmp_path / "run/machine.jsonl").read_text()
    (line,) = map(json.loads, text.splitlines())
    assert (line["round"], line["engine"], line["layers"], line["device"]) == (0, "sequential", "torch's", "cpu")
    assert line["cores"] >= line["threads"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", line["date"])
    assert {"fedncv", "torch", "numpy", "python", "processor"} <= line.keys()
    assert line["method"] == "fedavg:server_lr=1.0"  # with every knob
    assert re.fullmatch(r"[0-9a-f]{6}", line["source"])
    assert platform.node() not in line.values()
    assert getpass.getuser() not in line.values()
    assert str(tmp_path) not in text
    results = gather(tmp_path / "run")
    shown = page(results, main_table(results), []).split("</header>")[0]
    for said in (line["date"][:10], "engine sequential", "torch's layers".replace("'", "&#x27;"), line["torch"]):
        assert said in shown


def test_a_resumed_run_has_a_line_for_each_start_and_a_cut_line_is_repaired(tmp_path):
    class StopError(Exception):
        pass

    def stop(row):
        if row["round"] == 1:
            raise StopError

    settings = {"model": "mlp", "clients": 4, "per_round": 2, "rounds": 2, "epochs": 1}
    with pytest.raises(StopError):
        fedncv.simulate(out=tmp_path / "run", on_round=stop, **settings)
    with (tmp_path / "run/machine.jsonl").open("a") as file:
        file.write('{"date": "2026')  # a crash
    fedncv.resume(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/machine.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1]


def test_all_machines_of_a_study_are_named_and_unknown_ones_counted(tmp_path):
    write_study(tmp_path, made_up_study())
    for i, path in enumerate(sorted(tmp_path.glob("*/fedavg-*"))[:2]):
        line = {"date": f"2026-01-0{i + 1}T10:00:00+00:00", "round": 0, "cores": 8 * (i + 1), "engine": "processes"}
        (path / "machine.jsonl").write_text(json.dumps(line) + "\n")
    results = gather(tmp_path)
    facts, unknown = machines(results)
    assert (facts["date"], facts["cores"], unknown) == ("2026-01-01 to 2026-01-02", "8, 16", 7)
    text = page(results, main_table(results), [])
    assert "7 of 9 runs did not record their machine" in text
    assert "8, 16 cores" in text


# ---- links ---------------------------------------------------------------------------------------------


def test_links_work_when_the_folder_is_moved_and_with_any_characters(tmp_path):
    from urllib.parse import unquote

    from fedncv.report.write import write

    old = tmp_path / 'été #1 "50%"?'
    config = RunConfig(data="digits", clients=4, per_round=2, rounds=4, eval_every=2)
    write_run(old / "fed avg & <b>, 50%41 #1?" / "seed 0", config, 0.8)
    write(old)
    new = tmp_path / "moved" / "elsewhere"
    new.parent.mkdir()
    old.rename(new)
    links = re.findall(r'<a href="([^"#][^"]*)"', (new / "report.html").read_text())
    targets = [new / unquote(html.unescape(link)) for link in links]
    assert {path.name for path in targets} >= {"config.toml", "metrics.jsonl", "table.csv", "curves.png", "curves.svg"}
    for path in targets:
        assert path.is_file(), path
    assert not any(link.startswith(("/", "file:")) or set(link) & set(" #?") for link in links)

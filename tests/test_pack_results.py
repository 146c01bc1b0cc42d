"""A study run in parts and packed: unpacked, its report is that of the study run in one go."""

import importlib.util
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_runs import made_up_study, write_run, write_study

from fedncv.report.gather import gather
from fedncv.report.page import chart_data
from fedncv.report.repeat import again
from fedncv.report.table import main_table, to_csv
from fedncv.results import read_run
from fedncv.study import Tuning, read_study

TOOL = Path(__file__).parents[1] / "tools" / "pack_results.py"
LEVEL = {"fedavg": 0.6, "scaffold": 0.7, "fedncv": 0.8}
RATES = {"fedavg": 0.03, "scaffold": 0.01, "fedncv": 0.1}
SETTINGS = replace(made_up_study().settings, data_dir="/data", eval_every=10)


@pytest.fixture
def pack():
    spec = importlib.util.spec_from_file_location("pack_results", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def study(*methods):
    rates = {"cifar10": {method: RATES[method] for method in methods}}
    return made_up_study(methods=methods, seeds=(0, 1), settings=SETTINGS, tuning=Tuning(seeds=(1000,)), lr=rates)


def write(out, *methods):
    return write_study(out, study(*methods), level=lambda _, method: LEVEL[method])


@pytest.fixture
def parts(tmp_path):
    """Two parts in another order than the study's; one of them with a run of its tuning."""
    parts = [write(tmp_path / "a", "fedncv"), write(tmp_path / "b", "scaffold", "fedavg")]
    (trial,) = study("fedncv").tuning_cells("cifar10", "fedncv", {"lr": 0.1}, "lr-0.1")
    write_run(parts[0] / trial.folder, replace(trial.config, eval_every=20), 0.7)
    return parts


def test_parts_packed_and_unpacked_are_reported_as_the_whole(tmp_path, pack, parts):
    pack.main(tmp_path / "table1.tar.xz", parts)
    with tarfile.open(tmp_path / "table1.tar.xz") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    ours = gather(tmp_path / "unpacked" / "table1")
    whole = gather(write(tmp_path / "whole", "fedavg", "scaffold", "fedncv"))
    assert (ours.num_finished, ours.missing, ours.methods) == (6, [], ["fedavg", "scaffold", "fedncv"])
    assert to_csv(main_table(ours)) == to_csv(main_table(whole))
    assert chart_data(ours) == chart_data(whole)
    assert again(ours)[0].text == (
        "fedncv study table1 --datasets cifar10 --methods fedavg scaffold fedncv --seeds 2 --clients 20 "
        "--tune --tuning-lr 0.01 0.03 0.1 --tuning-seeds 1 --rounds 20 --per-round 5 --eval-every 10 "
        "--out runs/table1-again"
    )


def test_single_clients_are_kept_of_the_last_row_and_folders_of_data_not_at_all(tmp_path, pack, parts):
    files = pack.contents(parts)
    assert len(files) == 2 + 2 * 7  # study.toml, partition.json, and config and metrics of six runs and a trial
    assert not any(b"/data" in data for data in files.values())
    rows = [json.loads(line) for line in files["cifar10/fedncv-seed1/metrics.jsonl"].splitlines()]
    whole = read_run(parts[0] / "cifar10" / "fedncv-seed1").rows
    assert rows[-1] == whole[-1]
    assert rows[:-1] == [{k: v for k, v in row.items() if k != "before_clients"} for row in whole[:-1]]
    assert read_study(parts[0]).settings.data_dir == "/data"  # the parts stay as they are


def test_the_first_seeds_are_the_smallest_in_whatever_order_the_parts_come(tmp_path, pack):
    for name, seeds in (("late", (2, 3)), ("early", (0, 1))):
        write_study(tmp_path / name, replace(study("fedncv"), seeds=seeds))
    files = pack.contents([tmp_path / "late", tmp_path / "early"], seeds=2)
    assert {name.split("-seed")[1][0] for name in files if "-seed" in name} == {"0", "1"}


def test_parts_that_do_not_belong_together_are_refused(tmp_path, pack, parts):
    write_run(tmp_path / "c" / "cifar10" / "fedncv-seed0", study("fedncv").cells()[0].config, 0.5)
    other = write_study(tmp_path / "c", study("fedncv"), skip=("cifar10/fedncv-seed0",))
    with pytest.raises(SystemExit, match="fedncv-seed0 is also in an earlier part"):
        pack.contents([*parts, other])
    text = (other / "study.toml").read_text()
    (other / "study.toml").write_text(text.replace("fedncv = 0.1", "fedncv = 0.03"))
    with pytest.raises(SystemExit, match="other tuned settings of fedncv on cifar10"):
        pack.joined([*parts, other])
    (other / "study.toml").write_text(text.replace('torch = "2"', 'torch = "3"'))
    with pytest.raises(SystemExit, match="not made with the same versions"):
        pack.made_with([*parts, other])


def test_of_parts_that_hold_more_some_methods_and_seeds_are_chosen(pack, parts):
    files = pack.contents(parts, seeds=1, methods=["fedncv", "fedavg"])
    runs = sorted(path.removesuffix("/metrics.jsonl") for path in files if path.endswith("metrics.jsonl"))
    assert runs == ["cifar10/fedavg-seed0", "cifar10/fedncv-seed0", "tuning/cifar10/lr-0.1/fedncv-seed1000"]
    text = files["study.toml"].decode()
    assert 'methods = ["fedavg", "fedncv"]\nseeds = [0]\n' in text
    assert "--methods fedavg fedncv --seeds 1 " in text
    assert "scaffold" not in text

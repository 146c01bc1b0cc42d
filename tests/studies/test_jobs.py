"""Groups of runs in several processes: the bytes of one process, every row told, and nothing lost when it stops."""

import multiprocessing
import re
from dataclasses import replace

import pytest

from fedncv.config import RunConfig
from fedncv.results import read_run
from fedncv.runner import Watch, alike, run_folders
from fedncv.studies.cells import prepare
from fedncv.studies.jobs import JobError, run_groups
from fedncv.study import Cell, folder_name

CONFIG = RunConfig(model="mlp", clients=5, per_round=2, rounds=4, epochs=1, eval_every=1, lr=0.05)
CONFIGS = [replace(CONFIG, method=method, seed=seed) for method in ("fedavg", "scaffold") for seed in (0, 1)]
CELLS = [Cell(folder_name(config), config) for config in CONFIGS]


def quiet(row=lambda folder, row: None):
    return Watch(lambda folders, rounds: None, row, lambda folder, reason: None, lambda folders: None)


def metrics(folders):
    return [(folder / "metrics.jsonl").read_bytes() for folder in folders]


@pytest.mark.slow
def test_runs_end_as_in_one_process_and_one_that_fails_stops_no_other(tmp_path):
    alone, apart = (prepare(tmp_path / name, CELLS[:2]) for name in ("alone", "apart"))
    gone = [(data, replace(CONFIG, data=data, data_dir=str(tmp_path))) for data in ("mnist", "cifar10")]
    lost = prepare(tmp_path / "apart", [Cell(f"lost-{data}", config) for data, config in gone])
    rows = {}
    with pytest.raises(JobError) as error:
        run_groups(alike([*lost, *apart]), 2, quiet(lambda folder, row: rows.setdefault(folder, []).append(row)))
    for data, _ in gone:
        assert re.search(f"lost-{data}: .*{data}.*{tmp_path}", str(error.value))
    run_folders(alone, quiet())
    assert metrics(apart) == metrics(alone)
    assert rows == {run.folder: run.rows for run in map(read_run, apart)}
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_an_interrupt_stops_all_processes_and_the_runs_go_on_later(tmp_path):
    def interrupt(folder, row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    alone, apart = (prepare(tmp_path / name, CELLS) for name in ("alone", "apart"))
    with pytest.raises(KeyboardInterrupt):
        run_groups(alike(apart), 2, quiet(interrupt))
    assert not multiprocessing.active_children()
    run_groups(alike(prepare(tmp_path / "apart", CELLS)), 2, quiet())
    run_folders(alone, quiet())
    assert metrics(apart) == metrics(alone)


def test_a_process_that_is_killed_is_told_with_its_run(tmp_path):
    def kill(_configs, _rounds):
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(JobError, match=f"{CELLS[0].folder} ended with code -9"):
        run_groups(alike(prepare(tmp_path, CELLS[:1])), 1, quiet()._replace(begin=kill))

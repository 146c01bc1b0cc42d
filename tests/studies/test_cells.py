"""Runs of a study, together and one by one: the same bytes whatever round each of them stands at."""

import pytest

from fedncv import store
from fedncv.config import RunConfig
from fedncv.results import read_run
from fedncv.runner import Watch, alike, reasons, run_folders
from fedncv.simulation import resume
from fedncv.studies.cells import failures, prepare
from fedncv.study import Cell, folder_name

CONFIG = RunConfig(model="mlp", clients=5, per_round=2, rounds=4, epochs=1, eval_every=1, lr=0.05)


@pytest.fixture
def said():
    return []


@pytest.fixture
def watch(said):
    def begin(folders, rounds):
        said.append((len(folders), rounds))

    return Watch(begin, lambda folder, row: None, lambda folder, reason: said.append(reason), lambda folders: None)


def cells(*, seeds=(0, 1), methods=("fedavg",)):
    configs = [RunConfig(**vars(CONFIG) | {"seed": s, "method": m}) for m in methods for s in seeds]
    return [Cell(folder_name(config), config) for config in configs]


def test_seeds_of_one_method_go_together(tmp_path, watch, said):
    folders = prepare(tmp_path, cells(seeds=(0, 1, 2), methods=("fedavg", "scaffold")))
    assert [len(group) for group in alike(folders)] == [3, 3]
    run_folders(folders, watch)
    assert said == [(3, [0, 0, 0]), (3, [0, 0, 0])]
    assert prepare(tmp_path, cells(seeds=(0, 1, 2), methods=("fedavg", "scaffold"))) == []


def test_learning_rates_and_partitions_of_one_method_go_together_and_end_as_alone(tmp_path, said):
    """Runs of the same seed are told apart: every row comes with its own folder, and the bytes are those of alone."""
    own = [{"lr": 0.05}, {"lr": 0.01}, {"lr": 0.05, "partition": "iid"}, {"lr": 0.01, "seed": 1}]
    configs = [RunConfig(**vars(CONFIG) | each) for each in own]
    apart = [Cell(f"run-{i}", config) for i, config in enumerate(configs)]
    folders = prepare(tmp_path / "together", apart)
    assert alike(folders) == [folders]
    rows = {folder: [] for folder in folders}
    run_folders(
        folders,
        Watch(
            lambda folders, _: said.append(folders),
            lambda folder, row: rows[folder].append(row),
            lambda _, reason: said.append(reason),
            lambda folders: said.append("ended"),
        ),
    )
    assert said == [folders, "ended"]
    for cell in apart:
        (folder,) = prepare(tmp_path / "alone", [cell])
        resume(folder)
        alone = (folder / "metrics.jsonl").read_bytes()
        assert (tmp_path / "together" / cell.folder / "metrics.jsonl").read_bytes() == alone
        assert rows[tmp_path / "together" / cell.folder] == read_run(folder).rows
    assert len({(tmp_path / "alone" / cell.folder / "metrics.jsonl").read_bytes() for cell in apart}) == 4


def test_runs_of_other_lengths_go_apart(tmp_path):
    folders = prepare(tmp_path, [Cell(f"run-{t}", RunConfig(**vars(CONFIG) | {"rounds": t})) for t in (1, 2)])
    assert [len(group) for group in alike(folders)] == [1, 1]


def test_runs_that_stand_at_different_rounds_end_with_the_same_bytes(tmp_path, watch, said):
    def stop(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    folders = prepare(tmp_path / "stopped", cells())
    with pytest.raises(KeyboardInterrupt):
        resume(folders[0], on_round=stop)
    run_folders(folders, watch)
    assert said == [(1, [0]), (1, [2])]  # the one that stands further back first
    run_folders(prepare(tmp_path / "whole", cells()), watch)
    for folder in folders:
        whole = tmp_path / "whole" / folder.name
        assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_run_stopped_after_its_initial_model_and_one_that_has_not_begun_both_have_every_row_once(
    tmp_path, watch, said
):
    """Both stand at round 0; one has a row of it and the other has not."""

    def stop(row):
        raise KeyboardInterrupt

    folders = prepare(tmp_path, cells())
    with pytest.raises(KeyboardInterrupt):
        resume(folders[0], on_round=stop)
    run_folders(folders, watch)
    assert said == [(1, [0]), (1, [0])]
    for folder in folders:
        assert [row["round"] for row in read_run(folder).rows] == [0, 1, 2, 3, 4]


def test_one_that_diverges_leaves_the_others_alone_and_is_not_tried_again(tmp_path, watch, said):
    mixed = cells(methods=("fedprox:mu=1e30", "fedavg"))
    run_folders(prepare(tmp_path, mixed), watch)
    assert [read_run(tmp_path / cell.folder).status for cell in mixed] == ["failed", "failed", "finished", "finished"]
    assert len(failures(tmp_path, mixed)) == 2
    assert sum("diverged in round 1" in str(word) for word in said) == 2
    assert prepare(tmp_path, mixed) == []


def test_a_run_that_has_not_begun_takes_the_new_device(tmp_path):
    (cell,) = cells(seeds=(0,))
    elsewhere = cell._replace(config=RunConfig(**vars(cell.config) | {"data_dir": "elsewhere"}))
    (folder,) = prepare(tmp_path, [elsewhere])
    assert prepare(tmp_path, [cell]) == [folder]
    assert read_run(folder).config == cell.config
    store.create(tmp_path / "other", cell.config)
    other = RunConfig(**vars(cell.config) | {"rounds": 9})
    with pytest.raises(
        ValueError, match=r"whose settings differ from the study's \(rounds 4, not 9\); choose another --out"
    ):
        prepare(tmp_path, [Cell("other", other)])


def test_a_checkpoint_mends_rows_that_were_damaged_after_it(tmp_path, watch):
    def stop(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    for out in ("damaged", "whole"):
        (folder,) = prepare(tmp_path / out, cells(seeds=(0,)))
        with pytest.raises(KeyboardInterrupt):
            resume(folder, on_round=stop)
    with (tmp_path / "damaged" / folder.name / "metrics.jsonl").open("ab") as file:
        file.write(b"\0" * 100)
    for out in ("damaged", "whole"):
        run_folders(prepare(tmp_path / out, cells(seeds=(0,))), watch)
    damaged, whole = (tmp_path / out / folder.name / "metrics.jsonl" for out in ("damaged", "whole"))
    assert damaged.read_bytes() == whole.read_bytes()


def test_rows_that_were_changed_are_refused_with_their_bytes_and_stop_no_other_run(tmp_path, watch):
    """A line that grew: cut at the checkpoint's bytes, the last row would be gone."""
    one, other = prepare(tmp_path, cells(seeds=(0, 1)))
    (later,) = prepare(tmp_path / "later", cells(seeds=(2,)))
    run_folders([one], watch)
    path = one / "metrics.jsonl"
    changed = path.read_bytes().replace(b'"lr": ', b'"lr":  ')
    path.write_bytes(changed)
    ((failed, error),) = run_folders([one, other, later], watch)
    assert failed == one
    assert "seed0/metrics.jsonl was edited, or lacks rows that state.safetensors" in str(error)
    assert path.read_bytes() == changed
    assert [read_run(folder).status for folder in (other, later)] == ["finished", "finished"]


def test_what_all_runs_lack_is_told_once(tmp_path, watch, monkeypatch):
    def no_data(config, **objects):
        raise ValueError("no data")

    folders = prepare(tmp_path, cells(methods=("fedavg", "fedper")))
    monkeypatch.setattr("fedncv.runner.build", no_data)
    assert reasons(run_folders(folders, watch)) == [f"{folders[0]} and 3 more: no data"]

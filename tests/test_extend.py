"""More rounds than planned: the same bits as a run of so many rounds from the start, or a refusal that says why."""

import re

import pytest
import torch

import fedncv
from fedncv.cli import main
from fedncv.methods.fedavg import fedavg
from fedncv.results import Extension, extensions, notes_on, read_config, read_rows, read_run
from fedncv.runner import extend, open_run
from fedncv.tree import leaves

QUICK = {
    "model": "mlp",
    "clients": 4,
    "per_round": 2,
    "epochs": 1,
    "eval_every": 2,
    "checkpoint_every": 2,
    "engine": "sequential",
}


def tensors(result):
    return {path: leaf for path, leaf in leaves(result.state) if isinstance(leaf, torch.Tensor)}


def test_an_extended_run_ends_with_the_bits_of_one_that_was_planned_so(tmp_path):
    """Its rows too, except for the measurements at the old end, which stay."""
    settings = QUICK | {"method": "scaffold+momentum", "schedule": "step:every=2,factor=0.5"}
    fedncv.simulate(out=tmp_path / "run", rounds=3, **settings)
    extended = fedncv.resume(tmp_path / "run", rounds=6)
    planned = fedncv.simulate(rounds=6, **settings)
    a, b = tensors(extended), tensors(planned)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[path], b[path]) for path in a)
    assert [row["round"] for row in extended.rows] == list(range(7))
    for row, other in zip(extended.rows, planned.rows, strict=True):
        assert {name: row[name] for name in other} == other
        assert ("after" in row) == (row["round"] in (3, 6))
    assert read_config(tmp_path / "run").rounds == 6
    assert read_rows(tmp_path / "run") == extended.rows


def test_it_is_recorded_once_and_shown(tmp_path, capsys):
    run = tmp_path / "run"
    fedncv.simulate(out=run, rounds=2, **QUICK)
    fedncv.resume(run, rounds=4)
    fedncv.resume(run)  # nothing to do
    fedncv.resume(run, rounds=4)
    fedncv.resume(run, rounds=5)
    assert extensions(run) == [Extension(2, 2, 4), Extension(4, 4, 5)]
    assert main(["show", str(run)]) == 0
    assert "was planned with 2 rounds and extended to 4 at round 2" in capsys.readouterr().out.replace("\n", " ")


def test_equal_extensions_of_several_runs_are_one_note(tmp_path):
    for name in "abc":
        fedncv.simulate(out=tmp_path / name, rounds=1, seed=ord(name), **QUICK)
        fedncv.resume(tmp_path / name, rounds=2 + (name == "c"))
    runs = [read_run(tmp_path / name) for name in "abc"]
    assert notes_on(runs)[-2:] == [
        f"note: {tmp_path / 'a'} and 1 more were planned with 1 rounds and extended to 2 at round 1",
        f"note: {tmp_path / 'c'} was planned with 1 rounds and extended to 3 at round 1",
    ]


def test_killed_after_the_plan_was_written_it_goes_on(tmp_path):
    """As if the machine had stopped before the first round."""
    run = tmp_path / "run"
    fedncv.simulate(out=run, rounds=2, **QUICK)
    extend(run, 3)
    assert read_run(run).status == "unfinished"
    for _ in range(2):  # and again, before the next checkpoint
        open_run(run).close()
    fedncv.resume(run)
    assert extensions(run) == [Extension(2, 2, 3)]
    assert read_run(run).status == "finished"


def test_a_number_of_rounds_that_no_command_wrote_is_refused_everywhere(tmp_path, capsys):
    run = tmp_path / "run"
    fedncv.simulate(out=run, rounds=2, **QUICK)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(re.sub("^rounds = 2$", "rounds = 3", text, flags=re.MULTILINE))
    for words in (["resume", str(run)], ["show", str(run)], ["export", str(run)]):
        assert main(words) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedncv: ")]
        assert "has rounds 3, but the run was planned with 2" in line
        assert f"`fedncv resume {run} --rounds 3`" in line


def test_a_plan_that_was_taken_back_leaves_no_note(tmp_path):
    run = tmp_path / "run"
    fedncv.simulate(out=run, rounds=2, **QUICK)
    for rounds in (5, 4):
        extend(run, rounds)
    assert extensions(run) == [Extension(2, 2, 4)]
    extend(run, 2)
    assert extensions(run) == []
    assert read_run(run).status == "finished"


def test_a_run_that_was_stopped_may_end_earlier_but_not_before_its_rounds(tmp_path):
    class StopError(Exception):
        pass

    def stop(row):
        if row["round"] == 2:
            raise StopError

    with pytest.raises(StopError):
        fedncv.simulate(out=tmp_path / "run", rounds=9, on_round=stop, **QUICK)
    with pytest.raises(ValueError, match=r"has 2 rounds; rounds must be at least that, not 1"):
        fedncv.resume(tmp_path / "run", rounds=1)
    with pytest.raises(ValueError, match=r"the last round are still to be measured; rounds must be at least 3"):
        fedncv.resume(tmp_path / "run", rounds=2)
    assert read_config(tmp_path / "run").rounds == 9
    shorter = fedncv.resume(tmp_path / "run", rounds=3)
    assert shorter.rows == fedncv.simulate(rounds=3, **QUICK).rows


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"schedule": "cosine"},
            r"its schedule cosine depends on that: with 4 rounds, round 1 would have had 1.71 times its learning rate",
        ),
        ({"method": "pfedsim"}, "was planned with 2 rounds, and pfedsim depends on that number; start another run"),
        ({"rounds": -1}, "rounds must be at least 0, not -1"),
    ],
)
def test_where_the_bits_would_differ_it_is_refused(settings, words, tmp_path):
    more = settings.pop("rounds", 4)
    fedncv.simulate(out=tmp_path / "run", rounds=2, **(QUICK | settings))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match=words):
        fedncv.resume(tmp_path / "run", rounds=more)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_an_own_method_that_plans_with_the_rounds_is_refused(tmp_path):
    def init(x_P, federation):
        return (x_P, float(federation.rounds))

    plain = fedavg()
    method = plain._replace(
        init=init,
        broadcast=lambda server, ids: plain.broadcast(plain.init(server[0], None), ids),
        step=lambda ask, server, sums: plain.step(ask, plain.init(server[0], None), sums)._replace(server=server),
        shared=lambda server: server[0],
        model=None,
        with_model=None,
    )
    fedncv.simulate(out=tmp_path / "run", method=method, rounds=1, **QUICK)
    with pytest.raises(ValueError, match="depends on that number"):
        fedncv.resume(tmp_path / "run", rounds=2, method=method)


def test_a_folder_of_runs_is_extended_as_a_whole_or_not_at_all(tmp_path, capsys):
    for name, schedule in (("a", "constant"), ("b", "cosine")):
        fedncv.simulate(out=tmp_path / name, rounds=2, schedule=schedule, **QUICK)
    assert main(["resume", str(tmp_path), "--rounds", "3"]) == 2
    assert "schedule cosine depends on that" in capsys.readouterr().err
    assert read_config(tmp_path / "a").rounds == 2
    assert main(["resume", str(tmp_path / "a"), "--rounds", "3"]) == 0
    assert "round 3/3" in capsys.readouterr().err
    assert read_run(tmp_path / "a").rounds == 3


def test_a_part_of_a_study_is_not_extended(tmp_path, capsys):
    fedncv.simulate(out=tmp_path / "digits" / "a", rounds=1, **QUICK)
    (tmp_path / "study.toml").write_text("")
    assert main(["resume", str(tmp_path / "digits"), "--rounds", "3"]) == 2
    assert "belongs to a study, whose runs follow" in capsys.readouterr().err
    assert read_config(tmp_path / "digits" / "a").rounds == 1

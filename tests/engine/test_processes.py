"""Clients on several processes: the bits of the sequential engine, whatever happens to a worker."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from federations import FULL_FEDNCV, Tiny, everyone, tiny

from fedncv import machine
from fedncv.engine import evaluate
from fedncv.engine.choose import engine_for
from fedncv.engine.gradients import of_run
from fedncv.engine.problem import Arrival, DivergedError, start
from fedncv.engine.processes import Job, Pace, ProcessesEngine, WorkerError, can_fork, num_samples
from fedncv.engine.sequential import SequentialEngine, run_round
from fedncv.simulation import simulate, simulate_many
from fedncv.tree import leaves

pytestmark = pytest.mark.skipif(not can_fork(), reason="workers are forked")
HARD = {"sizes": (20, 1, 9, 18, 31), "per_round": 4, "stragglers": 0.5, "dropout": 0.2, "momentum": 0.5}


def same(tree, other):
    ours, theirs = list(leaves(tree)), list(leaves(other))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


@pytest.mark.parametrize(
    "name",
    [
        *("fedavg", "scaffold", "fedrep", FULL_FEDNCV),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("moon", "ditto", "knnper", "fedavg+finetune:lr=0.01")
        ),
    ],
)
def test_rounds_and_scores_have_the_bits_of_the_sequential_engine(name):
    problems = [tiny(name, seed=seed, **HARD) for seed in (0, 1)]
    states = [start(problem) for problem in problems]
    expected = list(states)
    with ProcessesEngine(problems, workers=2) as engine:
        for _ in range(3):
            settled = engine.run_rounds(states)
            for j, problem in enumerate(problems):
                expected[j], row = run_round(problem, expected[j])
                assert settled[j][1] == row
            states = [state for state, _ in settled]
        for j in range(2):
            same(states[j], expected[j])
        assert engine.before(states) == [evaluate.before(p, s) for p, s in zip(problems, expected, strict=True)]
        assert engine.after(states) == [evaluate.after(p, s) for p, s in zip(problems, expected, strict=True)]


@pytest.mark.parametrize("kind", [ProcessesEngine, SequentialEngine])
def test_some_runs_go_on_with_the_engine_of_all(kind):
    """Also with the same workers; the engine of all can still be used."""
    problems = [tiny("scaffold", seed=seed, **HARD) for seed in range(3)]
    engine = kind(problems)
    try:
        states = [state for state, _ in engine.run_rounds([start(problem) for problem in problems])]
        some, mine = engine.only([2, 0]).only([1]), [states[0]]
        ((state, row),) = some.run_rounds(mine)
        same((state, row), run_round(problems[0], states[0]))
        assert some.before(mine) == [evaluate.before(problems[0], states[0])]
        assert some.after(mine) == [evaluate.after(problems[0], states[0])]
        same(tuple(some.gradients(mine)), (of_run(problems[0], states[0]),))
        assert some.layers == ["torch's"]
        assert engine.before(states) == [evaluate.before(p, s) for p, s in zip(problems, states, strict=True)]
        if kind is ProcessesEngine:
            assert some.pids == engine.pids
    finally:
        engine.close()


def test_jobs_are_planned_by_samples_and_shares_first_then_by_measured_time():
    problem = tiny("fedavg", sizes=(20, 8, 9))

    def job(client, kind="train", share=1.0):
        return Job(kind, 0, 0, Arrival(client, (), torch.empty(0), None), share)

    def order(jobs):
        return sorted(range(len(jobs)), key=lambda i: -pace.expected(jobs[i], num_samples(problem, jobs[i])))

    pace, jobs = Pace(), [job(0, share=0.1), job(1), job(2)]
    assert [num_samples(problem, each) for each in jobs] == [
        share * len(problem.clients.train[u]) for u, share in enumerate((0.1, 1.0, 1.0))
    ]
    assert num_samples(problem, job(0, "before")) == len(problem.clients.test[0])
    assert order(jobs) == [2, 1, 0]
    pace.record(jobs[2], 10, 1.0)
    pace.record(jobs[1], 10, 2.0)  # client 1 is slower; client 0 has the latest pace of the run
    assert order(jobs) == [1, 2, 0]
    pace.record(jobs[0], 1, 1000.0)
    assert order(jobs) == [0, 1, 2]
    assert pace.expected(job(1, "before"), 7) == 7  # another kind, not measured


class Fatal(Tiny):
    """Kills the process it runs in, as long as the file names one more death."""

    deaths: Path

    def forward(self, x):
        if self.training and os.getpid() != PARENT and Fatal.deaths.read_text():
            Fatal.deaths.write_text(Fatal.deaths.read_text()[1:])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


PARENT = os.getpid()


@pytest.fixture
def fatal(tmp_path):
    Fatal.deaths = tmp_path / "deaths"
    Fatal.deaths.write_text("")
    return tiny("scaffold", model=Fatal, **HARD)


def test_a_killed_worker_is_replaced_and_nothing_changes(fatal, capsys):
    expected, row = run_round(fatal, start(fatal))
    with ProcessesEngine([fatal], workers=2) as engine:
        before = engine.pids
        Fatal.deaths.write_text("xx")
        ((state, killed_row),) = engine.run_rounds([start(fatal)])
        assert engine.pids != before
        assert len(engine.pids) == 2
    same(state, expected)
    assert killed_row == row
    assert "running the client again" in capsys.readouterr().err


def test_a_worker_killed_between_rounds_is_replaced(fatal):
    expected, _ = run_round(fatal, start(fatal))
    with ProcessesEngine([fatal], workers=2) as engine:
        os.kill(engine.pids[0], signal.SIGKILL)
        time.sleep(0.1)
        ((state, _),) = engine.run_rounds([start(fatal)])
    same(state, expected)


def test_a_client_that_kills_every_worker_is_named(fatal):
    Fatal.deaths.write_text("x" * 100)
    with (
        ProcessesEngine([fatal], workers=2) as engine,
        pytest.raises(WorkerError, match=r"client \d+ died 3 times \(exit code -9"),
    ):
        engine.run_rounds([start(fatal)])


def test_an_error_in_a_worker_is_raised_in_the_parent():
    def broken(*_):
        raise ValueError("no direction today")

    problem = tiny("fedavg")
    problem = problem._replace(method=problem.method._replace(direction=broken))
    with ProcessesEngine([problem], workers=2) as engine, pytest.raises(ValueError, match="no direction today"):
        engine.run_rounds([start(problem)])


def test_a_diverging_run_leaves_the_other_alone():
    problems = [tiny("fedavg", seed=0), tiny("fedavg", seed=1)]
    broken = start(problems[0])
    broken = broken._replace(server=broken.server._replace(x_P=broken.server.x_P * float("nan")))
    with ProcessesEngine(problems, workers=2) as engine:
        first, second = engine.run_rounds([broken, start(problems[1])])
    assert isinstance(first, DivergedError)
    same(second[0], run_round(problems[1], start(problems[1]))[0])


def test_workers_end_with_the_engine_and_start_quickly():
    problem = tiny("fedavg")
    began = time.perf_counter()
    engine = ProcessesEngine([problem], workers=2)
    engine.run_rounds([start(problem)], [everyone(2)])
    assert time.perf_counter() - began < 5
    pids = engine.pids
    engine.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_every_engine_gives_the_same_run():
    settings = {"model": "mlp", "clients": 6, "per_round": 3, "rounds": 2, "epochs": 1, "dtype": "float64"}
    results = {name: simulate(engine=name, **settings) for name in ("sequential", "processes", "stacked")}
    expected = results["sequential"]
    assert results["processes"].rows == expected.rows
    same(results["processes"].state, expected.state)
    for ours, theirs in zip(results["stacked"].rows, expected.rows, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value == pytest.approx(theirs[name], abs=1e-10), name


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_many_seeds_are_as_each_alone(engine, tmp_path):
    settings = {"model": "mlp", "clients": 6, "per_round": 3, "rounds": 2, "epochs": 1, "dtype": "float64"}
    seen = []
    many = simulate_many(
        seeds=[0, 3],
        engine=engine,
        out=tmp_path / "runs",
        on_round=lambda seed, row: seen.append((seed, row["round"])),
        **settings,
    )
    assert seen == [(seed, t) for t in range(3) for seed in (0, 3)]
    for seed, result in zip((0, 3), many, strict=True):
        alone = simulate(seed=seed, engine="sequential", **settings)
        assert result.folder == tmp_path / "runs" / f"seed-{seed}"
        assert (result.folder / "state.safetensors").exists()
        for ours, theirs in zip(result.rows, alone.rows, strict=True):
            for name, value in ours.items():
                assert value == pytest.approx(theirs[name], abs=1e-10), name
    with pytest.raises(ValueError, match="no seeds"):
        simulate_many(seeds=[], **settings)


def test_auto_takes_one_process_for_little_work_and_several_for_much(monkeypatch):
    problem = tiny("fedavg")
    assert isinstance(engine_for([problem]), SequentialEngine)
    monkeypatch.setattr("fedncv.engine.choose.WORTH_FORKING", 0.0)
    monkeypatch.setattr("fedncv.engine.choose.num_cores", lambda: 2)
    engine = engine_for([problem])
    assert isinstance(engine, ProcessesEngine)
    engine.close()


def test_what_cannot_be_stacked_falls_back_with_one_line(capsys):
    class Sees(Tiny):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    engine = engine_for([tiny("fedavg", model=Sees, engine="stacked")])
    assert isinstance(engine, SequentialEngine)
    assert capsys.readouterr().err.count("\n") == 1


def test_processes_are_refused_where_nothing_forks(monkeypatch):
    monkeypatch.setattr("fedncv.engine.choose.can_fork", lambda: False)
    with pytest.raises(ValueError, match="use sequential or auto"):
        engine_for([tiny("fedavg", engine="processes")])
    assert machine.num_cores() >= 1

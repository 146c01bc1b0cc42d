"""Blocks of a cohort on workers: equal to the sequential engine, whatever happens to workers. Ray itself is a fake."""

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from agreement import HARD, QUICK, close, close_rows, same
from fake_ray import FakeRay
from federations import FULL_FEDNCV, Tiny, tiny

from fedncv.cluster import pool
from fedncv.cluster.connect import ClusterError
from fedncv.cluster.packing import pack, unpack
from fedncv.engine import evaluate, ray_engine, row_cache
from fedncv.engine.choose import on_gpu
from fedncv.engine.gradients import of_run
from fedncv.engine.problem import DivergedError, arrivals, start
from fedncv.engine.ray_engine import RayEngine
from fedncv.engine.ray_worker import BlockWorker, Missing
from fedncv.engine.relay import Messages, blocks_of, everybody
from fedncv.engine.round import Draw, Reply, aggregate, partial
from fedncv.engine.sequential import outcomes, run_round
from fedncv.rows import Rows
from fedncv.tree import leaves, num_bytes, tree_map

BLOCK = {"block": 2, "engine": "ray"}


@pytest.fixture
def fake(monkeypatch):
    """A function (cpus, seed) that puts a fake Ray in place of the real one."""

    def put(cpus=3, seed=0):
        made = FakeRay(cpus, seed)
        monkeypatch.setitem(sys.modules, "ray", made)
        return made

    monkeypatch.setattr(ray_engine.connect, "connect", lambda *_, **__: None)
    monkeypatch.setattr(pool, "TICK", 1e-9)
    monkeypatch.setattr(ray_engine.connect, "close", lambda: None)
    return put


def rounds(problems, number):
    states, rows = [start(problem) for problem in problems], []
    with RayEngine(problems) as engine:
        for _ in range(number):
            settled = engine.run_rounds(states)
            states = [state for state, _ in settled]
            rows.append([row for _, row in settled])
        measured = engine.before(states), engine.after(states), list(engine.gradients(states))
    return states, rows, measured


MIXING = "pfedsim:warm_up=0"
METHODS = ["fedavg", "scaffold", FULL_FEDNCV, MIXING, "fedgen"]
MORE = ["fedrep", "fedavg+ht", "fedavg+average:share=1.0", "fednova", "moon", "feddyn", "fedavg+memory"]


@pytest.mark.parametrize("name", METHODS + [pytest.param(name, marks=pytest.mark.slow) for name in MORE])
def test_the_numbers_do_not_depend_on_the_workers_and_are_those_of_the_sequential_engine(name, fake):
    problems = [tiny(QUICK.get(name, name), seed=seed, **HARD, **BLOCK) for seed in (0, 1)]
    found = []
    for cpus in (1, 2, 3):
        fake(cpus, seed=cpus)
        found.append(rounds(problems, 3))
    for states, rows, measured in found[1:]:
        same(tuple(states), tuple(found[0][0]))
        assert rows == found[0][1]
        assert measured[:2] == found[0][2][:2]
        same(tuple(measured[2]), tuple(found[0][2][2]))
    states, rows, (before, after, gradients) = found[0]
    for j, problem in enumerate(problems):
        expected = start(problem)
        for t in range(3):
            expected, row = run_round(problem, expected)
            close_rows(rows[t][j], row)
        (same if problem.method.form == "each reply" else close)(states[j], expected)
        close_rows(before[j], evaluate.before(problem, states[j]), atol=0)
        close_rows(after[j], evaluate.after(problem, states[j]), atol=0)
        same((gradients[j],), (of_run(problem, states[j]),))


@pytest.mark.parametrize("name", ["fedrep", MIXING])
def test_clients_that_never_train_are_scored_on_workers_too(name, fake):
    problem = tiny(name, unseen=0.25, per_round=2, **BLOCK)
    fake(3)
    (state,), _, ((before,), (after,), (gradients,)) = rounds([problem], 2)
    assert "unseen_after" in after
    close_rows(before, evaluate.before(problem, state), atol=0)
    close_rows(after, evaluate.after(problem, state), atol=0)
    same((gradients,), (of_run(problem, state),))


@pytest.mark.parametrize("name", ["fedavg+average:share=1.0", "scaffold"])
def test_personal_statistics_and_rows_on_disk_come_back_to_their_clients(name, fake):
    problem = tiny(name, **BLOCK, buffers="personal", rows="disk")
    fake(3)
    (state,), _, (before, after, _) = rounds([problem], 4)
    assert isinstance(state.kept, Rows)
    expected = start(problem)
    for _ in range(4):
        expected, _ = run_round(problem, expected)
    close(state._replace(kept=dict(state.kept)), expected)
    assert before == [evaluate.before(problem, state)]
    assert after == [evaluate.after(problem, state)]


@pytest.mark.parametrize("name", ["scaffold", pytest.param(FULL_FEDNCV, marks=pytest.mark.slow), "fedrep"])
def test_workers_on_a_gpu_train_a_block_as_one_stack(name, fake):
    """Here on a CPU, where the stacked engine runs as well."""
    problems = [tiny(name, seed=seed, **HARD, **BLOCK) for seed in (0, 1)]
    made = fake(2)
    states = [start(problem) for problem in problems]
    expected = list(states)
    with RayEngine(problems, on_gpu=on_gpu) as engine:
        assert engine.layers == ["stacked", "stacked"]
        for _ in range(2):
            settled = engine.run_rounds(states)
            for j, problem in enumerate(problems):
                expected[j], row = run_round(problem, expected[j])
                close_rows(settled[j][1], row)
            states = [state for state, _ in settled]
        close(tuple(states), tuple(expected))
        for j, problem in enumerate(problems):
            close_rows(engine.before(states)[j], evaluate.before(problem, expected[j]))
            close_rows(engine.after(states)[j], evaluate.after(problem, expected[j]))
        close(tuple(engine.gradients(states)), tuple(map(of_run, problems, expected)))
    assert made.started == 2


def test_deaths_change_nothing_and_a_block_that_kills_its_workers_is_named(fake, capsys):
    problem = tiny("scaffold", **(HARD | BLOCK | {"per_round": 5, "block": 1}))
    fake(2)
    expected = rounds([problem], 3)
    deaths = 0
    for seed in range(3):
        made = fake(2, seed)
        made.dies = lambda reference, rng=made.rng: reference.name == "run" and rng.random() < 0.2
        found = rounds([problem], 3)
        same(tuple(found[0]), tuple(expected[0]))
        assert found[1:2] == expected[1:2]
        deaths += made.started - 2
    assert deaths > 2
    assert "a worker was lost" in capsys.readouterr().err
    made = fake(2)
    made.dies = lambda reference: reference.name == "run"
    with RayEngine([problem]) as engine, pytest.raises(ClusterError, match=r"clients? \d.* was lost 3 times"):
        engine.run_rounds([start(problem)])


def test_a_lost_cache_is_filled_from_the_driver(fake):
    problem = tiny("scaffold", **HARD, **BLOCK)
    fake(1)
    (expected,), _, _ = rounds([problem], 3)
    with RayEngine([problem]) as engine:
        state = start(problem)
        for _ in range(3):
            for worker in engine.pool.workers:  # which the driver believes to have all rows
                worker.actor.instance._caches[0]._slots.clear()
            ((state, _),) = engine.run_rounds([state])
    same(state, expected)


def test_a_row_travels_to_a_worker_that_has_it_by_name_only(fake):
    problem = tiny("scaffold", sizes=(20, 13, 9, 18), **BLOCK)
    fake(1)
    with RayEngine([problem]) as engine:
        ((state, _),) = engine.run_rounds([start(problem)])
        rows = 4 * num_bytes(state.kept[0])
        first = engine.traffic.sent
        engine.run_rounds([state])
        assert engine.traffic.sent - first == first  # four rows fewer than with an empty cache
        for worker in engine.pool.workers:
            worker.data.clear()
        second = engine.traffic.sent
        engine.run_rounds([state])
        assert engine.traffic.sent - second == first + rows


def test_a_sums_method_moves_one_model_for_each_block(fake):
    def received(name, block):
        problem = tiny(name, sizes=(9,) * 12, engine="ray", block=block)
        fake(2)
        with RayEngine([problem]) as engine:
            engine.run_rounds([start(problem)])
            return engine.traffic.received, num_bytes(problem.model.start_P)

    (by_two, size), (by_six, _) = received("fedavg", 2), received("fedavg", 6)
    assert by_two - by_six > 4 * size
    assert by_six < received("pfedsim", 6)[0] - 9 * size


def test_the_sums_of_blocks_are_the_sums_of_all():
    """Cut anywhere, sum_blocks sum_block n_u a_u = sum_all n_u a_u, and so are the samples and replies."""
    problem = tiny("scaffold", sizes=(20, 13, 9, 18, 31))
    state = start(problem)
    replies = [Reply(each.client, each.trained) for each in outcomes(problem, state, everybody(np.arange(5)))]
    whole = partial(problem, replies)
    ends = [0, 2, 3, 5]
    first, *others = [partial(problem, replies[a:b]) for a, b in pairwise(ends)]
    for other in others:
        first = first.plus(other)
    close(tuple(first), tuple(whole))
    sizes = problem.clients.sizes
    assert first.totals.samples == sizes.sum()
    assert first.totals.num_replies == 5
    expected = sum(int(n) * each.trained.buffers_R for n, each in zip(sizes, replies, strict=True))
    torch.testing.assert_close(first.buffers_R, expected)
    close(aggregate(problem, state, replies, [whole])[0], aggregate(problem, state, replies)[0])


def test_blocks_are_consecutive_and_depend_on_the_cohort_alone():
    drawn = Draw(np.array([1, 4, 5, 8, 9]), [True, False, True, True, True], [1.0, 1.0, 0.5, 1.0, 1.0])
    blocks = list(blocks_of("train", 0, 3, drawn, 2))
    assert [block.ids.tolist() for block in blocks] == [[1, 4], [5, 8], [9]]
    assert [block.answers for block in blocks] == [[True, False], [True, True], [True]]
    assert [block.words for block in blocks] == ["clients 1 to 4", "clients 5 to 8", "client 9"]


@pytest.mark.parametrize(("name", "rows"), [("fedavg", 1), ("fedgen", 1), (MIXING, 3), (FULL_FEDNCV, 3)])
@pytest.mark.parametrize("at_once", [100, 2])
def test_a_message_that_is_the_same_for_all_clients_is_sent_once(name, rows, at_once, monkeypatch):
    """And others have the bits of those that the sequential engine makes, a portion at a time."""
    problem = tiny(QUICK.get(name, name), **HARD)
    state, _ = run_round(problem, start(problem), everybody(np.arange(5)))
    monkeypatch.setattr("fedncv.engine.problem.MESSAGE_BYTES", at_once * num_bytes(problem.model.start_P))
    expected = list(arrivals(problem, state, np.arange(5)))
    made = Messages(problem, state, np.arange(5))
    for ids in ([0, 1, 2], [3, 4]):
        sent = made.to(np.array(ids))
        if name != "fedgen" or at_once > 2:  # which makes its small tensors anew
            assert max(len(leaf) for _, leaf in leaves(sent.down_S)) == min(rows, len(ids))
        for i, u in enumerate(ids):
            same(tree_map(lambda leaf, i=i: leaf[i if len(leaf) > 1 else 0], sent.down_S), expected[u].down)


def broken(**config):
    """Training overflows at the second client, of a block of two."""
    inputs = torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs[20:33] = torch.finfo(torch.float64).max
    return tiny("fedavg", inputs=inputs, **BLOCK, **config)


def test_a_client_that_diverges_is_named_with_its_round(fake):
    fake(2)
    problem = broken()
    with RayEngine([problem]) as engine:
        (found,) = engine.run_rounds([start(problem)])
    assert isinstance(found, DivergedError)
    with pytest.raises(DivergedError, match="client 1 diverged in round 1") as expected:
        run_round(problem, start(problem))
    assert str(found) == str(expected.value)


def test_skipped_replies_are_in_no_sum(fake):
    fake(2)
    problem = broken(diverged="skip")
    expected, row = run_round(problem, start(problem))
    with RayEngine([problem]) as engine:
        ((state, found),) = engine.run_rounds([start(problem)])
    close(state, expected)
    close_rows(found, row)
    assert found["skipped"] == [1]


class Failing(Tiny):
    def forward(self, x):
        if self.training and torch.is_grad_enabled() and Failing.armed:
            raise RuntimeError("this layer is broken\nsecond line")
        return super().forward(x)

    armed = False


def test_an_error_of_the_users_code_is_raised_once(fake, monkeypatch):
    made = fake(2)
    problem = tiny("fedavg", model=Failing, **HARD, **BLOCK)
    with RayEngine([problem]) as engine:
        monkeypatch.setattr(Failing, "armed", True)
        with pytest.raises(ClusterError, match=r"clients? \d.*: RuntimeError: this layer is broken "):
            engine.run_rounds([start(problem)])
    assert made.started == 2


def test_more_workers_than_there_is_room_for_are_refused(fake):
    made = fake(2)
    with pytest.raises(ClusterError, match="3 workers need 3 CPUs, but the cluster has 2 CPUs"):
        RayEngine([tiny("fedavg", workers=3, **BLOCK)])
    assert not made.started
    with RayEngine([tiny("fedavg", workers=1, **BLOCK)]) as engine:
        engine.run_rounds([start(engine.problems[0])])
    assert made.started == 1


class Unpicklable:
    def __reduce__(self):
        raise TypeError("it has an open file")


def test_an_object_that_cannot_be_sent_is_named_with_the_remedy(fake):
    fake(1)
    problem = tiny("fedavg", **BLOCK)
    method = problem.method._replace(finish=Unpicklable())
    with pytest.raises(ClusterError, match=r'method cannot be sent .*open file.*by name: method="module:function"'):
        RayEngine([problem._replace(method=method)])


def test_values_are_packed_with_their_tensors_beside_them():
    x = torch.arange(6.0).reshape(2, 3)
    value = {"same": (x, x), "view": x[:, 1], "none": torch.empty(0, 3), "words": ["a"], "f": lambda y: y + 1}
    packed = pack(value)
    assert [len(part) for part in packed.parts] == [24, 8, 0]
    back = unpack(*packed)
    assert back["same"][0] is back["same"][1]
    same((back["same"], back["view"], back["none"]), ((x, x), x[:, 1], torch.empty(0, 3)))
    assert back["f"](1) == 2
    back["same"][0].zero_()  # its own memory
    assert x.sum() == 15
    shared = unpack(*packed, copy=False)["same"][0]
    assert shared.data_ptr() == packed.parts[0].ctypes.data


def test_a_cache_that_holds_less_than_a_block_gets_all_its_rows_again(fake, monkeypatch):
    """If only the missing rows came, they would push the others out, and so on for ever."""
    fake(cpus=1)
    problem = tiny("scaffold", sizes=(9, 9, 9, 9), per_round=4, engine="ray", block=4)
    row = num_bytes(problem.model.start_P)
    monkeypatch.setitem(row_cache.RowCache.__init__.__kwdefaults__, "most_bytes", 2 * (row + 64))
    missing, run = [], BlockWorker._run

    def noted(self, job):
        answer = run(self, job)
        missing.append(isinstance(answer, Missing))
        assert sum(missing[-2:]) < 2, "it asks again for what it was sent"
        return answer

    monkeypatch.setattr(BlockWorker, "_run", noted)
    state, (expected, _) = start(problem), run_round(problem, start(problem))
    with RayEngine([problem]) as engine:
        for _ in range(3):
            ((state, _row),) = engine.run_rounds([state])
            if state.round == 1:
                torch.testing.assert_close(state.server.x_P, expected.server.x_P)
    assert any(missing)


def test_clients_may_keep_rows_of_different_shapes(fake):
    """As with the other engines."""

    def init_own(ask, x_P):
        return x_P.new_zeros(1 + ask.client.id % 2)

    problem = tiny("fedavg", sizes=(9, 9, 9, 9), per_round=4, **BLOCK)
    problem = problem._replace(method=problem.method._replace(init_own=init_own))
    fake(cpus=1)
    states = [start(problem)]
    with RayEngine([problem]) as engine:
        for _ in range(2):
            states = [state for state, _ in engine.run_rounds(states)]
    assert [len(states[0].kept[u].own) for u in range(4)] == [1, 2, 1, 2]

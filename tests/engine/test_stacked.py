"""The stacked engine equals the sequential one: every method, every round, every number."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from agreement import HARD, QUICK, close, close_rows, runs, same
from federations import FULL_FEDNCV, Tiny, everyone, inside, quadratics, tiny
from torch import nn
from torch.testing import assert_close

from fedncv.engine import evaluate, stacked, stacked_scores
from fedncv.engine.keeping import Keeper
from fedncv.engine.masked import masked
from fedncv.engine.problem import DivergedError, start
from fedncv.engine.round import draw
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import CannotStackError, StackedEngine
from fedncv.engine.stage import buckets
from fedncv.estimators import running_beta
from fedncv.methods import METHODS, find_method
from fedncv.methods.base import Phase
from fedncv.tree import leaves

NAMES = [*METHODS, FULL_FEDNCV]
ALIKE = (
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "fedavgm",
    "fedexp",
    "fedstale",
    "mifa",
    "fedadp",
    "fat_clipping_pr",
    "fedbabu",
)
"""Their clients are those of FedAvg, or of FedRep without the head's part, and their servers run the same code in every
engine: in `make test-all`."""
FEW = ("fedavg", FULL_FEDNCV, "scaffold", "fedrep")  # plain, rows, state, phases
few_methods = pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)


@pytest.mark.parametrize(
    ("way", "name"),
    [pytest.param("stacked", name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in NAMES]
    + [pytest.param("streams", name, marks=[] if name in FEW else [pytest.mark.slow]) for name in NAMES],
)
def test_whole_rounds_equal_the_sequential_engine(way, name):
    """Server, running statistics, what clients keep, work, bytes, losses and scores; float64, 1e-10."""
    problem, atol = tiny(QUICK.get(name, name), **HARD), 1e-10
    engine = StackedEngine([problem], way=way)
    state = stacked = start(problem)
    for _ in range(3):
        state, row = run_round(problem, state)
        ((stacked, stacked_row),) = engine.run_rounds([stacked])
        close(stacked, state, atol)
        close_rows(stacked_row, row, atol)
    for ours, theirs in ((stacked_scores.before, evaluate.before), (stacked_scores.after, evaluate.after)):
        (measured,) = ours(engine, [stacked])
        assert measured == theirs(problem, state)


def test_two_rounds_bring_the_full_fedncv_to_use_all_that_it_keeps():
    """Else the third round above would compare zeros with zeros."""
    problem = tiny(FULL_FEDNCV, **HARD)
    server = runs(StackedEngine([problem]), 2)[0][0].server
    assert 0.1 < float(running_beta(inside(server, "moments"))) < 1
    assert problem.method.broadcast(server, torch.arange(5)).e_P.abs().max() > 0.01


def test_every_round_is_drawn_once_also_where_it_is_planned_ahead(monkeypatch):
    """Two runs of three rounds: six draws, and none of a fourth round."""
    made = [tiny("fedavg", seed=seed, rounds=3) for seed in (0, 1)]
    asked = []

    def noted(problem, round):
        asked.append((problem.config.seed, round))
        return draw(problem, round)

    monkeypatch.setattr(stacked, "draw", noted)
    runs(StackedEngine(made), 3)
    assert sorted(asked) == [(seed, round) for seed in (0, 1) for round in range(3)]


@pytest.mark.parametrize("given", ["more", "others", "silent"])
def test_a_draw_that_is_given_stands_in_for_the_planned_one(given):
    """Other clients, as many or more, and the planned ones of whom one does not answer."""
    problem = tiny(FULL_FEDNCV, per_round=2)
    planned = draw(problem, 1)
    others = sorted({0, 1, 2, 3} - set(planned.ids.tolist()))
    drawn = {
        "more": everyone(0, 1, 2, 3),
        "others": everyone(*others),
        "silent": planned._replace(answers=[True, False]),
    }[given]
    engine = StackedEngine([problem])
    states, _ = runs(engine, 1)
    state, _ = run_round(problem, start(problem))
    states, _ = runs(engine, 1, states, [drawn])
    close(states[0], run_round(problem, state, drawn)[0])


@pytest.mark.parametrize("per_round", [2, 4])
def test_a_round_that_is_run_again_is_the_same_whatever_was_planned_since(per_round):
    """Two of four are others in the next round; where all take part, only their batches are others."""
    problem = tiny("fedavg", per_round=per_round)
    drawn = [draw(problem, round).ids.tolist() for round in (0, 1)]
    assert (drawn[0] == drawn[1]) == (per_round == 4)
    engine = StackedEngine([problem])
    first, _ = runs(engine, 1)
    again, _ = runs(engine, 1)
    same(again[0], first[0])


@few_methods
def test_one_round_in_float32_is_within_1e4_of_the_update(name):
    problem = tiny(QUICK.get(name, name), **HARD | {"dtype": "float32", "stragglers": 0.0, "dropout": 0.0})
    engine, state = StackedEngine([problem]), start(problem)
    expected, _ = run_round(problem, state)
    ((got, _),) = engine.run_rounds([state])
    start_P = problem.model.start_P
    shared = [problem.method.shared(s.server) for s in (expected, got)]
    if shared[0] is None:  # what the clients hold then
        vectors = [
            torch.cat([leaf.reshape(-1) for _, leaf in leaves((s.server, s.kept)) if leaf.is_floating_point()])
            for s in (expected, got)
        ]
        first = vectors[0]
        assert torch.linalg.vector_norm(vectors[1] - first) <= 1e-4 * torch.linalg.vector_norm(first)
    else:
        move = torch.linalg.vector_norm(shared[0] - start_P)
        assert torch.linalg.vector_norm(shared[1] - shared[0]) <= 1e-4 * move


@few_methods
def test_seeds_stacked_together_are_as_alone_and_so_are_other_buckets(name):
    problems = [tiny(QUICK.get(name, name), seed=seed, **HARD) for seed in (0, 5)]
    together, rows = runs(StackedEngine(problems), 3)
    few, few_rows = runs(StackedEngine(problems, capacity=3, ratio=2.0), 3)
    alone, alone_rows = runs(StackedEngine([problems[1]]), 3)
    atol = 1e-10
    for j in range(2):
        close(few[j], together[j], atol)
        close_rows(few_rows[-1][j], rows[-1][j], atol)
    close(alone[0], together[1], atol)
    close_rows(alone_rows[-1][0], rows[-1][1], atol)


def test_a_run_goes_on_from_any_state_with_the_same_bits():
    problem = tiny("scaffold", **HARD)
    through, _ = runs(StackedEngine([problem]), 4)
    half, _ = runs(StackedEngine([problem]), 2)
    resumed, _ = runs(StackedEngine([problem]), 2, states=half)
    same(resumed[0], through[0])


def test_a_round_changes_no_earlier_state():
    problem = tiny("scaffold")
    engine = StackedEngine([problem])
    (first,), _ = runs(engine, 1)
    copied = [(path, leaf.clone()) for path, leaf in leaves(first) if isinstance(leaf, torch.Tensor)]
    runs(engine, 2, states=[first])
    stacked_scores.after(engine, [first])
    for (path, before), (_, now) in zip(
        copied, [x for x in leaves(first) if isinstance(x[1], torch.Tensor)], strict=True
    ):
        assert torch.equal(before, now), path


@pytest.mark.parametrize("sizes", [(2,), (1, 1, 2), (5, 4, 3)])
def test_tiny_clients(sizes):
    problem = tiny("fedavg", sizes=sizes)
    engine = StackedEngine([problem])
    state, row = run_round(problem, start(problem))
    ((stacked, stacked_row),) = engine.run_rounds([start(problem)])
    close(stacked, state)
    close_rows(stacked_row, row)
    for ours, theirs in ((stacked_scores.before, evaluate.before), (stacked_scores.after, evaluate.after)):
        assert ours(engine, [stacked]) == [theirs(problem, state)]


@pytest.mark.parametrize("sampling", ["weighted", "available"])
@pytest.mark.parametrize("buffers", ["averaged", "personal"])
def test_other_draws_and_personal_statistics(sampling, buffers):
    problem = tiny("fedper", **HARD | {"sampling": sampling, "buffers": buffers, "per_round": 2})
    state, engine = start(problem), StackedEngine([problem])
    stacked, rows = runs(engine, 3)
    for t in range(3):
        state, row = run_round(problem, state)
        close_rows(rows[t][0], row)
    close(stacked[0], state)


def test_full_batches_on_the_quadratics_with_equal_and_unequal_sizes():
    for sizes in ((1, 1), (3, 1)):
        problem = quadratics("scaffold", sizes=list(sizes))
        state, stacked = start(problem), start(problem)
        engine = StackedEngine([problem])
        for _ in range(3):
            state, _ = run_round(problem, state)
            ((stacked, _),) = engine.run_rounds([stacked])
        close(stacked, state)


def test_phases_that_straggle_in_different_orders():
    """Head, then body, then a pass over the data; a step of scratch that is an old model must not be overwritten."""
    base = find_method("fedavg")

    def begin(_ask, down, _own):
        return down.x_P, (down.x_P, down.x_P)

    def direction(ask, y_P, batch, _down, _own, scratch):
        return ask.grad(y_P, batch) + 0.1 * (y_P - scratch[1]), (y_P, scratch[0])

    def finish(_ask, y_P, work, down, _own, scratch):
        return base.finish(_ask, y_P, work, down, (), ())[0], (scratch[0] * work.steps, scratch[1] * work.samples)

    phases = (Phase(1, trains=("head",), mode="eval"), Phase(2, trains=("body",)), Phase(1, trains=(), mode="still"))
    method = base._replace(
        begin=begin,
        direction=direction,
        finish=finish,
        phases=lambda _epochs: phases,
        init_own=lambda _ask, x_P: (x_P, x_P),
        same_batches=True,
    )
    problem = tiny(method, **HARD)
    state, stacked = start(problem), start(problem)
    engine = StackedEngine([problem])
    for _ in range(3):
        state, row = run_round(problem, state)
        ((stacked, stacked_row),) = engine.run_rounds([stacked])
        close(stacked, state)
        close_rows(stacked_row, row)


def test_a_diverging_seed_is_named_and_the_other_goes_on():
    problems = [tiny("fedavg", seed=0), tiny("fedavg", seed=1)]
    broken = start(problems[0])
    broken = broken._replace(server=broken.server._replace(x_P=broken.server.x_P * float("nan")))
    engine = StackedEngine(problems)
    first, second = engine.run_rounds([broken, start(problems[1])])
    assert isinstance(first, DivergedError)
    assert "client 0 diverged in round 1" in str(first)
    close(second[0], run_round(problems[1], start(problems[1]))[0])


def test_nobody_answers():
    problem = tiny("fedavg")
    nobody = everyone(0, 1)._replace(answers=[False, False])
    expected = run_round(problem, start(problem), nobody)
    ((state, row),) = StackedEngine([problem]).run_rounds([start(problem)], [nobody])
    same(state, expected[0])
    assert row == expected[1]


def test_a_model_that_cannot_be_stacked_is_refused_with_its_reason():
    class Sees(Tiny):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    class Branches(Tiny):
        def forward(self, x):
            return super().forward(x if bool(x.sum() > 0) else -x)

    with pytest.raises(CannotStackError, match="mixes the samples"):
        StackedEngine([tiny("fedavg", model=Sees)])
    with pytest.raises(CannotStackError):
        StackedEngine([tiny("fedavg", model=Branches)])


def test_out_of_memory_halves_the_stack_and_goes_on(monkeypatch, capsys):
    problem = tiny("scaffold", **HARD)
    expected, rows = runs(StackedEngine([problem]), 2)
    engine = StackedEngine([problem])
    whole = engine._train_group

    def small_memory(arrived, plan, who):
        if len(who) > 1:
            raise torch.cuda.OutOfMemoryError("too large")
        return whole(arrived, plan, who)

    monkeypatch.setattr(engine, "_train_group", small_memory)
    got, got_rows = runs(engine, 2)
    assert engine.capacity == 1
    assert "continuing with 1 clients" in capsys.readouterr().err
    close(got[0], expected[0])
    close_rows(got_rows[1][0], rows[1][0])


def test_out_of_memory_outside_of_training_repeats_the_round_with_a_smaller_stack(monkeypatch, capsys):
    problem = tiny("scaffold", **HARD)
    expected, rows = runs(StackedEngine([problem]), 2)
    engine = StackedEngine([problem])
    whole = engine._outcomes

    def small_memory(*arguments):
        if engine.capacity > 1:
            raise torch.cuda.OutOfMemoryError("too large")
        return whole(*arguments)

    monkeypatch.setattr(engine, "_outcomes", small_memory)
    got, got_rows = runs(engine, 2)
    assert [line.split()[-5] for line in capsys.readouterr().err.splitlines()] == ["2", "1"]
    close(got[0], expected[0])
    close_rows(got_rows[1][0], rows[1][0])


@pytest.mark.parametrize("place", ["device", "host", "file"])
def test_what_clients_keep_comes_back_from_every_place(place):
    keeper = Keeper(10, torch.device("cpu"), place=place)
    tree = (torch.arange(6.0).view(2, 3), torch.zeros(0), torch.tensor(3))
    put = keeper.put(tree)
    same(keeper.here(put), tree)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(put, tree, strict=True) if a.numel())


def test_buckets_are_close_to_each_other():
    sizes = buckets(500, 1.08)
    assert sizes[0] == 1
    assert sizes[-1] == 500
    assert all(b <= max(a + 1, 1.08 * a) for a, b in pairwise(sizes))


def test_waste_is_the_share_of_padding_and_idle_rows():
    problem = tiny("fedavg", sizes=(8, 8), test_share=0.0)  # 6 training samples each: batches of 4 and 2
    engine = StackedEngine([problem])
    runs(engine, 1)
    assert engine.waste == pytest.approx(0.25)


# ---- BatchNorm that knows padding ----------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("mode", ["train", "still", "eval"])
def test_masked_batch_norm_is_that_of_the_smaller_batch(affine, tracked, mode):
    class Net(nn.Module):
        def __init__(self, _shape, outputs):
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 2)
            self.norm = nn.BatchNorm2d(3, affine=affine, track_running_stats=tracked, momentum=0.3)
            self.head = nn.Linear(12, outputs)

        def forward(self, x):
            return self.head(self.norm(self.conv(x)).flatten(1))

    problem = tiny("fedavg")
    x = torch.randn(7, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    problem = problem._replace(dataset=problem.dataset._replace(x=x))
    from fedncv.flat import Model

    model = Model(Net, x, 3, 0)
    weight_B = torch.tensor([1.0, 1, 1, 1, 1, 0, 0], dtype=torch.float64)
    real = 7 if mode == "eval" and not tracked else 5
    if real == 7:
        weight_B = torch.ones(7, dtype=torch.float64)
    expected, moved = model.forward(model.start_P, model.start_R, x[:real], mode=mode)
    got, got_moved = masked(model).forward(model.start_P, model.start_R, x, mode=mode, weight_B=weight_B)
    assert_close(got.logits_BC[:real], expected.logits_BC, rtol=1e-12, atol=1e-12)
    assert_close(got.features_BF[:real], expected.features_BF, rtol=1e-12, atol=1e-12)
    assert_close(got_moved, moved, rtol=1e-12, atol=1e-12)


def test_the_masked_model_leaves_the_plain_one_alone():
    problem = tiny("fedavg")
    copy = masked(problem.model)
    assert copy.layout == problem.model.layout
    x = problem.dataset.x[:4]
    a, _ = problem.model.forward(problem.model.start_P, problem.model.start_R, x, mode="eval")
    b, _ = copy.forward(problem.model.start_P, problem.model.start_R, x[:2], mode="eval")
    assert a.features_BF.shape[0] == 4
    assert b.features_BF.shape[0] == 2
    assert np.isfinite(float(a.logits_BC.sum()))

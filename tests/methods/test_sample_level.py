"""The sample level: corrections that sum to zero over an epoch in any order, straight paths, the optimum itself."""

from itertools import permutations

import numpy as np
import pytest
import torch
from federations import QUADRATIC, Point, everyone, full_fedncv, model_of, quadratics, tiny, train
from torch.testing import assert_close

from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, build, start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.estimators import new_table, saga_direction
from fedncv.methods import find_method
from fedncv.methods.base import Ask, Batch, Phase
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches.even_samples import with_even_samples
from fedncv.methods.switches.sample_level import Config, with_samples
from fedncv.tasks import Task
from fedncv.tree import leaves

LINEAR = Task(loss=lambda out, ab: ab[:, 0] * out[:, 0], score=lambda out, ab: -ab[:, 0], score_name="minus slope")
KINDS = ["saga", "svrg"]
SLOPES = (1.0, -2.0, 5.0, 3.0, 0.5, 7.0, -4.0, 2.5, 6.0, 1.5)  # ten samples, batches of 4, 4 and 2


def samples(method, values, *, task=LINEAR, lr=0.1, epochs=3, batch_size=4, **config):
    """One client; sample i has loss v_i * x, whose gradient is v_i anywhere, or (x - v_i)^2 / 2."""
    rows = [[v, 0.0] if task is LINEAR else [1.0, v] for v in values]
    dataset = Dataset("numbers", torch.zeros(len(rows), 1, dtype=torch.float64), torch.tensor(rows).double(), 1)
    settings = {"clients": 1, "per_round": 1, "rounds": 10**6} | config
    return build(
        RunConfig(dtype="float64", epochs=epochs, lr=lr, batch_size=batch_size, **settings),
        data=dataset,
        clients=Clients([np.arange(len(rows))], [np.array([], dtype=np.int64)]),
        model=lambda _shape, _outputs: Point(5.0),
        method=find_method(method),
        task=task,
    )


def path(problem, orders):
    """Every step's z when the batches come in ``orders``, an epoch each, and d, the step without control variates.

    Batches are four samples each, as they stand; an order for the pass of svrg is the first one.
    """
    method, here = problem.method, next(arrivals(problem, start(problem), everyone(0).ids))
    phases = [i for i, phase in enumerate(method.phases(len(orders))) for _ in range(phase.epochs)]
    passes = len(phases) - len(orders)
    opening = problem.ask(0, here.buffers_R, 0)
    y_P, scratch = method.begin(opening, here.down, here.kept.own)
    steps = []
    for phase, order in zip(phases, [orders[0]] * passes + list(orders), strict=True):
        for number in order:
            ask = Ask(
                problem.model, problem.task, here.buffers_R, client=opening.client, round=0, key=opening.key,
                num_batches=opening.num_batches, batch_size=opening.batch_size, phase=phase,
            )  # fmt: skip
            rows = problem.dataset.y[4 * number : 4 * number + 4]
            batch = Batch(torch.zeros(len(rows), 1).double(), rows, torch.ones(len(rows)).double(), number)
            z_P, scratch = method.direction(ask, y_P, batch, here.down, here.kept.own, scratch)
            if phase >= passes:
                y_P = y_P - 0.1 * z_P
                steps.append(float(z_P))
    return steps


# ---- what makes the sum over an epoch vanish -----------------------------------------------------------


@pytest.mark.parametrize("even", ["", "+even"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_corrections_of_an_epoch_sum_to_zero_in_every_order(kind, even):
    """Constant gradients: each epoch moves by sum_B s_B g_B whatever the 6 x 6 orders of two epochs are."""
    slopes = torch.tensor(SLOPES)
    means = [float(part.mean()) for part in torch.split(slopes, 4)]
    shares = [1.0, 1.0, 0.5 if even else 1.0]
    whole = sum(s * g for s, g in zip(shares, means, strict=True))
    if even:
        assert whole == pytest.approx(float(slopes.sum()) / 4)  # every sample counts the same
    problem = samples(f"fedavg{even}+samples:kind={kind},alpha=0.7", SLOPES)
    for first in permutations(range(3)):
        for second in permutations(range(3)):
            z = path(problem, [first, second])
            assert sum(z[:3]) == pytest.approx(whole, abs=1e-12)
            assert sum(z[3:]) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("even", ["", "+even"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_is_right_leaves_no_noise(kind, even):
    """Constant gradients, alpha = 1: every step is s_B a_bar; saga's first epoch is the method's own."""
    means = [float(part.mean()) for part in torch.split(torch.tensor(SLOPES), 4)]
    shares = [1.0, 1.0, 0.5 if even else 1.0]
    a_bar = sum(s * g for s, g in zip(shares, means, strict=True)) / sum(shares)
    orders = [(2, 0, 1), (1, 2, 0), (0, 2, 1)]
    z = path(samples(f"fedavg{even}+samples:kind={kind}", SLOPES), orders)
    first = [shares[b] * (means[b] if kind == "saga" else a_bar) for b in orders[0]]
    later = [shares[b] * a_bar for order in orders[1:] for b in order]
    assert z == pytest.approx(first + later, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_correction_has_mean_zero_over_the_orders_at_every_step(kind):
    """Quadratics, whose gradients move with y: the first step of an epoch, over the 6 orders that it may have."""
    problem = samples(f"fedavg+samples:kind={kind},alpha=0.6", SLOPES, task=QUADRATIC)
    plain = samples("fedavg", SLOPES, task=QUADRATIC)
    if kind == "saga":  # the first epoch is plain SGD, so both are at the same y when the second begins
        z = torch.tensor([path(problem, [(0, 1, 2), order]) for order in permutations(range(3))])
        d = torch.tensor([path(plain, [(0, 1, 2), order]) for order in permutations(range(3))])
        assert_close(z[:, :3], d[:, :3])
        assert_close(z[:, 3].mean(), d[:, 3].mean())
        assert float((z[:, 3] - d[:, 3]).abs().max()) > 0.1
    first = torch.tensor([path(problem, [order]) for order in permutations(range(3))])[:, 0]
    assert float(first.mean()) == pytest.approx(5 - np.mean([np.mean(SLOPES[i : i + 4]) for i in (0, 4, 8)]))


def test_two_visits_by_hand():
    """saga, alpha = 1/2, lr = 0.1, f_B = (x - b)^2 / 2 with b = 0 and 4, from x = 5, batches 0, 1, then 1, 0.

    z = 5, y = 4.5;  z = 0.5, y = 4.45;  a = (5, 0.5), a_bar = 2.75
    z = 0.45 - (0.5 - 2.75) / 2 = 1.575, y = 4.2925;  z = 4.2925 - (5 - 2.75) / 2 = 3.1675
    """
    problem = samples("fedavg+samples:kind=saga,alpha=0.5", [0.0] * 4 + [4.0] * 4, task=QUADRATIC)
    assert path(problem, [(0, 1), (1, 0)]) == pytest.approx([5.0, 0.5, 1.575, 3.1675])


def test_svrg_remembers_the_rounds_start_in_every_epoch():
    """As above with svrg: a = (5, 1), a_bar = 3 at x = 5, so a batch's z is its gradient less 1, or plus 1.

    z = 5 - 1, y = 4.6;  z = 0.6 + 1, y = 4.44;  z = 0.44 + 1, y = 4.296;  z = 4.296 - 1
    """
    problem = samples("fedavg+samples:kind=svrg,alpha=0.5", [0.0] * 4 + [4.0] * 4, task=QUADRATIC)
    assert path(problem, [(0, 1), (1, 0)]) == pytest.approx([4.0, 1.6, 1.44, 3.296])


def test_in_a_loop_the_textbooks_running_mean_does_not_cancel():
    """Gradients 1 and 1, alpha = 1, a table of zeros: z = 1, then a_bar = 1/2 and z = 1 - (0 - 1/2). Ours: 1 and 1."""
    w_B, one_P = torch.tensor([0.5, 0.5]), torch.ones(1)
    first_P, table = saga_direction(new_table(torch.zeros(2, 1), w_B), w_B, torch.tensor(0), one_P, alpha=1.0)
    second_P, _ = saga_direction(table, w_B, torch.tensor(1), one_P, alpha=1.0)
    assert [float(first_P), float(second_P)] == [1.0, 1.5]
    assert path(samples("fedavg+samples", [1.0] * 8), [(0, 1)]) == [1.0, 1.0]


# ---- what it is good for -------------------------------------------------------------------------------


@pytest.mark.parametrize(("even", "values"), [("+even", SLOPES), ("", SLOPES[:8])])
def test_svrg_rests_at_the_optimum_that_sgd_jumps_around(even, values):
    """(x - v_i)^2 / 2: the mean of all samples, with a smaller batch where its steps are smaller, too."""
    svrg, sgd = (
        samples(f"fedavg{even}{s}", values, task=QUADRATIC, lr=0.3, epochs=1) for s in ("+samples:kind=svrg", "")
    )
    assert float(model_of(train(svrg, rounds=40))) == pytest.approx(np.mean(values), abs=1e-9)
    states = [train(sgd, rounds=40)]
    states += [train(sgd, state=states[0]._replace(round=t)) for t in range(41, 45)]
    assert np.ptp([float(model_of(state)) for state in states]) > 0.01


def test_the_pass_of_svrg_is_counted_and_moves_nothing():
    plain, svrg, saga = (
        tiny(text, epochs=2) for text in ("fedavg", "fedavg+samples:kind=svrg", "fedavg+samples:kind=saga")
    )
    totals = [run_round(p, start(p))[0].totals for p in (plain, svrg, saga)]
    assert totals[1].gradients * 2 == totals[0].gradients * 3
    assert totals[2].gradients == totals[0].gradients
    assert totals[0].bytes_down == totals[1].bytes_down
    assert totals[0].bytes_up == totals[1].bytes_up


# ---- with other pieces, on other engines ---------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        full_fedncv(more="+samples"),
        "fedncv+samples:kind=svrg",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                "fedncv-sums+samples:kind=svrg,alpha=0.5",
                "fedncv-paper+samples",
                "fedavg+samples:kind=saga,alpha=0.5",
                "scaffold:option=I+samples:kind=svrg",
                "fedrep+samples:kind=svrg",
                "moon+samples+prior",
            )
        ),
    ],
)
def test_stacked_clients_equal_clients_one_by_one(text):
    """Clients of one sample, of unequal numbers of batches, of part of their steps; float64, 1e-10."""
    problem = tiny(text, sizes=(20, 1, 9, 18, 31), per_round=4, stragglers=0.5, dropout=0.2, momentum=0.5, epochs=3)
    engine = StackedEngine([problem])
    state = stacked = start(problem)
    for _ in range(3):
        state, row = run_round(problem, state)
        ((stacked, stacked_row),) = engine.run_rounds([stacked])
        for (name, a), (_, b) in zip(leaves(stacked), leaves(state), strict=True):
            if isinstance(a, torch.Tensor):
                assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
            else:
                assert a == b, name
        exact = {k: v for k, v in row.items() if k not in ("loss", "beta")}
        assert {k: v for k, v in stacked_row.items() if k not in ("loss", "beta")} == exact
        assert stacked_row.get("beta", 0) == pytest.approx(row.get("beta", 0), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_methods_keep_their_own_scratch_and_phases(kind):
    """Constants in a step cancel in a_B - a_bar: SCAFFOLD's memory is that of its own formula, option I and II."""
    for option in ("I", "II"):
        problem = samples(f"scaffold:option={option}+samples:kind={kind}", SLOPES[:8])
        assert float(train(problem).kept[0].own) == pytest.approx(np.mean(SLOPES[:8]))
    slopes = [
        train_client(p, 0, next(arrivals(p, start(p), everyone(0).ids))).up.slope
        for p in (
            samples(f"fedncv-paper{s}", SLOPES[:4], task=QUADRATIC, epochs=2) for s in ("", f"+samples:kind={kind}")
        )
    ]
    assert_close(slopes[0], slopes[1])  # one batch corrects nothing, and svrg's pass is no step of the paper's alpha


def test_the_pass_of_svrg_is_made_of_the_steps_of_the_phase_that_trains():
    """A method with a pass of its own and two epochs of one batch: svrg's pass, then the method's phases 0, 1 and 1."""
    seen = []

    def direction(ask, y_P, batch, _down, _own, scratch):
        seen.append(ask.phase)
        return ask.grad(y_P, batch), scratch

    def phases(epochs):
        return Phase(1, trains=(), mode="still"), Phase(epochs)

    method = with_samples(fedavg()._replace(phases=phases, direction=direction), Config(kind="svrg"))
    problem = quadratics(method, a=(1.0,), b=(0.0,), steps=2)
    seen.clear()  # the method was tried
    train(problem)
    assert seen == [1, 0, 1, 1]


def test_off_is_the_method_to_the_last_bit():
    for off, method in (("fedavg+samples:alpha=0", "fedavg"), ("fedncv+samples:alpha=0", "fedncv")):
        a, b = train(tiny(off), rounds=1), train(tiny(method), rounds=1)
        for (_, x), (_, y) in zip(leaves(a), leaves(b), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_knobs_and_order_are_checked():
    with pytest.raises(ValueError, match="alpha must be from 0 to 1, not 2"):
        find_method("fedavg+samples:alpha=2")
    with pytest.raises(ValueError, match="kind must be one of saga, svrg"):
        find_method("fedavg+samples:kind=sag")
    with pytest.raises(ValueError, match=r"\+even before \+samples"):
        with_even_samples(find_method("fedavg+samples"))
    assert find_method("fedavg+samples+even").switches == ("even", "samples")  # put right
    with pytest.raises(ValueError, match="twice"):
        find_method("fedncv+samples+samples")

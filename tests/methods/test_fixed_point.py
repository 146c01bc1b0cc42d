"""+fixed_point: rounding to a grid, exact sums, and what clients keep of it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import everyone, inside, model_of, quadratics, tiny, train
from torch.testing import assert_close

from fedncv.config import RunConfig
from fedncv.engine.check import check
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, build, start
from fedncv.engine.round import Partial, Reply, aggregate, partial
from fedncv.engine.sequential import run_round
from fedncv.methods import METHODS, find_method
from fedncv.methods.base import field_of
from fedncv.secure.fixed_point import (
    STATISTICS,
    Grid,
    Part,
    check_room,
    from_words,
    outside,
    pack,
    rounded,
    signed,
    to_words,
    unpack,
    whole,
    words,
)

SUMS = [name for name in METHODS if find_method(name).form == "sums" and find_method(name).reveals]
GRID = Grid(bits=64, precision=4, bound=2.0)  # steps of 1/8


# ---- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_rounded_to_the_nearest_step_and_clipped_to_the_bound(dtype):
    a = torch.tensor([0.0, 0.06, 0.07, -0.07, 1.99, 2.0, 2.05, 2.07, -900.0], dtype=dtype)
    expected = torch.tensor([0.0, 0.0, 0.125, -0.125, 2.0, 2.0, 2.0, 2.0, -2.0], dtype=dtype)
    assert torch.equal(rounded(GRID, "delta_P", a), expected)
    assert rounded(GRID, "delta_P", a).dtype == dtype
    assert float(outside(GRID, "delta_P", a)) == 2  # 2.07 and -900: beyond the bound by more than half a step
    assert whole(GRID, "delta_P", a).tolist() == [0, 0, 1, -1, 16, 16, 16, 16, -16]


def test_what_is_not_finite_stays_not_finite():
    """Clipping infinity to the bound would hide that a client diverged."""
    a = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert torch.isnan(rounded(GRID, "delta_P", a)).tolist() == [True, True, True, False]


@pytest.mark.parametrize("precision", [8, 24, 40])
def test_rounding_twice_changes_nothing_and_errs_by_half_a_step(precision):
    """Also in float32 with more bits than it has: the values lie on the grid by themselves."""
    grid = Grid(precision=precision)
    for dtype in (torch.float32, torch.float64):
        a = torch.linspace(-16, 16, 10_001, dtype=torch.float64).to(dtype) * 0.77 + 1e-5
        once = rounded(grid, "delta_P", a)
        assert torch.equal(rounded(grid, "delta_P", once), once)
        assert float((once - a).abs().max()) <= grid.step_of("delta_P") / 2
        assert torch.equal(
            whole(grid, "delta_P", a).to(torch.float64) * grid.step_of("delta_P"), once.to(torch.float64)
        )


def test_a_bound_that_is_no_power_of_two_is_held_with_the_step_of_the_next_one():
    grid = GRID._replace(bound=1.6)
    assert grid.step_of("delta_P") == 0.125
    assert rounded(grid, "delta_P", torch.tensor([1.6, 5.0, -5.0])).tolist() == [1.5, 1.5, -1.5]


# ---- one vector -------------------------------------------------------------------------------------------

PARTS = [Part("delta_P", (2, 2), True), Part("new", (), False), Part(STATISTICS, (1,), True)]


def vectors(grid, sizes, values):
    tensors = [torch.full(part.shape, value, dtype=torch.float64) for part, value in zip(PARTS, values, strict=True)]
    parts = list(zip(PARTS, tensors, strict=True))
    return [to_words(grid, parts, n) for n in sizes]


@pytest.mark.parametrize("bits", [32, 40, 48, 56, 64])
def test_the_sum_modulo_2_to_the_k_is_the_plain_sum(bits):
    """n = 3 and 5: 8 * -0.25, a plain count of 2 * 1, 8 * 0.5, in steps of 1/8, 1/8 and 64."""
    grid = GRID._replace(bits=bits, samples=100)
    summed = sum(vectors(grid, (3, 5), (-0.25, 1.0, 128.0))) & np.uint64(2**bits - 1)
    again = unpack(bits, pack(bits, summed), len(summed))
    assert np.array_equal(again, summed)
    assert len(pack(bits, summed)) == 7 * bits // 8
    fields, samples = from_words(grid, PARTS, again, 2)
    assert samples == 8
    assert fields["delta_P"].tolist() == [[-16, -16], [-16, -16]]
    assert fields["new"].item() == 16
    assert fields[STATISTICS].tolist() == [16]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sum_that_is_allowed_does_not_overflow_and_the_next_is_refused(sign):
    """7 clients of 2^19 samples with 2^8 steps: 7 * 2^27 < 2^30 < 2^31, so 32 bits do; 17 clients need 33."""
    grid = Grid(bits=32, precision=8, samples=2**19)
    check_room(grid, 15)
    summed = sum(vectors(grid, [2**19] * 15, (sign * 16.0, sign * 16.0, sign * 1024.0)))
    fields, samples = from_words(grid, PARTS, summed & np.uint64(2**32 - 1), 15)
    assert samples == 15 * 2**19
    assert fields["delta_P"][0, 0].item() == sign * 15 * 2**27
    with pytest.raises(ValueError, match=r"over 16 clients of up to 524,288 samples with precision=8 needs 33 bits"):
        check_room(grid, 16)
    with pytest.raises(ValueError, match=r"a word has bits=32; use bits=40, or a lower precision"):
        check_room(grid, 16)
    with pytest.raises(ValueError, match=r"needs 83 bits, and a word has bits=64; use a lower precision"):
        check_room(Grid(precision=40, samples=2**40), 2)


def test_a_sum_that_cannot_be_is_refused():
    """As a sum would be that is not unmasked, or of a client that sends what no client can send."""
    grid = GRID._replace(samples=100)
    good = sum(vectors(grid, (3, 5), (0.25, 1.0, 0.5)))
    from_words(grid, PARTS, good, 2)
    for place, number in ((-1, 1), (-1, 201), (-1, -8), (0, 16 * 8 + 1), (0, -16 * 8 - 1), (4, 16 * 2 + 1)):
        spoiled = good.copy()
        spoiled[place] = words(64, np.array([number]))[0]
        with pytest.raises(ValueError, match="a client cheated"):
            from_words(grid, PARTS, spoiled, 2)
    random = np.random.default_rng(0).integers(0, 2**64, len(good), dtype=np.uint64)
    with pytest.raises(ValueError, match="a client cheated"):
        from_words(grid, PARTS, random, 2)
    with pytest.raises(ValueError, match="7 numbers, not 6"):
        from_words(grid, PARTS[:2], good, 2)
    with pytest.raises(ValueError, match=r"101 training samples; with samples=100"):
        vectors(grid, [101], (0.0, 0.0, 0.0))


def test_words_are_signed_numbers_modulo_2_to_the_k():
    numbers = np.array([0, 1, -1, 2**31 - 1, -(2**31)])
    for bits in (32, 40, 64):
        assert signed(bits, words(bits, numbers)).tolist() == numbers.tolist()
    assert signed(32, words(32, np.array([2**31]))).tolist() == [-(2**31)]


# ---- rounds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUMS)
def test_a_round_differs_from_the_plain_one_by_rounding_only(name):
    """A fine grid in float64: 2^-36 for a field, and more for one with a bound of its own above 16."""
    fine = f"{name}+fixed_point:precision=40,samples=1000"
    ours, theirs = tiny(fine), tiny(name)
    a, b = train(ours), train(theirs)
    step = max(ours.method.grid.step_of(field) for field in theirs.method.reveals)
    assert_close(a.server, b.server, rtol=1e-6, atol=max(1e-8, step))
    assert_close(a.buffers, b.buffers, rtol=1e-6, atol=1e-7)
    assert_close([kept.own for _, kept in sorted(a.kept.items())], [k.own for _, k in sorted(b.kept.items())],
                 rtol=1e-6, atol=1e-8)  # fmt: skip


def test_one_round_by_hand():
    """x = 5, one step of 0.1 on x^2 / 2 and 4 (x - 1)^2 / 2: Delta = 0.5 and 1.6, rounded to steps of 1/128."""
    problem = quadratics("fedavg+fixed_point:bound=2,precision=8", sizes=[1, 3], steps=1, lr=0.1)
    step = 2 / 256
    state, row = run_round(problem, start(problem))
    mean = (round(0.5 / step) + 3 * round(1.6 / step)) * step / 4
    assert float(model_of(state)) == 5 - mean
    assert row["beyond_bound"] == 0


def test_clipped_numbers_are_counted_and_only_their_sum_is_told():
    problem = quadratics("fedavg+fixed_point:bound=1", sizes=[1, 3], steps=1, lr=0.1)
    state, row = run_round(problem, start(problem))
    assert row["beyond_bound"] == 1  # 1.6 is beyond 1, 0.5 is not
    assert float(model_of(state)) == 5 - (0.5 + 3 * 1) / 4


@pytest.mark.parametrize("bound", [16.0, 0.02])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scaffold_s_c_stays_the_mean_of_what_the_clients_keep(bound, dtype):
    """All that is added lies on one grid of 24 bits, so it is exact, also where almost everything is clipped."""
    problem = tiny(f"scaffold+fixed_point:bound={bound}", per_round=2, dtype=dtype, sizes=(12, 20, 9, 8))
    state = train(problem, rounds=5)
    kept = sum(k.own.to(torch.float64) for k in state.kept.values()) / 4
    assert float(kept.abs().max()) > 0
    exact = inside(state.server, "c_P").to(torch.float64)
    assert_close(exact, kept, rtol=0, atol=0 if dtype == "float64" else 1e-7)
    _, row = run_round(problem, state)
    assert (row["beyond_bound"] > 0) == (bound < 1)


@pytest.mark.parametrize("bound", [16.0, 0.02])
def test_the_sums_of_fedncv_stay_those_of_what_the_clients_keep(bound):
    """drift:memory=clients: sum_c is sum_u n_u c_u, exactly, also where clients are clipped."""
    problem = tiny(f"fedncv-sums+fixed_point:bound={bound}", sizes=(20, 8, 12, 31), per_round=2)
    state = train(problem, rounds=5)
    n, (total_P, size) = problem.federation.sizes_N, inside(state.server, "sum_c")
    assert torch.equal(total_P, sum(n[u] * kept.own.c_P for u, kept in sorted(state.kept.items())))
    assert float(size) == sum(float(n[u]) for u in state.kept)
    _, row = run_round(problem, state)
    assert (row["beyond_bound"] > 0) == (bound < 1)


def test_feddyn_s_h_stays_the_mean_of_what_the_clients_keep():
    """h = -alpha/N sum (y_u - x) over all rounds, lambda_u = -alpha (y_u - x) summed: h = mean lambda_u."""
    problem = tiny("feddyn:alpha=0.125+fixed_point:bound=0.02", per_round=2)
    state = train(problem, rounds=5)
    kept = sum(k.own for k in state.kept.values()) / len(problem.clients.train)
    assert_close(inside(state.server, "h_P"), kept, rtol=0, atol=1e-15)


def test_what_a_client_sends_and_keeps_fit_together_within_a_switch_around_it():
    """MOON's own model stays what it was; the control variate beside it follows what was sent."""
    problem = tiny("moon+drift:memory=clients+fixed_point:bound=0.02")
    state = start(problem)
    (arrival,) = arrivals(problem, state, everyone(1).ids)
    trained = train_client(problem, 0, arrival)
    assert torch.equal(trained.kept.own.c_P, field_of(trained.up, "dc_P"))
    assert float(trained.kept.own.c_P.abs().max()) <= 0.02
    assert torch.equal(trained.kept.own.own, trained.y_P)


# ---- exact sums -------------------------------------------------------------------------------------------


def replies_of(problem, state, ids):
    return [
        Reply(a.client, train_client(problem, state.round, a)) for a in arrivals(problem, state, everyone(*ids).ids)
    ]


@pytest.mark.parametrize("method", ["fedavg+fixed_point", "fedncv-sums+fixed_point", "scaffold+fixed_point"])
def test_partial_sums_in_any_order_give_the_same_bits(method):
    """As of the workers of a cluster, whatever the size of their blocks."""
    problem = tiny(method, dtype="float32")
    state = train(problem, rounds=2)
    replies = replies_of(problem, state, range(4))
    expected, _ = aggregate(problem, state, replies)
    alone = {reply.client: partial(problem, [reply]) for reply in replies}
    for order in itertools.permutations(range(4)):
        found, _ = aggregate(problem, state, replies, [alone[u] for u in order])
        assert_close(found.server, expected.server, rtol=0, atol=0)
        assert torch.equal(found.buffers, expected.buffers)
    pairs = [Partial.plus(alone[0], alone[3]), Partial.plus(alone[2], alone[1])]
    found, _ = aggregate(problem, state, replies, pairs)
    assert_close(found.server, expected.server, rtol=0, atol=0)


def test_running_statistics_are_on_the_grid_too(bn_problem):
    state = train(bn_problem, rounds=1)
    step = bn_problem.method.grid.step_of(STATISTICS)
    replies = replies_of(bn_problem, start(bn_problem), range(4))
    n = [len(bn_problem.clients.train[r.client]) for r in replies]
    total = sum(size * torch.round(r.trained.buffers_R / step) for size, r in zip(n, replies, strict=True))
    assert state.buffers.numel() > 0
    assert torch.equal(state.buffers, total * step / sum(n))


@pytest.fixture
def bn_problem():
    return tiny("fedavg+fixed_point")


def test_the_bytes_are_those_of_the_whole_numbers():
    problem = tiny("fedavg+fixed_point:bits=48,samples=1000")
    _, row = run_round(problem, start(problem), everyone(0, 1))
    numbers = (
        len(problem.model.start_P) + len(problem.model.start_R) + 2
    )  # and the counts of samples and of clipped ones
    assert row["bytes_up"] == 2 * 6 * numbers


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["memory", "ht", "calibrated", "labels"])
def test_switches_that_need_single_replies_or_sizes_are_refused_by_name(switch):
    with pytest.raises(ValueError, match=rf"fixed_point sums replies, but \+{switch} needs single replies"):
        find_method(f"fedavg+{switch}+fixed_point")


@pytest.mark.parametrize("method", [name for name in METHODS if find_method(name).form != "sums"])
def test_methods_that_need_single_replies_are_refused(method):
    with pytest.raises(ValueError, match="fixed_point sums replies"):
        find_method(f"{method}+fixed_point")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ("bits=33", "bits must be 32, 40, 48, 56 or 64, not 33"),
        ("precision=41", "precision must be from 8 to 40, not 41"),
        ("bound=0", r"bound must be from 2\^-40 to 2\^40, not 0"),
        ("bound=nan", "bound must be"),
        ("statistics=inf", "statistics must be"),
        ("samples=0", "samples must be from 1"),
    ],
)
def test_wrong_knobs_are_refused(knobs, said):
    with pytest.raises(ValueError, match=said):
        find_method(f"fedavg+fixed_point:{knobs}")


def test_a_study_without_room_for_its_sums_is_refused_with_numbers():
    config = RunConfig(method="fedavg+fixed_point:bits=32", clients=10, per_round=10)
    with pytest.raises(ValueError, match="over 10 clients of up to 1,000,000 samples with precision=24 needs 49 bits"):
        check(config)
    check(replace(config, method="fedavg+fixed_point:bits=56"))
    with pytest.raises(ValueError, match="sampling=weighted draws clients by their sizes"):
        check(replace(config, method="fedavg+fixed_point", sampling="weighted"))
    with pytest.raises(ValueError, match=r"training samples, and fixed_point has room for samples=10; use"):
        build(replace(config, method="fedavg+fixed_point:samples=10"))


def test_a_poisson_round_may_have_all_clients():
    """100 clients of up to 1,000 samples fit into 40 bits at precision 21, and 10 do at 24."""
    study = {"method": "fedavg+fixed_point:bits=40,samples=1000,precision=24", "clients": 100, "per_round": 10}
    check(RunConfig(**study))
    with pytest.raises(ValueError, match="the sum over 100 clients"):
        check(RunConfig(**study, sampling="poisson"))

"""Probes of the update against brute force: every draw through the engine's own aggregate, moments from the list."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
import torch
from federations import FULL_FEDNCV, full_fedncv, inside, quadratics, tiny, vector
from torch.testing import assert_close

from fedncv.engine.local import train
from fedncv.engine.problem import arrivals
from fedncv.engine.round import Reply, aggregate
from fedncv.estimators import running_beta
from fedncv.observatory import errors
from fedncv.observatory.errors import Draws, spread, weights
from fedncv.observatory.everyone import Point, _another_seed, common_point, engine_for, everyone
from fedncv.observatory.shadow import states_along
from fedncv.observatory.update import _clients_apart, probe

SIZES = (20, 13, 9, 18, 31)


def slow(method):
    return pytest.param(method, marks=pytest.mark.slow)


STILL = full_fedncv("momentum=off")  # no velocity: it aims at the weighted mean
UNBIASED = full_fedncv("momentum=off", "+ht")
WEIGHTED = ["fedavg", slow("fedvarp"), "fedstale:beta=0.5", STILL, UNBIASED, slow("fedncv:momentum=0"), "mifa"]
OTHERS = ["scaffold", "fedadp", "fedncv-sums:momentum=0", FULL_FEDNCV, slow("fedncv"), slow("fedavgm:server_lr=0.5")]
FORMS = {
    "fedavg": "ratio", "fedvarp": "ratio", "fedstale:beta=0.5": "ratio", "fedavgm:server_lr=0.5": "ratio",
    "fedncv": "ratio", "fedncv:momentum=0": "ratio", FULL_FEDNCV: "ratio", STILL: "ratio", UNBIASED: "sum",
    "fedncv-sums:momentum=0": "ratio", "scaffold": "mean", "mifa": "sum", "fedadp": "none",
}  # fmt: skip


@cache
def walked(method, *, rounds=5, per_round=2, sizes=SIZES, **config):
    """A problem and its state after some rounds, its memory partly filled."""
    problem = tiny(method, sizes=sizes, per_round=per_round, rounds=rounds, epochs=1, **config)
    *_, states = states_along(engine_for([problem]), rounds)
    return problem, states[0]


def probed(problem, state, *, again=False, num_draws=100):
    engine = engine_for([problem])
    (answers,) = everyone(engine, [state])
    second = everyone(engine, [state], replicate=1)[0] if again else None
    return probe(problem, state, answers, second, num_draws=num_draws), answers


def replies(problem, state):
    ids = np.arange(problem.federation.num_clients)
    return [Reply(a.client, train(problem, state.round, a)) for a in arrivals(problem, state, ids)]


def steps(problem, state, everybody):
    """x - x' of every draw, by the engine's aggregate."""
    x_P = model(problem, state)
    drawn = combinations(everybody, problem.config.per_round)
    return torch.stack([x_P - model(problem, aggregate(problem, state, list(S))[0]) for S in drawn])


def model(problem, state):
    """What clients are sent to train from."""
    return problem.method.model(state.server)


def weighted_mean(problem, state, everybody):
    """sum_u p_u Delta_u, written out."""
    x_P, n_N = model(problem, state), problem.federation.sizes_N
    return sum(n * (x_P - reply.trained.y_P) for n, reply in zip(n_N, everybody, strict=True)) / n_N.sum()


# ---- every number is what the list of all draws gives ----------------------------------------------------


@pytest.mark.parametrize("method", WEIGHTED)
def test_error_bias_and_variance_are_those_of_all_draws_against_the_weighted_mean(method):
    problem, state = walked(method)
    everybody = replies(problem, state)
    e_DP = steps(problem, state, everybody) - weighted_mean(problem, state, everybody)
    row, _ = probed(problem, state)
    mean_P = e_DP.mean(dim=0)
    assert row["form"] == FORMS[method]
    assert row["offset2"] < 1e-20
    assert row["mse"] == pytest.approx(float(e_DP.square().sum(dim=1).mean()), rel=1e-9)
    assert row["bias2"] == pytest.approx(float(mean_P.square().sum()), rel=1e-9, abs=1e-20)
    assert row["variance"] == pytest.approx(float((e_DP - mean_P).square().sum(dim=1).mean()), rel=1e-9)


@pytest.mark.parametrize("method", OTHERS)
def test_a_server_with_another_aim_is_measured_around_its_own_full_participation(method):
    problem, state = walked(method)
    everybody = replies(problem, state)
    full_P = model(problem, state) - model(problem, aggregate(problem, state, everybody)[0])
    e_DP = steps(problem, state, everybody) - full_P  # self-normalised or equal weights: inclusion plays no part
    row, _ = probed(problem, state)
    assert row["form"] == FORMS[method]
    assert row["mse"] == pytest.approx(float(e_DP.square().sum(dim=1).mean()), rel=1e-9)
    assert row["bias2"] == pytest.approx(float(e_DP.mean(dim=0).square().sum()), rel=1e-9, abs=1e-20)
    offset_P = full_P - weighted_mean(problem, state, everybody)
    assert row["offset2"] == pytest.approx(float(offset_P.square().sum()), rel=1e-9)


@pytest.mark.parametrize("method", [FULL_FEDNCV, "scaffold", "fedadp"])
def test_plain_is_fedavg_on_the_same_updates_and_the_cosine_that_of_all_draws(method):
    problem, state = walked(method)
    everybody, n_N = replies(problem, state), problem.federation.sizes_N
    x_P, g_P = model(problem, state), weighted_mean(problem, state, everybody)
    delta_NP = torch.stack([x_P - reply.trained.y_P for reply in everybody])
    draws = [list(S) for S in combinations(range(len(n_N)), problem.config.per_round)]
    plain = [float((n_N[S] @ delta_NP[S] / n_N[S].sum() - g_P).square().sum()) for S in draws]
    full_P = x_P - model(problem, aggregate(problem, state, everybody)[0])
    hat_DP = steps(problem, state, everybody) - full_P + g_P
    row, _ = probed(problem, state)
    assert row["plain"] == pytest.approx(np.mean(plain), rel=1e-9)
    assert row["times"] == pytest.approx(np.mean(plain) / row["mse"], rel=1e-9)
    assert row["cosine"] == pytest.approx(float(torch.cosine_similarity(hat_DP, g_P[None]).mean()), rel=1e-9)
    apart = sum(n * (d - g_P).square().sum() for n, d in zip(n_N, delta_NP, strict=True)) / n_N.sum()
    drift = sum(n * d.square().sum() for n, d in zip(n_N, delta_NP, strict=True)) / n_N.sum()
    assert row["apart"] == pytest.approx(float(apart), rel=1e-9)
    assert row["drift"] == pytest.approx(float(drift) ** 0.5, rel=1e-9)


@pytest.mark.parametrize("method", ["fedavg", full_fedncv(more="+ht"), slow("scaffold"), "fedadp", slow("mifa")])
def test_the_parts_add_up_to_the_whole(method):
    problem, state = walked(method)
    row, _ = probed(problem, state)
    assert row["mse"] == pytest.approx(row["bias2"] + row["variance"], rel=1e-12)
    for name, whole in (("layer_mse", "mse"), ("layer_plain", "plain"), ("layer_full2", "full2")):
        assert sum(row[name]) == pytest.approx(row[whole], rel=1e-9)
    assert row["layers"] == ["body.0", "body.1", "head"]


def test_horvitz_thompson_weights_have_no_bias_and_self_normalised_ones_have():
    (problem, state), (other, at) = walked(UNBIASED), walked(STILL)
    row, ratio = probed(problem, state)[0], probed(other, at)[0]
    assert row["bias2"] < 1e-25 * row["mse"]
    assert ratio["bias2"] > 1e-4 * ratio["mse"]


def test_a_velocity_is_known_before_the_draw_and_changes_no_error():
    """Both follow the same path, so that memory and updates are the same."""
    reference = small("fedavg")
    path = [common_point(reference, states[0]) for states in states_along(engine_for([reference]), 4)]
    rows = []
    for method in (FULL_FEDNCV, STILL):
        problem = small(method)
        *_, states = states_along(engine_for([problem]), 4, [path])
        rows.append(probed(problem, states[0], again=True)[0])
    assert rows[0]["offset2"] > 1e-3 * rows[0]["full2"]
    assert rows[0]["aims"]
    assert rows[1]["aims"]
    for name in ("mse", "bias2", "plain", "beta", "beta_best", "cosine", "within", "between"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-7), name


def small(method):
    return tiny(method, sizes=SIZES, per_round=2, rounds=5, epochs=1)


def test_a_server_that_steps_twice_as_far_does_not_aim_at_the_weighted_mean():
    problem, state = walked("fedavg:server_lr=2")
    row, _ = probed(problem, state, again=True)
    assert not row["aims"]
    assert row["mse"] == pytest.approx(4 * row["plain"], rel=1e-9)


# ---- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "beta"),
    [("fedvarp", 1.0), ("fedstale:beta=0.3", 0.3), ("fedncv:momentum=off+memory:beta=0.7+ht", 0.7)],
)
@pytest.mark.parametrize("rounds", [1, 5])  # after one round three clients were never seen: 0 or the mean of the seen
def test_the_coefficient_in_use_is_found_and_the_parabola_passes_through_the_error(method, beta, rounds):
    problem, state = walked(method, rounds=rounds)
    row, _ = probed(problem, state)
    assert (row["remembered"] == 2) == (rounds == 1)
    aa, ab, bb = row["curve"]
    assert row["beta"] == pytest.approx(beta, abs=1e-9)
    assert aa - 2 * beta * ab + beta**2 * bb == pytest.approx(row["mse"], rel=1e-8)
    assert row["without"] == pytest.approx(aa)
    assert row["best"] == pytest.approx((1 - row["rho2"]) * aa)


@pytest.mark.parametrize("method", [STILL, UNBIASED])
def test_a_coefficient_that_is_learned_is_found_too(method):
    problem, state = walked(method)
    learned = float(running_beta(inside(state.server, "moments")))
    assert 0.1 < learned < 1
    assert probed(problem, state)[0]["beta"] == pytest.approx(learned, abs=1e-9)


@pytest.mark.parametrize("weights", ["", "+ht"])
def test_no_other_coefficient_errs_less_than_the_best_one(weights):
    """The best one is put into the method, and the neighbours on either side; the memory is kept, not the path."""
    method = "fedncv:momentum=off,drift=off" + weights
    problem, state = walked(f"{method}+memory:beta=0.5")
    row, _ = probed(problem, state)
    assert 0.05 < row["beta_best"] < 0.95
    found = []
    for beta in (row["beta_best"] - 0.05, row["beta_best"], row["beta_best"] + 0.05):
        again = small(f"{method}+memory:beta={beta}")
        found.append(probed(again, state)[0]["mse"])
    assert found[1] == pytest.approx(row["best"], rel=1e-8)
    assert found[0] > found[1] < found[2]


@pytest.mark.parametrize("method", ["fedvarp", "fedncv:momentum=off,drift=off,prior=off+memory+ht"])
def test_perfect_memory_leaves_no_error(method):
    """The path stands still and the clients' updates have no noise, so what is remembered is what comes."""
    problem = quadratics(method, a=(1.0, 4.0, 2.0, 3.0), b=(0.0, 1.0, -2.0, 7.0), sizes=[1, 2, 3, 4], per_round=2)
    still = [Point(vector(5.0), vector())] * 13
    *_, states = states_along(engine_for([problem]), 12, [still])
    row, _ = probed(problem, states[0])
    assert row["remembered"] == 4
    assert row["plain"] > 0.1 * row["full2"]
    assert row["mse"] < 1e-25 * row["full2"]
    assert (row["beta"], row["beta_best"], row["rho2"]) == pytest.approx((1.0, 1.0, 1.0))


@pytest.mark.parametrize("method", ["mifa", "fedncv"])
def test_steps_that_remember_something_else_or_nothing_have_no_beta(method):
    """MIFA steps by remembered updates and the weights of all clients: no multiple of h_u stands beside Delta_u."""
    problem, state = walked(method)
    assert "beta" not in probed(problem, state)[0]


@pytest.mark.parametrize("drift", ["on", "learned"])
def test_alpha_in_use_is_the_servers_and_the_best_one_fits_the_fresh_gradients(drift):
    problem, state = walked(f"fedncv:drift={drift},prior=off,even=off", batch_size=100)
    everybody, n_N = replies(problem, state), problem.federation.sizes_N
    server = state.server.server.server  # inside average and momentum
    row, _ = probed(problem, state)
    assert row["alpha_clients"] == sorted(server.alpha)
    assert row["alpha"] == pytest.approx([float(server.alpha[u]) for u in sorted(server.alpha)])
    e_NP = problem.method.broadcast(state.server, torch.arange(5)).e_P
    fresh = [
        r.trained.up.up.delta_P / problem.config.lr + e_P for r, e_P in zip(everybody, e_NP, strict=True)
    ]  # one step
    mean_P = sum(n * c for n, c in zip(n_N, fresh, strict=True)) / n_N.sum()
    seen = sorted(server.c)
    old_P = sum(n_N[u] * server.c[u] for u in seen) / sum(n_N[u] for u in seen)
    for u, best in zip(seen, row["alpha_best"], strict=True):
        a_P, b_P = fresh[u] - mean_P, server.c[u] - old_P
        assert best == pytest.approx(min(1.0, max(0.0, float(a_P @ b_P / (b_P @ b_P)))), abs=1e-9)
    assert row["drift_best"] <= row["drift_with"]
    assert row["drift_best"] <= row["drift_without"]


# ---- a quadratic, in closed form -----------------------------------------------------------------------


def test_on_quadratics_the_numbers_are_the_closed_form():
    """K full-batch steps on a/2 (x - b)^2 move by Delta = (1 - (1 - lr a)^K)(x - b); one of N equal clients
    is drawn, so the error is (1/N) sum (Delta_u - mean)^2 without bias; two clients of sizes 1 and 3 have bias
    (Delta_0 - Delta_1) / 4."""
    a, b, x, lr, K = (1.0, 4.0, 2.0), (0.0, 1.0, -3.0), 5.0, 0.05, 10
    delta = np.array([(1 - (1 - lr * ai) ** K) * (x - bi) for ai, bi in zip(a, b, strict=True)])
    problem = quadratics("fedavg", a=a, b=b, x=x, lr=lr, steps=K, per_round=1)
    (state,) = next(states_along(engine_for([problem]), 0))
    row, _ = probed(problem, state, again=True)
    assert row["variance"] == pytest.approx(delta.var())
    assert row["bias2"] == pytest.approx(0.0, abs=1e-20)
    assert row["full2"] == pytest.approx(delta.mean() ** 2)
    assert row["within"] == pytest.approx(0.0, abs=1e-20)  # full batches: no noise
    assert row["between"] == pytest.approx(delta.var())
    two = quadratics("fedavg", a=a[:2], b=b[:2], x=x, lr=lr, steps=K, sizes=[1, 3], per_round=1)
    (state,) = next(states_along(engine_for([two]), 0))
    row, _ = probed(two, state)
    apart = delta[0] - delta[1]
    assert row["bias2"] == pytest.approx((apart / 4) ** 2)
    assert row["variance"] == pytest.approx((apart / 2) ** 2)


# ---- batch orders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["fedavg", slow("scaffold"), full_fedncv(more="+ht"), slow(FULL_FEDNCV), "fedncv-sums", slow("mifa")],
)
def test_within_and_between_are_those_of_all_draws_and_add_up_to_the_total_variance(method):
    """With steps s, s' of two trainings, over all draws: within E|s - s'|^2 / 2, between Cov(s, s')."""
    problem, state = walked(method)
    row, _ = probed(problem, state, again=True)
    s_DP = steps(problem, state, replies(problem, state))
    other = problem._replace(config=_seeded(problem.config))
    again = [Reply(a.client, train(other, state.round, a)) for a in arrivals(problem, state, np.arange(len(SIZES)))]
    t_DP = steps(problem, state, again)
    assert float((s_DP - t_DP).abs().max()) > 1e-4
    within = float((s_DP - t_DP).square().sum(dim=1).mean() / 2)
    between = float(((s_DP - s_DP.mean(dim=0)) * (t_DP - t_DP.mean(dim=0))).sum(dim=1).mean())
    assert row["within"] == pytest.approx(within, rel=1e-9)
    assert row["between"] == pytest.approx(between, rel=1e-9)
    # over the draw and a fair coin between the two trainings: twice the total variance of a step is
    both = [float((x_DP - x_DP.mean(dim=0)).square().sum(dim=1).mean()) for x_DP in (s_DP, t_DP)]
    of_means = float((s_DP.mean(dim=0) - t_DP.mean(dim=0)).square().sum()) / 2
    assert row["within"] + row["between"] == pytest.approx(sum(both) / 2 + of_means, rel=1e-9)


def _seeded(config):
    return replace(config, seed=_another_seed(config.seed, 1))


@pytest.mark.parametrize(
    "method", ["fedavg", slow("scaffold"), slow("fedvarp"), slow(FULL_FEDNCV), full_fedncv(more="+ht")]
)
def test_a_server_is_asked_by_groups_of_clients_and_not_client_by_client(method):
    """14 clients, 2 a round: two singles, a pair, all, 7 groups and 2 draws; then two singles and all again."""
    problem, state = walked(method, sizes=(9,) * 14)
    calls = []

    def counted(*arguments):
        calls.append(1)
        return problem.method.step(*arguments)

    row, _ = probed(problem._replace(method=problem.method._replace(step=counted)), state, again=True)
    assert row["form"] != "none"
    assert len(calls) <= (2 + 1 + 1 + 7 + 2) + (2 + 1) + 1  # and a second training's, and alpha's


# ---- draws in place of the list ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", FULL_FEDNCV, full_fedncv(more="+ht"), slow("scaffold"), slow("fedadp")])
def test_drawn_numbers_lie_around_the_listed_ones(method, monkeypatch):
    problem, state = walked(method, sizes=(20, 13, 9, 18, 31, 12, 25, 16), per_round=3)
    exact, _ = probed(problem, state)
    monkeypatch.setattr(errors, "MOST_LISTED", 0)
    drawn, _ = probed(problem, state, num_draws=400)
    linear = exact["form"] in ("mean", "sum")
    assert drawn["how"] == ("closed form" if linear else "400 draws" if method != "fedadp" else drawn["how"])
    for name in ("mse", "bias2", "variance", "plain", "plain_bias2", "cosine", "times"):
        if linear and name in ("mse", "bias2", "variance"):
            assert drawn[name] == pytest.approx(exact[name], rel=1e-9, abs=1e-20)
        else:
            half = (drawn[name + "_high"] - drawn[name + "_low"]) / 2
            assert half > 0 or (name, method) == ("times", "fedavg")  # which is 1 in every draw
            assert abs(drawn[name] - exact[name]) <= 2 * half, name  # four standard errors


def test_bias_and_variance_from_three_draws_are_right_on_average():
    """Over all 6^3 triples of draws of 2 of 4 the mean estimate is the exact number; the naive |mean|^2 is not."""
    n_N, v_NP = vector(1, 2, 4, 5), torch.tensor([[1.0, 0], [0, 2], [3, 1], [-1, 1]], dtype=torch.float64)
    v_KP = torch.cat([v_NP, torch.zeros(1, 2, dtype=torch.float64)])
    in_DN = torch.tensor([[float(u in S) for u in range(4)] for S in combinations(range(4), 2)], dtype=torch.float64)
    exact = spread(weights("ratio", Draws(in_DN, True, 2), n_N), v_KP)
    each = [spread(weights("ratio", Draws(in_DN[list(i)], False, 2), n_N), v_KP) for i in product(range(6), repeat=3)]
    for name in ("second", "bias2", "variance"):
        mean = np.mean([getattr(one, name).value for one in each])
        assert mean == pytest.approx(getattr(exact, name).value, rel=1e-9), name


def test_the_jackknife_of_a_mean_is_its_standard_error():
    x_D = vector(1, 4, 2, 8, 5)
    found = errors.of_means(lambda mean: mean, x_D, exact=False)
    half = 1.96 * float(x_D.std()) / 5**0.5
    assert (found.value, found.low, found.high) == pytest.approx((4.0, 4.0 - half, 4.0 + half))


def test_intervals_over_clients_leave_out_one_client_at_a_time():
    n_N, delta_NP = vector(1, 2, 4, 5), torch.tensor([[1.0, 0], [0, 2], [3, 1], [-1, 1]], dtype=torch.float64)

    def numbers(n_N, delta_NP):
        p_N = n_N / n_N.sum()
        square = p_N @ delta_NP.square().sum(dim=1)
        return square**0.5, square - (p_N @ delta_NP).square().sum()

    found = _clients_apart(delta_NP, n_N)
    rest = [[v for v in range(4) if v != u] for u in range(4)]
    without = [numbers(n_N[some], delta_NP[some]) for some in rest]
    for i, name in enumerate(("drift", "apart")):
        theta = np.array([float(each[i]) for each in without])
        half = 1.96 * (3 / 4 * ((theta - theta.mean()) ** 2).sum()) ** 0.5
        assert found[name].value == pytest.approx(float(numbers(n_N, delta_NP)[i]))
        assert found[name].high - found[name].value == pytest.approx(half)


@pytest.mark.parametrize("settings", [{"sampling": "weighted"}, {"sampling": "available"}, {"dropout": 0.4}])
def test_other_designs_are_drawn_as_the_study_draws_them(settings):
    """Horvitz-Thompson weights stay unbiased under each, as far as the draws can tell."""
    problem, state = walked(UNBIASED, **settings)
    row, _ = probed(problem, state, num_draws=600)
    assert row["form"] == "sum"
    assert row["unit"] == "draw"
    assert row["bias2_low"] < 0.01 * row["mse"]
    assert abs(row["bias2"]) < 0.05 * row["mse"]


# ---- engines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["scaffold", slow("fedavg"), slow(FULL_FEDNCV)])
def test_the_stacked_engine_gives_the_same_answers(method):
    problem, state = walked(method)
    stacked = problem._replace(config=_with_engine(problem.config))
    for replicate in (0, 1):
        (one,) = everyone(engine_for([problem]), [state], replicate=replicate)
        engine = engine_for([stacked])
        assert engine.name == "stacked"
        (other,) = everyone(engine, [state], replicate=replicate)
        assert_close(one.delta_NP, other.delta_NP, rtol=0, atol=1e-10)
        assert_close(one.ups, other.ups, rtol=0, atol=1e-10)


def _with_engine(config):
    return replace(config, engine="stacked")


def test_a_method_without_a_common_model_is_refused_by_name():
    problem = tiny("fedper")
    with pytest.raises(ValueError, match="no model that all clients share"):
        everyone(engine_for([problem]), [next(states_along(engine_for([problem]), 0))[0]])

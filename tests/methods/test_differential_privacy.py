"""Differential privacy of clients: how far one client moves the sums, the noise on them, and what stays the same."""

import math
from collections import namedtuple
from itertools import combinations

import pytest
import torch
from federations import Tiny, answer, everyone, federation, inside, model_of, quadratics, tiny, train, vector
from torch import nn
from torch.testing import assert_close

from fedncv.engine import budget, evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.round import Reply, collect, draw
from fedncv.engine.sequential import SequentialEngine, run_round
from fedncv.keys import fold, key_for, normal
from fedncv.methods import METHODS, find_method
from fedncv.methods.base import totals_of
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches.differential_privacy import COUNT, NOISE, joint_length
from fedncv.tree import leaves

OPEN = "dp:noise=0,clip=inf"  # changes nothing but weights and denominators


def linear(shape, num_classes):
    return nn.Linear(shape[0], num_classes)


def even(method, **config):
    """Four clients of equal size, a model without running statistics."""
    return tiny(method, sizes=(12,) * 4, model=linear, **config)


def sums(problem, state, ids):
    """The sums that the server gets of these clients: its fields as one vector, as the clip weighs them."""
    replies = [
        Reply(arrival.client, train_client(problem, state.round, arrival))
        for arrival in arrivals(problem, state, everyone(*ids).ids)
    ]
    collected, _ = collect(problem, replies)
    return totals_of(collected, problem.method.weights).fields


# ---- what stays the same ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "scaffold:option=I", "feddyn", "fedadam", "fedper"])
def test_without_noise_and_clip_it_is_the_method_to_rounding(method):
    """Everybody replies, and sizes are equal: the fixed weight is the sum of the weights."""
    ours, theirs = even(f"{method}+{OPEN}"), even(method)
    a, b = train(ours, rounds=4), train(theirs, rounds=4)
    for (path, leaf), (_, other) in zip(leaves(a.server.server), leaves(b.server), strict=True):
        assert_close(leaf, other, rtol=1e-9, atol=1e-11, msg=path)


@pytest.mark.parametrize("method", ["fedncv-sums", "fedavg+drift:memory=clients"])
def test_with_the_memory_at_the_clients_too_once_everybody_was_seen(method):
    ours, theirs = even(f"{method}+{OPEN}"), even(method)
    assert_close(model_of(train(ours, rounds=4)), model_of(train(theirs, rounds=4)), rtol=1e-9, atol=1e-11)


def test_it_is_the_last_switch_wherever_it_is_written():
    a, b = even(f"fedavg+{OPEN}+momentum"), even(f"fedavg+momentum+{OPEN}")
    assert torch.equal(model_of(train(a, rounds=3)), model_of(train(b, rounds=3)))
    assert find_method(f"fedavg+{OPEN}+momentum+average+prior").switches[-1] == "dp"


# ---- weights and denominators ----------------------------------------------------------------------------


def test_every_client_counts_once_and_the_denominator_is_the_expected_number():
    """x = 5, one step: Delta = (0.25, 0.8), sizes (1, 3). Alone, client 1 moves the model by half of its Delta."""
    problem = quadratics(f"fedavg+{OPEN}", steps=1, sizes=[1, 3])
    assert_close(model_of(train(problem)), vector(5 - (0.25 + 0.8) / 2))
    assert_close(model_of(train(problem, ids=[1])), vector(5 - 0.8 / 2))


def test_with_a_cap_clients_count_by_their_samples_up_to_it():
    """cap 2: w = (1/2, 1), together 3/2."""
    problem = quadratics(f"fedavg+{OPEN},cap=2", steps=1, sizes=[1, 3])
    assert_close(model_of(train(problem)), vector(5 - (0.25 / 2 + 0.8) / 1.5))
    assert_close(model_of(train(problem, ids=[0])), vector(5 - (0.25 / 2) / 1.5))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"per_round": 2}, 2.0),
        ({"per_round": 2, "sampling": "poisson"}, 2.0),
        ({"per_round": 2, "dropout": 0.25}, 1.5),
        ({"per_round": 4, "sampling": "available", "availability": 0.4}, 0.4 + 0.6 + 0.8 + 1.0),
    ],
)
def test_the_denominator_is_the_expected_weight_of_a_round(config, expected):
    state = start(tiny(f"fedavg+{OPEN}", model=linear, **config))
    assert state.server.weight == pytest.approx(expected)
    capped = start(tiny(f"fedavg+{OPEN},cap=10", model=linear, per_round=2, sizes=(20, 4, 12, 8)))
    assert capped.server.weight == pytest.approx(2 / 4 * (1 + 0.3 + 0.9 + 0.6))  # a quarter of the samples tests


# ---- how far one client moves the sums -------------------------------------------------------------------

CLIP = 0.05
BOUNDED = [
    f"scaffold+dp:clip={CLIP},decay=0.3,control=0.1",
    f"fedncv-sums+dp:clip={CLIP},control=0.3",
    f"fedavg+dp:clip={CLIP},cap=12",
    *(
        pytest.param(f"{method}+dp:clip={CLIP}", marks=pytest.mark.slow)
        for method in ("fedavg", "scaffold", "feddyn", "fedper", "fat_clipping_pr")
    ),
]


def lengths(text, fields):
    """The length of what a server is given, as the clip measures it."""
    control = float(text.partition("control=")[2] or 1)
    factor = {name: control if name == "dc_P" else 1.0 for name in fields if name != "new"}
    up = namedtuple("Up", fields)(**fields)
    return float(joint_length(up, factor))


@pytest.mark.parametrize("text", BOUNDED)
def test_one_client_more_moves_all_sums_together_by_at_most_the_clip(text):
    """All cohorts of four clients, without and with each of the others, in a first and a third round."""
    problem = tiny(text, model=Tiny)
    reached = 0.0
    for state in (start(problem), train(problem, rounds=2)):
        known = {ids: sums(problem, state, ids) for k in range(1, 5) for ids in combinations(range(4), k)}
        for ids, whole in known.items():
            for u in ids:
                rest = known.get(tuple(v for v in ids if v != u))
                moved = {name: whole[name] - (rest[name] if rest else 0) for name in whole}
                assert lengths(text, moved) <= CLIP * (1 + 1e-9)
                reached = max(reached, lengths(text, moved))
    assert reached > 0.9 * CLIP  # the clip is at work


def test_another_clients_data_move_the_sums_by_at_most_twice_the_clip():
    """The same client with its samples and with others, with labels turned round: more than once, less than twice."""
    text = f"scaffold+dp:clip={CLIP},control=0.2"
    problem = tiny(text, sizes=(12, 12), model=linear)
    turned = problem._replace(dataset=problem.dataset._replace(y=2 - problem.dataset.y, x=-problem.dataset.x))
    state = start(problem)
    a, b = sums(problem, state, [0, 1]), sums(turned, state, [0])
    other = sums(problem, state, [1])
    moved = lengths(text, {name: a[name] - other[name] - b[name] for name in a})
    assert CLIP < moved <= 2 * CLIP * (1 + 1e-9)


@pytest.mark.parametrize("text", BOUNDED)
def test_nothing_else_leaves_a_client(text):
    """No running statistics, and not whether it is its first round; the bytes are those of the arrays alone."""
    problem = tiny(text, model=Tiny)
    state, row = run_round(problem, start(problem), everyone(0, 1))
    assert problem.buffer_rule == "personal"
    assert torch.equal(state.buffers, problem.model.start_R)
    assert not torch.equal(state.kept[0].buffers_R, problem.model.start_R)
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    up = dict(leaves(train_client(problem, 0, arrival).up))
    assert row["bytes_up"] == 2 * 8 * sum(leaf.numel() for leaf in up.values())
    assert all(not leaf.any() for path, leaf in up.items() if path.endswith("new"))


def test_the_bits_of_adaptive_clipping_are_half_up_or_down():
    problem = even("fedavg+dp:clip=0.07,adapt=0.2,noise=0.1")
    bits = [float(sums(problem, start(problem), [u])["inside"]) for u in range(4)]
    assert {abs(bit) for bit in bits} == {0.5}


def test_the_methods_own_server_is_not_told_what_single_clients_hold():
    given = []
    plain = fedavg()

    def init(x_P, known):
        given.append(known)
        return plain.init(x_P, known)

    from fedncv.methods import chain
    from fedncv.methods.switches.differential_privacy import Config

    start(tiny(chain(plain._replace(init=init), dp=Config(cap=10)), model=linear, sizes=(20, 4, 12, 8)))
    assert given[-1].sizes_N.tolist() == pytest.approx([(1 + 0.3 + 0.9 + 0.6) / 4] * 4)
    assert given[-1].label_counts is None


def test_an_averaged_model_is_handed_out_with_the_clip():
    """Scores use the average of the models; its message holds the clip that a client needs to read it."""
    problem = even("fedavg+average:share=1+dp:clip=0.07,adapt=0.2,noise=0")
    state = train(problem, rounds=3)
    assert state.server.server.a_P.shape == problem.model.start_P.shape
    (arrival,) = arrivals(problem.in_use, state, everyone(0).ids)
    assert torch.equal(arrival.down.down.x_P, state.server.server.a_P)
    assert torch.equal(arrival.down.C, state.server.C)
    assert evaluate.before(problem, state)["before"] is not None


# ---- noise -----------------------------------------------------------------------------------------------


def test_the_noise_of_each_sum_is_the_clip_times_the_noise_over_its_factor():
    """A round without replies: x moves by noise alone, by the draw of the server's key."""
    problem = even("scaffold+dp:clip=0.5,noise=3,control=0.2", per_round=2, seed=7)
    state, _ = run_round(problem, start(problem), everyone())
    key, size = fold(key_for(7, "server", 0), NOISE), len(problem.model.start_P)
    first, second = (normal(fold(key, i), size) for i in (0, 1))
    assert_close(model_of(state), problem.model.start_P - 3 * 0.5 * first / 2)
    assert_close(inside(state.server, "c_P"), 3 * 0.5 / 0.2 * second / 4)


def test_with_a_count_the_sums_have_the_larger_share_of_the_noise():
    """noise 3, count 2: the fields have (1/9 - 1/16)^(-1/2) = 12 / sqrt(7), of the clip 0.5, over m = 2."""
    problem = even("fedavg+dp:clip=0.5,noise=3,adapt=0.2,count_noise=2", per_round=2, seed=7)
    state, _ = run_round(problem, start(problem), everyone())
    drawn = normal(fold(fold(key_for(7, "server", 0), NOISE), 0), len(problem.model.start_P))
    assert_close(model_of(state), problem.model.start_P - 12 / math.sqrt(7) * 0.5 * drawn / 2)


def test_its_variance_is_that_of_the_algebra():
    """100,000 numbers: the variance of the mean of squares is 2 / 100,000."""
    wide = namedtuple("Up", ["delta_P"])
    method = find_method("fedavg+dp:clip=2,noise=1.5")
    server = method.init(torch.zeros(100_000, dtype=torch.float64), federation((1,) * 4))
    x_P = answer(method, server, {0: wide(torch.zeros(100_000, dtype=torch.float64))}).server.x_P
    assert float((x_P * 4 / 3).square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2e-5))
    assert float(x_P.mean()) == pytest.approx(0, abs=5 * 0.75 / math.sqrt(1e5))


def test_rounds_seeds_and_fields_have_noise_of_their_own_and_repeats_the_same():
    def moved(seed, rounds):
        problem = even("fedavg+dp:clip=1,noise=1", seed=seed)
        state = start(problem)
        for _ in range(rounds):
            before = model_of(state)
            state, _ = run_round(problem, state, everyone())
        return model_of(state) - before

    assert torch.equal(moved(0, 2), moved(0, 2))
    for other in (moved(1, 2), moved(0, 1)):
        assert abs(float(torch.corrcoef(torch.stack([moved(0, 2), other]))[0, 1])) < 0.9


def test_a_round_without_replies_makes_a_step_and_without_privacy_it_does_not():
    problem, plain = even("fedavg+dp:noise=1"), even("fedavg")
    state, row = run_round(problem, start(problem), everyone())
    assert not torch.equal(model_of(state), problem.model.start_P)
    assert (row["asked"], row["replies"], row["loss"]) == (0, 0, None)
    assert torch.equal(model_of(run_round(plain, start(plain), everyone())[0]), plain.model.start_P)


# ---- control variates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0, 0.3])
def test_with_everybody_decay_keeps_the_mean_and_what_clients_keep(decay):
    """Then sum_S c_u is N c_bar, so that what clients send again is what the server takes off."""
    problem = tiny(f"scaffold+dp:clip=0.1,noise=0,decay={decay}", model=linear)
    state = train(problem, rounds=5)
    assert_close(inside(state.server, "c_P"), sum(kept.own for kept in state.kept.values()) / 4)


@pytest.mark.parametrize("cap", [0, 10])
@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedavg+drift:memory=clients"])
def test_the_servers_control_variate_stays_the_mean_of_what_clients_keep(method, cap):
    """A client keeps what it sent, after clipping: c_bar = sum w_u c_u / sum w_u over all clients, unseen ones 0."""
    problem = tiny(f"{method}+dp:clip=0.1,noise=0,cap={cap}", model=linear, sizes=(20, 8, 12, 31), per_round=2)
    state = train(problem, rounds=5)
    n_N = problem.federation.sizes_N
    w_N = (n_N / cap).clamp(max=1) if cap else torch.ones_like(n_N)
    own = {u: kept.own.c_P if "drift" in method else kept.own for u, kept in state.kept.items()}
    expected = sum(w_N[u] * c_P for u, c_P in own.items()) / w_N.sum()
    if "drift" in method:
        total_P, size = inside(state.server, "sum_c")
        assert_close(total_P / size, expected, rtol=1e-9, atol=1e-12)
    else:
        assert_close(inside(state.server, "h_P" if method == "feddyn" else "c_P"), expected, rtol=1e-9, atol=1e-12)


def control_noise(decay, rounds):
    """c after each of some rounds without replies: noise alone."""
    problem = even(f"scaffold+dp:clip=1,noise=1,decay={decay}", per_round=2)
    state, found = start(problem), []
    for _ in range(rounds):
        state, _ = run_round(problem, state, everyone())
        found.append(inside(state.server, "c_P"))
    return found


def test_noise_adds_up_in_the_control_variate_and_decay_forgets_it():
    """c_t = c_(t-1) + n_t / N without decay; with it (1 - decay m/N) c_(t-1) + n_t / N, of bounded variance."""
    plain, forgetting = control_noise(0, 5), control_noise(0.25, 5)
    fresh = [now - before for now, before in zip(plain, [0 * plain[0], *plain], strict=False)]
    expected = torch.zeros_like(plain[0])
    for n, c in zip(fresh, forgetting, strict=True):
        expected = (1 - 0.25 * 2 / 4) * expected + n
        assert_close(c, expected)


def test_scaffold_with_decay_still_stops_at_the_optimum():
    """Whatever c_bar starts from: its distance from the mean of the c_u shrinks by the decay in every round."""
    problem = quadratics(f"scaffold+{OPEN},decay=0.2", x=1.0)
    state = start(problem)
    server = state.server._replace(server=state.server.server._replace(c_P=vector(0.5)), added_P=vector(1.0))
    state = state._replace(server=server)
    assert_close(model_of(train(problem, rounds=50, state=state)), vector(0.8), atol=1e-5, rtol=0)


# ---- adaptive clipping -----------------------------------------------------------------------------------


def of_lengths(*lengths):
    """Clients that send (length, 0), whatever they train."""
    Up = namedtuple("Up", ["delta_P"])
    table = torch.tensor(lengths, dtype=torch.float64)

    def finish(ask, y_P, _work, _down, own, _scratch):
        return Up(table[ask.client.id] * torch.ones_like(y_P)), own

    return fedavg()._replace(finish=finish)


def adaptive(lengths, **knobs):
    from fedncv.methods import chain
    from fedncv.methods.switches.differential_privacy import Config

    return quadratics(
        chain(of_lengths(*lengths), dp=Config(**{"noise": 0.0, "adapt": 0.2} | knobs)),
        a=(1.0,) * len(lengths),
        b=(0.0,) * len(lengths),
        steps=1,
    )


def test_one_step_of_the_clip_by_hand():
    """Three of four are within 3.5: C' = 3.5 exp(-0.2 (3/4 - 1/2)), and the server moves by (1 + 2 + 3 + 3.5) / 4."""
    problem = adaptive((1.0, 2.0, 3.0, 4.0), clip=3.5)
    state, row = run_round(problem, start(problem))
    assert (row["clip"], row["clip_inside"]) == (3.5, 0.75)
    assert_close(state.server.C, vector(3.5 * math.exp(-0.05))[0])
    assert_close(model_of(state), vector(5 - 9.5 / 4))


@pytest.mark.parametrize(
    ("quantile", "low", "high"),
    [(0.25, 1, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.5, 2, 3), (0.75, 3, 4)))],
)
def test_the_clip_settles_where_the_quantile_of_the_clients_is_within(quantile, low, high):
    """With lengths 1, 2, 3, 4 the share is exactly the quantile between two lengths, and C rests there."""
    problem = adaptive((1.0, 2.0, 3.0, 4.0), clip=0.5, quantile=quantile)
    state = train(problem, rounds=60)
    assert low <= float(state.server.C) < high
    assert torch.equal(state.server.C, train(problem, state=state).server.C)


def test_the_noise_is_split_between_sums_and_count():
    """1 / spread^2 + 1 / (2 count)^2 = 1 / noise^2: a bit counts with sensitivity 1/2."""
    for knobs in ({}, {"count_noise": 3.0}):
        server = start(adaptive((1.0, 2.0), noise=1.5, epsilon=math.inf, **knobs)).server
        assert server.spread**-2 + (2 * server.count_noise) ** -2 == pytest.approx(1.5**-2)
        assert server.spread > 1.5
    problem = adaptive((1.0, 2.0), noise=1.5, count_noise=3.0, clip=10.0)
    _, row = run_round(problem, start(problem))
    drawn = float(normal(fold(key_for(0, "server", 0), COUNT), 1))
    assert row["clip_inside"] == pytest.approx((2 * 0.5 + 3 * drawn) / 2 + 0.5)


# ---- what the rounds spend -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "release"),
    [
        ({"sampling": "poisson"}, (2, 4, False)),
        ({"sampling": "uniform"}, (2, 4, True)),
        ({"sampling": "available"}, (4, 4, True)),
        ({"sampling": "poisson", "dropout": 0.1}, (4, 4, False)),
        ({"sampling": "uniform", "dropout": 0.1}, (4, 4, True)),
    ],
)
def test_sampling_amplifies_only_where_the_draw_is_by_chance_alone(config, release):
    problem = even("fedavg+dp:noise=2", per_round=2, **config)
    assert tuple(budget.release(problem, start(problem)))[1:] == release


def test_the_epsilon_of_every_row_is_that_of_its_rounds():
    problem = even("fedavg+dp:noise=2", per_round=2, sampling="poisson")
    state = start(problem)
    for t in range(1, 4):
        state, row = run_round(problem, state)
        assert row["epsilon"] == budget.spent(problem, state, t)
    plain = even("fedavg")
    assert "epsilon" not in run_round(plain, start(plain))[1]
    without = even(f"fedavg+{OPEN}")
    assert run_round(without, start(without))[1]["epsilon"] is None


def test_the_noise_found_keeps_the_planned_rounds_within_the_budget():
    problem = even("fedavg+dp:epsilon=2", per_round=2, rounds=6, sampling="poisson")
    state = start(problem)
    assert budget.spent(problem, state, 6) <= 2 < budget.spent(problem, state, 7)
    assert budget.rounds_within(problem, state) == 6


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedavg+ht+dp", "\\+ht needs single replies"),
        ("fedavg+labels+dp", "\\+labels needs single replies"),
        ("fedavg+calibrated+dp", "\\+calibrated needs single replies"),
        ("fedavg+memory+ht+dp", "\\+memory and \\+ht needs single replies"),
        ("fedncv+dp", "this method needs single replies.*fedncv-sums\\+dp"),
        ("pfedsim+dp", "single replies"),
        ("fedgen+dp", "single replies|when they join"),
        ("fednova+dp", "d_P, a, which clipping would make disagree"),
        ("fedexp+dp", "delta_P, square, which"),
        ("local+dp", "send nothing"),
        ("fedavg+dp:clip=0", "clip must be above 0"),
        ("fedavg+dp:clip=inf", "clip=inf has no bound"),
        ("fedavg+dp:clip=inf,noise=0,adapt=0.2", "adapt needs a finite clip"),
        ("fedavg+dp:noise=-1", "noise must be at least 0"),
        ("fedavg+dp:noise=inf", "noise must be at least 0 and finite"),
        ("fedavg+dp:noise=0,epsilon=1", "noise=0 has no finite epsilon"),
        ("fedavg+dp:epsilon=0", "epsilon must be above 0"),
        ("fedavg+dp:epsilon=nan", "epsilon must be above 0"),
        ("fedavg+dp:delta=1", "delta must be above 0 and below"),
        ("scaffold+dp:decay=1.1", "decay must be"),
        ("fedavg+dp:decay=0.1", "decay is for control variates"),
        ("feddyn+dp:decay=0.1", "decay is for control variates"),
        ("fedavg+dp:quantile=0", "quantile must be"),
        ("fedavg+dp:cap=-1", "cap must be"),
        ("fedavg+dp:control=0", "control must be"),
        ("fedavg+dp+dp", "names dp twice"),
    ],
)
def test_what_cannot_be_protected_is_refused_by_name(text, words):
    with pytest.raises(ValueError, match=words) as caught:
        find_method(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "config", "words"),
    [
        ("fedavg+dp", {"sampling": "weighted", "per_round": 2}, "cannot be used with sampling=weighted"),
        ("fedavg+dp:delta=0.25", {}, "must be below 1 / clients = 0.25"),
        ("fedavg+dp:noise=4,adapt=0.2,count_noise=2", {}, "count_noise is 2, but must be above half the noise"),
        ("fedavg+dp:cap=5", {"stream": "arrivals:start=0.5,rate=0.1"}, "number of samples does not change"),
    ],
)
def test_settings_that_break_the_guarantee_are_refused(text, config, words):
    with pytest.raises(ValueError, match=words):
        start(even(text, **config))


def test_every_method_is_either_bounded_or_refused():
    """Those in the sums form that send one update, and control variates that belong to it."""
    taken = set()
    for name in METHODS:
        try:
            find_method(f"{name}+dp")
            taken.add(name)
        except ValueError:
            pass
    assert taken == {
        "fedncv-sums", "fedavg", "fedavgm", "fedprox", "scaffold", "feddyn", "moon", "fedlc", "fedper", "fedrep",
        "fat_clipping_pi", "fat_clipping_pr", "fedadagrad", "fedadam", "fedyogi",
        "fedrod", "ditto", "fedbabu", "knnper", "d2", "quasi_global", "relaysgd",
    }  # fmt: skip


def test_the_engine_asks_nobody_in_an_empty_poisson_round():
    problem = even("fedavg+dp:noise=1", per_round=1, sampling="poisson")
    sizes = [len(draw(problem, t).ids) for t in range(12)]
    assert 0 in sizes
    engine, state = SequentialEngine([problem]), start(problem)
    for size in sizes:
        ((state, row),) = engine.run_rounds([state])
        assert row["asked"] == size

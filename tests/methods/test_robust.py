"""Robust combining: what a few bad replies can do to a step, by enumeration over which clients are bad."""

import math
import re
from itertools import combinations

import pytest
import torch
from federations import Tiny, everyone, inside, model_of, quadratics, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.relay import returned
from fedncv.engine.round import Reply, aggregate
from fedncv.engine.sequential import outcomes, run_round
from fedncv.methods import find_method
from fedncv.methods.base import Replies, sums_of
from fedncv.methods.fedavg import Up
from fedncv.methods.fedexp import Up as SquaredUp
from fedncv.methods.fednova import Up as NovaUp
from fedncv.methods.switches.clipped import clipped, threshold
from fedncv.methods.switches.krum import chosen, scores
from fedncv.methods.switches.median import median
from fedncv.methods.switches.robust import fields_screened, withstood
from fedncv.methods.switches.through import ROBUST
from fedncv.methods.switches.trimmed import trimmed
from fedncv.tree import tree_map_named

RULES = ("median", "trimmed:share=0.4", "krum:share=0.4", "clipped:share=0.4")


def mean(w_S, a_SP):
    return (w_S[:, None] * a_SP).sum(dim=0) / w_S.sum()


def screened(rule, a_SP, w_S):
    """The rows that a switch makes of the updates of a round."""
    return find_method(f"fedavg+{rule}").screen.rows(a_SP, w_S)


def honest(num, seed=0, columns=3):
    return torch.randn(num, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attacks(a_SP, bad):
    """Yield the replies with those of ``bad`` replaced: all at one far place, far apart, opposite, one coordinate."""
    bad = list(bad)
    signs = torch.tensor([(-1.0) ** i for i in range(len(bad))], dtype=a_SP.dtype)[:, None]
    for rows in (
        torch.full((len(bad), a_SP.shape[1]), 1e6, dtype=a_SP.dtype),
        signs * torch.linspace(1e6, 1e8, len(bad), dtype=a_SP.dtype)[:, None].expand(-1, a_SP.shape[1]),
        -10 * a_SP[bad],
        torch.cat([a_SP[bad][:, :-1], torch.full((len(bad), 1), -1e6, dtype=a_SP.dtype)], dim=1),
    ):
        yield a_SP.index_copy(0, torch.tensor(bad, dtype=torch.int64), rows)


# ---- rules by hand -------------------------------------------------------------------------------------------


def test_the_number_withstood_is_the_share_rounded_up_and_never_more_than_the_rule_can():
    assert [withstood(0.1, num, 99) for num in (1, 10, 11, 30)] == [1, 1, 2, 3]  # 0.1 * 30 is above 3 in floats
    assert withstood(0.49, 3, 1) == 1
    assert [withstood(0.0, 5, 2), withstood(0.2, 1, 0), withstood(0.2, 1, -1)] == [0, 0, 0]


def test_the_median_of_an_odd_and_an_even_number_of_replies():
    assert_close(median(vector(5, 1, 9)[:, None]), vector(5))
    assert_close(median(vector(5, 1, 9, 7)[:, None]), vector(6))
    assert_close(median(vector(2, 2, 2, 9)[:, None]), vector(2))  # ties


def test_the_trimmed_mean_goes_by_samples_among_those_kept():
    """Kept in the first column: 2 and 4 with weights 1 and 3; in the second, clients 0 and 3: (5 * 1 + 1 * 4) / 5."""
    a_SP = torch.stack([vector(2, 4, 100, -7), vector(1, -9, 8, 5)], dim=1)
    rows = trimmed(a_SP, vector(1, 3, 9, 4), 1)
    assert_close(rows[:, 0], vector(2, 4, 14 / 4, 14 / 4))
    assert_close(rows[:, 1], vector(1, 21 / 5, 21 / 5, 5))
    assert_close(mean(vector(1, 3, 9, 4), rows), vector(14 / 4, 21 / 5))


def test_the_scores_of_krum_are_sums_of_squares_to_the_nearest_others():
    """Five points on a line and f = 1: the squares to the two nearest others."""
    assert_close(scores(vector(0, 1, 3, 7, 20)[:, None], 1), vector(1 + 9, 1 + 4, 4 + 9, 16 + 36, 169 + 289))
    rows = chosen(vector(0, 1, 3, 7, 20)[:, None], vector(1, 2, 3, 4, 5), 1, 2)
    assert_close(rows[:, 0], vector(0, 1, 2 / 3, 2 / 3, 2 / 3))  # 0 and 1 with weights 1 and 2


def test_scores_keep_their_digits_where_replies_have_much_in_common():
    """In single precision, with the 26 rows from which torch would compute distances from products."""
    near_SP = (100 + 0.01 * honest(26)).float()
    squares_SS = (near_SP[:, None] - near_SP[None]).double().square().sum(dim=2)
    assert_close(scores(near_SP, 1).double(), squares_SS.sort(dim=1).values[:, 1:24].sum(dim=1), rtol=1e-5, atol=0)


def test_clipping_keeps_directions_and_the_short_replies():
    a_SP = torch.stack([vector(3, 4), vector(0, 1), vector(-60, 80), vector(6, 8)])
    assert_close(threshold(a_SP, 1), torch.tensor(10.0, dtype=torch.float64))
    assert_close(clipped(a_SP, 1), torch.stack([vector(3, 4), vector(0, 1), vector(-6, 8), vector(6, 8)]))
    assert_close(clipped(a_SP, 2)[2:], torch.stack([vector(-3, 4), vector(3, 4)]))


# ---- breakdown points, over all choices of the bad clients ----------------------------------------------------


@pytest.mark.parametrize("num", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("rule", ["median", "trimmed:share=0.49"])
def test_up_to_the_breakdown_point_every_row_stays_within_the_honest_range(rule, num):
    """Whoever is bad, whatever they send and however many samples they claim."""
    a_SP, f = honest(num), (num - 1) // 2
    for bad in combinations(range(num), f):
        good = [u for u in range(num) if u not in bad]
        low_P, high_P = a_SP[good].min(dim=0).values, a_SP[good].max(dim=0).values
        w_S = torch.ones(num, dtype=torch.float64).index_fill(0, torch.tensor(bad, dtype=torch.int64), 1e9)
        for sent_SP in attacks(a_SP, bad):
            rows = screened(rule, sent_SP, w_S)
            assert ((rows >= low_P) & (rows <= high_P)).all()


@pytest.mark.parametrize("num", [3, 4, 5, 6, 7])
@pytest.mark.parametrize(("share", "rule"), [(0.5, "median"), (0.2, "trimmed:share=0.2"), (0.49, "trimmed:share=0.49")])
def test_one_more_bad_client_moves_the_mean_as_far_as_it_wants(share, rule, num):
    f = min(math.ceil(share * num), (num - 1) // 2)
    a_SP, ones_S = honest(num), torch.ones(num, dtype=torch.float64)
    for bad in combinations(range(num), f + 1):
        assert (mean(ones_S, screened(rule, next(attacks(a_SP, bad)), ones_S)) > 1e4).all()


@pytest.mark.parametrize("num", [4, 5, 6, 7, 8])
def test_krum_chooses_only_replies_near_an_honest_one(num):
    """Within sqrt(S - f - 2) times the largest distance between two honest replies, whoever is bad."""
    f = (num - 2) // 2
    a_SP = honest(num)
    for bad in combinations(range(num), f):
        good = [u for u in range(num) if u not in bad]
        reach = math.sqrt(max(num - f - 2, 1)) * torch.cdist(a_SP[good], a_SP[good]).max()
        for sent_SP in attacks(a_SP, bad):
            order = scores(sent_SP, f).argsort()[: num - f]
            assert (torch.cdist(sent_SP[order], a_SP[good]).min(dim=1).values <= reach).all()
            rows = screened("krum:share=0.49", sent_SP, torch.ones(num, dtype=torch.float64))
            assert rows.abs().max() <= a_SP[good].norm(dim=1).max() + reach


@pytest.mark.parametrize("num", [4, 5, 6, 7])
def test_krum_breaks_where_its_page_says(num):
    """Multi-Krum keeps |S| - f, more than are honest with f + 1 bad; |S| - f - 1 equal replies have score 0."""
    f, a_SP, ones_S = (num - 2) // 2, honest(num), torch.ones(num, dtype=torch.float64)
    for bad in combinations(range(num), f + 1):
        rows = screened("krum:share=0.49", next(attacks(a_SP, bad)), ones_S)
        assert (mean(ones_S, rows) > 1e4).all()
    for bad in combinations(range(num), num - f - 1):
        rows = screened("krum:share=0.49,keep=1", next(attacks(a_SP, bad)), ones_S)
        assert (rows == 1e6).all()


@pytest.mark.parametrize("num", [3, 4, 5, 6])
def test_clipping_makes_nothing_longer_than_the_longest_honest_reply_until_it_breaks(num):
    a_SP, f, ones_S = honest(num), (num - 1) // 2, torch.ones(num, dtype=torch.float64)
    for bad in combinations(range(num), f):
        good = [u for u in range(num) if u not in bad]
        longest = a_SP[good].norm(dim=1).max() * (1 + 1e-12)
        for sent_SP in attacks(a_SP, bad):
            rows = screened("clipped:share=0.49", sent_SP, ones_S)
            assert (rows.norm(dim=1) <= longest).all()
            assert mean(ones_S, rows).norm() <= longest
    for bad in combinations(range(num), f + 1):
        assert mean(ones_S, screened("clipped:share=0.49", next(attacks(a_SP, bad)), ones_S)).norm() > 1e4


# ---- limits and corners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["trimmed:share=0", "krum:share=0", "clipped:share=0", "poisoned:share=0"])
def test_without_a_share_it_is_the_method_to_the_last_bit(rule):
    a, b = train(tiny(f"scaffold+{rule}"), rounds=2), train(tiny("scaffold"), rounds=2)
    assert torch.equal(a.server.x_P, b.server.x_P)
    assert torch.equal(a.server.c_P, b.server.c_P)


@pytest.mark.parametrize("rule", ["trimmed", "krum", "clipped"])
def test_two_replies_give_the_mean_to_the_last_bit_and_the_row_says_that_nobody_is_withstood(rule):
    problem, plain = tiny(f"fedavg+{rule}"), tiny("fedavg")
    ours, row = run_round(problem, start(problem), everyone(0, 2))
    theirs, _ = run_round(plain, start(plain), everyone(0, 2))
    assert torch.equal(ours.server.x_P, theirs.server.x_P)
    assert torch.equal(ours.buffers, theirs.buffers)
    assert row["withstands"] == 0


@pytest.mark.parametrize("rule", RULES)
def test_one_reply_is_itself_and_equal_replies_are_their_common_value(rule):
    for num in (1, 2, 3, 4, 5):
        a_SP = vector(1.5, -2.0).expand(num, 2)
        w_S = torch.arange(1.0, num + 1, dtype=torch.float64)
        assert torch.equal(screened(rule, a_SP, w_S), a_SP)


@pytest.mark.parametrize("rule", [*RULES, "krum:keep=1"])
def test_the_mean_of_the_rows_moves_and_scales_with_the_replies(rule):
    """Ranks and distances do not see a common shift (norms do), and all rules scale."""
    a_SP, w_S = honest(7), vector(1, 2, 3, 4, 5, 6, 7)
    found_P = mean(w_S, screened(rule, a_SP, w_S))
    assert_close(mean(w_S, screened(rule, -3 * a_SP, w_S)), -3 * found_P)
    if not rule.startswith("clipped"):
        assert_close(mean(w_S, screened(rule, a_SP + 5, w_S)), found_P + 5)


@pytest.mark.parametrize(
    ("rule", "f"),
    [("median", 2), ("trimmed", 1), ("trimmed:share=0.4", 2), ("krum", 1), ("krum:share=0.4", 1), ("clipped", 1)],
)
def test_a_round_says_how_many_bad_replies_it_withstands(rule, f):
    """Of five: krum needs |S| >= 2f + 2, the others |S| >= 2f + 1. The fourth of the norms 1, …, 5 is the threshold."""
    a_SP = torch.diag(vector(5, 3, 1, 2, 4))
    method = find_method(f"fedexp+{rule}")
    ups = SquaredUp(a_SP, a_SP.square().sum(dim=1))
    server = method.init(a_SP[0], None)
    robust = method.combine(server, Replies(ups, torch.arange(5), torch.ones(5), torch.ones(5)))
    numbers = method.step(None, server, robust).numbers
    assert numbers["withstands"] == f
    assert numbers["eta_g"] >= 1  # the method's own stay
    assert numbers.get("clip_norm", 4) == 4


def test_trimming_all_but_the_middle_is_the_median():
    for num in (3, 4, 5, 6):
        a_SP, ones_S = honest(num), torch.ones(num, dtype=torch.float64)
        assert_close(mean(ones_S, screened("trimmed:share=0.49", a_SP, ones_S)), median(a_SP))


def test_multi_krum_that_keeps_all_but_f_and_krum_keep_as_many():
    a_SP, ones_S = honest(10), torch.ones(10, dtype=torch.float64)
    order = scores(a_SP, 2).argsort()
    for rule, keep in (("krum", 8), ("krum:keep=3", 3), ("krum:keep=1", 1), ("krum:keep=99", 8)):
        assert_close(mean(ones_S, screened(rule, a_SP, ones_S)), a_SP[order[:keep]].mean(dim=0))


def test_a_field_that_counts_clients_once_is_averaged_so():
    """scaffold's fields have weight one: sizes do not matter; fedavg's go by samples."""
    problem = tiny("scaffold+trimmed:share=0.3")
    method, state = problem.method, start(problem)
    here = [Reply(a.client, train_client(problem, 0, a)) for a in arrivals(problem, state, everyone(0, 1, 2, 3).ids)]
    rows = torch.stack([reply.trained.up.delta_P for reply in here]).sort(dim=0).values
    ups = type(here[0].trained.up)(*(torch.stack(part) for part in zip(*(r.trained.up for r in here), strict=True)))
    replies = Replies(ups, torch.arange(4), vector(15, 10, 7, 14), torch.ones(4))
    sums = method.combine(state.server, replies).combined
    assert_close(sums.mean("delta_P"), rows[1:3].mean(dim=0))
    assert_close(sums.sum("delta_P"), 4 * rows[1:3].mean(dim=0))
    assert sums.num_replies == 4


@pytest.mark.parametrize(
    ("rule", "fixed"), [("median", 2.0), ("trimmed", 3.0), ("krum", 2.25), ("krum:keep=1", 1.0), ("clipped", 3.0)]
)
def test_fixed_points_of_five_quadratics_one_of_them_far_away(rule, fixed):
    """f_u = (x - b_u)^2 / 2, b = 0, 1, 2, 6, 100: updates are proportional to x - b_u, and f = 1.

    trimmed   mean of 1, 2, 6; krum: of 0, 1, 2, 6, and alone 1, the least sum of squares to its two nearest
    clipped   x + (x - 1) + (x - 2) - (6 - x) - tau = 0 with tau = max(x, 6 - x)
    """
    problem = quadratics(f"fedavg+{rule}", a=(1.0,) * 5, b=(0.0, 1.0, 2.0, 6.0, 100.0), x=4.0, lr=0.1)
    state = train(problem, rounds=15)
    assert_close(model_of(state), vector(fixed), atol=1e-3, rtol=0)


def test_scaffold_with_the_median_rests_at_the_median_of_equal_curvatures():
    """At rest the median of the updates and of the changes of c_u is 0."""
    problem = quadratics("scaffold+median", a=(1.0,) * 3, b=(0.0, 1.0, 50.0), x=4.0)
    state = train(problem, rounds=40)
    after = train(problem, state=state, rounds=1)
    assert_close(after.server.x_P, state.server.x_P, atol=1e-6, rtol=0)
    assert after.server.x_P.item() < 50 / 2


# ---- the whole server -----------------------------------------------------------------------------------------


def attacked(problem, state, bad, number):
    """The replies of a round in which the clients ``bad`` send ``number`` in every place, statistics included."""
    replies = []
    for arrival in arrivals(problem, state, everyone(*range(len(problem.clients.train))).ids):
        trained = train_client(problem, state.round, arrival)
        if arrival.client in bad:
            up = tree_map_named(lambda _, leaf: torch.full_like(leaf, number), trained.up)
            trained = trained._replace(up=up, buffers_R=torch.full_like(trained.buffers_R, number))
        replies.append(Reply(arrival.client, trained))
    return replies


@pytest.mark.parametrize("number", [1e6, *(pytest.param(n, marks=pytest.mark.slow) for n in (-1e6, 0.0, 1e-300))])
@pytest.mark.parametrize("rule", ["median", "trimmed:share=0.3"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", pytest.param("fedper", marks=pytest.mark.slow)])
def test_model_statistics_and_control_variate_stay_within_the_honest_range(method, rule, number):
    problem = tiny(f"{method}+{rule}", sizes=(20, 13, 9, 18, 16))
    state = train(problem, rounds=1)
    for bad in combinations(range(5), 2):
        replies = attacked(problem, state, bad, number)
        good = [reply.trained for reply in replies if reply.client not in bad]
        after, _ = aggregate(problem, state, replies)
        sent = torch.stack([trained.up[0] for trained in good])
        old, new = (getattr(s.server, "x_P", None) for s in (state, after))
        old, new = (state.server.body_Q, after.server.body_Q) if old is None else (old, new)
        assert within(old - new, sent)
        assert within(after.buffers, torch.stack([trained.buffers_R for trained in good]))
        if method == "scaffold":
            assert within(after.server.c_P - state.server.c_P, torch.stack([t.up.dc_P for t in good]))


def within(found_P, honest_SP):
    low_P, high_P = honest_SP.min(dim=0).values, honest_SP.max(dim=0).values
    return bool(((found_P >= low_P - 1e-9) & (found_P <= high_P + 1e-9)).all())


@pytest.mark.parametrize("rule", ["krum:share=0.3", "clipped:share=0.3"])
def test_statistics_and_single_numbers_are_trimmed_where_norms_mean_nothing(rule):
    problem = tiny(f"fednova+{rule}", sizes=(20, 13, 9, 18, 16))
    state = train(problem, rounds=1)
    replies = attacked(problem, state, (1,), 1e6)
    good = [reply.trained for reply in replies if reply.client != 1]
    after, _ = aggregate(problem, state, replies)
    assert within(after.buffers, torch.stack([trained.buffers_R for trained in good]))
    a_S = torch.stack([trained.up.a for trained in good])
    reach = max(float((trained.up.d_P).norm()) for trained in good)
    if rule.startswith("clipped"):
        assert (state.server.x_P - after.server.x_P).norm() <= float(a_S.max()) * reach + 1e-9


@pytest.mark.parametrize("rule", ["krum:share=0.3", "clipped:share=0.3"])
def test_arrays_go_by_the_rule_and_single_numbers_by_the_trimmed_mean(rule):
    method, n_S = find_method(f"fednova+{rule}"), vector(1, 2, 3, 4, 5)
    ups = NovaUp(honest(5), vector(3, -1e6, 4, 9, 6))
    found = fields_screened(method, method.screen, Replies(ups, torch.arange(5), n_S, torch.ones(5))).ups
    assert torch.equal(found.d_P, screened(rule, ups.d_P, n_S))
    assert_close(found.a, vector(4, 4, 4, 4, 4))  # f = 2 of five: only the middle one, 4, is kept


@pytest.mark.parametrize("rule", RULES)
def test_variances_that_nobody_sends_as_negative_never_become_negative(rule):
    rule = find_method(f"fedavg+{rule}").screen.coordinates
    for num in (1, 2, 3, 4, 5, 8):
        for seed in range(20):
            a_SP = honest(num, seed).abs() * 10.0 ** honest(num, seed + 99)
            assert (mean(torch.ones(num, dtype=torch.float64), rule(a_SP, torch.ones(num))) >= 0).all()


@pytest.mark.parametrize("number", [1e6, 0.0, *(pytest.param(n, marks=pytest.mark.slow) for n in (-1e6, 1e-300))])
@pytest.mark.parametrize("rule", ["trimmed:share=0.3", "krum:share=0.3", "clipped:share=0.3"])
def test_the_memory_of_fedncv_is_screened_also_against_false_step_lengths(rule, number):
    """A reply of 1e-300 in every field has a plausible c_u = 1, one of 0 has none; nothing far gets into c_bar."""
    problem = tiny(f"fedncv+{rule}", sizes=(20, 13, 9, 18, 16))
    state = train(problem, rounds=1)
    for bad in combinations(range(5), 1):
        replies = attacked(problem, state, bad, number)
        replies = [
            reply._replace(trained=reply.trained._replace(up=with_step(reply.trained.up, 1e-30 if number else 0.0)))
            if reply.client in bad
            else reply
            for reply in replies
        ]
        plain, _ = aggregate(tiny("fedncv", sizes=(20, 13, 9, 18, 16)), state, replies)
        after, _ = aggregate(problem, state, replies)
        good = torch.stack([inside(plain.server, "c")[u] for u in range(5) if u not in bad])
        rows = torch.stack([inside(after.server, "c")[u] for u in range(5)])
        assert torch.isfinite(rows).all()
        if rule.startswith("trimmed"):
            assert all(within(row_P, good) for row_P in rows)
        assert rows.norm(dim=1).max() <= 3 * good.norm(dim=1).max()


def with_step(up, number):
    return up._replace(total_step=torch.full_like(up.total_step, number))


def test_personal_statistics_take_no_part():
    problem = tiny("fedavg+krum:share=0.3", buffers="personal")
    state, _ = run_round(problem, start(problem))
    assert torch.isfinite(state.server.x_P).all()


def test_momentum_and_average_go_with_a_rule():
    problem = tiny("fedavg+median+momentum+average+prior+even+samples", model=Tiny)
    assert torch.isfinite(model_of(train(problem, rounds=2))).all()


# ---- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize(
    "chain",
    [
        "fedavg+memory", "fedavg+ht", "fedavg+labels", "fedavg+calibrated", "fedvarp", "mifa", "fedadp", "fedgen",
        "pfedsim", "fedncv-paper", "local", "fedncv-sums",
    ],
)  # fmt: skip
def test_what_cannot_be_combined_robustly_is_refused_by_name_with_a_chain_that_works(chain, rule):
    with pytest.raises(ValueError, match=f"{rule}.*as in ") as caught:
        find_method(f"{chain}+{rule}")
    for remedy in re.findall(r"as in ([\w+:=.]+)", str(caught.value).partition(":")[2]):
        find_method(remedy)


def test_the_median_is_refused_with_drift_and_another_rule_is_named():
    with pytest.raises(ValueError, match=r"drift cannot be used with median.*as in fedncv\+trimmed"):
        find_method("fedncv+median")


def test_two_rules_are_refused():
    with pytest.raises(ValueError, match=r"median and krum both replace the mean"):
        find_method("fedavg+krum+median")


@pytest.mark.parametrize("rule", ROBUST)
def test_the_server_needs_each_reply_so_neither_secure_sums_nor_partial_sums_serve(rule):
    """A worker of a Ray cluster returns the replies themselves, and no sum of them."""
    assert find_method(f"fedavg+{rule}").form == "each reply"
    problem = tiny(f"fedavg+{rule}")
    found = list(outcomes(problem, start(problem), everyone(0, 1, 2)))
    sent = returned(problem, found)
    assert sent.partial is None
    for ours, theirs in zip(sent.outcomes, found, strict=True):
        assert torch.equal(ours.trained.up.delta_P, theirs.trained.up.delta_P)
    assert returned(tiny("fedavg"), found).partial is not None


@pytest.mark.parametrize("rule", ["trimmed", "krum", "clipped"])
@pytest.mark.parametrize("share", ["0.5", "-0.1", "nan"])
def test_a_share_of_half_or_more_is_refused(rule, share):
    with pytest.raises(ValueError, match=rf"share must be at least 0 and below 0.5, not {share}"):
        find_method(f"fedavg+{rule}:share={share}")


def test_krum_that_keeps_nobody_is_refused():
    with pytest.raises(ValueError, match="keep must be at least 1 or most, not 0"):
        find_method("fedavg+krum:keep=0")


def test_sums_of_rows_that_a_rule_made_have_the_robust_mean():
    """So a method in the sums form needs no change."""
    a_SP, n_S = honest(5), vector(1, 2, 3, 4, 5)
    rows = screened("trimmed", a_SP, n_S)
    sums = sums_of(Replies(Up(rows), torch.arange(5), n_S, torch.ones(5)), {})
    kept = a_SP.sort(dim=0)
    w_SP = n_S[kept.indices[1:4]]
    assert_close(sums.mean("delta_P"), (w_SP * kept.values[1:4]).sum(dim=0) / w_SP.sum(dim=0))

"""Poisoned clients: who attacks, what they send, and that nothing else changes."""

import numpy as np
import pytest
import torch
from agreement import HARD, close, close_rows
from federations import everyone, inside, quadratics, tiny, train
from torch.testing import assert_close

from fedncv.config import RunConfig
from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.processes import ProcessesEngine
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.keys import key_for
from fedncv.methods import find_method
from fedncv.methods.base import Batch
from fedncv.methods.switches.poisoned import Down, bad_clients
from fedncv.tree import leaves

HALF = "poisoned:share=0.5,attack="


def key(seed):
    return key_for(seed, "server start")


def up_of(problem, u, state=None):
    (arrival,) = arrivals(problem, state or start(problem), everyone(u).ids)
    return train_client(problem, 0, arrival)


def bad_of(problem):
    return torch.nonzero(inside(start(problem).server, "bad_N"))[:, 0].tolist()


def test_the_share_of_clients_attacks_exactly_and_a_larger_share_holds_the_smaller_one():
    for num, share, expected in ((50, 0.2, 10), (50, 0.1, 5), (7, 0.5, 4), (3, 1.0, 3), (3, 0.1, 0)):
        assert len(set(bad_clients(key(0), num, share).tolist())) == expected
    assert set(bad_clients(key(0), 50, 0.1).tolist()) < set(bad_clients(key(0), 50, 0.2).tolist())
    drawn = [tuple(bad_clients(key(seed), 50, 0.2).tolist()) for seed in range(20)]
    assert len(set(drawn)) == 20
    assert set().union(*drawn) == set(range(50))  # nobody is spared


def test_the_same_clients_attack_every_method_of_a_seed():
    expected = bad_clients(key(3), 4, 0.5).tolist()
    for chain in ("fedavg", "scaffold+median", "fedncv", "fedncv+krum"):
        for attack in ("sign_flip", "label_flip"):
            assert bad_of(tiny(f"{chain}+{HALF}{attack}", seed=3)) == expected


@pytest.mark.parametrize(("attack", "factor"), [("sign_flip,scale=3", -3), ("sign_flip", -1), ("scaled,scale=3", 3)])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fednova", "fedncv"])
def test_a_bad_client_sends_its_honest_arrays_times_a_factor_and_the_others_send_theirs(method, attack, factor):
    problem, plain = tiny(f"{method}+{HALF}{attack}"), tiny(method)
    bad = bad_of(problem)
    for u in range(4):
        ours, theirs = up_of(problem, u), up_of(plain, u)
        expected = factor if u in bad else 1
        for sent, honest in zip(leaves_of(ours.up), leaves_of(theirs.up), strict=True):
            assert torch.equal(sent, (expected if sent.dim() else 1) * honest)
        assert torch.equal(ours.buffers_R, theirs.buffers_R)
        for kept, honest in zip(leaves_of(ours.kept), leaves_of(theirs.kept), strict=True):
            assert torch.equal(kept, honest)


def leaves_of(tree):
    return [leaf for _, leaf in leaves(tree)]


def test_a_client_with_flipped_labels_sends_what_it_would_send_if_its_labels_were_c_minus_1_minus_y():
    problem, plain = tiny(f"fedavg+{HALF}label_flip"), tiny("fedavg")
    flipped = plain._replace(dataset=plain.dataset._replace(y=2 - plain.dataset.y))
    bad = bad_of(problem)
    assert 0 < len(bad) < 4
    for u in range(4):
        expected = flipped if u in bad else plain
        assert torch.equal(up_of(problem, u).up.delta_P, up_of(expected, u).up.delta_P)
    assert any(not torch.equal(up_of(flipped, u).up.delta_P, up_of(plain, u).up.delta_P) for u in bad)


def test_labels_outside_the_classes_stay_as_they_are():
    """Such as -100, which a loss ignores: flipped it would be no class at all."""
    method = find_method("fedavg+poisoned:share=1,attack=label_flip")
    seen = []

    class Asked:
        class client:  # noqa: N801
            label_counts_C = torch.zeros(3)

        @staticmethod
        def grad(y_P, batch):
            seen.append(batch.y)
            return y_P

    batch = Batch(torch.zeros(5, 1), torch.tensor([-100, 0, 1, 2, 3]), torch.ones(5), 0)
    method.direction(Asked, torch.zeros(1), batch, Down((), torch.tensor(1.0)), (), ())
    assert seen[0].tolist() == [-100, 2, 1, 0, 3]


def test_two_quadratics_of_which_one_flips_its_sign_have_the_step_of_the_difference():
    """Equal curvature and steps: x - lr K (x - b_0)/2 + lr K (x - b_1)/2, one step."""
    problem = quadratics("fedavg+poisoned:share=0.5", a=(1.0, 1.0), b=(0.0, 1.0), x=5.0, lr=0.1, steps=1)
    (bad,) = bad_of(problem)
    after = inside(train(problem, rounds=1).server, "x_P")
    gradients = [5.0, 4.0]
    expected = 5.0 - 0.05 * (gradients[1 - bad] - gradients[bad])
    assert_close(after, torch.tensor([expected], dtype=torch.float64))


@pytest.mark.parametrize(
    "chain",
    [
        f"fedavg+trimmed:share=0.3+{HALF}label_flip",
        "fedncv+krum:share=0.3+poisoned:share=0.2,attack=sign_flip,scale=10",
        pytest.param(f"scaffold+median+{HALF}scaled,scale=3", marks=pytest.mark.slow),
        pytest.param(f"fedavg+clipped+average+momentum+{HALF}sign_flip", marks=pytest.mark.slow),
    ],
)
def test_engines_agree(chain):
    """Stacked and on streams: rows and states to 1e-10 in float64."""
    problem = tiny(chain, **HARD)
    for way in ("stacked", "streams"):
        engine = StackedEngine([problem], way=way)
        state = other = start(problem)
        for _ in range(2):
            state, row = run_round(problem, state)
            ((other, other_row),) = engine.run_rounds([other])
            close(other, state)
            close_rows(other_row, row)


@pytest.mark.slow
def test_processes_have_the_same_bits():
    problem = tiny(f"fedncv+trimmed:share=0.3+{HALF}label_flip", **HARD)
    engine = ProcessesEngine([problem], workers=2)
    try:
        state = other = start(problem)
        for _ in range(2):
            state, row = run_round(problem, state)
            ((other, other_row),) = engine.run_rounds([other])
            assert row == other_row
            close(other, state, atol=0)
    finally:
        engine.close()


def test_scores_are_over_all_clients_with_their_true_labels():
    """A label-flipping client changes no score before training has changed the model."""
    problem, plain = tiny(f"fedavg+{HALF}label_flip"), tiny("fedavg")
    assert evaluate.before(problem, start(problem)) == evaluate.before(plain, start(plain))


def test_a_real_federation_refuses_it():
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedncv[flower]'")
    from fedncv.flower.halves import check

    with pytest.raises(ValueError, match=r"fedavg\+poisoned is for simulations: poisoned lets clients attack"):
        check(RunConfig(data="digits", method="fedavg+poisoned", clients=3, per_round=3))
    check(RunConfig(data="digits", method="fedncv+trimmed", clients=3, per_round=3))


def test_flipped_labels_without_classes_are_refused():
    with pytest.raises(ValueError, match="label_flip needs targets that are classes; use sign_flip or scaled"):
        start(quadratics("fedavg+poisoned:attack=label_flip,share=0.5"))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ("share=1.1", "share must be from 0 to 1, not 1.1"),
        ("share=nan", "share must be from 0 to 1, not nan"),
        ("scale=0", "scale must be above 0 and finite, not 0"),
        ("attack=scaled", "attack=scaled needs a scale other than 1"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        find_method(f"fedavg+poisoned:{knobs}")


def test_a_method_that_sends_nothing_is_refused():
    with pytest.raises(ValueError, match=r"poisoned needs clients that send something, as in fedavg\+poisoned"):
        find_method("local+poisoned")


def test_a_krum_that_withstands_them_leaves_the_attack_out():
    """Sign flips times 1000 by one of five: the model of Krum stays near that without an attack."""
    sizes = (20, 13, 9, 18, 16)
    reached = {
        chain: inside(train(tiny(chain, sizes=sizes, lr=0.01), rounds=2).server, "x_P").abs().max().item()
        for chain in ("fedavg", "fedavg+poisoned:scale=1000", "fedavg+krum+poisoned:scale=1000")
    }
    assert reached["fedavg+poisoned:scale=1000"] > 10 * reached["fedavg"]
    assert reached["fedavg+krum+poisoned:scale=1000"] < 2 * reached["fedavg"]
    assert np.isfinite(list(reached.values())).all()

"""Horvitz-Thompson weights: unbiased over every draw, with the sizes that clients report now."""

from itertools import combinations

import numpy as np
import pytest
import torch
from federations import bare_fedncv, federation, model_of, tiny, train, vector
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import State, arrivals
from fedncv.methods import find_method
from fedncv.methods.base import Replies, ServerAsk, aggregate
from fedncv.methods.fedavg import Up


@pytest.mark.parametrize("memory", ["off", "fixed", "adaptive"])
def test_with_horvitz_thompson_weights_the_update_is_unbiased_over_every_draw(memory):
    """Unequal sizes, clients never seen, beta from earlier rounds: the mean over all C(5, 2) draws is exact."""
    problem = tiny(bare_fedncv(memory=memory, beta=0.7, weights="ht"), sizes=(20, 8, 12, 31, 9), per_round=2)
    state = train(problem, ids=[0, 1], rounds=2)
    state = train(problem, ids=[1, 3], state=state)  # clients 2 and 4 were never seen
    x_P = model_of(state)
    steps = [x_P - model_of(train(problem, ids=list(ids), state=state)) for ids in combinations(range(5), 2)]
    whole = [train_client(problem, state.round, a).up.delta_P for a in arrivals(problem, state, np.arange(5))]
    p = problem.federation.sizes_N / problem.federation.sizes_N.sum()
    full_P = sum(p_u * delta for p_u, delta in zip(p, whole, strict=True))
    assert_close(torch.stack(steps).mean(dim=0), full_P, rtol=1e-10, atol=1e-12)
    assert (torch.stack(steps).var(dim=0) > 0).any()


def test_weights_of_two_rounds_by_hand():
    """n = (1, 3), inclusion 1/2: client 0 alone weighs 1/4 / (1/2), and Delta = 8. Then it holds 5 of 8 samples."""
    method, half = find_method("fedavg+ht"), torch.tensor([0.5], dtype=torch.float64)
    server = method.init(vector(0.0), federation((1, 3)))
    ask = ServerAsk(None, 0, None)
    for size, x in ((1.0, -4.0), (5.0, -14.0)):
        replies = Replies(Up(vector(8.0)[None]), torch.tensor([0]), vector(size), half)
        server = aggregate(method, ask, server, replies).server
        assert_close(model_of(State(0, server, (), {})), vector(x))

"""What every method promises, the moment it is listed. See fedncv/methods/base.py for the contract."""

import random
from pathlib import Path

import pytest
import torch
from federations import FULL_FEDNCV, everyone, quadratics, tiny, train
from torch.testing import assert_close

import fedncv.methods
from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.round import Reply, aggregate, collect
from fedncv.engine.sequential import run_round
from fedncv.methods import METHODS, find_method
from fedncv.methods.base import Ask, Batch, Work
from fedncv.tree import all_finite, leaves, row, stack, tree_map

# A text that makes the method FedAvg, bit for bit; None where it has no such limit, and why.
FEDAVG_LIMIT = {
    "fedncv": "fedncv:memory=off,drift=off,even=false,tau=0,momentum=0,average=0,blend=0",
    "fedncv-sums": None,  # beta is 1; see test_fedncv_sums.py
    "fedncv-paper": None,  # its server weights sum to zero; see test_fedncv_paper.py
    "fedavg": "fedavg",
    "fedavgm": "fedavgm:beta=0",
    "fedprox": "fedprox:mu=0",
    "fednova": None,  # equal steps give FedAvg to rounding, see test_fednova.py
    "scaffold": None,  # averages uniformly; with equal sizes see test_scaffold.py
    "feddyn": None,  # divides by alpha
    "fedgen": "fedgen:alpha=0,beta=0,generator_steps=1",
    "fedlc": "fedlc:tau=0",
    "moon": "moon:mu=0",
    "fedper": None,  # the head is personal
    "fedrep": None,  # the head is personal
    "pfedsim": "pfedsim:warm_up=1",
    "fat_clipping_pi": "fat_clipping_pi:clip=inf",
    "fat_clipping_pr": "fat_clipping_pr:clip=inf",
    "fedadp": "fedadp:alpha=0",
    "fedvarp": None,  # with all clients in every round, to rounding, see test_fedvarp.py
    "fedstale": "fedstale:beta=0",
    "mifa": None,  # with all clients in every round, to rounding, see test_mifa.py
    "fedadagrad": None,  # to rounding for a large tau, see test_fedopt.py
    "fedadam": None,  # to rounding for a large tau, see test_fedopt.py
    "fedyogi": None,  # to rounding for a large tau, see test_fedopt.py
    "local": None,  # no server
}
# Knobs with which a method is quick enough to be run a hundred times.
SMALL = {"fedgen": "fedgen:generator_steps=2,hidden=8,generated=4"}
# Where the defaults would take hundreds of rounds to come to rest on the quadratics, knobs that take fewer, and why.
SETTLING = {
    "fedncv-sums": ("fedncv-sums:momentum=0", {}),
    "fedncv": ("fedncv:momentum=0", {}),  # oscillations decay by sqrt(momentum) a round
    FULL_FEDNCV: (f"{FULL_FEDNCV},momentum=0", {}),
    "fedavgm": ("fedavgm:beta=0.3", {}),  # oscillations decay by sqrt(beta) a round
    "feddyn": ("feddyn:alpha=1", {}),  # lambda_u is learned over 1/alpha rounds
    "fedadp": ("fedadp", {"b": (1.0, 1.0)}),  # in one dimension angles are 0 or pi: opposing clients flip the weights
    "fedadagrad": ("fedadagrad:server_lr=2,tau=1", {}),  # a step is about server_lr, far from the optimum
    "fedadam": ("fedadam:server_lr=2,tau=1,beta1=0", {}),
    "fedyogi": ("fedyogi:server_lr=2,tau=1,beta1=0", {}),
}
every_method = pytest.mark.parametrize("name", [*METHODS, FULL_FEDNCV])


def same(tree, other):
    """Equal to the last bit, in form and in every number."""
    ours, theirs = list(leaves(tree)), list(leaves(other))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


def small(name, **config):
    return tiny(SMALL.get(name, name), **config)


def copied(tree):
    return tree_map(torch.clone, tree)


def test_the_folder_and_the_dictionary_agree():
    files = {path.stem for path in Path(fedncv.methods.__file__).parent.glob("*.py")} - {"__init__", "base"}
    assert {entry.make.__module__.rpartition(".")[2] for entry in METHODS.values()} == files
    assert set(FEDAVG_LIMIT) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_limit_of_the_method_is_fedavg_to_the_last_bit(name):
    if FEDAVG_LIMIT[name] is None:
        pytest.skip(f"{name} has no limit that is FedAvg")
    limit, fedavg = tiny(FEDAVG_LIMIT[name], per_round=2), tiny("fedavg", per_round=2)
    a, b = train(limit, rounds=3), train(fedavg, rounds=3)
    same(limit.method.shared(a.server), fedavg.method.shared(b.server))
    here, there = (next(arrivals(p, s, everyone(0).ids)) for p, s in ((limit, a), (fedavg, b)))
    same(here.buffers_R, there.buffers_R)


@every_method
def test_a_round_changes_nothing_in_place_and_repeats_itself(name):
    problem = small(name, per_round=2)
    state = train(problem, rounds=2)
    before = copied(state)
    once, _ = run_round(problem, state)
    same(state, before)
    same(run_round(problem, state)[0], once)


@every_method
def test_the_order_of_replies_does_not_matter(name):
    problem = small(name)
    state = train(problem, rounds=1)
    replies = [Reply(a.client, train_client(problem, 1, a)) for a in arrivals(problem, state, everyone(0, 1, 2, 3).ids)]
    expected = aggregate(problem, state, replies)
    for seed in range(5):
        shuffled = random.Random(seed).sample(replies, len(replies))
        result = aggregate(problem, state, shuffled)
        same(result.server, expected.server)
        same(result.buffers, expected.buffers)
        for u in range(4):
            same(result.kept[u], expected.kept[u])


@every_method
def test_what_crosses_is_declared(name):
    problem = small(name)
    state = start(problem)
    (arrival,) = arrivals(problem, state, everyone(1).ids)
    up = train_client(problem, 0, arrival).up
    assert {path for path, _ in leaves(up)} == set(problem.method.reveals)
    assert all(isinstance(leaf, torch.Tensor) for _, leaf in leaves((up, arrival.down)))


@every_method
def test_a_client_is_not_moved_by_what_another_one_keeps(name):
    """Client 0's reply is the same after others have taken part as it is when only their state changed."""
    problem = small(name)
    state = train(problem, rounds=2)
    wiped = state._replace(kept={0: state.kept[0]})
    (ours,) = arrivals(problem, state, everyone(0).ids)
    (theirs,) = arrivals(problem, wiped, everyone(0).ids)
    same(train_client(problem, 2, ours).up, train_client(problem, 2, theirs).up)


@every_method
@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ((20, 1, 9), "one sample"),
        ((20, 2, 9), "one training batch of two"),
        ((12,), "one client"),
        ((9, 9), "m = N"),
    ],
)
def test_small_clients_give_numbers(name, sizes, what):
    problem = small(name, sizes=sizes)
    state = train(problem, rounds=3)
    assert state.round == 3
    assert all_finite(tuple(leaf for _, leaf in leaves(state)))
    for measure in (evaluate.before, evaluate.after):
        assert 0 <= next(iter(measure(problem, state).values())) <= 1


@every_method
def test_a_round_without_a_reply_keeps_the_server(name):
    problem = small(name)
    state = train(problem, rounds=1)
    nobody = everyone(0, 1)._replace(answers=[False, False])
    after, metrics = run_round(problem, state, nobody)
    same(after.server, state.server)
    assert after.round == 2
    assert metrics["replies"] == 0
    assert metrics["bytes_down"] > state.totals.bytes_down or not list(
        leaves(problem.method.broadcast(state.server, torch.tensor([0])))
    )


@every_method
def test_measuring_changes_nothing(name):
    problem = small(name)
    state = train(problem, rounds=2)
    before = copied(state)
    evaluate.before(problem, state)
    evaluate.after(problem, state)
    same(state, before)


@every_method
def test_frozen_slices_and_still_statistics_keep_their_bits(name):
    """In every phase, what it does not train does not move, weight decay and momentum included."""
    problem = small(name, momentum=0.9, weight_decay=0.1)
    method, layout = problem.method, problem.model.layout
    state = train(problem, rounds=1)
    (arrival,) = arrivals(problem, state, everyone(0).ids)
    for number, phase in enumerate(method.phases(2)):
        cut = tuple(p if i == number else p._replace(epochs=0) for i, p in enumerate(method.phases(2)))
        alone = problem._replace(method=method._replace(phases=lambda _epochs, cut=cut: cut))
        trained = train_client(alone, 1, arrival)
        if trained is None:
            assert not phase.trains
            continue
        start_P, _ = method.begin(problem.ask(0, arrival.buffers_R, 1), arrival.down, arrival.kept.own)
        for part in ("body", "head"):
            moved = not torch.equal(trained.y_P[layout.slice(part)], start_P[layout.slice(part)])
            assert moved == (part in phase.trains)
        assert torch.equal(trained.buffers_R, arrival.buffers_R) == (phase.mode != "train")


@every_method
def test_clients_can_be_stacked(name):
    """Client pieces under torch.vmap give what they give one client at a time: 1e-10 in float64."""
    problem = small(name, sizes=(20, 20))
    method, model = problem.method, problem.model
    state = train(problem, rounds=2)
    here = list(arrivals(problem, state, everyone(0, 1).ids))
    rows = [problem.clients.train[a.client][:8] for a in here]

    def one(down, own, buffers_R, client, key, x_B, y_B, stacked):
        ask = Ask(model, problem.task, buffers_R, client=client, round=2, key=key, num_batches=2, stacked=stacked)
        y_P, scratch = method.begin(ask, down, own)
        for phase_number, phase in enumerate(method.phases(2)):
            for number in range(2):
                ask = Ask(
                    model, problem.task, ask.buffers_R, client=client, round=2, key=key, num_batches=2,
                    phase=phase_number, mode=phase.mode, stacked=stacked,
                )  # fmt: skip
                batch = Batch(x_B[4 * number :][:4], y_B[4 * number :][:4], torch.ones(4, dtype=x_B.dtype), number)
                g_P, scratch = method.direction(ask, y_P, batch, down, own, scratch)
                if phase.trains:
                    y_P = y_P - 0.1 * g_P
        work = Work(torch.tensor(4), torch.tensor(16), 0.1, torch.tensor(0.4, dtype=x_B.dtype))
        up, own = method.finish(ask, y_P, work, down, own, scratch)
        prediction, offset = method.predict(ask, y_P, down, own)
        return (up, own, prediction, ask.buffers_R) + (() if offset is None else (offset,))

    arguments = [
        (a.down, a.kept.own, a.buffers_R, problem.client(a.client)._replace(id=torch.tensor(a.client)),
         torch.tensor([a.client, 7]), problem.dataset.x[r], problem.dataset.y[r])
        for a, r in zip(here, rows, strict=True)
    ]  # fmt: skip
    alone = [one(*each, False) for each in arguments]
    together = torch.vmap(lambda *each: one(*each, True))(*stack([tuple(each) for each in arguments]))
    for i, expected in enumerate(alone):
        assert_close(row(together, i), expected, rtol=1e-10, atol=1e-10)


@every_method
def test_quadratics_stay_finite_and_settle(name):
    """On two quadratics with exact gradients every method comes to rest (its own test says where)."""
    if name == "fedgen":
        pytest.skip("needs classes")
    text, clients = SETTLING.get(name, (name, {}))
    problem = quadratics(text, x=1.0, **clients)
    state = train(problem, rounds=40)
    assert all_finite(tuple(leaf for _, leaf in leaves(state)))
    shared = problem.method.shared(state.server)
    if shared is not None:
        assert_close(problem.method.shared(train(problem, state=state, rounds=1).server), shared, atol=1e-6, rtol=0)


def test_replies_are_stacked_by_id_with_their_own_sizes():
    problem = tiny("fedavg")
    state = start(problem)
    replies = [Reply(a.client, train_client(problem, 0, a)) for a in arrivals(problem, state, everyone(0, 2, 3).ids)]
    collected, b_SR = collect(problem, replies[::-1])
    assert collected.ids_S.tolist() == [0, 2, 3]
    assert collected.sizes_S.tolist() == [len(problem.clients.train[u]) for u in (0, 2, 3)]
    for i, reply in enumerate(replies):
        assert torch.equal(collected.ups.delta_P[i], reply.trained.up.delta_P)
        assert torch.equal(b_SR[i], reply.trained.buffers_R)


def test_a_typo_in_a_method_gets_the_nearest_name():
    with pytest.raises(ValueError, match="unknown method 'fedavgg'; did you mean 'fedavg'"):
        find_method("fedavgg")
    with pytest.raises(ValueError, match=r"no knob 'nu' .it has mu"):
        find_method("fedprox:nu=1")
    with pytest.raises(ValueError, match="mu must be at least 0, not -1"):
        find_method("fedprox:mu=-1")

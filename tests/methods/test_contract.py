"""What every method promises, the moment it is listed. See fedncv/methods/base.py for the contract."""

import random
from pathlib import Path

import pytest
import torch
from federations import FULL_FEDNCV, ROBUST, everyone, full_fedncv, quadratics, tiny, train
from torch.testing import assert_close

import fedncv.methods
from fedncv.engine import evaluate
from fedncv.engine.local import local_step
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.round import Reply, aggregate, collect
from fedncv.engine.sequential import run_round
from fedncv.methods import METHODS, find_method
from fedncv.methods.base import Ask, Batch, ServerAsk, Work, sums_from_totals, totals_of
from fedncv.methods.base import aggregate as aggregate_server
from fedncv.optimizers import find_optimizer
from fedncv.tree import all_finite, leaves, row, stack, tree_map

SGD = find_optimizer("sgd")
robust = [pytest.param(name, marks=[pytest.mark.slow] if "trimmed" not in name else []) for name in ROBUST]
every_method = pytest.mark.parametrize("name", [*METHODS, FULL_FEDNCV, *robust])


def same(tree, other):
    """Equal to the last bit, in form and in every number."""
    ours, theirs = list(leaves(tree)), list(leaves(other))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


def with_knobs(name, field):
    """Return the method with the knobs that its entry states for this, if it states any."""
    knobs = getattr(METHODS[name], field) if name in METHODS else ""
    return f"{name}:{knobs}" if knobs else name


def small(name, **config):
    return tiny(with_knobs(name, "quick"), **config)


def copied(tree):
    return tree_map(torch.clone, tree)


def test_the_folder_and_the_dictionary_agree():
    others = {"__init__", "base", "ask", "gathered", "sums", "registry", "older", "trial", "space", "spaces"}
    files = {path.stem for path in Path(fedncv.methods.__file__).parent.glob("*.py")} - others
    assert {entry.make.__module__.rpartition(".")[2] for entry in METHODS.values()} == files


@pytest.mark.parametrize("name", METHODS)
def test_an_entry_says_where_the_method_is_fedavg_or_why_it_never_is(name):
    entry = METHODS[name]
    assert bool(entry.limit) != bool(entry.no_limit), f"give the entry of {name} either limit or no_limit"


@pytest.mark.parametrize("name", METHODS)
def test_a_limit_of_the_method_is_fedavg_to_the_last_bit(name):
    if METHODS[name].no_limit:
        pytest.skip(f"{name} is never FedAvg to the last bit: {METHODS[name].no_limit}")
    limit, fedavg = tiny(with_knobs(name, "limit"), per_round=2), tiny("fedavg", per_round=2)
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
    expected, numbers = aggregate(problem, state, replies)
    for seed in range(5):
        shuffled = random.Random(seed).sample(replies, len(replies))
        result, same_numbers = aggregate(problem, state, shuffled)
        assert same_numbers == numbers
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
    assert {path.rpartition(".")[2] for path, _ in leaves(up)} == set(problem.method.reveals)
    assert len(list(leaves(up))) == len(problem.method.reveals)  # no name twice: sums find a field by its name
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
        pytest.param((20, 2, 9), "one training batch of two", marks=pytest.mark.slow),
        ((12,), "one client, and m = N"),
        pytest.param((9, 9), "m = N", marks=pytest.mark.slow),
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
def test_the_server_of_the_sums_form_needs_nothing_but_totals(name):
    """What secure aggregation gives, sum_S w_u a_u with sum_S n_u, makes the same step, to rounding."""
    problem = small(name)
    method, state = problem.method, train(problem, rounds=2)
    if method.form != "sums":
        pytest.skip(f"{name} needs each reply")
    here = arrivals(problem, state, everyone(0, 1, 3).ids)
    replies, _ = collect(problem, [Reply(a.client, train_client(problem, 2, a)) for a in here])
    ask = ServerAsk(problem.model, 2, torch.zeros(2))
    known = sums_from_totals(totals_of(replies, method.weights), method.weights)
    ours, theirs = method.step(ask, state.server, known), aggregate_server(method, ask, state.server, replies)
    assert_close(ours.server, theirs.server, rtol=1e-10, atol=1e-12)


@every_method
def test_the_server_can_be_asked_for_its_model_and_take_another(name):
    """Client 0 begins with the model that the server was given, and all else in the server's state stays."""
    problem = small(name)
    method, state = problem.method, train(problem, rounds=2)
    if method.model is None:
        assert method.with_model is None
        pytest.skip(f"{name} has no one model")
    x_P = torch.linspace(-1, 1, len(problem.model.start_P), dtype=problem.dtype)
    server = method.with_model(state.server, x_P)
    assert torch.equal(method.model(server), x_P)
    same(method.with_model(server, method.model(state.server)), state.server)
    if name != "pfedsim":  # which sends every client a model of its own after its warm-up
        (arrival,) = arrivals(problem, state._replace(server=server), everyone(0).ids)
        begun_P, _ = method.begin(problem.ask(0, arrival.buffers_R, 2), arrival.down, arrival.kept.own)
        assert torch.equal(begun_P[: len(x_P)], x_P)  # what is behind it is the client's own


@every_method
def test_an_ask_does_not_change(name):
    problem = small(name)
    ask = problem.ask(0, problem.model.start_R, 0)
    for field in ("phase", "prior_C", "buffers_R", "received_R", "round"):
        with pytest.raises(AttributeError, match="does not change"):
            setattr(ask, field, 1)
    assert ask.replace(phase=1).phase == 1
    assert ask.phase == 0


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
        known = {"client": client, "round": 2, "key": key, "num_batches": 2, "batch_size": 4, "stacked": stacked}
        ask = Ask(model, problem.task, buffers_R, **known)
        y_P, scratch = method.begin(ask, down, own)
        for phase_number, phase in enumerate(method.phases(2)):
            for number in range(2):
                ask = Ask(model, problem.task, ask.notes.buffers_R, **known, phase=phase_number, mode=phase.mode)
                batch = Batch(x_B[4 * number :][:4], y_B[4 * number :][:4], torch.ones(4, dtype=x_B.dtype), number)
                g_P, scratch = method.direction(ask, y_P, batch, down, own, scratch)
                y_P, _ = local_step(SGD, phase, model.layout, g_P, SGD.init(y_P), y_P, 0.1)
        work = Work(torch.tensor(4), torch.tensor(16), 0.1, torch.tensor(0.4, dtype=x_B.dtype))
        up, own = method.finish(ask, y_P, work, down, own, scratch)
        notes = ()
        if method.survey:
            looking = Ask(model, problem.task, ask.notes.buffers_R, **known, mode="eval")
            notes = method.survey.start(looking, y_P)
            for number in range(2):
                batch = Batch(x_B[4 * number :][:4], y_B[4 * number :][:4], torch.ones(4, dtype=x_B.dtype), number)
                notes = method.survey.see(looking, y_P, batch, notes)
        closing = Ask(model, problem.task, ask.notes.buffers_R, **known, survey=notes)
        x_P, used_R, offset, given = method.predict(closing, y_P, down, own)
        return (up, own, x_P, used_R, ask.notes.buffers_R, given) + (() if offset is None else (offset,))

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
    if name in ("fedgen", "fedpac", "pfedfda", "fedbabu"):
        pytest.skip("needs classes, or a body")
    # in one dimension angles are 0 or pi: opposing clients flip FedAdp's weights
    clients = {"b": (1.0, 1.0)} if name == "fedadp" else {}
    text = full_fedncv("momentum=off") if name == FULL_FEDNCV else with_knobs(name, "settles")
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

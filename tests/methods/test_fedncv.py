"""FedNCV is a chain, and the chain is FedNCV in one piece, bit for bit."""

import numpy as np
import pytest
import torch
from federations import bare_fedncv, model_of, tiny, train
from one_piece_fedncv import Config, one_piece
from torch.testing import assert_close

from fedncv.engine import evaluate
from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals
from fedncv.methods import METHODS, find_method, in_full
from fedncv.methods.fedavg import fedavg
from fedncv.methods.switches import SWITCHES, chain
from fedncv.methods.switches.server_momentum import Config as Momentum
from fedncv.tree import leaves

CASES = {
    "fedncv": Config(),
    "fedavg+even+drift+prior+momentum+average+blend": Config(),
    "fedavg+blend+average+momentum+prior+drift+even": Config(),  # order is put right
    "fedncv:drift.alpha=learned": Config(drift="adaptive"),
    "fedncv:drift.alpha=learned,drift.rate=1": Config(drift="adaptive", rate=1.0),
    "fedncv:drift=0.5,momentum=0.9,prior.epsilon=0.1": Config(alpha=0.5, momentum=0.9, epsilon=0.1),
    "fedncv:drift=off,even=off": Config(drift="off", even=False),
    "fedncv:prior=off,average=off,blend=off": Config(tau=0, average=0, blend=0),
    "fedncv:momentum=off,average=0.7,blend=2": Config(momentum=0, average=0.7, blend=2),
    "fedncv+memory:beta=learned": Config(memory="adaptive"),
    "fedncv:drift=off+memory:beta=0.7": Config(memory="fixed", beta=0.7, drift="off"),
    "fedncv:drift.alpha=learned+memory:beta=learned,forget=0.5+ht": Config(
        memory="adaptive", drift="adaptive", weights="ht", forget=0.5
    ),
    "fedncv+ht": Config(weights="ht"),
    "fedncv+samples": Config(samples="saga"),
    "fedncv:drift.alpha=learned+samples:kind=svrg": Config(drift="adaptive", samples="svrg"),
}


HARD = {"sizes": (20, 8, 12, 31, 9), "per_round": 3, "rounds": 4, "batch_size": 4, "epochs": 2}


QUICK = {"fedncv", "fedavg+blend+average+momentum+prior+drift+even", "fedncv:drift=off,even=off", "fedncv+samples"}


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("fedncv", "float64"),
        *(pytest.param(text, "float32", marks=[pytest.mark.slow] * (text not in QUICK)) for text in CASES),
    ],
)
def test_the_chain_is_fedncv_in_one_piece_to_the_last_bit(text, dtype):
    """Models, running statistics, messages and scores, over rounds with clients new and known; sizes differ."""
    ours = tiny(text, dtype=dtype, **HARD)
    theirs = ours._replace(method=one_piece(CASES[text]))
    a, b = train(ours, rounds=4), train(theirs, rounds=4)
    assert torch.equal(ours.method.model(a.server), b.server.x_P)
    assert torch.equal(a.buffers, b.buffers)
    everyone = np.arange(5)
    for here, there in zip(arrivals(ours, a, everyone), arrivals(theirs, b, everyone), strict=True):
        messages = [[leaf for _, leaf in leaves(each.down)] for each in (here, there)]
        for mine, other in zip(*messages, strict=False):  # the one piece sends an empty correction where it has none
            assert torch.equal(mine, other)
    for measure in (evaluate.before, evaluate.after):
        assert measure(ours, a) == measure(theirs, b)


def test_the_case_distinguishes_what_it_compares():
    """Without one of its parts the chain is another method: the oracle can fail."""
    whole = tiny("fedncv", **HARD)
    reference = train(whole, rounds=4)
    for part in ("even", "drift", "prior", "momentum"):
        other = tiny(f"fedncv:{part}=off", **HARD)
        moved = other.method.model(train(other, rounds=4).server)
        assert not torch.equal(moved, whole.method.model(reference.server)), part
    for part in ("average", "blend"):
        other = tiny(f"fedncv:{part}=off", **HARD)
        state = train(other, rounds=4)
        predicted = [_predicted(each, each_state) for each, each_state in ((other, state), (whole, reference))]
        assert not torch.equal(*predicted), part


def _predicted(problem, state):
    """Return the model that client 0 predicts with after its training."""
    problem = problem.in_use
    (arrival,) = arrivals(problem, state, np.array([0]))
    trained = train_client(problem, state.round, arrival)
    ask = problem.ask(0, trained.buffers_R, state.round, received_R=arrival.buffers_R)
    return problem.method.predict(ask, trained.y_P, arrival.down, trained.kept.own).x_P


@pytest.mark.parametrize("sizes", [(12,) * 4, (20, 8, 12, 31)])
@pytest.mark.parametrize("alpha", [0.5, 1])
def test_the_memory_at_the_clients_gives_what_the_memory_at_the_server_gives(alpha, sizes):
    """From the first round on, with clients never seen among the others: the same sums in two places."""
    ours = tiny(f"fedncv-sums:drift={alpha}", sizes=sizes, per_round=2)
    theirs = tiny(f"fedncv:drift={alpha}", sizes=sizes, per_round=2)
    assert ours.method.form == "sums"
    assert theirs.method.form == "each reply"
    a, b = train(ours, rounds=7), train(theirs, rounds=7)
    assert len(a.kept) == 4  # everybody took part
    torch.testing.assert_close(ours.method.model(a.server), theirs.method.model(b.server), rtol=1e-10, atol=1e-12)
    assert not torch.equal(ours.method.model(a.server), ours.model.start_P)


# ---- spelling ------------------------------------------------------------------------------------------


def test_a_part_is_set_by_its_first_knob_or_by_name():
    assert in_full("fedncv:momentum=0.9") == in_full("fedncv:momentum.beta=0.9")
    assert "momentum.beta=0.9" in in_full("fedncv:momentum=0.9")
    assert "prior=off" in in_full("fedncv:prior=off")
    assert in_full("fedncv:prior=on") == in_full("fedncv")
    assert in_full("fedncv:drift=0.5,drift.rate=1") == in_full("fedncv:drift.rate=1,drift.alpha=0.5")


@pytest.mark.parametrize("text", ["drift.alpha=learned,drift.memory=server", "drift.memory=server,drift.alpha=learned"])
def test_the_knobs_of_a_part_are_set_at_once(text):
    """Either alone would be refused where the memory is at the clients."""
    full = in_full(f"fedncv-sums:{text}")
    assert in_full(full) == full


@pytest.mark.parametrize(
    "text", ["fedncv", "fedncv:prior=off,drift.alpha=learned+memory", "fedncv-sums", "fedavgm+even"]
)
def test_the_full_text_names_the_same_method(text):
    assert in_full(in_full(text)) == in_full(text)


def test_the_order_of_switches_does_not_matter():
    assert in_full("fedavg+average+even+momentum") == in_full("fedavg+momentum+even+average")


def test_fedvarp_and_fedstale_are_chains():
    for name, text in {
        "fedvarp": "fedavg+memory:unseen=zero",
        "fedstale": "fedavg+memory:beta=0.5,unseen=zero",
    }.items():
        a, b = (train(tiny(each, per_round=2), rounds=5).server for each in (name, text))
        assert torch.equal(a.server.x_P, b.server.x_P)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedavg+prio", ["unknown switch 'prio'", "did you mean 'prior'"]),
        ("fedavg+prior+prior", ["names prior twice"]),
        ("fedncv+momentum", ["fedncv already has momentum", "fedncv:momentum=on"]),
        ("fedavgm+momentum", ["fedavgm already has momentum", "fedavg+momentum"]),
        ("scaffold+drift", ["scaffold already has drift", "fedavg+drift"]),
        ("mifa+memory", ["memory needs", "fedavg+memory"]),
        ("mifa+ht", ["ht needs", "fedavg+ht"]),
        ("fedncv-paper+ht", ["ht needs", "fedavg+ht"]),
        ("fedadp+ht", ["ht needs", "fedavg+ht"]),
        ("fedper+drift", ["drift needs", "fedavg+drift"]),
        ("local+average", ["average needs", "fedavg+average"]),
        ("fedrep+blend", ["blend needs", "fedavg+blend"]),
        ("scaffold+memory", ["memory needs", "fedavg+memory"]),
        ("fedadp+memory", ["memory needs", "fedavg+memory"]),
        ("fednova+ht", ["ht needs", "fedavg+ht"]),
        ("fedncv-sums+memory", ["drift:memory=clients", "+memory needs them", "fedncv+memory"]),
        ("fedavg+drift:alpha=learned,memory=clients", ["alpha=learned", "memory=server"]),
        ("fedncv:momentum=1", ["beta must be", "not 1"]),
        ("fedncv:even=0.5", ["even must be on or off"]),
        ("fedncv:prior.sigma=1", ["prior.sigma", "it has tau, epsilon"]),
        ("fedncv:mommentum=1", ["no knob 'mommentum'", "momentum"]),
        ("fedncv:drift=maybe", ["on, off or float or learned, not 'maybe'"]),
        ("fedncv:momentum=0.9,momentum=0.1", ["sets momentum twice"]),
        ("fedncv:momentum=off,momentum=on", ["sets momentum twice"]),
        ("fedncv:momentum=0.9,momentum.beta=0.1", ["same knob"]),
        ("fedncv:drift=off,drift.alpha=0.5", ["contradict"]),
        ("fedncv:momentum.=0.3", ["no knob 'momentum.'"]),
        ("fedavg:server_lr=1,server_lr=2", ["sets server_lr twice"]),
        ("fedavg+prior:tau=1,tau=2", ["sets tau twice"]),
        ("fedavg+memory:beta=2", ["switch 'memory'", "beta must be"]),
        ("fedavg+Prior", ["unknown switch 'Prior'", "did you mean 'prior'"]),
        ("fedavg+", ["unknown switch ''"]),
        ("fedncv+momentum:beta=0.9", ["fedncv:momentum.beta=0.9"]),
        ("fedncv-sums+ht", ["+ht needs them", "fedncv+ht"]),
        ("fat_clipping_pr+drift", ["drift needs"]),
        ("fedavg+average:share=inf", ["share must be"]),
        ("fedavg+blend:rate=inf", ["rate must be"]),
        ("fedavg+prior:tau=inf", ["tau must be"]),
        ("fedavg:server_lr=inf", ["server_lr must be"]),
    ],
)
def test_a_chain_that_does_not_work_names_the_part_and_one_that_does(text, words):
    with pytest.raises(ValueError) as caught:
        find_method(text)
    (line,) = str(caught.value).splitlines()
    for word in words:
        assert word in line


def test_the_chain_has_six_switches_and_the_docs_name_three_more_that_can_be_added():
    parts = set(find_method("fedncv").switches)
    assert parts == {"even", "drift", "prior", "momentum", "average", "blend"}
    assert {"memory", "ht", "samples"} <= set(SWITCHES) - parts
    assert METHODS["fedncv"].title == "FedNCV"


# ---- parts --------------------------------------------------------------------------------------------


def test_the_average_is_handed_out_and_training_goes_on_from_the_last_model():
    """Two rounds, share 1/2: a = x_1, then x_1 + (x_2 - x_1) / 1.5."""
    plain, ours = tiny(bare_fedncv(), per_round=2), tiny(bare_fedncv(average=0.5), per_round=2)
    first = train(plain)
    second, state = train(plain, state=first), train(ours, rounds=2)
    x_1, x_2 = model_of(first), model_of(second)
    average = x_1 + (x_2 - x_1) / 1.5
    ids_S = torch.arange(2)
    assert_close(ours.method.hand_out(state.server, ids_S).x_P[1], average)
    assert torch.equal(ours.method.broadcast(state.server, ids_S).x_P[1], x_2)
    assert_close(ours.method.shared(state.server), average)
    assert torch.equal(plain.method.shared(second.server), x_2)
    assert plain.method.hand_out is None
    assert plain.method.buffers == "averaged"
    assert_close(state.buffers, first.buffers + (second.buffers - first.buffers) / 1.5)


@pytest.mark.parametrize(
    ("knobs", "kept"),
    [
        ({}, ""),
        ({"drift": "fixed"}, "c alpha"),
        ({"memory": "fixed"}, "h"),
        ({"momentum": 0.5, "average": 1}, "v_P a_P"),
    ],
)
def test_what_is_off_takes_no_memory(knobs, kept):
    held = {part for path, _ in leaves(train(tiny(bare_fedncv(**knobs))).server) for part in path.split(".")}
    assert held & {"h", "c", "alpha", "v_P", "a_P"} == set(kept.split())


@pytest.mark.parametrize(
    "text",
    ["fedavg+memory:beta=2", "fedavg+memory:forget=1.5", "fedncv:drift.alpha=-1", "fedncv:drift.rate=1.5",
     "fedncv:momentum=1", "fedncv:prior=-1", "fedncv:prior.epsilon=0", "fedncv:blend=nan", "fedncv:average=-1",
     "fedavg+memory:unseen=one"],
)  # fmt: skip
def test_knobs_out_of_range_are_named(text):
    name = {"momentum": "beta", "prior": "tau", "blend": "rate", "average": "share"}
    knob = text.partition(":")[2].partition("=")[0].split(".")[-1]
    with pytest.raises(ValueError, match=rf"{name.get(knob, knob)} must be"):
        find_method(text)


def test_a_chain_in_python_is_checked_too():
    with pytest.raises(ValueError, match="did you mean 'momentum'"):
        chain(fedavg(), momentun=Momentum())
    with pytest.raises(ValueError, match="already has momentum"):
        chain(find_method("fedavgm"), momentum=Momentum())
    assert chain(fedavg(), momentum=None).switches == ()

"""FedGen: generator, its training against the heads that were sent, and the clients' losses, by hand."""

from math import exp

import pytest
import torch
from agreement import close
from federations import answer, everyone, quadratics, tiny, train, vector
from torch import nn
from torch.testing import assert_close

from fedncv.engine.local import train as train_client
from fedncv.engine.problem import arrivals, start
from fedncv.engine.stacked import StackedEngine
from fedncv.keys import fold, key_for
from fedncv.methods import fedgen as module
from fedncv.methods import find_method
from fedncv.methods.base import Batch
from fedncv.methods.fedgen import Down, Server, Shape, adam, draw_labels, draw_noise, generate, sameness
from fedncv.methods.fedgen import start as start_generator

SMALL = "fedgen:generator_steps=3,hidden=8,generated=4,noise=2"
KEY = key_for(0, "test")


# ---- the generator ---------------------------------------------------------------------------------------


def test_the_generator_by_hand():
    """Noise weight 2, class weights (3, -1), bias 0.5; then 4 h - 1.
    e = 1, class 0: 4 * 5.5 - 1.  e = 1, class 1: 4 * 1.5 - 1.  e = -2, class 1: the unit is off, -1.
    """
    shape = Shape(noise=1, classes=2, hidden=1, features=torch.Size([1]))
    w_G = vector(2.0, 3.0, -1.0, 0.5, 4.0, -1.0)
    z_KF = generate(shape, w_G, vector(1.0, 1.0, -2.0)[:, None], torch.tensor([0, 1, 1]))
    assert_close(z_KF, vector(21.0, 5.0, -1.0)[:, None])


def test_it_makes_features_of_the_heads_shape():
    shape = Shape(noise=2, classes=3, hidden=5, features=torch.Size([2, 3]))
    w_G = start_generator(shape, KEY, torch.float64)
    assert len(w_G) == 5 * 5 + 5 + 6 * 5 + 6
    assert generate(shape, w_G, torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4)).shape == (4, 2, 3)


def test_it_begins_as_torch_begins_linear_layers():
    """Uniform within 1/sqrt(inputs): 1/2 for noise 1 + 3 classes, 1/20 for 400 hidden units; means near 0."""
    shape = Shape(noise=1, classes=3, hidden=400, features=torch.Size([50]))
    first, bias, second, last = torch.split(start_generator(shape, KEY, torch.float64), shape.layers)
    for part, bound in ((first, 0.5), (bias, 0.5), (second, 0.05), (last, 0.05)):
        assert 0.95 * bound < part.abs().max() <= bound
        assert part.mean().abs() < bound / 5
    assert not torch.equal(first[:400], bias)


def test_labels_follow_their_probabilities():
    """A class of probability 0 never comes; of 10,000 draws at 1/4 and 3/4 the shares are within 5 deviations."""
    labels_K = draw_labels(KEY, 10_000, vector(0.0, 0.25, 0.0, 0.75))
    counts = torch.bincount(labels_K, minlength=4)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert abs(counts[1] - 2500) < 5 * (10_000 * 0.25 * 0.75) ** 0.5
    assert draw_labels(KEY, 50, vector(1.0)).tolist() == [0] * 50


def test_noise_is_standard_normal():
    e_KZ = draw_noise(KEY, 2000, Shape(3, 2, 1, torch.Size([1])), torch.float64)
    assert e_KZ.shape == (2000, 3)
    assert e_KZ.mean().abs() < 0.06
    assert abs(e_KZ.std() - 1) < 0.06


def test_sameness_by_hand():
    """Noise (1, 3): squared distance 4. Features (1, 1) and (2, 6): mean distance 3. Of four pairs two count 12."""
    e_KZ, z_KF = vector(1.0, 3.0)[:, None], torch.tensor([[1.0, 1.0], [2.0, 6.0]])
    assert_close(sameness(e_KZ, z_KF), vector(exp(-6))[0])


def test_adam_by_hand():
    """The first step is lr in the direction of the gradient; the second, with gradient 0, by the moments
    m = 0.09 g, v = 0.000999 g^2 over 1 - 0.81 and 1 - 0.998001.
    """
    server = Server(*[vector(0.0)] * 5, trainings=0)
    server = adam(server, vector(4.0), 1, 0.1)
    assert_close(server.w_G, vector(-0.1))
    server = adam(server, vector(0.0), 2, 0.1)
    second = 0.1 * (0.36 / 0.19) / (0.001 * 0.999 * 16 / (1 - 0.999**2)) ** 0.5
    assert_close(server.w_G, vector(-0.1 - second))


def test_adams_epsilon_halves_a_step_of_its_size():
    """A gradient of 1e-8: lr * 1e-8 / (1e-8 + 1e-8)."""
    assert_close(adam(Server(*[vector(0.0)] * 5, trainings=0), vector(1e-8), 1, 0.1).w_G, vector(-0.05))


# ---- the server ------------------------------------------------------------------------------------------


def trained(text, deltas, counts, server=None):
    """The server after clients that answered with these updates and label counts."""
    problem = tiny(text)
    server = server or start(problem).server
    ups = {u: (delta, vector(*n)) for u, (delta, n) in enumerate(zip(deltas, counts, strict=True))}
    return problem, answer(problem.method, server, ups, sizes=(1, 1), model=problem.model)


def sent_head(problem, *, weight, bias=(0.0, 0.0, 0.0)):
    """The update after which a client's head is this one."""
    layout = problem.model.layout
    sent_P = problem.model.start_P.clone()
    sent_P[layout.head] = torch.cat([weight.flatten(), vector(*bias)])
    return problem.model.start_P - sent_P


def test_the_generator_learns_from_the_heads_that_were_sent():
    """The server's own head is all zeros and teaches nothing; the clients' heads tell the classes by the first
    three features. Generated features end up where the clients' heads find their class.
    """
    text = "fedgen:generator_lr=0.02,generator_steps=60,hidden=32,noise=2,eta=0"
    problem = tiny(text)
    weight = 3 * torch.eye(3, 6, dtype=torch.float64)
    delta_P = sent_head(problem, weight=weight)
    zero_P = problem.model.start_P.clone()
    zero_P[problem.model.layout.head] = 0
    server = start(problem).server._replace(x_P=zero_P)
    delta_P = zero_P - (problem.model.start_P - delta_P)
    _, after = trained(text, [delta_P, delta_P], [(5, 5, 5)] * 2, server)
    shape = Shape(2, 3, 32, torch.Size([6]))
    labels_K = torch.arange(30) % 3
    z_KF = generate(shape, after.w_G, draw_noise(KEY, 30, shape, torch.float64), labels_K)
    assert (z_KF @ weight.T).argmax(dim=1).tolist() == labels_K.tolist()


def test_it_sees_the_heads_and_nothing_but_the_heads():
    problem = tiny(SMALL)
    head, body = problem.model.layout.head, problem.model.layout.body
    zero_P = torch.zeros_like(problem.model.start_P)
    other_head_P, other_body_P = zero_P.clone(), zero_P.clone()
    other_head_P[head], other_body_P[body] = 1.0 + torch.arange(head.stop - head.start), 1.0
    counts = [(2, 3, 4), (4, 0, 1)]
    (_, a), (_, b), (_, c) = (trained(SMALL, [d, zero_P], counts) for d in (zero_P, other_head_P, other_body_P))
    assert not torch.equal(a.w_G, b.w_G)
    assert torch.equal(a.w_G, c.w_G)


def test_a_head_counts_for_the_classes_that_its_client_holds():
    """The second client holds nothing of classes 0 and 1: with the third class out of the draw, its head is mute.
    With one sample more it is heard.
    """
    problem = tiny(SMALL)
    zero_P = torch.zeros_like(problem.model.start_P)
    loud_P = sent_head(problem, weight=torch.arange(18.0, dtype=torch.float64))
    (_, a), (_, b) = (trained(SMALL, [zero_P, d], [(3, 4, 0), (0, 0, 0)]) for d in (zero_P, loud_P))
    assert torch.equal(a.w_G, b.w_G)
    assert_close(a.p_C, vector(3 / 7, 4 / 7, 0))
    (_, c), (_, d) = (trained(SMALL, [zero_P, d], [(3, 4, 0), (0, 1, 0)]) for d in (zero_P, loud_P))
    assert not torch.equal(c.w_G, d.w_G)


def test_shares_of_a_class_are_normalised_over_the_clients():
    """Two clients with one head teach what one with that head does, however the counts are divided."""
    problem = tiny(SMALL)
    delta_P = sent_head(problem, weight=torch.linspace(-1, 1, 18, dtype=torch.float64))
    (_, a), (_, b) = (trained(SMALL, [delta_P] * 2, n) for n in ([(4, 2, 6), (0, 2, 2)], [(4, 4, 8), (0, 0, 0)]))
    assert_close(a.w_G, b.w_G, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_the_generators_loss_by_hand():
    """One hidden unit that is always on, one client, one class in the draw, a head of weight 0: no gradient but
    the diversity's; and that is 0 where all features are equal. So the generator stays, for eta = 0, where it is.
    """
    text = "fedgen:generator_steps=1,hidden=1,generated=4,noise=1,eta=0"
    problem = tiny(text)
    mute_P = sent_head(problem, weight=torch.zeros(18, dtype=torch.float64))
    _, after = trained(text, [mute_P] * 2, [(1, 1, 1)] * 2)
    assert torch.equal(after.w_G, start(problem).server.w_G)
    _, after = trained(text.replace("eta=0", "eta=1"), [mute_P] * 2, [(1, 1, 1)] * 2)
    assert not torch.equal(after.w_G, start(problem).server.w_G)


def first_gradient(text, deltas, counts):
    """(Adam's first gradient, the generator's shape and start, and the noise and labels of the first step)."""
    problem, after = trained(text, deltas, counts)
    w_G = start(problem).server.w_G
    shape = Shape(2, 3, 8, torch.Size([6]))
    labels_K = draw_labels(fold(KEY, 0), 4, after.p_C)
    return after.m_G / 0.1, shape, w_G, draw_noise(fold(KEY, 1), 4, shape, torch.float64), labels_K


def test_the_gradient_is_that_of_the_weighted_heads():
    """Written out client by client: sum_u n_uc / n_c CE(head_u(z), c), averaged over the generated samples."""
    text = "fedgen:generator_steps=1,hidden=8,generated=4,noise=2,eta=0"
    problem, counts = tiny(text), [(1, 3, 0), (0, 1, 2)]
    heads = [torch.linspace(-1, 1, 18, dtype=torch.float64), torch.linspace(0, 3, 18, dtype=torch.float64).cos()]
    g_G, shape, w_G, e_KZ, labels_K = first_gradient(text, [sent_head(problem, weight=w) for w in heads], counts)

    def loss(w_G):
        z_KF = generate(shape, w_G, e_KZ, labels_K)
        total = 0.0
        for z_F, c in zip(z_KF, labels_K.tolist(), strict=True):
            n_c = sum(n[c] for n in counts)
            for weight, n in zip(heads, counts, strict=True):
                total = total - n[c] / n_c * torch.log_softmax(weight.reshape(3, 6) @ z_F, 0)[c] / 4
        return total

    assert_close(g_G, torch.func.grad(loss)(w_G))


def test_the_gradient_of_the_diversity_is_added_eta_times():
    text = "fedgen:generator_steps=1,hidden=8,generated=4,noise=2,eta=3"
    mute_P = sent_head(tiny(text), weight=torch.zeros(18, dtype=torch.float64))
    g_G, shape, w_G, e_KZ, labels_K = first_gradient(text, [mute_P] * 2, [(1, 1, 1)] * 2)
    assert_close(g_G, 3 * torch.func.grad(lambda w: sameness(e_KZ, generate(shape, w, e_KZ, labels_K)))(w_G))


def test_adams_steps_are_counted_over_all_rounds():
    """Without a gradient (mute heads, eta = 0) moments of 1 decay; two steps of round four are the 7th and the 8th."""
    text = "fedgen:generator_steps=2,hidden=4,noise=2,eta=0,decay=0.5,generator_lr=0.1"
    problem = tiny(text)
    mute_P = sent_head(problem, weight=torch.zeros(18, dtype=torch.float64))
    fresh = start(problem).server
    ones_G = torch.ones_like(fresh.w_G)
    _, after = trained(text, [mute_P] * 2, [(1, 1, 1)] * 2, fresh._replace(m_G=ones_G, v_G=ones_G, trainings=3))
    moved = 0.0
    for i, (m, v) in ((7, (0.9, 0.999)), (8, (0.81, 0.999**2))):
        moved += 0.1 * 0.5**3 * (m / (1 - 0.9**i)) / ((v / (1 - 0.999**i)) ** 0.5 + 1e-8)
    assert_close(fresh.w_G - after.w_G, moved * ones_G)


def test_labels_are_even_until_clients_have_told_theirs():
    assert_close(start(tiny(SMALL)).server.p_C, vector(1 / 3, 1 / 3, 1 / 3))


def test_diversity_spreads_the_features():
    """With heads that teach nothing, only the diversity term is left, and it lowers the sameness."""
    text = "fedgen:generator_steps=30,generator_lr=0.01,hidden=16,noise=2,generated=8"
    problem = tiny(text)
    mute_P = sent_head(problem, weight=torch.zeros(18, dtype=torch.float64))
    _, after = trained(text, [mute_P] * 2, [(1, 1, 1)] * 2)
    shape, labels_K = Shape(2, 3, 16, torch.Size([6])), torch.arange(20) % 3
    e_KZ = draw_noise(KEY, 20, shape, torch.float64)
    before_w, after_w = start(problem).server.w_G, after.w_G
    assert sameness(e_KZ, generate(shape, after_w, e_KZ, labels_K)) < 0.9 * sameness(
        e_KZ, generate(shape, before_w, e_KZ, labels_K)
    )


def test_its_learning_rate_decays_with_the_rounds():
    """Adam's first step has length lr on every coordinate that has a gradient; trainings = 2 multiplies by decay^2."""
    text = "fedgen:generator_steps=1,hidden=4,noise=2,decay=0.5,generator_lr=0.01"
    problem = tiny(text)
    delta_P = sent_head(problem, weight=torch.linspace(-1, 1, 18, dtype=torch.float64))
    fresh = start(problem).server
    moves = []
    for trainings in (0, 1):
        _, after = trained(text, [delta_P] * 2, [(1, 1, 1)] * 2, fresh._replace(trainings=trainings))
        moves.append((after.m_G, (after.w_G - fresh.w_G).abs().max().item(), after.trainings))
    assert moves[0][1] == pytest.approx(0.01, rel=1e-4)
    # Two steps' bias correction of a first gradient: 0.1/0.19 over sqrt(0.001/0.001999)
    assert moves[1][1] == pytest.approx(0.005 * (0.1 / 0.19) / (0.001 / (1 - 0.999**2)) ** 0.5, rel=1e-4)
    assert [m[2] for m in moves] == [1, 2]


def test_the_model_is_averaged_as_fedavgs():
    ours, theirs = tiny(SMALL), tiny("fedavg")
    assert torch.equal(train(ours).server.x_P, train(theirs).server.x_P)  # no extra loss in the first round
    assert not torch.equal(train(ours, rounds=2).server.x_P, train(theirs, rounds=2).server.x_P)


def test_generators_begin_differently_under_other_seeds():
    a, b, c = (start(tiny(SMALL, seed=seed)).server.w_G for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


# ---- the clients -----------------------------------------------------------------------------------------


def test_label_counts_are_declared_and_sent():
    problem = tiny(SMALL)
    assert "n_C" in problem.method.reveals
    for arrival in arrivals(problem, start(problem), everyone(0, 3).ids):
        index = torch.from_numpy(problem.clients.train[arrival.client])
        counts = torch.bincount(problem.dataset.y[index], minlength=3).double()
        assert torch.equal(train_client(problem, 0, arrival).up.n_C, counts)


def test_the_extra_losses_begin_with_the_first_trained_generator_and_decay():
    method = find_method("fedgen:decay=0.5")
    server = start(tiny(method)).server
    decays = [method.broadcast(server._replace(trainings=t), torch.arange(2)).decay.tolist() for t in (0, 1, 3)]
    assert decays == [[0.0, 0.0], [0.5, 0.5], [0.125, 0.125]]


def extra(text, p, decay=0.5):
    """(batch, model's logits on it, gradient beyond FedAvg's) with a generator that gives zeros: head(0) = bias."""
    problem = tiny(text)
    (arrival,) = arrivals(problem, start(problem), everyone(0).ids)
    index = torch.from_numpy(problem.clients.train[0])
    batch = Batch(problem.dataset.x[index], problem.dataset.y[index], torch.ones(len(index)), 0)
    y_P = arrival.down.x_P
    down = Down(y_P, torch.zeros_like(arrival.down.w_G), vector(*p), vector(decay)[0])
    ask = problem.ask(0, arrival.buffers_R, 0)
    g_P, _ = problem.method.direction(ask, y_P, batch, down, (), ())
    extra_P = g_P - problem.ask(0, arrival.buffers_R, 0).grad(y_P, batch)
    logits_BC = problem.ask(0, arrival.buffers_R, 0).forward(y_P, batch).logits_BC
    return extra_P, logits_BC, y_P[-3:], ask


def test_the_loss_on_generated_features_by_hand():
    """All labels are class 1, all logits the head's bias b: d CE/d b = softmax(b) - (0, 1, 0); nothing else moves."""
    extra_P, _, bias_C, _ = extra("fedgen:alpha=4,beta=0", (0.0, 1.0, 0.0))
    assert_close(extra_P[-3:], 0.5 * 4 * (torch.softmax(bias_C, 0) - vector(0.0, 1.0, 0.0)))
    assert_close(extra_P[:-3], torch.zeros_like(extra_P[:-3]), atol=1e-12, rtol=0)


def test_the_pull_of_predictions_by_hand():
    """KL(softmax(b) || softmax(logits)) with a constant first argument: d/d b = mean(softmax(logits)) - softmax(b)."""
    extra_P, logits_BC, bias_C, _ = extra("fedgen:alpha=0,beta=3", (0.0, 1.0, 0.0))
    expected_C = torch.softmax(logits_BC, 1).mean(0) - torch.softmax(bias_C, 0)
    assert_close(extra_P[-3:], 0.5 * 3 * expected_C)
    assert extra_P[:-3].abs().max() > 1e-4


class Plain(nn.Module):
    def __init__(self, shape, num_classes):
        super().__init__()
        self.body = nn.Linear(shape[0], 6)
        self.head = nn.Linear(6, num_classes)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def test_padding_does_not_count():
    """Three samples and one of weight 0 give the direction of the three."""
    problem = tiny("fedgen:hidden=8,generated=4,noise=2", model=Plain)
    (arrival,) = arrivals(problem, train(problem), everyone(0).ids)

    def direction(num, *weights):
        index = torch.from_numpy(problem.clients.train[0][:num])
        batch = Batch(problem.dataset.x[index], problem.dataset.y[index], vector(*weights), 0)
        ask = problem.ask(0, arrival.buffers_R, 1)
        return problem.method.direction(ask, arrival.down.x_P, batch, arrival.down, (), ())[0]

    assert_close(direction(4, 1, 1, 1, 0), direction(3, 1, 1, 1))


def test_a_step_costs_one_gradient():
    *_, ask = extra("fedgen", (0.0, 1.0, 0.0))
    assert (ask.notes.num_gradients, ask.notes.num_forwards) == (1, 0)


def test_labels_and_noise_are_drawn_with_keys_of_their_own(monkeypatch):
    """With one key for both, the words that choose a label would also make its noise."""
    keys = []

    def recording(draw):
        return lambda key, *rest: keys.append(tuple(key.tolist())) or draw(key, *rest)

    for name in ("draw_labels", "draw_noise"):
        monkeypatch.setattr(module, name, recording(getattr(module, name)))
    problem = tiny("fedgen:generated=2,hidden=4", epochs=1)
    keys.clear()  # the method was tried
    train_client(problem, 0, next(arrivals(problem, start(problem), everyone(0).ids)))
    assert len(keys) == 8  # 15 samples, 4 steps
    assert len(set(keys)) == 8


class Dropping(nn.Module):
    """A head that draws, as a layer and as a function."""

    def __init__(self):
        super().__init__()
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.drop(x), 0.5, self.training))


class WithDroppingHead(nn.Module):
    def __init__(self, shape, _outputs):
        super().__init__()
        self.body, self.head = nn.Linear(shape[0], 5), Dropping()

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def test_generated_features_pass_a_head_without_its_dropout_in_every_engine():
    problem = tiny(SMALL, model=WithDroppingHead)
    x_P, z_BF = problem.model.start_P, torch.ones(4, 5, dtype=torch.float64)
    weight, bias = x_P[problem.model.layout.head].split([15, 3])
    assert_close(problem.model.head(x_P, z_BF), z_BF @ weight.view(3, 5).T + bias)
    ((stacked, _),) = StackedEngine([problem]).run_rounds([start(problem)])
    close(stacked, train(problem), 1e-10)


def test_numbers_to_predict_are_refused():
    with pytest.raises(ValueError, match="the targets must be labels"):
        train(quadratics("fedgen"))


OUT_OF_RANGE = "alpha=-1 beta=-1 eta=-1 generated=0 noise=0 hidden=0 generator_steps=0 decay=0 decay=1.1 generator_lr=0"


@pytest.mark.parametrize("text", OUT_OF_RANGE.split())
def test_values_out_of_range_are_refused(text):
    name, value = text.split("=")
    with pytest.raises(ValueError, match=f"{name} must be .* not {value}"):
        find_method(f"fedgen:{text}")


def test_the_ends_of_the_ranges_are_taken():
    assert find_method("fedgen:alpha=0,beta=0,eta=0,generated=1,noise=1,hidden=1,generator_steps=1,decay=1")

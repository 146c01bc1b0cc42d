"""Rewritten functions equal torch's: exactly where nothing is drawn, in distribution where something is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from fedncv.flat import Model
from fedncv.functional import Rewritten, attention_weights
from fedncv.keys import key_for

KEY = key_for(0, "a")


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rewritten(function, *arguments, key=KEY, **more):
    mode = Rewritten()
    mode.key = key
    with mode:
        return function(*arguments, **more)


def vmapped(function, *arguments):
    """Under vmap over two copies, of which the first is returned."""
    both = torch.vmap(lambda *some: rewritten(function, *some))(*(torch.stack([a, a + 1]) for a in arguments))
    return both[0] if isinstance(both, torch.Tensor) else tuple(each[0] for each in both)


# ---- dropout ---------------------------------------------------------------------------------------------

ONES = torch.ones(400, 6, 5, 4, dtype=torch.float64)
KINDS = {
    "dropout": (F.dropout, ONES, (400, 6, 5, 4)),
    "dropout1d": (F.dropout1d, ONES[..., 0], (400, 6, 1)),
    "dropout2d": (F.dropout2d, ONES, (400, 6, 1, 1)),
    "dropout3d": (F.dropout3d, ONES[..., None], (400, 6, 1, 1, 1)),
}


@pytest.mark.parametrize("name", KINDS)
def test_dropout_keeps_the_mean_and_drops_whole_features_where_torch_does(name):
    function, x, shape = KINDS[name]
    out = rewritten(function, x, 0.3, True)
    assert torch.equal(out, rewritten(function, x, 0.3, True))
    assert not torch.equal(out, rewritten(function, x, 0.3, True, key=key_for(0, "b")))
    assert set(out.unique().tolist()) == {0.0, 1 / 0.7}
    firsts = out[tuple(slice(0, size) for size in shape)]
    assert torch.equal(firsts.expand_as(out), out)  # one draw for all that are dropped together
    assert abs(float(firsts.mean()) - 1) < 5 * (0.3 / 0.7 / firsts.numel()) ** 0.5
    assert rewritten(function, x, 0.3, False) is x
    assert rewritten(function, x, 1.0, True).abs().max() == 0


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance_of_standard_inputs(function):
    x = numbers(2000, 10, 2)
    out = rewritten(function, x, 0.2, True)
    assert abs(float(out.mean())) < 0.04
    assert abs(float(out.var()) - 1) < 0.06
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = function(x, 0.2, True)
    dropped = lambda some: some.flatten().mode().values  # noqa: E731  the value of all that were dropped
    assert_close(dropped(out), dropped(plain))


def test_in_place_dropout_changes_its_input():
    x = numbers(50)
    given = x.clone()
    out = rewritten(F.dropout, given, 0.5, True, True)
    assert out is given
    assert_close(out, rewritten(F.dropout, x, 0.5, True))


def test_two_calls_of_a_pass_draw_differently():
    a, b = rewritten(lambda x: (F.dropout(x), F.dropout(x)), ONES)
    assert not torch.equal(a, b)


# ---- attention -------------------------------------------------------------------------------------------

Q, K, V = numbers(2, 4, 5, 6), numbers(2, 4, 7, 6, seed=1), numbers(2, 4, 7, 3, seed=2)
HIDDEN = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) > 0.4
HIDDEN[2] = False  # a query that may see nothing
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": HIDDEN},
    "float": {"attn_mask": numbers(4, 5, 7).masked_fill(~HIDDEN, -torch.inf)},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_written_out_is_torchs(name):
    more = MASKS[name]
    expected = F.scaled_dot_product_attention(Q, K, V, **more)
    assert torch.equal(rewritten(F.scaled_dot_product_attention, Q, K, V, **more), expected)
    assert_close(vmapped(lambda *some: F.scaled_dot_product_attention(*some, **more), Q, K, V), expected)


@pytest.mark.parametrize("way", [rewritten, vmapped])
def test_a_mask_beside_the_causal_one_is_refused_as_by_torch(way):
    for p in (0.0, 0.5):
        with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
            way(lambda *some, p=p: F.scaled_dot_product_attention(*some, HIDDEN, p, is_causal=True), Q, K, V)


def test_grouped_queries():
    more = {"enable_gqa": True}
    expected = F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], **more)
    got = vmapped(lambda *some: F.scaled_dot_product_attention(*some, **more), Q, K[:, :2], V[:, :2])
    assert_close(got, expected)


def test_masked_queries_have_a_gradient():
    q = Q.clone().requires_grad_()
    attention_weights(q, K, MASKS["float"]["attn_mask"], is_causal=False, scale=None).square().sum().backward()
    assert q.grad.isfinite().all()
    assert q.grad[:, :, 2].abs().max() == 0


def test_dropout_in_attention_keeps_its_mean():
    value = torch.eye(7, dtype=torch.float64).expand(300, 4, 7, 7)  # the output is the dropped weights
    q, k = numbers(1, 4, 5, 6).expand(300, 4, 5, 6), numbers(1, 4, 7, 6, seed=1).expand(300, 4, 7, 6)
    out = rewritten(F.scaled_dot_product_attention, q, k, value, dropout_p=0.25)
    weights = attention_weights(q, k, None, is_causal=False, scale=None)
    ratio = out / weights
    assert_close(ratio.unique()[[0, -1]], torch.tensor([0, 1 / 0.75], dtype=torch.float64))
    assert abs(float(ratio.mean()) - 1) < 5 * (0.25 / 0.75 / ratio.numel()) ** 0.5


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    "more",
    [{}, {"kdim": 3, "vdim": 4}, {"add_bias_kv": True, "add_zero_attn": True}, {"bias": False, "batch_first": True}],
)
def test_multihead_attention_is_torchs_with_every_option(more, weights):
    layer = nn.MultiheadAttention(6, 2, **more).double()
    q, k, v = numbers(5, 3, 6), numbers(5, 3, more.get("kdim", 6), seed=1), numbers(5, 3, more.get("vdim", 6), seed=2)
    samples, length = (5, 3) if more.get("batch_first") else (3, 5)
    options = {
        "need_weights": weights,
        "attn_mask": torch.ones(length, length, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.arange(length) >= torch.full((samples, 1), length - 1),
    }
    expected = layer(q, k, v, **options)
    got, seen = rewritten(layer, q, k, v, **options)
    assert torch.equal(got, expected[0])
    assert torch.equal(seen, expected[1]) if weights else seen is None

    def output(*some):
        return layer(*some, **options)[0]

    assert_close(vmapped(output, q, k, v), expected[0])


# ---- recurrent layers ------------------------------------------------------------------------------------

RECURRENT = {
    "lstm": lambda **more: nn.LSTM(4, 5, **more),
    "gru": lambda **more: nn.GRU(4, 5, **more),
    "tanh": lambda **more: nn.RNN(4, 5, **more),
    "relu": lambda **more: nn.RNN(4, 5, nonlinearity="relu", **more),
    "projected": lambda **more: nn.LSTM(4, 5, proj_size=3, **more),
}
FORMS = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bias": False},
]


def flat(result):
    """Output and last states as a tuple of tensors."""
    out, state = result
    return (out, *state) if isinstance(state, tuple) else (out, state)


@pytest.mark.parametrize("more", FORMS)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_written_out_are_torchs(name, more):
    layer, x = RECURRENT[name](**more).double(), numbers(3, 6, 4)
    expected = flat(layer(x))
    for got, plain in zip(flat(rewritten(layer, x)), expected, strict=True):
        assert torch.equal(got, plain)
    for got, plain in zip(vmapped(lambda some: flat(layer(some)), x), expected, strict=True):
        assert_close(got, plain)
    start = tuple(numbers(*state.shape, seed=i) for i, state in enumerate(expected[1:]))
    begin = start if len(start) == 2 else start[0]
    from_start = vmapped(lambda some, *s: flat(layer(some, s if len(s) == 2 else s[0])), x, *start)
    for got, plain in zip(from_start, flat(layer(x, begin)), strict=True):
        assert_close(got, plain)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda a, b: nn.RNNCell(a, b, bias=False)])
def test_cells_written_out_are_torchs(cell):
    layer, x = cell(4, 5).double(), numbers(3, 4)
    expected = layer(x)
    got = vmapped(layer, x)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", ["lstm", "gru", "tanh"])
def test_dropout_between_recurrent_layers_is_keyed_and_torchs_in_its_limits(name, batch_first):
    """p -> 1: the second layer sees zeros. Otherwise: one layer, dropout by hand, the next layer."""
    both = RECURRENT[name](num_layers=2, dropout=0.4, batch_first=batch_first).double()
    x = numbers(3, 6, 4)
    out = rewritten(both, x)[0]
    assert torch.equal(out, rewritten(both, x)[0])
    assert not torch.equal(out, rewritten(both, x, key=key_for(0, "b"))[0])
    assert_close(vmapped(lambda some: both(some)[0], x), out)
    ends = rewritten(both, x)[1]  # of the first layer, which no dropout precedes
    first_ends = (ends[0] if name == "lstm" else ends)[0]
    assert torch.equal(rewritten(both.eval(), x)[0], both(x)[0])
    plain_ends = both(x)[1]
    assert_close(first_ends, (plain_ends[0] if name == "lstm" else plain_ends)[0])
    both.train().dropout = 1.0
    second = type(both)(5, 5, batch_first=batch_first).double()
    for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(second, f"{kind}_l0", getattr(both, f"{kind}_l1"))
    assert_close(rewritten(both, x)[0], second(x.new_zeros(3, 6, 5))[0])


def test_padding_a_batch_changes_no_draw_of_its_other_samples():
    x = numbers(3, 6, 4)
    padded = torch.cat([x, x[:1]])
    for batch_first in (True, False):
        layer = nn.LSTM(4, 5, 2, dropout=0.5, batch_first=batch_first).double()
        turn = (lambda some: some) if batch_first else (lambda some: some.transpose(0, 1))
        few, more = (turn(rewritten(layer, turn(some))[0]) for some in (x, padded))
        assert_close(more[:3], few)
    attention = nn.MultiheadAttention(4, 2, dropout=0.5).double()
    few, more = (rewritten(attention, *[some.transpose(0, 1)] * 3)[0].transpose(0, 1) for some in (x, padded))
    assert_close(more[:3], few)


def test_packed_sequences_get_keyed_dropout_and_are_refused_under_vmap():
    layer, x = nn.LSTM(4, 5, 2, dropout=0.5, batch_first=True).double(), numbers(3, 6, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 1]), batch_first=True)
    out = rewritten(layer, packed)[0].data
    assert torch.equal(out, rewritten(layer, packed)[0].data)
    assert torch.equal(rewritten(layer.eval(), packed)[0].data, layer(packed)[0].data)

    def packs(some):
        return layer(nn.utils.rnn.pack_padded_sequence(some, torch.tensor([6, 4, 1]), batch_first=True))[0].data

    with pytest.raises(NotImplementedError, match="packed sequences"):
        vmapped(packs, x)


# ---- in a model ------------------------------------------------------------------------------------------


class Reads(nn.Module):
    """A sequence of tokens, through recurrent layers and attention."""

    def __init__(self, _shape, outputs):
        super().__init__()
        self.embedding = nn.Embedding(9, 6, padding_idx=0)
        self.rnn = nn.LSTM(6, 6, 2, dropout=0.2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.head = nn.Linear(6, outputs)

    def forward(self, x):
        return self.head(self.block(self.rnn(self.embedding(x))[0]).mean(1))


def test_a_module_trains_on_the_weights_it_is_given():
    """nn.LSTM keeps a list of its weights beside its parameters: all must be those of the flat vector."""
    x = torch.arange(20).reshape(4, 5) % 9
    model = Model(Reads, x, 3, seed=0, dtype=torch.float64)
    module = Reads(None, 3).double()
    moved_P = model.start_P + 0.1 * numbers(len(model.start_P))
    module.load_state_dict(model.state_dict(moved_P, model.start_R))
    leaf_P = moved_P.clone().requires_grad_()
    output, _ = model.forward(leaf_P, model.start_R, x, mode="eval")
    assert torch.equal(output.logits_BC, module.eval()(x))  # with gradients torch takes no shortcut in attention
    (g_P,) = torch.autograd.grad(output.logits_BC.square().sum(), leaf_P)
    module(x).square().sum().backward()
    for name, gradient in model.layout.unflatten(g_P, model.start_R).items():
        assert_close(gradient, module.get_parameter(name).grad)
    with torch.no_grad():
        assert torch.equal(model.forward(moved_P, model.start_R, x, mode="eval")[0].logits_BC, output.logits_BC)


def test_a_model_that_calls_none_of_them_runs_without_a_detour():
    assert Model(lambda *_: nn.Linear(4, 2), torch.ones(2, 4), 2, seed=0)._rewritten is None


class Renormed(nn.Module):
    def __init__(self, *_):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6, max_norm=100.0), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


class DropsInLargeBatches(nn.Module):
    """Draws nothing in a trial pass of two samples."""

    def __init__(self, *_):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.dropout(x, 0.5 if len(x) > 2 else 0.0, self.training))


@pytest.mark.parametrize("copied", [False, True])
def test_a_model_that_begins_to_draw_later_gets_keyed_draws(copied):
    model, x = Model(DropsInLargeBatches, numbers(2, 4), 3, 0), numbers(50, 4)
    model = model.changed(lambda _module: None) if copied else model

    def passed(key):
        return model.forward(model.start_P, model.start_R, x, mode="train", key=key)[0].logits_BC

    assert torch.equal(passed(KEY), passed(KEY))
    assert not torch.equal(passed(KEY), passed(key_for(0, "b")))


def test_a_model_that_changes_its_weights_in_a_pass_is_refused():
    with pytest.raises(ValueError, match=r"changes its weight 'embedding.weight' .*max_norm"):
        Model(Renormed, torch.ones(2, 3, dtype=torch.int64), 2, seed=0)


def test_sparse_gradients_are_dense_here():
    def factory(*_):
        return nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))

    x = torch.tensor([[1, 2], [3, 1]])
    model = Model(factory, x, 2, seed=0)
    leaf_P = model.start_P.clone().requires_grad_()
    loss = model.forward(leaf_P, model.start_R, x, mode="train")[0].logits_BC.sum()
    assert torch.autograd.grad(loss, leaf_P)[0][:27].reshape(9, 3).abs().sum(1).bool().tolist() == [
        False, True, True, True, *[False] * 5,
    ]  # fmt: skip

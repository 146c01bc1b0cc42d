"""Low-rank adapters: the base's output at the start, only adapters trained, one base for all clients."""

import copy

import pytest
import torch
from agreement import close, close_rows
from federations import tiny
from torch import nn
from torch.testing import assert_close

import fedncv
from fedncv.adapters import lora
from fedncv.config import RunConfig
from fedncv.data import Clients, Dataset
from fedncv.engine.problem import build, start
from fedncv.engine.sequential import run_round
from fedncv.engine.stacked import StackedEngine
from fedncv.engine.stacked_scores import ScoringEngine
from fedncv.models import Logits


class Base(nn.Module):
    def __init__(self, outputs=3):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, outputs)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def base():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Base()


def factory(*_):
    return lora(base(), 2, "layers.1", train="head", dropout=0.1)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def test_adapters_change_nothing_at_the_start_and_everything_by_their_product():
    plain, adapted = base(), lora(base(), 2, ("0", "1"), alpha=6)
    assert torch.equal(adapted(X), plain(X))
    layer, inner = adapted.layers[0], plain.layers[0]
    with torch.no_grad():
        layer.lora_B.copy_(torch.arange(32).reshape(16, 2) / 10)
        inner.weight += 6 / 2 * layer.lora_B @ layer.lora_A
    assert_close(adapted(X), plain(X))


def test_names_of_the_base_stay_and_only_adapters_and_named_parts_train():
    adapted = lora(base(), 2, lambda name: name.startswith("layers."), train=("head.bias",))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained == [f"layers.{i}.lora_{kind}" for i in (0, 1) for kind in "AB"] + ["head.bias"]
    missing, unexpected = adapted.load_state_dict(base().state_dict(), strict=False)
    assert not unexpected
    assert all("lora_" in name for name in missing)
    assert isinstance(adapted.layers[0], nn.Linear)
    assert_close(copy.deepcopy(adapted)(X), adapted(X))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"targets": "layers.7"},
            "'layers.7', but no linear layer has it; linear layers here: layers.0, layers.1, head",
        ),
        ({"targets": ()}, "targets name ''"),
        ({"targets": lambda _name: False}, "targets choose no linear layer"),
        ({"train": "classifier"}, "train names 'classifier', but no parameter is in it"),
        ({"rank": 0}, "rank must be at least 1, not 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_names_and_numbers_that_do_not_fit_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        lora(base(), **{"rank": 2, "targets": "0"} | more)


def test_attention_that_does_not_call_its_layer_is_refused():
    with pytest.raises(ValueError, match=r"self_attn.out_proj belongs to nn.MultiheadAttention"):
        lora(nn.TransformerEncoderLayer(4, 2), 2, "out_proj")


def test_adapters_train_stacked_over_one_base():
    """Per client there are adapters and head; the base is the same memory for both seeds and the stack."""
    problems = [tiny("scaffold", model=factory, seed=seed) for seed in (0, 1)]
    layout = problems[0].model.layout
    assert layout.num_parameters == 2 * (16 + 16) + 16 * 3 + 3
    engine = StackedEngine(problems)
    settled = engine.run_rounds([start(problem) for problem in problems])
    for problem, (state, row) in zip(problems, settled, strict=True):
        expected, expected_row = run_round(problem, start(problem))
        close(state, expected)
        close_rows(row, expected_row)
    assert engine._stage._moving.y_P.shape == (8, layout.num_parameters)
    bases = {m._module.layers[1].weight.data_ptr() for m in (engine.model, *(p.model for p in problems))}
    assert len(bases) == 1
    drawn = [problem.model.layout.unflatten(problem.model.start_P, problem.model.start_R) for problem in problems]
    assert not torch.equal(*(each["layers.1.lora_A"] for each in drawn))  # adapters are drawn from the seed


def test_an_exported_adapter_loads_into_the_same_factory():
    result = fedncv.simulate(
        data=Dataset("tiny", X.repeat(4, 1), torch.arange(20) % 3, 3), model=factory, clients=2, per_round=2, rounds=1
    )
    module = factory()
    module.load_state_dict(result.state_dict())
    for name, tensor in base().state_dict().items():
        assert name.startswith("head") or torch.equal(module.state_dict()[name], tensor)


# ---- the libraries transformers and peft ----------------------------------------------------------------


def federation(model):
    x = torch.arange(60).reshape(12, 5) * 7 % 11
    data = Dataset("text", x, x.sum(1) % 11, 11)
    clients = Clients([torch.arange(0, 5).numpy(), torch.arange(5, 8).numpy()], [torch.arange(8, 12).numpy()] * 2)
    config = RunConfig(clients=2, per_round=2, rounds=1, batch_size=4, epochs=1, dtype="float64", lr=0.1)
    return build(config, data=data, clients=clients, model=model)


def bert(_shape, outputs):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'fedncv[lora]'"
    )
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, num_labels=outputs,
    )  # fmt: skip
    return Logits(transformers.BertForSequenceClassification(config))


def gpt2(_shape, outputs):
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'fedncv[lora]'"
    )
    config = transformers.GPT2Config(
        vocab_size=outputs, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return Logits(transformers.GPT2LMHeadModel(config), last=True)


def with_peft(*arguments):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'fedncv[lora]'")
    return peft.get_peft_model(bert(*arguments), peft.LoraConfig(r=2, target_modules=["query"], lora_dropout=0.1))


HUGGING_FACE = {
    "bert": lambda *a: lora(bert(*a), 2, ("query", "value"), train="classifier"),
    "gpt2": lambda *a: lora(gpt2(*a), 2, "c_attn"),
    "peft": with_peft,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the libraries
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_train_stacked_with_keyed_dropout(name):
    """Their dropout is 0.1 in embeddings, attention and after both; both engines draw the same."""
    problem = federation(HUGGING_FACE[name])
    assert problem.model.layout.num_parameters < problem.model.num_weights / 2
    ((state, row),) = ScoringEngine([problem]).run_rounds([start(problem)])
    expected, expected_row = run_round(problem, start(problem))
    close(state, expected)
    close_rows(row, expected_row)


@pytest.mark.filterwarnings("default")
def test_a_causal_model_predicts_the_token_after_the_last():
    module, x = gpt2(None, 11), torch.arange(10).reshape(2, 5)
    assert_close(module.eval()(x), module.model(x).logits[:, 4])

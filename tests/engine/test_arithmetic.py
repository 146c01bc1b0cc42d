"""The setting `precision`: what it changes, what it leaves alone, and where it is refused."""

import pytest
import torch
from agreement import runs
from federations import Tiny, tiny

from fedncv.config import RunConfig
from fedncv.engine import arithmetic as module
from fedncv.engine.arithmetic import arithmetic
from fedncv.engine.choose import decide, engine_for
from fedncv.engine.problem import start
from fedncv.engine.sequential import run_round
from fedncv.flat import Model
from fedncv.models import MLP
from fedncv.tree import leaves

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def flags():
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
    )


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("float32", (False, False)), ("tf32", (True, True)), ("torch", None), ("bf16", None)],
)
def test_flags_are_set_and_put_back(precision, expected):
    before = flags()

    def fail():
        with arithmetic(RunConfig(precision=precision)):
            assert flags()[:2] == (before[:2] if expected is None else expected)
            assert flags()[2]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert flags() == before


def test_what_the_device_lacks_is_refused_with_a_remedy(monkeypatch):
    with pytest.raises(
        ValueError, match=r"precision=tf32 needs a GPU since Ampere; cpu has none; use precision=float32"
    ):
        tiny("fedavg", precision="tf32", dtype="float32")
    monkeypatch.setattr(module, "has_bf16", lambda _: False)
    with pytest.raises(ValueError, match=r"precision=bf16: cpu has no bfloat16 arithmetic here; use precision=float32"):
        tiny("fedavg", precision="bf16", dtype="float32")
    for precision in ("tf32", "bf16"):
        with pytest.raises(ValueError, match=rf"precision={precision} is lower than dtype=float64"):
            tiny("fedavg", precision=precision, dtype="float64")
    with pytest.raises(ValueError, match="precision must be one of torch, float32, tf32, bf16, not 'half'"):
        tiny("fedavg", precision="half")


@pytest.mark.parametrize(("capability", "there"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_has_both_since_ampere(monkeypatch, capability, there):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert module.has_tf32(GPU) == module.has_bf16(GPU) == there


@pytest.mark.parametrize("engine", ["sequential", "stacked", "streams", "processes"])
def test_bf16_multiplies_in_bfloat16_and_keeps_the_rest_in_float32(monkeypatch, engine):
    """One round is within bfloat16's rounding of the round in float32, and is not that round."""
    monkeypatch.setattr(module, "has_bf16", lambda _: True)
    settings = {"dtype": "float32", "momentum": 0.0, "epochs": 1, "model": MLP}  # BatchNorm would amplify rounding
    exact, low = tiny("scaffold", **settings), tiny("scaffold", precision="bf16", engine=engine, **settings)
    expected, _ = run_round(exact, start(exact))
    made = engine_for([low])
    try:
        ((state, _row),) = made.run_rounds([start(low)])
    finally:
        made.close()
    assert made.name == engine
    tensors = [leaf for _, leaf in leaves((state.server, state.kept)) if isinstance(leaf, torch.Tensor)]
    assert {leaf.dtype for leaf in tensors if leaf.is_floating_point()} == {torch.float32}
    move = expected.server.x_P - exact.model.start_P
    error = torch.linalg.vector_norm(state.server.x_P - expected.server.x_P) / torch.linalg.vector_norm(move)
    assert 1e-5 < float(error) < 0.05


def test_layers_see_bfloat16_and_callers_float32():
    seen = []

    class Watched(Tiny):
        def forward(self, x):
            h = self.body(x)
            seen.append(h.dtype)
            return self.head(h)

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    model = Model(Watched, x, 2, seed=0, low=torch.bfloat16)
    output, moved_R = model.forward(model.start_P, model.start_R, x, mode="still", key=torch.tensor([1, 2]))
    assert seen[-1] == torch.bfloat16
    assert {output.logits_BC.dtype, output.features_BF.dtype, moved_R.dtype} == {torch.float32}
    assert model.head(model.start_P, output.features_BF).dtype == torch.float32


def test_our_own_kernels_are_for_exact_precisions_only(monkeypatch):
    monkeypatch.setattr(module, "has_bf16", lambda _: True)
    with pytest.raises(ValueError, match="layers=compiled computes in float32, not in bf16"):
        decide([tiny("fedavg", precision="bf16", dtype="float32", layers="compiled")])
    monkeypatch.setattr("fedncv.engine.choose._worth_compiling", lambda _: True)
    for precision, compiled in (("torch", True), ("float32", True), ("bf16", False)):
        assert decide([tiny("fedavg", precision=precision, dtype="float32")]).compiled == [compiled]


def test_engines_agree_in_bf16_up_to_its_rounding(monkeypatch):
    monkeypatch.setattr(module, "has_bf16", lambda _: True)
    settings = {"precision": "bf16", "dtype": "float32", "epochs": 1, "model": MLP}
    problem = tiny("fedavg", **settings)
    state, _ = run_round(problem, start(problem))
    for engine in ("stacked", "streams"):
        (got,), _ = runs(engine_for([tiny("fedavg", engine=engine, **settings)]), 1)
        move = torch.linalg.vector_norm(state.server.x_P - problem.model.start_P)
        assert torch.linalg.vector_norm(got.server.x_P - state.server.x_P) < 0.05 * move

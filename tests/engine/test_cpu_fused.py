"""Compiled layers on the CPU: the numbers of torch's own for any shape, and torch's own wherever they do not fit."""

import copy
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agreement import QUICK, close, same
from federations import FULL_FEDNCV
from torch import nn
from torch.testing import assert_close

from fedncv.config import RunConfig
from fedncv.data import Dataset
from fedncv.engine import cpu_library, cpu_trial, gradients
from fedncv.engine.choose import decide, engine_for
from fedncv.engine.cpu_fused import CannotCompileError, FusedConv, fuse, fused, lanes
from fedncv.engine.cpu_library import library
from fedncv.engine.problem import build, start
from fedncv.engine.processes import ProcessesEngine, can_fork
from fedncv.engine.sequential import SequentialEngine, run_round
from fedncv.methods import METHODS
from fedncv.models import LeNet5, find_model
from fedncv.simulation import resume, simulate

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
SIZES = [  # samples, channels in, height, width, channels out, rows and columns of a filter
    (32, 3, 32, 32, 6, 5, 5),
    (1, 1, 6, 6, 1, 5, 5),  # one sample, one window
    (7, 2, 9, 11, 5, 3, 3),  # odd sizes: a row and a column are in no window
    (9, 5, 8, 7, 9, 1, 4),  # filters that are not square, channels in unequal groups
    (17, 1, 12, 20, 13, 7, 9),  # more taps in a row than a tile takes
    (8, 4, 30, 4, 2, 2, 2),
]


def layers(channels, outputs, filter, *, bias=True, dtype=torch.float64):
    norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.3)
    made = nn.Sequential(nn.Conv2d(channels, outputs, filter, bias=bias), norm, nn.ReLU(), nn.MaxPool2d(2)).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1.5, 1.5, outputs))  # of both signs
        norm.bias.copy_(torch.linspace(0.5, -0.2, outputs))
    return made


def pass_through(module, x, g):
    """Output, running statistics, and the gradient of <output, g> in the input and every parameter."""
    x = x.detach().requires_grad_()
    out = module(x)
    gradients = torch.autograd.grad((out * g).sum(), [x, *module.parameters()])
    return [out.detach(), *(b for b in module.buffers() if b.is_floating_point()), *gradients]


@needs_compiler
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_one_compiled_operation_is_the_four_layers(sizes, dtype):
    B, C, H, W, O, I, J = sizes  # noqa: E741
    torch.manual_seed(0)
    plain = layers(C, O, (I, J), dtype=dtype)
    ours = copy.deepcopy(plain)
    assert fuse(ours) == 1
    x = torch.randn(B, C, H, W, dtype=dtype)
    g = torch.randn(B, O, (H - I + 1) // 2, (W - J + 1) // 2, dtype=dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    for result, expected in zip(pass_through(ours, x, g), pass_through(plain, x, g), strict=True):
        assert_close(result, expected, rtol=tolerance, atol=tolerance)


@needs_compiler
def test_every_number_of_samples_in_the_last_vector_gives_torchs_numbers():
    torch.manual_seed(0)
    plain = layers(2, 3, 3, bias=False)
    ours = copy.deepcopy(plain)
    fuse(ours)
    for B in range(1, 2 * lanes(torch.float64) + 2):
        x, g = torch.randn(B, 2, 7, 6, dtype=torch.float64), torch.randn(B, 3, 2, 2, dtype=torch.float64)
        for result, expected in zip(pass_through(ours, x, g), pass_through(plain, x, g), strict=True):
            assert_close(result, expected, rtol=1e-10, atol=1e-10)


@needs_compiler
def test_of_equal_pixels_the_first_has_the_gradient():
    """A zero filter makes all pixels of z equal: x = e_p then tells in dw where the gradient of a window went."""
    plain = layers(1, 1, 1)
    with torch.no_grad():
        plain[0].weight.zero_()
        plain[1].bias.fill_(1.0)
    for p in range(4):
        ours = copy.deepcopy(plain)
        fuse(ours)
        x = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
        x.view(-1)[p] = 1.0
        (out,) = ours(x).flatten()
        assert out == 1.0
        (dw,) = torch.autograd.grad(out, ours[0].weight)
        # dz = gamma / sqrt(eps) (g at the first pixel, minus its mean 1/4)
        scale = plain[1].weight.item() / 1e-3**0.5
        assert_close(dw.item(), scale * ((1.0 if p == 0 else 0.0) - 0.25))


@needs_compiler
def test_what_is_not_a_number_reaches_the_output_and_the_gradient():
    ours = layers(1, 2, 3)
    fuse(ours)
    x = torch.zeros(4, 1, 8, 8, dtype=torch.float64)
    x[2, 0, 3, 3] = float("nan")
    out = ours(x)
    assert out.isnan().all()
    assert torch.autograd.grad(out.sum(), ours[0].weight)[0].isnan().all()


@needs_compiler
def test_second_derivatives_are_refused():
    ours = layers(1, 2, 3)
    fuse(ours)
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    (g,) = torch.autograd.grad(ours(x).square().sum(), ours[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


# ---- which models --------------------------------------------------------------------------------------


def test_lenet5_has_two_places_and_keeps_its_names():
    module = LeNet5((3, 32, 32), 10)
    names, buffers = [n for n, _ in module.named_parameters()], {n for n, _ in module.named_buffers()}
    assert fuse(module) == 2
    assert [n for n, _ in module.named_parameters()] == names
    assert {n for n, _ in module.named_buffers()} == {n for n in buffers if not n.endswith("tracked")}


class Subclass(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def other_layers():
    conv, norm, relu, pool = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)
    others = {
        "stride": (nn.Conv2d(1, 2, 3, stride=2), norm, relu, pool),
        "padding": (nn.Conv2d(1, 2, 3, padding=1), norm, relu, pool),
        "padding by name": (nn.Conv2d(1, 2, 3, padding="same"), norm, relu, pool),
        "dilation": (nn.Conv2d(1, 2, 3, dilation=2), norm, relu, pool),
        "groups": (nn.Conv2d(2, 2, 3, groups=2), norm, relu, pool),
        "a convolution of its own": (Subclass(1, 2, 3), norm, relu, pool),
        "reparametrised": (nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), norm, relu, pool),
        "no affine": (conv, nn.BatchNorm2d(2, affine=False), relu, pool),
        "no statistics": (conv, nn.BatchNorm2d(2, track_running_stats=False), relu, pool),
        "another activation": (conv, norm, nn.GELU(), pool),
        "windows of 3": (conv, norm, relu, nn.MaxPool2d(3)),
        "windows that overlap": (conv, norm, relu, nn.MaxPool2d(2, stride=1)),
        "windows over the edge": (conv, norm, relu, nn.MaxPool2d(2, ceil_mode=True)),
        "means": (conv, norm, relu, nn.AvgPool2d(2)),
        "another order": (conv, relu, norm, pool),
    }
    return [pytest.param(parts, id=name) for name, parts in others.items()]


@pytest.mark.parametrize("parts", other_layers())
def test_other_layers_are_left_alone(parts):
    assert fuse(nn.Sequential(*parts)) == 0


def test_a_layer_used_twice_or_looked_at_is_left_alone():
    twice = layers(1, 2, 3)
    twice.again = nn.Sequential(twice[0])
    assert fuse(twice) == 0
    seen = layers(1, 2, 3)
    seen[1].register_forward_hook(lambda *_: None)
    assert fuse(seen) == 0


class Inside(nn.Module):
    """Looks into its layers: what comes out of the norm is not what came out of it when fused."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(shape[0], 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(2, outputs)

    def forward(self, x):
        return self.head(self.body[1](self.body[0](x)).mean((2, 3)))


# ---- whole rounds --------------------------------------------------------------------------------------


def study(method="fedavg", *, model=LeNet5, seed=0, **settings):
    """Three unequal clients with pictures of 16 x 16; batches of 9, so that vectors are never full."""
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 1, 16, 16, dtype=torch.float64, generator=rng), torch.arange(60) % 3
    config = {"clients": 3, "per_round": 2, "batch_size": 9, "epochs": 1, "rounds": 3, "lr": 0.05, "dtype": "float64"}
    return build(
        RunConfig(data="custom", method=method, model="lenet5", seed=seed, **(config | settings)),
        data=Dataset("drawn", x, y, 3),
        model=model,
    )


@needs_compiler
def test_another_optimizer_agrees_too():
    """With a large eps: divided by 1e-8, the rounding of a gradient that is zero would show."""
    problem = study("fedavg", optimizer="adamw:eps=1e-3", momentum=0.0, lr=0.003)
    close(run_round(fused(problem), start(problem))[0], run_round(problem, start(problem))[0], atol=1e-10)


def has_compiled(problem):
    return any(isinstance(part, FusedConv) for part in problem.model._module.modules())


@needs_compiler
@pytest.mark.parametrize("name", [*METHODS, FULL_FEDNCV])
def test_rounds_agree_with_the_sequential_engine(name):
    problem = study(QUICK.get(name, name), per_round=3 if name == "d2" else 2)
    ours = fused(problem)
    assert ours is not problem
    state = expected = start(problem)
    for _ in range(3):
        (state, row), (expected, expected_row) = run_round(ours, state), run_round(problem, expected)
        close(state, expected, atol=1e-10)
        assert row["loss"] == pytest.approx(expected_row["loss"], abs=1e-10)


@needs_compiler
def test_in_single_precision_a_round_moves_the_model_alike():
    problem = study(dtype="float32")
    (state, _), (expected, _) = run_round(fused(problem), start(problem)), run_round(problem, start(problem))
    moved = (expected.server.x_P - problem.model.start_P).norm()
    assert (state.server.x_P - expected.server.x_P).norm() < 1e-4 * moved


@needs_compiler
@pytest.mark.skipif(not can_fork(), reason="workers are forked")
def test_processes_give_the_bits_of_one_process():
    problems = [fused(study("scaffold", seed=seed)) for seed in (0, 1)]
    with ProcessesEngine(problems, workers=2) as engine:
        settled = engine.run_rounds([start(problem) for problem in problems])
    for problem, (state, row) in zip(problems, settled, strict=True):
        expected, expected_row = run_round(problem, start(problem))
        same(state, expected)
        assert row == expected_row


@needs_compiler
def test_probes_of_a_compiled_model_come_from_layers_with_the_bits_of_the_plain_one(monkeypatch):
    monkeypatch.setattr(gradients, "of_samples", None)
    problems = [study("fedncv", seed=seed) for seed in (0, 1)]
    states, ours = [run_round(problem, start(problem))[0] for problem in problems], list(map(fused, problems))
    assert all(map(has_compiled, ours))
    expected = tuple(SequentialEngine(problems).gradients(states))
    same(tuple(SequentialEngine(ours).gradients(states)), expected)
    if can_fork():
        with ProcessesEngine(ours, workers=1) as engine:
            same(tuple(engine.gradients(states)), expected)


@needs_compiler
def test_a_module_that_uses_its_layers_in_another_way_keeps_torchs():
    problem = study(model=Inside)
    assert fuse(copy.deepcopy(problem.model._module)) == 1
    with pytest.raises(CannotCompileError, match="uses its layers in another way"):
        fused(problem)


@needs_compiler
def test_transforms_of_functions_take_torchs_layers():
    problem = study()
    x = problem.dataset.x[:4]

    def gradient(model):
        loss = lambda y_P: model.forward(y_P, model.start_R, x, mode="train")[0].logits_BC.square().sum()  # noqa: E731
        return torch.func.grad(loss)(model.start_P)

    assert torch.equal(gradient(fused(problem).model), gradient(problem.model))


@pytest.fixture
def win(monkeypatch):
    """Compiled layers win their trial, whatever the clock says."""
    monkeypatch.setattr("fedncv.engine.choose.faster", lambda *_: True)


@needs_compiler
@pytest.mark.parametrize("seconds", [0.1, 0.3])
def test_auto_takes_what_was_faster_in_a_trial_and_remembers_it(fresh, monkeypatch, seconds):
    """Torch's layers take 0.2 s. A second run has the layers of the first, whatever a second trial would find."""
    monkeypatch.setattr("fedncv.engine.choose.WORTH_FORKING", 0.0)
    monkeypatch.setattr("fedncv.engine.choose.num_cores", lambda: 1)
    trials = []
    for compiled in (seconds, 0.4 - seconds):
        found = {"torch": 0.2, "compiled": compiled}
        monkeypatch.setattr(cpu_trial, "measured", lambda *_, found=found: trials.append(found) or found)
        assert has_compiled(engine_for([study()]).problems[0]) == (seconds < 0.2)
        assert has_compiled(engine_for([study(layers="compiled")]).problems[0])
    assert len(trials) == 1
    engine_for([study(batch_size=5)])
    assert len(trials) == 2  # other steps have a trial of their own


@needs_compiler
@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_run_keeps_its_layers_whatever_a_new_trial_would_find(tmp_path, monkeypatch, capsys, first):
    monkeypatch.setattr("fedncv.engine.choose.WORTH_FORKING", 0.0)
    monkeypatch.setattr("fedncv.engine.choose.num_cores", lambda: 1)

    def stop(row):
        if row["round"] == 1:
            raise KeyboardInterrupt

    given = {"data": study().dataset, "model": LeNet5}
    monkeypatch.setattr("fedncv.engine.choose.faster", lambda *_: first)
    with pytest.raises(KeyboardInterrupt):
        simulate(**given, clients=3, per_round=2, rounds=2, epochs=1, out=tmp_path / "run", on_round=stop)
    monkeypatch.setattr("fedncv.engine.choose.faster", lambda *_: not first)
    resume(tmp_path / "run", **given)
    clocks = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert [row["layers"] for row in clocks] == ["compiled" if first else "torch's"] * 3
    assert not capsys.readouterr().err


@needs_compiler
def test_a_trial_times_both_kinds_of_layers():
    problem = study()
    found = cpu_trial.measured(problem, fused(problem))
    assert set(found) == {"torch", "compiled"}
    assert all(seconds > 0 for seconds in found.values())


@needs_compiler
def test_auto_takes_compiled_layers_for_much_work_alone_as_in_company(monkeypatch, win):
    """A run of W sample-parameters is compiled above the threshold, whatever runs beside it."""
    problem, other = study(), study(seed=1)
    work = 60 * 0.75 * (2 / 3) * 3 * problem.model.layout.num_parameters  # test share 1/4, 2 of 3 clients, 3 rounds
    for threshold, compiled in ((work - 1, True), (work + 1, False)):
        monkeypatch.setattr("fedncv.engine.choose.WORTH_FORKING", threshold)
        for problems in ([problem], [problem, other]):
            engine = engine_for(problems)
            assert [has_compiled(p) for p in engine.problems] == [compiled] * len(problems)
            engine.close()


@needs_compiler
def test_a_named_engine_keeps_torchs_layers_unless_compiled_ones_are_asked_for(monkeypatch, win):
    assert isinstance(engine_for([study(layers="compiled")]), SequentialEngine)
    monkeypatch.setattr("fedncv.engine.choose.WORTH_FORKING", 0.0)
    monkeypatch.setattr("fedncv.engine.choose.num_cores", lambda: 2)
    for name in ("auto", "processes", "sequential") if can_fork() else ("auto", "sequential"):
        for layers in ("auto", "torch", "compiled"):
            engine = engine_for([study(engine=name, layers=layers)])
            compiled = layers == "compiled" or (layers, name) == ("auto", "auto")
            assert has_compiled(engine.problems[0]) == compiled
            assert engine.layers == ["compiled" if compiled else "torch's"]
            assert isinstance(engine, SequentialEngine) == (name == "sequential" or not can_fork())
            engine.close()


def test_compiled_layers_are_refused_for_a_stack_and_a_model_without_a_place_for_them_says_so(capsys):
    with pytest.raises(ValueError, match="layers=compiled is for the CPU, not for engine=stacked; use layers=auto"):
        decide([study(engine="stacked", layers="compiled")])
    for layers in ("auto", "compiled"):
        (name,) = engine_for([study(model=find_model("mlp"), layers=layers)]).layers
        assert name == "torch's"
        said = capsys.readouterr().err
        expected = "layers=compiled: the model has no convolution with BatchNorm, ReLU and a 2x2 maximum after it; "
        assert said.startswith(expected) if layers == "compiled" else not said


def test_on_a_gpu_compiled_layers_are_refused():
    problem = study(layers="compiled")
    problem = problem._replace(config=replace(problem.config, device="cuda"))
    with pytest.raises(ValueError, match="layers=compiled is for the CPU, not for a GPU"):
        decide([problem])


@needs_compiler
def test_a_run_that_goes_on_in_other_layers_says_so_and_its_clocks_know_which(tmp_path, monkeypatch, capsys):
    """Three rounds: the first with a compiler, the others on a machine without one."""

    def stop(row):
        if row["round"] == 1:
            raise KeyboardInterrupt

    given = {"data": study().dataset, "model": LeNet5}
    settings = {"clients": 3, "per_round": 2, "rounds": 3, "epochs": 1, "layers": "compiled"}
    with pytest.raises(KeyboardInterrupt):
        simulate(**given, **settings, out=tmp_path / "run", on_round=stop)
    assert not capsys.readouterr().err
    monkeypatch.setattr("fedncv.engine.cpu_fused.library", lambda _: None)
    resume(tmp_path / "run", **given)
    assert "run: compiled layers until round 1, torch's layers from now on; they agree up to rounding" in (
        capsys.readouterr().err
    )
    clocks = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert [row["layers"] for row in clocks] == ["compiled", "compiled", "torch's", "torch's"]


# ---- the compiler --------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """No library in memory and none on disk, before and after."""
    monkeypatch.setenv("FEDNCV_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_library, "FLAGS", ("-O0", "-fPIC", "-shared"))  # in a quarter of the time
    library.cache_clear()
    yield tmp_path / f"kernels-{os.geteuid()}"
    library.cache_clear()


def test_without_a_compiler_one_line_says_so_and_torchs_layers_run(fresh, monkeypatch, capsys):
    monkeypatch.setattr(cpu_library.shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("fedncv.engine.choose.WORTH_FORKING", 0.0)
    monkeypatch.setattr("fedncv.engine.choose.num_cores", lambda: 1)
    problem = study()
    for _ in range(2):
        assert decide([problem]).compiled == [True]
        assert engine_for([problem]).problems == [problem]
    assert capsys.readouterr().err == (
        "compiled kernels: no C compiler (cc, gcc, clang) was found; torch's own are used instead\n"
    )


@pytest.mark.parametrize(("compiler", "reason"), [("false", "exit code 1"), ("/no/such/cc", "No such file")])
def test_a_compiler_that_fails_is_named(fresh, monkeypatch, capsys, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    assert library(torch.float64) is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert compiler in lines[0]
    assert reason in lines[0]


@needs_compiler
def test_a_compiler_may_be_named_with_options(fresh, monkeypatch):
    monkeypatch.setenv("CC", "cc -g0")
    assert library(torch.float32) is not None


@needs_compiler
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_vectors_of_every_width_give_torchs_numbers(fresh, monkeypatch, width, dtype):
    monkeypatch.setenv("CC", f"cc -DBYTES={width} -Wno-psabi")
    plain = layers(3, 7, 3, dtype=dtype)
    ours = copy.deepcopy(plain)
    fuse(ours)
    for samples in (1, 5, 19):
        x, g = torch.randn(samples, 3, 9, 11, dtype=dtype), torch.randn(samples, 7, 3, 4, dtype=dtype)
        for result, expected in zip(pass_through(ours, x, g), pass_through(plain, x, g), strict=True):
            assert_close(result, expected, rtol=1e-3, atol=1e-3)


@needs_compiler
def test_a_damaged_library_is_compiled_anew(fresh, capsys):
    path = cpu_library.compiled(torch.float32)
    whole = path.read_bytes()
    path.write_bytes(b"")
    assert library(torch.float32) is not None
    assert path.read_bytes()[:4] == whole[:4]
    assert not capsys.readouterr().err


@needs_compiler
@pytest.mark.parametrize("place", [0.02, 0.3, 0.5, 0.7, 0.98])
def test_a_library_with_a_flipped_bit_is_never_loaded_but_compiled_anew(fresh, place):
    path = cpu_library.compiled(torch.float32)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[int(place * len(whole))] ^= 4
    path.write_bytes(damaged)
    made = library(torch.float32)
    assert Path(made._name).read_bytes() == whole
    assert [each.read_bytes() for each in fresh.iterdir()] == [whole]


@needs_compiler
def test_a_trial_whose_record_is_damaged_is_held_again(fresh, monkeypatch):
    trials = []
    found = {"torch": 0.2, "compiled": 0.1}
    monkeypatch.setattr(cpu_trial, "measured", lambda *_: trials.append(found) or found)
    problem = study()
    assert cpu_trial.faster(problem, fused(problem))
    (record,) = fresh.glob("*.json")
    whole = record.read_text()
    for content in (whole.replace("0.2", "0.0"), whole[:-9], "[" * 100_000, ""):
        record.write_text(content)
        assert cpu_trial.faster(problem, fused(problem))
        assert record.read_text() == whole
    assert len(trials) == 5


@needs_compiler
def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(fresh, capsys):
    fresh.mkdir()
    fresh.chmod(0o777)
    assert library(torch.float32) is None
    assert f"others may write to {fresh}" in capsys.readouterr().err
    fresh.chmod(0o755)
    library.cache_clear()
    assert library(torch.float32) is not None


@needs_compiler
def test_a_cache_folder_that_cannot_be_made_or_found_is_named(fresh, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDNCV_CACHE", str(tmp_path / "file"))
    assert library(torch.float32) is None
    assert str(tmp_path / "file") in capsys.readouterr().err
    monkeypatch.delenv("FEDNCV_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    library.cache_clear()
    assert library(torch.float32) is None
    assert "no home directory; torch's own are used" in capsys.readouterr().err


@needs_compiler
def test_the_library_is_compiled_once_and_again_when_its_source_changes(fresh, tmp_path, monkeypatch):
    path = cpu_library.compiled(torch.float32)
    assert list(fresh.iterdir()) == [path]  # nothing half made beside it
    made = path.stat().st_mtime_ns
    assert cpu_library.compiled(torch.float32) == path
    assert path.stat().st_mtime_ns == made
    changed = tmp_path / "changed.c"
    changed.write_text(cpu_library.SOURCE.read_text() + "\n")
    monkeypatch.setattr(cpu_library, "SOURCE", changed)
    assert cpu_library.compiled(torch.float32) != path
    assert len(list(fresh.iterdir())) == 2


def test_types_that_are_not_compiled_have_no_library(capsys):
    assert library(torch.float16) is None
    assert not capsys.readouterr().err

"""Ordinary steps of each client on a stream of its own: the same numbers as the sequential engine, for any module.

On a CPU there are no streams and graphs, but the same slots, batches and models; `bench/check_gpu.py` checks a GPU.
"""

import json
import re
from itertools import chain

import numpy as np
import pytest
import torch
from agreement import HARD, close, close_rows, runs
from federations import Tiny, tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedncv.engine import choose, evaluate, stacked, stacked_scores, stage
from fedncv.engine.choose import engine_for
from fedncv.engine.problem import start
from fedncv.engine.sequential import SequentialEngine, run_round
from fedncv.engine.stacked import NoMemoryError, StackedEngine
from fedncv.engine.stacked_scores import ScoringEngine
from fedncv.engine.streams import deal
from fedncv.flat import Model
from fedncv.layout import Form, Unpacked
from fedncv.methods.fedavg import fedavg


class Sees(Tiny):
    """Mixes the samples of a batch, in scoring too."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_a_model_that_cannot_be_stacked_equals_the_sequential_engine():
    """Sizes 9, 7, 5 and 3 with batches of 4: every client's last batch is smaller."""
    problem = tiny("scaffold", model=Sees, **HARD)
    engine = engine_for([tiny("scaffold", model=Sees, **HARD, engine="streams")])
    assert engine.name == "streams"
    state, got = start(problem), [start(problem)]
    for _ in range(2):
        state, row = run_round(problem, state)
        got, rows = runs(engine, 1, got)
        close_rows(rows[0][0], row)
    close(got[0], state)
    assert engine.before(got) == [evaluate.before(problem, state)]
    assert engine.after(got) == [evaluate.after(problem, state)]


def test_code_that_depends_on_values_is_not_padded_and_not_scored_with_other_clients(capsys):
    """The branch of a whole batch of one client is another one with padding, or with another client's samples."""

    class Branches(Tiny):
        def forward(self, x):
            return super().forward(3 * x if x.abs().sum() > 8 else x)

    problem = tiny("fedavg", model=Branches, engine="streams")
    engine = engine_for([problem])
    assert isinstance(engine, SequentialEngine)
    assert "depend on values of the batch" in capsys.readouterr().err


def test_a_batch_is_padded_only_if_padding_changes_nothing():
    assert ScoringEngine([tiny("fedavg")], way="streams")._models.padded is not None
    assert ScoringEngine([tiny("fedavg", model=Sees)], way="streams")._models.padded is None


def test_several_runs_and_fewer_slots_than_clients_change_nothing():
    problems = [tiny("fedrep", seed=seed, **HARD) for seed in (0, 5)]
    together, _ = runs(StackedEngine(problems, way="streams"), 2)
    one_slot, _ = runs(StackedEngine(problems, way="streams", capacity=1), 2)
    for ours, few, problem in zip(together, one_slot, problems, strict=True):
        state = start(problem)
        for _ in range(2):
            state, _ = run_round(problem, state)
        close(ours, state)
        close(few, state)


def test_the_same_engine_turned_to_the_other_way_gives_the_same_numbers():
    problem = tiny("scaffold", **HARD)
    engine = ScoringEngine([problem])
    expected, _ = runs(engine, 2)
    turned = engine.turned("streams")
    assert (engine.name, turned.name) == ("stacked", "streams")
    assert turned.resident is engine.resident
    close(runs(turned, 2)[0][0], expected[0])
    close(runs(engine, 2)[0][0], expected[0])


def test_a_step_that_reads_the_round_gets_the_round():
    """The direction grows with the round; a recorded step must not keep the first one."""

    def direction(ask, y_P, batch, down, own, scratch):
        return ask.grad(y_P, batch) * (1 + ask.round), scratch

    problem = tiny("fedavg")._replace(method=fedavg()._replace(direction=direction))
    (got,), _ = runs(StackedEngine([problem], way="streams"), 3)
    state = start(problem)
    for _ in range(3):
        state, _ = run_round(problem, state)
    close(got, state)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_clients_are_dealt_once_and_evenly(steps, slots):
    steps = np.sort(np.array(steps))[::-1]
    dealt = deal(steps, slots)
    assert sorted(chain(*dealt)) == list(range(len(steps)))
    load = [int(steps[some].sum()) for some in dealt]
    assert max(load) - min(load) <= steps[0]


class SeesInScoring(Tiny):
    """Mixes the samples of a batch in scoring only."""

    def forward(self, x):
        return super().forward(x if self.training else x - x.mean(0))


class NoStatistics(Tiny):
    """BatchNorm without running statistics: in scoring too it uses those of the batch."""

    def __init__(self, shape, outputs):
        super().__init__(shape, outputs)
        self.body[1] = nn.BatchNorm1d(6, track_running_stats=False)


@pytest.mark.parametrize("way", ["stacked", "streams"])
@pytest.mark.parametrize("model", [SeesInScoring, NoStatistics])
def test_clients_are_scored_alone_if_samples_affect_each_other_in_scoring(model, way):
    problem = tiny("fedavg", model=model, sizes=(40, 12, 9, 30))
    engine = ScoringEngine([problem], way=way)
    assert engine.scores_alone
    state, _ = run_round(problem, start(problem))
    assert engine.before([state]) == [evaluate.before(problem, state)]
    assert engine.after([state]) == [evaluate.after(problem, state)]


@pytest.mark.parametrize("way", ["stacked", "streams"])
@pytest.mark.parametrize("method", ["scaffold:option=I", "fedrep", "fedavg"])
def test_the_trial_makes_steps_of_every_phase(monkeypatch, way, method):
    """SCAFFOLD's option I begins with a pass over the data that trains nothing."""
    made = []
    for kind in (stage.Stage, stacked.Streams):
        whole = kind.run_phase

        def noted(self, phase, *rest, whole=whole, **more):
            made.append(phase)
            return whole(self, phase, *rest, **more)

        monkeypatch.setattr(kind, "run_phase", noted)
    engine = ScoringEngine([tiny(method)], way=way)
    assert set(made) == set(range(len(engine.method.phases(engine.config.epochs))))
    assert engine.computed == 0


def test_work_is_counted_right_after_memory_ran_out_between_groups(monkeypatch, capsys):
    problem = tiny("fedrep", **HARD)
    expected, rows = runs(StackedEngine([problem], way="streams", capacity=1), 1)
    engine = StackedEngine([problem], way="streams", capacity=2)
    whole, calls = engine._train_group, []

    def small_memory(arrived, plan, who):
        calls.append(who)
        if len(calls) == 2:
            raise torch.cuda.OutOfMemoryError("too large")
        return whole(arrived, plan, who)

    monkeypatch.setattr(stacked, "GROUP", 1)
    monkeypatch.setattr(engine, "_train_group", small_memory)
    got, got_rows = runs(engine, 1)
    assert len(calls) > 2
    close(got[0], expected[0])
    assert got_rows == rows


# ---- memory ----------------------------------------------------------------------------------------------


def test_too_little_memory_for_one_client_is_one_line_with_what_is_needed(monkeypatch, capsys):
    engine = StackedEngine([tiny("fedavg")], way="streams")

    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")

    gib = 1 << 30
    monkeypatch.setattr(engine, "_train_group", full)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 6 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gib, 8 * gib))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Card", (), {"total_memory": 8 * gib}))
    with pytest.raises(NoMemoryError) as raised:
        engine.run_rounds([start(engine.problems[0])])
    said = str(raised.value)
    assert "\n" not in said
    for words in ("one client", "6.0 GiB", "2.50 GiB more", "8.0 GiB", "1.0 GiB of them free", "batch_size"):
        assert words in said
    assert "continuing with 1 clients" in capsys.readouterr().err
    assert engine.capacity == 1


@pytest.mark.parametrize("way", ["stacked", "streams"])
def test_out_of_memory_in_scoring_repeats_it_with_fewer_clients_at_a_time(monkeypatch, capsys, way):
    problem = tiny("scaffold", **HARD)
    state, _ = run_round(problem, start(problem))
    engine = ScoringEngine([problem], way=way)
    expected, whole = (engine.before([state]), engine.after([state])), stacked_scores.scores

    def small_memory(engine, rows, *rest):
        if engine.capacity > 1:
            raise torch.cuda.OutOfMemoryError("too large")
        return whole(engine, rows, *rest)

    monkeypatch.setattr(stacked_scores, "scores", small_memory)
    assert (engine.before([state]), engine.after([state])) == expected
    assert engine.capacity == 1
    assert "continuing with 1 clients" in capsys.readouterr().err


# ---- the choice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "before", "on_gpu", "expected"),
    [
        ("auto", "", True, ["stacked", "streams"]),
        ("auto", "torch's", True, ["stacked", "streams"]),
        ("auto", "streams, channels last", True, ["streams"]),
        ("auto", "stacked", True, ["stacked"]),
        ("stacked", "streams", True, ["stacked"]),
        ("streams", "stacked", True, ["streams"]),
        ("stacked", "", False, ["stacked"]),
        ("streams", "", False, ["streams"]),
    ],
)
def test_auto_tries_both_ways_on_a_gpu_and_keeps_to_the_recorded_one(engine, before, on_gpu, expected):
    assert choose._ways(engine, before, on_gpu=on_gpu) == expected


@pytest.mark.parametrize("faster", ["stacked", "streams"])
def test_the_faster_way_is_taken_and_both_rates_are_told(monkeypatch, capsys, faster):
    monkeypatch.setattr(choose, "_ways", lambda *_, **__: ["stacked", "streams"])
    monkeypatch.setattr(choose, "_samples_per_second", lambda engine: 2000.0 if engine.name == faster else 1000.0)
    engine = engine_for([tiny("fedavg", engine="stacked")])
    assert engine.name == faster
    assert engine.why.startswith("2,000 samples/s in a trial")
    assert re.search(rf"engine=auto took {faster}: 2,000 .* 1,000 samples/s", capsys.readouterr().err)


def test_too_little_memory_for_one_way_leaves_the_other(monkeypatch, capsys):
    monkeypatch.setattr(choose, "_ways", lambda *_, **__: ["stacked", "streams"])
    turned = ScoringEngine.turned

    def full(*_, **__):
        raise NoMemoryError("not enough memory for one client")

    monkeypatch.setattr(ScoringEngine, "turned", full)
    assert engine_for([tiny("fedavg", engine="stacked")]).name == "stacked"
    monkeypatch.setattr(ScoringEngine, "turned", turned)
    monkeypatch.setattr(stacked.Stage, "run_phase", full)
    monkeypatch.setattr(stacked.Streams, "run_phase", full)
    with pytest.raises(NoMemoryError):
        engine_for([tiny("fedavg", engine="stacked")])


def test_the_way_that_runs_is_taken_if_the_other_one_cannot(monkeypatch, capsys):
    monkeypatch.setattr(choose, "_ways", lambda *_, **__: ["stacked", "streams"])
    assert engine_for([tiny("fedavg", model=Sees, engine="stacked")]).name == "streams"
    assert "trying each client on a stream of its own" in capsys.readouterr().err


def test_a_step_that_cannot_be_recorded_falls_back_with_the_reason(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(stacked.Streams, "_advance", broken)
    problem = tiny("fedavg", engine="streams")
    engine = engine_for([problem])
    assert isinstance(engine, SequentialEngine)
    said = capsys.readouterr().err
    assert "streams: CUDA error: operation not permitted" in said
    assert "running one client after the other instead" in said


def test_engine_and_reason_are_written_to_the_run_and_used_on_resume(tmp_path, monkeypatch):
    import fedncv
    from fedncv import runner

    asked = []

    def noted(problems, *, before):
        asked.extend(before)
        engine = ScoringEngine(problems, way="streams")
        engine.why = "measured"
        return engine

    monkeypatch.setattr(runner, "engine_for", noted)
    settings = {"clients": 4, "per_round": 2, "rounds": 2, "epochs": 1, "model": "mlp", "checkpoint_every": 1}
    fedncv.simulate(**settings, out=tmp_path / "run")
    (line,) = (tmp_path / "run" / "machine.jsonl").read_text().splitlines()
    assert {"engine": "streams", "layers": "streams", "why": "measured"}.items() <= json.loads(line).items()
    fedncv.resume(tmp_path / "run", rounds=3)
    assert asked == ["", "streams"]


# ---- parameters on a GPU ---------------------------------------------------------------------------------


class Pictures(nn.Module):
    def __init__(self, shape, outputs, norm=nn.BatchNorm2d):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(shape[0], 4, 3), norm(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * (shape[1] - 2) * (shape[2] - 2), outputs)

    def forward(self, x):
        return self.head(self.body(x))


def pictures(factory=Pictures, **options):
    x = torch.randn(3, 2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return Model(factory, x, 3, seed=0, **options), x


@pytest.mark.parametrize("last", [False, True])
def test_unpacked_parameters_and_their_gradient_are_those_of_a_split(last):
    model, _ = pictures()
    layout, forms = model.layout._replace(channels_last=last), model._find_forms(torch.float64)
    other = torch.randn_like(model.start_P)

    def parts(vector):
        named = layout.unflatten(vector, model.start_R)
        return [named[name] for name in layout.names]

    def gradient(unpacked):
        x_P = model.start_P.clone().requires_grad_()
        found = unpacked(x_P)
        value = sum((part.double().sin() * w).sum() for part, w in zip(found, parts(other), strict=True))
        return found, torch.autograd.grad(value, x_P)[0]

    theirs, expected = gradient(parts)
    assert [part.shape for part in theirs] == list(layout.shapes)
    assert theirs[0].is_contiguous(memory_format=torch.channels_last) == last
    converted = [form._replace(channels_last=len(shape) == 4) for form, shape in zip(forms, layout.shapes, strict=True)]
    for changed in (forms, converted):
        ours, found = gradient(lambda x_P, changed=changed: Unpacked.apply(x_P, layout, changed))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert torch.equal(found, expected)
    lower = [Form(torch.bfloat16, False)] * len(forms)
    ours, found = gradient(lambda x_P: Unpacked.apply(x_P, layout, lower))
    assert {part.dtype for part in ours} == {torch.bfloat16}
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_in_bf16_the_vector_has_other_places_for_the_same_weights():
    """Channels last, so that no step has to change the order; names, state_dict, body and head stay."""
    plain, x = pictures()
    low, _ = pictures(low=torch.bfloat16)
    assert low.layout == plain.layout._replace(channels_last=True)
    assert not torch.equal(low.start_P, plain.start_P)
    head = plain.layout.head
    assert torch.equal(low.start_P[head], plain.start_P[head])
    ours, theirs = (each.state_dict(each.start_P, each.start_R) for each in (low, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    logits = [each.forward(each.start_P, each.start_R, x, mode="eval")[0].logits_BC for each in (low, plain)]
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.05)


def test_channels_come_last_only_with_convolutions_and_batch_norm_and_change_rounding_only():
    model, x = pictures()
    last = model.for_streams()
    assert last.words == ", channels last"
    assert last._find_forms(torch.float64)[0] == Form(torch.float64, True)
    assert pictures(lambda s, o: Pictures(s, o, lambda c: nn.GroupNorm(2, c)))[0].for_streams().words == ""
    assert Model(Tiny, torch.zeros(2, 3), 2, seed=0).for_streams().words == ""
    (ours, ours_R), (theirs, theirs_R) = (
        each.forward(model.start_P, model.start_R, x, mode="train") for each in (last, model)
    )
    torch.testing.assert_close(ours.logits_BC, theirs.logits_BC, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours_R, theirs_R, rtol=1e-12, atol=1e-12)
    assert last.layout == model.layout


def test_weights_are_converted_once_if_one_layer_uses_them():
    """Autocast would convert the weights of convolutions and linear layers itself; norms and tied weights stay."""

    class Tied(nn.Module):
        def __init__(self, shape, outputs):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, outputs)

        def forward(self, x):
            return self.head(self.norm(self.second(self.first(x))))

    model = Model(Tied, torch.randn(2, 5), 3, seed=0, low=torch.bfloat16)
    forms = dict(zip(model.layout.names, model._find_forms(torch.float32), strict=True))
    assert {name for name, form in forms.items() if form.dtype == torch.bfloat16} == {"head.weight"}

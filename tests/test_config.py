"""Configs: what is written is read back, and whatever is wrong gets one line."""

import contextlib
import io
import math
from dataclasses import fields, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedncv.cli import main
from fedncv.config import (
    Kind,
    RunConfig,
    Settings,
    differences,
    from_dict,
    named,
    read_toml,
    simulation_only,
    write_toml,
)
from fedncv.engine.check import check
from fedncv.schedule import SCHEDULES, lr_factor
from fedncv.spec import knobs, parse, write

BAD = [
    ({"lr": -1.0}, "lr must be above 0 and finite, such as 0.01, not -1.0"),
    ({"lr": math.nan}, "lr must be above 0 .*not nan"),
    ({"lr": math.inf}, "lr must be above 0 .*not inf"),
    ({"clients": 0}, "clients must be at least 1, not 0"),
    ({"clients": 5, "per_round": 6}, "per_round is 6, but there are 5 clients"),
    ({"per_round": 0}, "per_round must be at least 1"),
    ({"rounds": -1}, "rounds must be at least 0"),
    ({"epochs": 0}, "epochs must be at least 1"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
    ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
    ({"test_share": 1.0}, "test_share must be at least 0 and below 1"),
    ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ({"stragglers": 1.5}, "stragglers must be from 0 to 1"),
    ({"availability": 0.0}, "availability must be above 0"),
    ({"seed": -1}, "seed must be from 0"),
    ({"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
    ({"method": "fedavgg"}, "did you mean 'fedavg'"),
    ({"data": "digit"}, "did you mean 'digits'"),
    ({"model": "lenet"}, "did you mean 'lenet5'"),
    ({"task": "clasification"}, "did you mean 'classification'"),
    ({"partition": "dirichle"}, "did you mean 'dirichlet'"),
    ({"partition": "dirichlet:alpha"}, "'alpha' should be key=value"),
    ({"partition": "dirichlet:beta=1"}, "has no knob 'beta'"),
    ({"schedule": "cosin"}, "did you mean 'cosine'"),
    ({"schedule": "step:every=0"}, "every must be at least 1, not 0"),
    ({"schedule": "exponential:decay=0"}, "decay must be above 0 and at most 1, not 0"),
    ({"sampling": "unifrom"}, "sampling must be one of uniform, poisson, weighted, available, not 'unifrom'"),
    ({"rounds": 1.5}, "rounds must be int, not 1.5"),
    ({"rounds": True}, "rounds must be int, not True"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_a_wrong_value_is_named_with_its_remedy(values, message):
    with pytest.raises(ValueError, match=message):
        check(replace(RunConfig(), **values))


def test_the_defaults_are_right_and_are_the_protocol():
    config = RunConfig()
    check(config)
    assert (config.clients, config.per_round, config.rounds, config.epochs) == (100, 10, 100, 5)
    assert (config.batch_size, config.lr, config.momentum, config.test_share) == (32, 0.01, 0.0, 0.25)
    assert (config.partition, config.model, config.buffers) == ("dirichlet:alpha=0.1", "lenet5", "averaged")


def test_every_setting_says_what_it_decides():
    for field in fields(RunConfig):
        kinds = field.metadata["kinds"]
        assert set(kinds) <= set(get_args(Kind)), field.name
        assert len({"protocol", "machine", "measurement"} & set(kinds)) == 1, field.name


def test_the_kinds_are_what_engines_studies_and_federations_go_by():
    assert set(named("machine")) == {
        "data_dir", "code_dir", "checkpoint_every", "rows", "device", "engine", "layers", "cluster", "workers", "block",
    }  # fmt: skip
    assert named("measurement") == ("metrics", "probe")
    assert set(named("own")) == {
        "seed", "lr", "schedule", "partition", "test_share", "sampling", "availability", "dropout", "stragglers",
        "diverged", "checkpoint_every",
    }  # fmt: skip
    assert named("samples") == ("data", "data_dir", "partition", "test_share")
    assert named("samples", "paper") == (
        "data", "data_dir", "partition", "clients", "test_share", "rounds", "per_round", "epochs",
    )  # fmt: skip
    assert set(simulation_only()) == {
        "stream", "availability", "dropout", "stragglers", "probe", "checkpoint_every", "diverged",
        "device", "engine", "layers", "eval_clients", "cluster", "workers", "block", "unseen", "topology",
    }  # fmt: skip


def test_what_the_paper_states_is_the_default():
    assert {name: getattr(Settings(), name) for name in named("paper")} == {
        "clients": 100, "partition": "dirichlet:alpha=0.1", "per_round": 10, "rounds": 100, "epochs": 5,
    }  # fmt: skip


def test_differences_name_both_values_and_leave_out_what_may_differ():
    changed = replace(RunConfig(), lr=0.5, rows="disk")
    assert differences(RunConfig(), changed) == {"lr": (0.01, 0.5), "rows": ("auto", "disk")}
    assert differences(RunConfig(), changed, but=named("machine")) == {"lr": (0.01, 0.5)}


def test_an_unknown_key_gets_the_nearest_name():
    with pytest.raises(ValueError, match=r"here: unknown key 'round'; did you mean 'rounds'"):
        from_dict({"round": 3}, where="here")


KINDS = {"str": st.text(), "int": st.integers(), "float": st.floats(allow_nan=False)}
configs = st.fixed_dictionaries(
    {}, optional={f.name: KINDS[f.type.__name__] for f in fields(RunConfig) if f.type in (str, int, float)}
)


@settings(deadline=None, max_examples=100)
@given(configs)
def test_what_is_written_is_read_back(tmp_path_factory, values):
    config = replace(RunConfig(), **values)
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(write_toml(config), encoding="utf-8")
    assert from_dict(read_toml(path), where="here") == config


junk = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers()))


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from([f.name for f in fields(RunConfig)] + ["nonsense"]), junk, max_size=4))
def test_arbitrary_configs_are_accepted_or_refused_with_one_line(values):
    said = "accepted"
    try:
        check(from_dict(values, where="here"))
    except ValueError as error:
        said = str(error)
    assert said
    assert "\n" not in said


words = st.sampled_from(
    [f"--{f.name.replace('_', '-')}" for f in fields(RunConfig)]
    + ["--config", "--recipe", "--out", "-1", "nan", "", "=", ":", "fedavg:", "1e999", "--", "dirichlet:alpha=-1"]
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(words, st.text(max_size=5).filter(lambda w: not w.startswith("-h"))), min_size=1, max_size=5))
def test_arbitrary_words_never_end_in_a_traceback(line):
    """Whatever the words, one line of error and exit code 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(["run", *line, "--clients", "0"])  # a value that is always refused: no word starts a training
    assert code == 2
    assert said.getvalue().startswith("fedncv: ")
    assert said.getvalue().count("\n") == 1


def test_a_spec_is_written_as_it_is_read():
    def thing(_data, *, alpha: float = 0.1, count: int = 3, on: bool = False): ...

    assert knobs(thing) == {"alpha": float, "count": int, "on": bool}
    values = {"alpha": 0.25, "count": 7, "on": True}
    assert parse(write("thing", values), {"thing": thing}, what="thing") == ("thing", values)
    assert parse("thing", {"thing": thing}, what="thing") == ("thing", {})
    for text, message in [
        ("thing:count=1.5", "must be int"),
        ("thing:on=1", "true or false"),
        ("think", "did you mean"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse(text, {"thing": thing}, what="thing")


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_begin_at_one(name):
    assert lr_factor(name, 0, 100) == 1


def test_schedules_are_their_formulas():
    assert lr_factor("constant", 57, 100) == 1
    assert lr_factor("exponential:decay=0.5", 3, 100) == 1 / 8
    assert lr_factor("cosine:floor=0.2", 50, 100) == pytest.approx(0.6)
    assert lr_factor("cosine:floor=0.2", 100, 100) == pytest.approx(0.2)
    assert [lr_factor("step:every=2,factor=0.1", t, 9) for t in range(5)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


def test_a_value_of_the_wrong_type_is_named_with_its_file():
    with pytest.raises(ValueError, match=r"^mine\.toml: lr must be float, not 'x'$"):
        from_dict({"lr": "x"}, where="mine.toml")


def test_compiled_layers_that_were_an_engine_are_read_as_layers(tmp_path):
    path = tmp_path / "config.toml"
    old = write_toml(RunConfig(seed=3)).replace('layers = "auto"\n', "")
    path.write_text(old.replace('engine = "auto"', 'engine = "compiled"'))
    assert from_dict(read_toml(path), where=str(path)) == RunConfig(seed=3, engine="auto", layers="compiled")
    path.write_text(old)
    assert from_dict(read_toml(path), where=str(path)) == RunConfig(seed=3)


@pytest.mark.parametrize("name", ["engine", "layers"])
def test_an_engine_and_layers_that_do_not_exist_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be one of auto, .*, not 'fast'"):
        replace(RunConfig(), **{name: "fast"}).check()

"""Everything that decides a run, in one frozen dataclass. The command line, the help and config.toml read it."""

import math
import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fedncv.data import PARTITIONS, STREAMS, check_name
from fedncv.engine.schedule import lr_factor
from fedncv.methods import find_method
from fedncv.models import find_model
from fedncv.observatory.probe import find_probe
from fedncv.spec import nearest, parse
from fedncv.tasks import find_task

CUSTOM = "custom"  # stands in a config for an object that was given from Python


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All of a run but its method and seed. The defaults are the paper's protocol, on the built-in digits."""

    data: str = "digits"
    """A dataset. `fedncv datasets` lists them."""
    data_dir: str = ""
    """Folder with the datasets' files; empty: $FEDNCV_DATA, then the cache folder."""
    partition: str = "dirichlet:alpha=0.1"
    """Who holds what: dirichlet:alpha=0.1,min_samples=10 or iid. `fedncv partition` draws it."""
    stream: str = ""
    """Samples that arrive while it trains: arrivals:start=0.1,rate=0.01,order=by_class; empty: all are there."""
    clients: int = 100
    """Clients of the federation, at least 1."""
    test_share: float = 0.25
    """Share of each client's samples kept for testing, at least 0 and below 1."""
    model: str = "lenet5"
    """lenet5, mlp, or package.module:function from (input shape, outputs) to a torch module."""
    task: str = "classification"
    """classification, regression, or package.module:task, a fedncv.Task of loss and score."""
    rounds: int = 100
    """Rounds, at least 0."""
    per_round: int = 10
    """Clients drawn for a round, from 1 to all."""
    sampling: Literal["uniform", "weighted", "available"] = "uniform"
    """uniform; weighted by samples; available: uniform among the clients that happen to be reachable."""
    availability: float = 0.5
    """sampling=available: clients are reachable with probabilities spread evenly from this one to 1; above 0."""
    dropout: float = 0.0
    """Probability that a drawn client never answers, from 0 to below 1."""
    stragglers: float = 0.0
    """Probability that a drawn client finishes only part of its steps (a uniform share), from 0 to 1."""
    epochs: int = 5
    """Local passes over a client's data, at least 1."""
    batch_size: int = 32
    """Samples of a local step, at least 1. A last smaller batch is trained as it is."""
    lr: float = 0.01
    """Local learning rate, above 0."""
    schedule: str = "constant"
    """Learning rate over rounds: constant, exponential:decay=0.985, cosine:floor=0, step:every=30,factor=0.1."""
    momentum: float = 0.0
    """Momentum of the local SGD, from 0 to below 1; begins at zero every round."""
    weight_decay: float = 0.0
    """Weight decay of the local SGD, at least 0."""
    buffers: Literal["averaged", "personal"] = "averaged"
    """BatchNorm's running statistics: averaged with the model, or kept by each client."""
    eval_every: int = 10
    """Measure all clients before local training every so many rounds, and at the end; 0: only at the end."""
    after_every: int = 0
    """Measure all clients after local training every so many rounds; 0: only at the end."""
    probe: str = ""
    """Measure the gradients' variance at the model: every=10, so many rounds; empty: never (docs/variance.md)."""
    checkpoint_every: int = 10
    """Save the state every so many rounds, and at the end; at least 1."""
    rows: Literal["auto", "memory", "disk"] = "auto"
    """Where what is remembered of each client lies; auto: on disk if that of all would crowd the memory."""
    diverged: Literal["stop", "skip"] = "stop"
    """A client whose update is not finite: stop and name it, or leave its reply out and count it."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of the arithmetic."""
    device: str = "cpu"
    """cpu, or cuda where there is one."""
    engine: Literal["auto", "sequential", "stacked", "processes"] = "auto"
    """How clients are run: one after the other, all at once, or in several processes; auto: the fastest here."""
    layers: Literal["auto", "torch", "compiled"] = "auto"
    """Layers to train in: torch's own, or compiled for this CPU, equal to rounding; auto: compiled for long runs
    on a CPU if no engine is named."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """One method, one seed."""

    method: str = "fedavg"
    """A method, with knobs if need be: fedprox:mu=0.1. `fedncv methods` lists them."""
    seed: int = 0
    """Decides the partition, the initial model, who is drawn and every batch; 0 to 2^64 - 1."""

    def check(self, *, custom: tuple[str, ...] = ()) -> None:
        """ValueError with the offending value and the remedy; fields in ``custom`` are objects, not names."""
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), field.type)
        ranges: list[tuple[bool, str, str]] = [
            (0 <= self.seed < 2**64, "seed", "from 0 to 2^64 - 1"),
            (self.clients >= 1, "clients", "at least 1"),
            (0 <= self.test_share < 1, "test_share", "at least 0 and below 1"),
            (self.rounds >= 0, "rounds", "at least 0"),
            (self.per_round >= 1, "per_round", "at least 1"),
            (0 < self.availability <= 1, "availability", "above 0 and at most 1"),
            (0 <= self.dropout < 1, "dropout", "at least 0 and below 1"),
            (0 <= self.stragglers <= 1, "stragglers", "from 0 to 1"),
            (self.epochs >= 1, "epochs", "at least 1"),
            (self.batch_size >= 1, "batch_size", "at least 1"),
            (0 < self.lr < math.inf, "lr", "above 0 and finite, as 0.01"),
            (0 <= self.momentum < 1, "momentum", "at least 0 and below 1"),
            (0 <= self.weight_decay < math.inf, "weight_decay", "at least 0 and finite"),
            (self.eval_every >= 0, "eval_every", "at least 0"),
            (self.after_every >= 0, "after_every", "at least 0"),
            (self.checkpoint_every >= 1, "checkpoint_every", "at least 1"),
        ]
        for right, name, remedy in ranges:
            if not right:
                raise ValueError(f"{name} must be {remedy}, not {getattr(self, name)}")
        if self.per_round > self.clients:
            raise ValueError(
                f"per_round is {self.per_round}, but there are {self.clients} clients: "
                f"draw at most {self.clients}, or raise clients"
            )
        for name in ("method", "data", "model", "task"):
            if getattr(self, name) == CUSTOM and name not in custom:
                raise ValueError(
                    f"this run was begun from Python with a {name} of its own; "
                    f"go on with fedncv.resume(folder, {name}=...)"
                )
        if "method" not in custom:
            find_method(self.method)
        if "data" not in custom:
            check_name(self.data)
        if "model" not in custom:
            find_model(self.model)
        if "task" not in custom:
            find_task(self.task)
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device, re.ASCII):
            raise ValueError(f"unknown device {self.device!r}; use cpu, cuda, or one GPU of several, as cuda:0")
        find_probe(self.probe)
        parse(self.partition, PARTITIONS, what="partition")
        if self.stream:
            parse(self.stream, STREAMS, what="stream")
        for t in {0, max(0, self.rounds - 1)}:
            factor = lr_factor(self.schedule, t, self.rounds)
            if not 0 < factor < math.inf:
                raise ValueError(f"schedule {self.schedule!r} multiplies the learning rate by {factor} in round {t}")


def _check_type(name: str, value: Any, kind: Any) -> None:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
        return
    allowed = (int, float) if kind is float else (kind,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ValueError(f"{name} must be {kind.__name__}, not {value!r}")


def from_dict(values: dict[str, Any], *, where: str, base: RunConfig | None = None) -> RunConfig:
    """``base`` with the given fields replaced; an unknown one is refused by name."""
    values = dict(values)
    if values.get("engine") == "compiled":  # as it was written when compiled layers were an engine
        values |= {"engine": "auto", "layers": "compiled"}
    names = [field.name for field in fields(RunConfig)]
    for name in values:
        if name not in names:
            remedy = "; leave it out, or use the version of fedncv that wrote it" if where.endswith(".toml") else ""
            raise ValueError(f"{where}: {nearest(name, names, what='key')}{remedy}")
    for field in fields(RunConfig):
        if field.name in values:
            _check_type(f"{where}: {field.name}", values[field.name], field.type)
            if field.type is float:
                values[field.name] = float(values[field.name])
    return replace(base or RunConfig(), **values)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def write_toml(config: RunConfig) -> str:
    return "".join(f"{name} = {_toml(value)}\n" for name, value in asdict(config).items())


def _toml(value: str | int | float) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'
    return repr(value)

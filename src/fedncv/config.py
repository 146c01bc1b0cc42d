"""Everything that decides a run, in one frozen dataclass. The command line, the help and config.toml read it."""

import math
import re
import tomllib
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from fedncv.probe import find_probe
from fedncv.schedule import lr_factor
from fedncv.spec import nearest

CUSTOM = "custom"  # stands in a config for an object that was given from Python

Kind = Literal["protocol", "machine", "measurement", "own", "samples", "paper"]
"""What a setting decides. Every setting is of exactly one of the first three kinds, and may be of others too.

    protocol      the numbers: runs that differ in it are different runs
    machine       where and how fast a run is trained; may change when it is resumed and when its study is extended
    measurement   what is measured beside the training; may change like `machine`
    own           may differ between the runs of one stack
    samples       which samples a client holds; a federation of real machines sets it once, in `federation init`
    paper         the paper states it, and the default is its value
"""

T = TypeVar("T")


def setting(default: T, *kinds: Kind, simulation_only: str = "") -> T:
    """Return a field with a default and its kinds.

    ``simulation_only`` says why the setting means nothing between real machines; empty: it means the same there.
    """
    return field(default=default, metadata={"kinds": kinds, "simulation_only": simulation_only})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All of a run but its method and seed. The defaults are the paper's protocol, on the built-in digits."""

    data: str = setting("digits", "protocol", "samples")
    """A dataset. `fedncv datasets` lists them."""
    data_dir: str = setting("", "machine", "samples")
    """Folder with the datasets' files; empty: $FEDNCV_DATA, then the cache folder."""
    partition: str = setting("dirichlet:alpha=0.1", "protocol", "own", "samples", "paper")
    """Who holds what: dirichlet:alpha=0.1,min_samples=10 or iid. `fedncv partition` draws it."""
    stream: str = setting("", "protocol", simulation_only="clients say once how many samples they hold")
    """Samples that arrive while it trains: arrivals:start=0.1,rate=0.01,order=by_class; empty: all are there."""
    clients: int = setting(100, "protocol", "paper")
    """Clients of the federation, at least 1."""
    test_share: float = setting(0.25, "protocol", "own", "samples")
    """Share of each client's samples kept for testing, at least 0 and below 1."""
    model: str = setting("lenet5", "protocol")
    """lenet5, mlp, or package.module:function from (input shape, outputs) to a torch module."""
    task: str = setting("classification", "protocol")
    """classification, regression, or package.module:task, a fedncv.Task of loss and score."""
    rounds: int = setting(100, "protocol", "paper")
    """Rounds, at least 0."""
    per_round: int = setting(10, "protocol", "paper")
    """Clients drawn for a round, from 1 to all."""
    sampling: Literal["uniform", "weighted", "available"] = setting("uniform", "protocol", "own")
    """uniform; weighted by samples; available: uniform among the clients that happen to be reachable."""
    availability: float = setting(0.5, "protocol", "own", simulation_only="who is reachable shows by itself")
    """sampling=available: clients are reachable with probabilities spread evenly from this one to 1; above 0."""
    dropout: float = setting(0.0, "protocol", "own", simulation_only="real clients fail by themselves")
    """Probability that a drawn client never answers, from 0 to below 1."""
    stragglers: float = setting(
        0.0,
        "protocol",
        "own",
        simulation_only="real clients are slow by themselves; round_seconds in rules.toml says how long a round waits",
    )
    """Probability that a drawn client finishes only part of its steps (a uniform share), from 0 to 1."""
    epochs: int = setting(5, "protocol", "paper")
    """Local passes over a client's data, at least 1."""
    batch_size: int = setting(32, "protocol")
    """Samples of a local step, at least 1. A last smaller batch is trained as it is."""
    lr: float = setting(0.01, "protocol", "own")
    """Local learning rate, above 0."""
    schedule: str = setting("constant", "protocol", "own")
    """Learning rate over rounds: constant, exponential:decay=0.985, cosine:floor=0, step:every=30,factor=0.1."""
    momentum: float = setting(0.0, "protocol")
    """Momentum of the local SGD, from 0 to below 1; begins at zero every round."""
    weight_decay: float = setting(0.0, "protocol")
    """Weight decay of the local SGD, at least 0."""
    buffers: Literal["averaged", "personal"] = setting("averaged", "protocol")
    """BatchNorm's running statistics: averaged with the model, or kept by each client."""
    eval_every: int = setting(10, "protocol")
    """Measure all clients before local training every so many rounds, and at the end; 0: only at the end."""
    after_every: int = setting(
        0, "protocol", simulation_only="scores stay at the clients, which measure the model as it comes (--eval-every)"
    )
    """Measure all clients after local training every so many rounds; 0: only at the end."""
    probe: str = setting("", "measurement", simulation_only="gradients of single samples stay at the clients")
    """Measure the gradients' variance at the model: every=10, so many rounds; empty: never (docs/variance.md)."""
    checkpoint_every: int = setting(
        10, "machine", "own", simulation_only="the server saves its state after every round"
    )
    """Save the state every so many rounds, and at the end; at least 1."""
    rows: Literal["auto", "memory", "disk"] = setting("auto", "machine")
    """Where what is remembered of each client lies; auto: on disk if that of all would crowd the memory."""
    diverged: Literal["stop", "skip"] = setting(
        "stop", "protocol", "own", simulation_only="a reply that is not finite is left out and counted, always"
    )
    """A client whose update is not finite: stop and name it, or leave its reply out and count it."""
    dtype: Literal["float32", "float64"] = setting("float32", "protocol")
    """Precision of the arithmetic."""
    device: str = setting("cpu", "machine", simulation_only="federations train on cpu so far")
    """cpu, or cuda where there is one."""
    engine: Literal["auto", "sequential", "stacked", "processes"] = setting(
        "auto", "machine", simulation_only="every client trains by itself, as in the sequential engine"
    )
    """How clients are run: one after the other, all at once, or in several processes; auto: the fastest here."""
    layers: Literal["auto", "torch", "compiled"] = setting(
        "auto", "machine", simulation_only="every client trains in torch's layers"
    )
    """Layers to train in: torch's own, or compiled for this CPU, equal to rounding; auto: compiled for long runs
    on a CPU if no engine is named."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """One method, one seed."""

    method: str = setting("fedavg", "protocol")
    """A method, with knobs if need be: fedprox:mu=0.1. `fedncv methods` lists them."""
    seed: int = setting(0, "protocol", "own")
    """Decides the partition, the initial model, who is drawn and every batch; 0 to 2^64 - 1."""

    def check(self, *, custom: tuple[str, ...] = ()) -> None:
        """Raise ValueError with the offending value and the remedy. Fields in ``custom`` are objects, not names.

        Names of methods, data, models, tasks and partitions are checked by ``fedncv.engine.check``, which knows them.
        """
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name), f.type)
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
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device, re.ASCII):
            raise ValueError(f"unknown device {self.device!r}; use cpu, cuda, or one GPU of several, as cuda:0")
        find_probe(self.probe)
        for t in {0, max(0, self.rounds - 1)}:
            factor = lr_factor(self.schedule, t, self.rounds)
            if not 0 < factor < math.inf:
                raise ValueError(f"schedule {self.schedule!r} multiplies the learning rate by {factor} in round {t}")


def named(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the settings of any of these kinds, in the order of their declaration.

    >>> named("measurement")
    ('probe',)
    """
    return tuple(f.name for f in fields(RunConfig) if set(kinds) & set(f.metadata["kinds"]))


def simulation_only() -> dict[str, str]:
    """Return the settings that mean nothing between real machines, each with the reason."""
    return {f.name: f.metadata["simulation_only"] for f in fields(RunConfig) if f.metadata["simulation_only"]}


def differences(theirs: Settings, ours: Settings, *, but: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Return every setting of both in which they differ, with both values; those in ``but`` are left out."""
    names = [f.name for f in fields(theirs) if f.name not in but]
    pairs = {name: (getattr(theirs, name), getattr(ours, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


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
    names = [f.name for f in fields(RunConfig)]
    for name in values:
        if name not in names:
            remedy = "; leave it out, or use the version of fedncv that wrote it" if where.endswith(".toml") else ""
            raise ValueError(f"{where}: {nearest(name, names, what='key')}{remedy}")
    for f in fields(RunConfig):
        if f.name in values:
            _check_type(f"{where}: {f.name}", values[f.name], f.type)
            if f.type is float:
                values[f.name] = float(values[f.name])
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

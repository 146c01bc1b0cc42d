"""All settings of a run, in one frozen dataclass. The command line, the help and config.toml are derived from it."""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from fedncv.files import read_text
from fedncv.probe import find_probe
from fedncv.schedule import lr_factor
from fedncv.spec import OWN, nearest, split, without_module

CUSTOM = "custom"  # in a config: an object that was passed from Python, without a name in older runs
OBJECTS = ("method", "data", "model", "task", "optimizer")  # settings that can be objects
_OWN = re.compile(r"custom:(.+)#([0-9a-f]{6})", re.DOTALL)

Kind = Literal["protocol", "machine", "measurement", "own", "samples", "paper"]
"""Kind of a setting. Every setting has exactly one of the first three kinds, and may have others too.

    protocol      changes the numbers: runs that differ in it are different runs
    machine       where and how fast a run trains; may change when the run is resumed or its study is extended
    measurement   what is measured in addition to the training; may change like `machine`
    own           may differ between the runs of one stack
    samples       which samples a client holds; a federation of real machines sets it once, in `federation init`
    paper         stated in the paper; the default is the paper's value
"""

T = TypeVar("T")

SHOWN = 40  # digits of a number that a message shows
LARGEST = 1e300  # of a setting that is a float
MOST = {
    "clients": 10_000_000, "rounds": 10_000_000, "epochs": 1_000_000, "batch_size": 1_000_000_000,
    "eval_every": 1_000_000_000, "after_every": 1_000_000_000, "eval_clients": 1_000_000_000,
    "checkpoint_every": 1_000_000_000, "workers": 100_000, "block": 1_000_000_000,
}  # fmt: skip
"""The largest sensible value of each setting that is a number of things; more would never end."""


class Own(NamedTuple):
    """An object that was passed from Python, as a config names it: ``custom:NAME#FINGERPRINT``.

    The name is for people. The fingerprint tells different objects of one name apart.

    >>> str(Own("clipped", "3f2a91"))
    'custom:clipped#3f2a91'
    """

    name: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{CUSTOM}:{self.name}#{self.fingerprint}"

    @property
    def short(self) -> str:
        """The name without the module, if it has one: package.module:function -> function."""
        return self.name.rpartition(":")[2] if self.is_path else self.name

    @property
    def is_path(self) -> bool:
        """Whether the name is package.module:function, which can be imported."""
        return re.fullmatch(r"[\w.]+:\w+", self.name) is not None


def own_object(text: str) -> Own | None:
    """Return the object that a text of a config stands for; None if the text is an ordinary name.

    >>> own_object("custom:clipped#3f2a91")
    Own(name='clipped', fingerprint='3f2a91')
    >>> own_object("fedavg"), own_object("custom:function")  # a function of the module custom.py
    (None, None)
    """
    if text == CUSTOM:
        return Own(CUSTOM, "")
    found = _OWN.fullmatch(text)
    return Own(*found.groups()) if found else None


def short_name(text: str) -> str:
    return short_names([text])[text]


def short_names(texts: Iterable[str]) -> dict[str, str]:
    """Return text -> its name for people, with the fingerprint only if two share a name.

    >>> short_names(["fedavg", "custom:clipped#3f2a91"])
    {'fedavg': 'fedavg', 'custom:clipped#3f2a91': 'clipped'}
    >>> list(short_names(["custom:clipped#3f2a91", "custom:clipped#b70c12"]).values())
    ['clipped #3f2a91', 'clipped #b70c12']
    >>> short_names(["my.module:mine:mu=1+prior", "table:path=/home/me/ill.csv,y=outcome"]).values()
    dict_values(['mine:mu=1+prior', 'ill.csv, y outcome'])
    """
    found = {text: own_object(text) for text in texts}
    short = {text: own.short if own else without_module(text) for text, own in found.items()}
    count = Counter(short.values())
    short = {text: name if found[text] or count[name] == 1 else text for text, name in short.items()}
    return {
        text: f"{short[text]} #{own.fingerprint}" if own and own.fingerprint and count[short[text]] > 1 else short[text]
        for text, own in found.items()
    }


def objects_wanted(missing: Mapping[str, Iterable[str]]) -> str:
    """Return the message for objects that were passed from Python, and now are not: setting -> their texts.

    >>> objects_wanted({"method": ["custom:mine#3f2a91"], "data": ["custom"]}).partition(";")[0]
    'this run was started from Python with objects of your own (method mine, data)'
    """
    found = [(name, own_object(text)) for name, texts in missing.items() for text in texts]
    words = [f"{name} {own.short}" if own and own.fingerprint and own.short != name else name for name, own in found]
    passed = [f"{name}={'[...]' if name == 'metrics' else '...'}" for name in missing]
    exported = [each for each in passed if not each.startswith("metrics")]
    export = f", export its model with fedncv.export_run(folder, {', '.join(exported)})" if exported else ""
    return (
        f"this run was started from Python with objects of your own ({', '.join(words)}); pass them again: "
        f"resume it with fedncv.resume(folder, {', '.join(passed)}){export}"
    )


def own_functions(config: "RunConfig") -> dict[str, str]:
    """Return setting -> the user's own function that its text names, as package.module:function.

    >>> own_functions(RunConfig(method="own:signed:scale=0.2+prior", data="table:path=a.csv,y=b", model="own:net"))
    {'method': 'own:signed', 'model': 'own:net'}
    """
    texts = {name: split(getattr(config, name), r"\+(?!\d)")[0].strip() for name in OBJECTS}  # without switches
    found = {name: OWN.fullmatch(text) for name, text in texts.items() if not own_object(getattr(config, name))}
    return {name: match[1] for name, match in found.items() if match}


def code_marks(config: "RunConfig") -> dict[str, str]:
    """Return the user's own functions that a config names -> the fingerprint of their code; empty if unknown.

    >>> code_marks(RunConfig(model="own:net", method="own:signed", code="own:net#3f2a91"))
    {'own:signed': '', 'own:net': '3f2a91'}
    """
    known = dict(word.rpartition("#")[::2] for word in config.code.split())
    return {name: known.get(name, "") for name in own_functions(config).values()}


def changed_code(configs: Iterable["RunConfig"]) -> list[str]:
    """Return the user's own functions whose code is not the same in all configs that name them."""
    marks: dict[str, set[str]] = {}
    for config in configs:
        for name, mark in code_marks(config).items():
            marks.setdefault(name, set()).add(mark)
    return [name for name, found in marks.items() if len(found) > 1]


def setting(default: T, *kinds: Kind, simulation_only: str = "") -> T:
    """Return a field with a default and its kinds.

    ``simulation_only`` says why the setting has no effect between real machines; empty: it has the same effect.
    """
    return field(default=default, metadata={"kinds": kinds, "simulation_only": simulation_only})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run except method and seed. The defaults are the paper's protocol, on the built-in digits."""

    data: str = setting("digits", "protocol", "samples")
    """Dataset name, folder:path=..., table:path=...,y=..., leaf:path=..., synthetic:clients=..., or
    package.module:function, which returns a fedncv.Dataset. `fedncv datasets` lists them."""
    data_dir: str = setting("", "machine", "samples")
    """Folder with the datasets' files; empty: $FEDNCV_DATA, then the cache folder."""
    code_dir: str = setting("", "machine")
    """Folder of your own modules, if they are named in data, method, model or task; filled in when a run is created."""
    partition: str = setting("dirichlet:alpha=0.1", "protocol", "own", "samples", "paper")
    """Division of samples among clients: dirichlet:alpha=0.1,min_samples=10, iid, natural (the owners that the data
    names), and five more, which `fedncv partition --help` lists. `fedncv partition` draws a division."""
    stream: str = setting("", "protocol", simulation_only="clients report their number of samples only once")
    """Samples that arrive during training: arrivals:start=0.1,rate=0.01,order=by_class; empty: all at the start."""
    topology: str = setting("server", "protocol", simulation_only="Flower's clients talk to its server alone")
    """Who talks to whom: server, or a graph without one: ring, chain, torus:rows=4, exponential,
    random_regular:degree=4, epidemic:peers=2, edges:path=graph.txt and more, a copy of the server's state at every
    client (docs/topology.md)."""
    clients: int = setting(100, "protocol", "paper")
    """Number of clients, at least 1."""
    unseen: float = setting(0.0, "protocol", simulation_only="a client that never trains does not join")
    """Share of the clients that never train, at least 0 and below 1. They are scored beside the others, before and
    after their own local training from the current model (docs/runs.md)."""
    test_share: float = setting(0.25, "protocol", "own", "samples")
    """Share of each client's samples kept for testing, at least 0 and below 1."""
    model: str = setting("lenet5", "protocol")
    """lenet5, mlp, resnet18 (GroupNorm), resnet18_bn, char_lstm, char_transformer, or package.module:function, which
    maps (input shape, outputs) to a torch module."""
    task: str = setting("classification", "protocol")
    """classification, regression, or package.module:task, a fedncv.Task with a loss and a score."""
    rounds: int = setting(100, "protocol", "paper")
    """Number of rounds, at least 0."""
    per_round: int = setting(10, "protocol", "paper")
    """Clients drawn per round, from 1 to all."""
    sampling: Literal["uniform", "poisson", "weighted", "available"] = setting("uniform", "protocol", "own")
    """How clients are drawn: uniform; poisson: each by itself, per_round on average; weighted by samples; available:
    uniform among the reachable clients."""
    availability: float = setting(0.5, "protocol", "own", simulation_only="real clients come and go by themselves")
    """sampling=available: probabilities of being reachable are evenly spaced from this value to 1; above 0."""
    dropout: float = setting(0.0, "protocol", "own", simulation_only="real clients fail by themselves")
    """Probability that a drawn client never replies, at least 0 and below 1."""
    stragglers: float = setting(
        0.0,
        "protocol",
        "own",
        simulation_only="real clients are slow by themselves; round_seconds in rules.toml sets how long a round waits",
    )
    """Probability that a drawn client finishes only a share of its steps (drawn uniformly), from 0 to 1."""
    epochs: int = setting(5, "protocol", "paper")
    """Local epochs: passes over a client's data per round, at least 1."""
    batch_size: int = setting(32, "protocol")
    """Samples per local step, at least 1. A smaller last batch is also used."""
    lr: float = setting(0.01, "protocol", "own")
    """Local learning rate, above 0."""
    schedule: str = setting("constant", "protocol", "own")
    """Learning rate over rounds: constant, exponential:decay=0.985, cosine:floor=0, step:every=30,factor=0.1."""
    optimizer: str = setting("sgd", "protocol")
    """Local optimizer: sgd, adamw, adam, rmsprop, adagrad, with optional knobs (adamw:beta1=0.9,beta2=0.999), or
    package.module:function. Its state begins anew every round (docs/optimizers.md)."""
    momentum: float = setting(0.0, "protocol")
    """Momentum of sgd, at least 0 and below 1; reset to zero every round."""
    weight_decay: float = setting(0.0, "protocol")
    """Weight decay of the local optimizer, at least 0: added to the gradient, or decoupled with adamw."""
    buffers: Literal["averaged", "personal"] = setting("averaged", "protocol")
    """BatchNorm's running statistics: averaged with the model, or kept by each client."""
    eval_every: int = setting(10, "protocol")
    """Score the clients before local training every so many rounds, and at the end; 0: only at the end."""
    after_every: int = setting(0, "protocol")
    """Score the clients after local training every so many rounds, and at the end; 0: only at the end."""
    eval_clients: int = setting(
        0, "protocol", simulation_only="every client decides by its own rules.toml whether it tells scores"
    )
    """Score only so many clients, a random sample that is the same in all rounds and for all methods; 0, or at least
    the number of clients: all of them (docs/runs.md)."""
    metrics: tuple[str, ...] = setting((), "measurement")
    """Metrics beside the score, whenever that is measured: --metrics f1_macro auroc ece (docs/metrics.md)."""
    probe: str = setting("", "measurement", simulation_only="gradients of single samples stay at the clients")
    """Measure the variance of the gradients: every=10 for every 10 rounds; empty: never (docs/variance.md)."""
    checkpoint_every: int = setting(
        10, "machine", "own", simulation_only="the server saves its state after every round"
    )
    """Save a checkpoint every so many rounds, and at the end; at least 1."""
    rows: Literal["auto", "memory", "disk"] = setting("auto", "machine")
    """Where per-client state is stored; auto: on disk if it would not fit in memory."""
    diverged: Literal["stop", "skip"] = setting(
        "stop", "protocol", "own", simulation_only="a reply that is not finite is always skipped and counted"
    )
    """If a client's update is not finite: stop and name the client, or skip its reply and count it."""
    dtype: Literal["float32", "float64"] = setting("float32", "protocol")
    """Floating-point type of parameters and of the method's algebra."""
    precision: Literal["torch", "float32", "tf32", "bf16"] = setting("torch", "protocol")
    """Arithmetic of matrix products and convolutions; the rest stays in dtype. torch: PyTorch's own choice, on a GPU
    TF32 in convolutions, float32 in matrix products. tf32 and bf16 are faster and less exact (docs/performance.md)."""
    device: str = setting("cpu", "machine", simulation_only="every client has its own, in its client.toml")
    """cpu, or cuda on a machine with a GPU; cuda:1 is the second GPU."""
    engine: Literal["auto", "sequential", "stacked", "streams", "processes", "ray"] = setting(
        "auto", "machine", simulation_only="every client trains by itself, as with engine=sequential"
    )
    """How clients train: one after the other; stacked, all in one batch; streams, several at a time, each with its own
    steps on a GPU; processes, on several cores; ray, on the machines of a Ray cluster (docs/scale.md). auto: the
    fastest on this machine, on a GPU by a trial of a few steps."""
    cluster: str = setting("", "machine", simulation_only="every client is a machine of its own")
    """engine=ray: HOST:PORT of a Ray cluster; auto, the one that runs on this machine; empty: start one here."""
    workers: int = setting(0, "machine", simulation_only="every client is a machine of its own")
    """engine=ray: number of workers, each with one CPU, and a GPU or a share of one with device cuda; 0: as many as the
    cluster has room for, a whole GPU each."""
    block: int = setting(10, "machine", simulation_only="every client trains by itself")
    """engine=ray: clients of the cohort that a worker trains at a time, at least 1. Their replies are summed together:
    the last digits depend on it, and not on the number of workers."""
    layers: Literal["auto", "torch", "compiled"] = setting(
        "auto", "machine", simulation_only="every client uses torch's layers"
    )
    """Torch's layers, or compiled for the CPU (equal up to rounding); auto: the faster for long runs if engine=auto."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """All settings of one run. ``check`` raises ValueError if a value is wrong."""

    method: str = setting("fedavg", "protocol")
    """Method name, with optional knobs: fedprox:mu=0.1; or package.module:function. `fedncv methods` lists them."""
    seed: int = setting(0, "protocol", "own")
    """Seed of the partition, the initial model, the draws of clients and every batch; 0 to 2^64 - 1."""
    code: str = setting("", "protocol")
    """Your own functions that data, method, model, task and optimizer name, with the fingerprints of their code:
    own:net#3f2a91 own:signed#b70c12; filled in when a run is created."""

    def check(self, *, custom: tuple[str, ...] = ()) -> None:
        """Raise ValueError with the offending value and the remedy. Fields in ``custom`` are objects, not names.

        ``fedncv.engine.check`` also checks the names of methods, data, models, tasks and partitions.
        """
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name), f.type)
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most:,}, not {_digits(getattr(self, name))}")
        for f in fields(self):
            text = str(getattr(self, f.name)) if f.type is str else ""
            if "\0" in text or (not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)):
                raise ValueError(f"{f.name} is {text!r:.200}, which holds a null character or bytes that are not UTF-8")
        ranges: list[tuple[bool, str, str]] = [
            (0 <= self.seed < 2**64, "seed", "from 0 to 2^64 - 1"),
            (self.clients >= 1, "clients", "at least 1"),
            (0 <= self.unseen < 1, "unseen", "at least 0 and below 1"),
            (0 <= self.test_share < 1, "test_share", "at least 0 and below 1"),
            (self.rounds >= 0, "rounds", "at least 0"),
            (self.per_round >= 1, "per_round", "at least 1"),
            (0 < self.availability <= 1, "availability", "above 0 and at most 1"),
            (0 <= self.dropout < 1, "dropout", "at least 0 and below 1"),
            (0 <= self.stragglers <= 1, "stragglers", "from 0 to 1"),
            (self.epochs >= 1, "epochs", "at least 1"),
            (self.batch_size >= 1, "batch_size", "at least 1"),
            (0 < self.lr < math.inf, "lr", "above 0 and finite, such as 0.01"),
            (0 <= self.momentum < 1, "momentum", "at least 0 and below 1"),
            (0 <= self.weight_decay < math.inf, "weight_decay", "at least 0 and finite"),
            (self.eval_every >= 0, "eval_every", "at least 0"),
            (self.after_every >= 0, "after_every", "at least 0"),
            (self.eval_clients >= 0, "eval_clients", "at least 0 (0: all clients)"),
            (self.checkpoint_every >= 1, "checkpoint_every", "at least 1"),
            (self.workers >= 0, "workers", "at least 0 (0: as many as there is room for)"),
            (self.block >= 1, "block", "at least 1"),
        ]
        for right, name, remedy in ranges:
            if not right:
                raise ValueError(f"{name} must be {remedy}, not {getattr(self, name)}")
        if self.per_round > self.clients:
            raise ValueError(
                f"per_round is {self.per_round}, but there are {self.clients} clients: "
                f"draw at most {self.clients}, or raise clients"
            )
        never = round(self.unseen * self.clients)
        if self.unseen and not 0 < never < self.clients:
            raise ValueError(
                f"unseen is {self.unseen:g}, which is {'no client' if not never else 'all clients'} of {self.clients}; "
                f"use at least {1 / self.clients:.2g} and less than 1"
            )
        if self.per_round > self.clients - never:
            raise ValueError(
                f"per_round is {self.per_round}, but with unseen {self.unseen:g} only {self.clients - never} of "
                f"{self.clients} clients train: draw at most so many, or raise clients"
            )
        if missing := {n: [getattr(self, n)] for n in OBJECTS if own_object(getattr(self, n)) and n not in custom}:
            raise ValueError(objects_wanted(missing))
        if re.fullmatch(r"mps(:\d+)?", self.device, re.ASCII):
            raise ValueError(
                f"device {self.device!r} is not supported: scores are sums in float64, which Apple's GPUs lack; use cpu"
            )
        if not re.fullmatch(r"cpu|cuda(:\d\d?)?", self.device, re.ASCII):
            raise ValueError(f"unknown device {self.device!r}; use cpu, cuda, or one of several GPUs, such as cuda:0")
        find_probe(self.probe)
        for t in {0, max(0, self.rounds - 1)}:
            factor = lr_factor(self.schedule, t, self.rounds)
            if not 0 < factor < math.inf:
                raise ValueError(
                    f"schedule {self.schedule!r} multiplies the learning rate by {factor} in round {t}; "
                    "the factor must be above 0 and finite"
                )


def named(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the settings that have any of these kinds, in the order of declaration.

    >>> named("measurement")
    ('metrics', 'probe')
    """
    return tuple(f.name for f in fields(RunConfig) if set(kinds) & set(f.metadata["kinds"]))


def simulation_only() -> dict[str, str]:
    """Return the settings that have no effect between real machines, each with the reason."""
    return {f.name: f.metadata["simulation_only"] for f in fields(RunConfig) if f.metadata["simulation_only"]}


def differences(theirs: Settings, ours: Settings, *, but: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with both values; those in ``but`` are left out."""
    names = [f.name for f in fields(theirs) if f.name not in but]
    pairs = {name: (getattr(theirs, name), getattr(ours, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def options(settings: Settings, plain: Settings, *, but: Collection[str] = ()) -> list[str]:
    """Return the words of a command that set what differs from ``plain``.

    >>> options(RunConfig(lr=0.1, partition="iid"), RunConfig())
    ['--partition', 'iid', '--lr', '0.1']
    """
    words: list[str] = []
    for name, (value, _) in differences(settings, plain, but=but).items():
        words += [f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else map(str, _listed(value)))]
    return words


def _listed(value: Any) -> Collection[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _digits(value: int) -> str:
    """
    >>> _digits(-12), _digits(10**20), _digits(10**5000)
    ('-12', '100000000000000000000', 'a number of 5001 digits')
    """
    digits = int(value.bit_length() * math.log10(2)) + 1
    return str(value) if digits < SHOWN else f"a number of {digits} digits"


def _check_type(name: str, value: Any, kind: Any) -> None:
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
        return
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{name} must be a list of names, not {value!r}")
        return
    allowed = (int, float) if kind is float else (kind,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ValueError(f"{name} must be {kind.__name__}, not {value!r:.200}")
    if kind is float and isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST:g}, not {_digits(value)}")


def from_dict(values: dict[str, Any], *, where: str, base: RunConfig | None = None) -> RunConfig:
    """Return ``base`` with the given fields replaced. Raise ValueError if a name is unknown or a type is wrong."""
    if base is not None and not isinstance(base, RunConfig):
        give = f"{where}(**config)" if isinstance(base, dict) else f"{where}(fedncv.RunConfig(rounds=10))"
        raise ValueError(f"{where}: config must be a fedncv.RunConfig, not {type(base).__name__}; write {give}")
    values = dict(values)
    if values.get("engine") == "compiled":  # from the time when compiled layers were an engine
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
            if get_origin(f.type) is tuple:
                values[f.name] = tuple(values[f.name])
    return replace(base or RunConfig(), **values)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is not valid TOML: it is nested too deeply") from None


def write_toml(config: RunConfig) -> str:
    return to_toml(asdict(config))


def to_toml(values: Mapping[str, Any]) -> str:
    """Return one line for every value: a text, a number, a truth value or a tuple of those.

    >>> print(to_toml({"lr": 0.1, "seeds": (0, 1), "tune": True, "data": "digits"}), end="")
    lr = 0.1
    seeds = [0, 1]
    tune = true
    data = "digits"
    """
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'
    return repr(value)

"""fedncv federation run: train a method on the federation."""

import sys
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Literal

from tyro.conf import Suppress

from fedncv.cli.arguments import parse
from fedncv.cli.federation.following import Following
from fedncv.cli.federation.shared import OF_INIT, Folder, check_server
from fedncv.config import RunConfig, simulation_only

LACKING = 3  # exit code of a finished run of which some round lacks a client


@dataclass(frozen=True, kw_only=True)
class Begin(RunConfig):
    """Train a method on the federation and wait for it. Settings that a simulation does not have are in rules.toml.
    Exit code 3: finished, but some round lacks a client."""

    folder: Folder
    """The folder that `fedncv federation init` wrote."""
    name: str = "first"
    """Name of the run; its folder is FOLDER/server/runs/NAME."""
    seconds: float = 86400.0
    """How long to wait for the run, in seconds; it can be resumed after that."""
    clients: int = 0
    """Number of clients; 0: all of them."""
    per_round: int = 0
    """Clients drawn per round; 0: all of them."""
    sampling: Literal["uniform", "weighted"] = "uniform"
    """How clients are drawn: uniformly, or weighted by their number of samples."""
    eval_every: int = RunConfig.eval_every
    """Every so many rounds, and at the end, clients score the model; 0: never. Those whose rules.toml allows it tell
    the server the sum of their scores."""
    after_every: int = RunConfig.after_every
    """Every so many rounds, and at the end, they also score it after a local training for that alone; 0: never."""
    rows: Literal["auto", "memory", "disk"] = "auto"
    """Where the server stores per-client state; auto: on disk if it would not fit in memory."""
    seed: int = RunConfig.seed
    """Seed of the initial model, the draws of clients and the batches; 0 to 2^64 - 1."""
    secure_sums: str = ""
    """Let the server learn sums of the replies only, and no single reply: threshold=3,neighbours=16. So many clients of
    a round must stay to the end, more than half of them (docs/privacy.md); empty: the server sees each reply."""


def main(argv: list[str]) -> int:
    from fedncv.engine.check import anchored
    from fedncv.flower import coordinator
    from fedncv.flower.folder import read_server_settings
    from fedncv.flower.secure_server import with_grid

    _refuse(argv)
    chosen = parse(_offered(Begin), argv, command="federation run")
    folder = Path(chosen.folder)
    clients = chosen.clients or read_server_settings(folder / "server").clients
    if chosen.secure_sums:
        chosen = replace(chosen, method=with_grid(chosen.method))
    config = anchored(_config(chosen, clients=clients, per_round=chosen.per_round or clients), custom=("data",))
    check_server(folder)
    coordinator.create(folder, chosen.name, config, chosen.secure_sums)
    return follow(folder, chosen.name, chosen.seconds)


def follow(folder: Path, name: str, seconds: float) -> int:
    from fedncv.flower.absences import absences
    from fedncv.flower.coordinator import follow as wait

    try:
        with Following(folder / "server" / "runs" / name) as shown:
            done = wait(folder, name, seconds=seconds, on_look=shown.look)
    except KeyboardInterrupt:
        return interrupted(folder, name)
    print(f"{done.folder}: {done.rounds} rounds of {done.config.method}")
    lines = absences(done.rows)
    for line in lines:
        print(line)
    return LACKING if lines else 0


def interrupted(folder: Path, name: str) -> int:
    """Offer to stop the run after Ctrl-C. Without a terminal, say how to stop it."""
    from fedncv.flower import coordinator

    place, option = quote(str(folder)), f" --name {quote(name)}"
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"\nStop the run {name!r}? Otherwise it goes on. [y/N] ", end="", file=sys.stderr, flush=True)
        try:
            answer = sys.stdin.readline()
        except KeyboardInterrupt:
            answer = ""
        if answer.strip().lower() in ("y", "yes"):
            run = coordinator.stop(folder, name)
            print(f"{run.folder}: stopped after round {run.rounds} of {run.config.rounds}", file=sys.stderr)
            return 130
    print(
        f"fedncv: the run {name!r} goes on; stop it with `fedncv federation stop {place}{option}`, or wait for it "
        f"again with `fedncv federation resume {place}{option}`",
        file=sys.stderr,
    )
    return 130


def _offered(kind: type[Begin]) -> type[Begin]:
    """Return ``kind`` without the options that have no effect on a federation's run; `_refuse` says why."""
    hidden = [
        (f.name, Suppress[f.type], f.default)  # type: ignore[misc, name-defined]  # known only at run time
        for f in fields(RunConfig)
        if f.name in _reasons()
    ]
    return make_dataclass(
        kind.__name__, hidden, bases=(kind,), frozen=True, kw_only=True, namespace={"__doc__": kind.__doc__}
    )


def _refuse(argv: list[str]) -> None:
    """Raise ValueError for a setting that has no effect on a run, with its value and the remedy."""
    reasons = _reasons()
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        option, _, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and name in reasons:
            raise ValueError(f"{option} {value or following}: {reasons[name]}; leave {option} out")


def _reasons() -> dict[str, str]:
    """Return the settings that have no effect on a federation's run, each with the reason."""
    reasons = simulation_only() | dict.fromkeys(OF_INIT, "`fedncv federation init` has already divided the samples")
    return reasons | {"code": "it is filled in when the run is created"}


def _config(chosen: RunConfig, **values: int) -> RunConfig:
    return RunConfig(**{f.name: getattr(chosen, f.name) for f in fields(RunConfig)} | values)

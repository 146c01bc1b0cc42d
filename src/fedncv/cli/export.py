"""fedncv export: write the trained model to a file that any torch program can load."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from safetensors.torch import save

from fedncv import store
from fedncv.cli.arguments import parse
from fedncv.engine.problem import Problem, build
from fedncv.export import export
from fedncv.objects import again
from fedncv.results import MODEL, is_run, read_config, read_rows, runs_in

SUMMED = "samples_in_all"  # in the first row of a federation with secure sums


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write a run's model as an ordinary state_dict in a safetensors file.

    Load it with safetensors.torch.load_file and module.load_state_dict.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of one run."""
    client: int = -1
    """Client whose model to write; -1: the model that all clients share."""
    to: str = ""
    """File to write; empty: model.safetensors in the run's folder."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="export")
    folder = Path(arguments.run)
    if not is_run(folder):
        raise ValueError(f"{folder} is not a run; name one, such as {runs_in(folder)[0]}")
    client = None if arguments.client == -1 else arguments.client
    problem = _problem(folder, client)
    state = store.read_state(folder, problem)
    tensors = export(problem, state, client)
    path = Path(arguments.to or folder / MODEL)
    store.write_atomically(path, save(tensors), name="export")
    count = sum(tensor.numel() for tensor in tensors.values())
    whose = "the shared model" if client is None else f"client {client}'s model"
    print(f"{path}: {whose} after round {state.round}, {len(tensors)} tensors, {count:,} numbers")
    return 0


def _problem(folder: Path, client: int | None) -> Problem:
    """Return the run's problem; for a federation's run, whose first row has the clients' samples, the server's half."""
    config = replace(read_config(folder), device="cpu", metrics=())
    first = next(iter(read_rows(folder)), {})
    sizes = [1] * config.clients if SUMMED in first else first.get("sizes")  # secure sums tell no sizes
    if sizes is None:
        return build(config, **again(folder, config, {}))
    if client is not None:
        raise ValueError(
            f"{folder} is a federation's run: the model of client {client} stays on its machine; leave out --client"
        )
    from fedncv.flower.folder import read_form
    from fedncv.flower.halves import server_problem

    return server_problem(config, read_form(folder.resolve().parent.parent), sizes)

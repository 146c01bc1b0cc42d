"""fedncv export: the trained model, for anybody's torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from safetensors.torch import save

from fedncv import store
from fedncv.cli.arguments import parse
from fedncv.engine.problem import build
from fedncv.results import MODEL, read_config
from fedncv.simulate import export


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write a run's model as an ordinary state_dict in a safetensors file.

    Load it with safetensors.torch.load_file and module.load_state_dict.
    """

    run: Annotated[str, tyro.conf.Positional]
    """The folder of one run."""
    client: int = -1
    """The client whose model it is; -1 is the model that all clients share."""
    to: str = ""
    """The file to write; empty: model.safetensors in the run's folder."""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, command="export")
    folder = Path(arguments.run)
    problem = build(replace(read_config(folder), device="cpu"))
    state = store.read_state(folder, problem)
    client = None if arguments.client == -1 else arguments.client
    tensors = export(problem, state, client)
    path = Path(arguments.to or folder / MODEL)
    store.write_atomically(path, save(tensors), name="export")
    count = sum(tensor.numel() for tensor in tensors.values())
    whose = "the shared model" if client is None else f"client {client}'s model"
    print(f"{path}: {whose} after round {state.round}, {len(tensors)} tensors, {count:,} numbers")
    return 0

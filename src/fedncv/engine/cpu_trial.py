"""Time a few steps in torch's and in compiled layers, and remember which are faster.

Which are depends on the processor and the model. The answer is kept in a file beside the compiled library, so that a
machine gives it once: a run that is repeated or resumed there has the same layers, and the same bits.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

import torch

from fedncv.engine.cpu_fused import one_pass
from fedncv.engine.cpu_library import library
from fedncv.engine.problem import Problem
from fedncv.files import is_intact, parse, sealed

TURNS = 7


def faster(problem: Problem, compiled: Problem) -> bool:
    """Return whether the steps of ``compiled`` take less time on this machine."""
    path = _path(problem)
    found = _recorded(path)
    if found is None:
        path.unlink(missing_ok=True)  # damaged
        found = measured(problem, compiled)
        _record(path, found)
        found = _recorded(path) or found  # of another process, if it was first
    return found["compiled"] < found["torch"]


def _recorded(path: Path) -> dict[str, float] | None:
    """Return the seconds that were measured; None if the file is missing or damaged."""
    try:
        found = parse(path.read_bytes())
        return {name: float(found[name]) for name in ("compiled", "torch")} if is_intact(found) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def measured(problem: Problem, compiled: Problem) -> dict[str, float]:
    """Return the seconds of a step's two passes; the least of several turns, in CPU time, on a busy machine too."""
    size = min(problem.config.batch_size, len(problem.dataset.x))
    inputs = problem.dataset.inputs(torch.arange(size), problem.dtype)
    models = {"torch": problem.model, "compiled": compiled.model}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(1 + TURNS):
        for name, model in models.items():
            began = time.process_time()
            one_pass(model, inputs)
            seconds[name].append(time.process_time() - began)
    return {name: min(each[1:]) for name, each in seconds.items()}


def _path(problem: Problem) -> Path:
    """Return the file for this library, which is of one processor, and for this model and size of a batch."""
    made = library(problem.dtype)
    assert made is not None, "the layers are compiled"
    layout, size = problem.model.layout, problem.config.batch_size
    facts = repr((torch.__version__, layout.names, layout.shapes, tuple(problem.dataset.x.shape[1:]), size))
    digest = hashlib.sha256(facts.encode()).hexdigest()
    place = Path(made._name)
    return place.with_name(f"{place.stem}-trial-{digest[:16]}.json")


def _record(path: Path, found: dict[str, float]) -> None:
    """Write the answer complete or not at all; of several processes the first is heard. A full disk is no error."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name
        written.write_text(json.dumps(sealed(found)))
        os.link(written, path)

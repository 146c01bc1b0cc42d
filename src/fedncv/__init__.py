"""Federated learning in which gradient variance is measured, not assumed.

>>> import fedncv
>>> result = fedncv.simulate(method="fedavg", model="mlp", clients=5, per_round=2, rounds=1, epochs=1)
>>> 0 <= result.last["before"] <= 1
True

Names are imported at their first use, so that reading results and `--help` do not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedncv import data as data
    from fedncv import estimators as estimators
    from fedncv import methods as methods
    from fedncv import models as models
    from fedncv import optimizers as optimizers
    from fedncv import tensorboard as tensorboard
    from fedncv.adapters import lora
    from fedncv.config import RunConfig
    from fedncv.data import Dataset
    from fedncv.methods import METHODS, find_method
    from fedncv.methods.base import Method
    from fedncv.optimizers import Optimizer
    from fedncv.results import scalars
    from fedncv.simulation import Result, export_run, plot, resume, simulate, simulate_many
    from fedncv.tasks import Task

__all__ = [
    "METHODS",
    "Dataset",
    "Method",
    "Optimizer",
    "Result",
    "RunConfig",
    "Task",
    "export_run",
    "find_method",
    "lora",
    "plot",
    "resume",
    "scalars",
    "simulate",
    "simulate_many",
]

MODULES = {
    "METHODS": "fedncv.methods",
    "Dataset": "fedncv.data",
    "Method": "fedncv.methods.base",
    "Optimizer": "fedncv.optimizers",
    "Result": "fedncv.simulation",
    "RunConfig": "fedncv.config",
    "Task": "fedncv.tasks",
    "export_run": "fedncv.simulation",
    "find_method": "fedncv.methods",
    "lora": "fedncv.adapters",
    "plot": "fedncv.simulation",
    "resume": "fedncv.simulation",
    "scalars": "fedncv.results",
    "simulate": "fedncv.simulation",
    "simulate_many": "fedncv.simulation",
}
"""Public name -> the module that defines it. No module of the package may have one of these names."""
SUBMODULES = (
    "data",
    "estimators",
    "methods",
    "models",
    "optimizers",
    "tensorboard",
)  # for `fedncv.data.from_arrays` after `import fedncv`


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name]), name)
    if name in SUBMODULES:
        return importlib.import_module(f"fedncv.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES, *SUBMODULES})

"""Federated learning in which gradient variance is measured, not assumed.

>>> import fedncv
>>> result = fedncv.simulate(method="fedavg", model="mlp", clients=5, per_round=2, rounds=1, epochs=1)
>>> 0 <= result.last["before"] <= 1
True
"""

from fedncv.config import RunConfig
from fedncv.data import Dataset
from fedncv.methods import METHODS, find_method
from fedncv.methods.base import Method
from fedncv.simulate import Result, resume, simulate, simulate_many
from fedncv.tasks import Task

__all__ = [
    "METHODS",
    "Dataset",
    "Method",
    "Result",
    "RunConfig",
    "Task",
    "find_method",
    "resume",
    "simulate",
    "simulate_many",
]

"""A client's look at its training samples before it predicts (``Survey``), as a local training that moves nothing."""

from typing import Any

import torch
from torch import Tensor

from fedncv.engine.local import train
from fedncv.engine.problem import Arrival, Problem
from fedncv.methods.base import Ask, Batch, Method, Phase, Survey, Work

SMALLEST = 1  # samples of a batch: with running statistics one is enough


def looking(method: Method, survey: Survey) -> Method:
    """Return a method that looks once at a client's samples at ``down`` = y_P, and replies its notes."""

    def begin(ask: Ask, y_P: Tensor, _own: Any) -> tuple[Tensor, Any]:
        return y_P, survey.start(ask, y_P)

    def direction(ask: Ask, y_P: Tensor, batch: Batch, _down: Tensor, _own: Any, notes: Any) -> tuple[Tensor, Any]:
        return torch.zeros_like(y_P), survey.see(ask, y_P, batch, notes)

    def finish(_ask: Ask, _y_P: Tensor, _work: Work, _down: Tensor, own: Any, notes: Any) -> tuple[Any, Any]:
        return notes, own

    def phases(_epochs: int) -> tuple[Phase, ...]:
        return (Phase(1, trains=(), mode="eval"),)

    return method._replace(phases=phases, begin=begin, direction=direction, finish=finish, same_batches=False)


def surveyed(problem: Problem, round: int, arrival: Arrival, y_P: Tensor) -> Any:
    """Return the notes of one client at ``y_P``; () if the method has no survey."""
    survey = problem.method.survey
    if survey is None:
        return ()
    looks = problem._replace(method=looking(problem.method, survey))
    found = train(looks, round, arrival._replace(down=y_P), smallest=SMALLEST)
    return found.up if found else survey.start(problem.ask(arrival.client, arrival.buffers_R, round), y_P)

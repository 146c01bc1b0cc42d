"""Two halves of one problem: the server's without samples, a client's with only its own.

Both are ordinary ``Problem``s, so ``engine.local.train`` and ``engine.round.settle`` run on them without
changes. Unknown values (samples at the server, other clients' sizes at a client) are placeholders that are never
read.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.config import RunConfig, simulation_only
from fedncv.data import Clients
from fedncv.engine.check import check as check_names
from fedncv.engine.local import train
from fedncv.engine.problem import Arrival, Problem, arrivals, build, check_targets, messages, start
from fedncv.flower.refusals import RefusedError
from fedncv.flower.samples import Form, Samples, form_of
from fedncv.methods import find_method
from fedncv.tree import row

NOT_HERE = simulation_only()  # settings of a simulation -> why they mean nothing between real machines


class Down(NamedTuple):
    """The server's message to a client in a round."""

    down: Any
    buffers_R: Tensor  # empty if running statistics stay at the client


class Up(NamedTuple):
    """A client's reply."""

    up: Any
    buffers_R: Tensor


def check(config: RunConfig) -> None:
    """Raise ValueError for settings that only a simulation has."""
    check_names(config, custom=("data",))
    for name, why in NOT_HERE.items():
        value, default = getattr(config, name), getattr(RunConfig, name)
        if value != default:
            raise ValueError(f"{name} is {value!r}: {why}; leave it at {default!r}")
    method = find_method(config.method)
    if method.only_simulated:
        raise ValueError(f"{config.method} is for simulations: {method.only_simulated}")
    if method.privacy is not None:
        raise ValueError(
            f"{config.method}: the noise of +dp is drawn from the seed of the run, which clients are told and could "
            "remove it with; secret noise for federations is not built yet; use +dp in a simulation"
        )
    if method.graph != "any":
        raise ValueError(
            f"{config.method} is for federations without a server (docs/topology.md); use it in a simulation"
        )
    tells = method.joining
    if tells:
        raise ValueError(
            f"{config.method} needs {', '.join(tells)} of every client when it joins, which a federation does not ask "
            "for; use it in a simulation"
        )
    if config.sampling == "available":
        raise ValueError("sampling is available: who is reachable shows by itself; use uniform or weighted")
    if config.sampling == "poisson":
        raise ValueError(
            "sampling is poisson: a round may ask nobody, which federations cannot; use uniform or weighted"
        )


def server_problem(config: RunConfig, form: Form, sizes: list[int]) -> Problem:
    """Return the server's problem, from the number of training samples of each client and no sample."""
    none = np.array([], dtype=np.int64)
    clients = Clients([np.zeros(size, dtype=np.int64) for size in sizes], [none] * len(sizes))
    return build(config, data=form.placeholder(2), clients=clients)


def client_problem(config: RunConfig, samples: Samples, u: int, *, device: str = "cpu") -> Problem:
    """Return the problem of client u, in which the other clients have no samples. It trains on the client's device.

    The model is made from a placeholder, as at the server, so that both make the same model for any data. The config
    stays that of the run, which says nothing about devices: every machine has its own.
    """
    none = np.array([], dtype=np.int64)
    train_N, test_N = [none] * config.clients, [none] * config.clients
    train_N[u], test_N[u] = samples.train, samples.test
    check_targets(config.task, samples.dataset)
    grid = find_method(config.method).grid
    if grid is not None and len(samples.train) > grid.samples:
        raise RefusedError("room", f"client {u} has more training samples than samples={grid.samples} in +fixed_point")
    blind = replace(config, sampling="uniform", device=device)  # other clients' sizes are unknown here, and not needed
    problem = build(blind, data=form_of(samples.dataset).placeholder(2), clients=Clients(train_N, test_N))
    mine, place = samples.dataset, problem.dataset.x.device
    return problem._replace(config=config, dataset=mine._replace(x=mine.x.to(place), y=mine.y.to(place)))


def blind(problem: Problem) -> Problem:
    """Return the server's problem with sizes that are not known: a method that used one would have no finite step."""
    nan_N = torch.full_like(problem.federation.sizes_N, torch.nan)
    return problem._replace(federation=problem.federation._replace(sizes_N=nan_N))


def down_template(problem: Problem) -> Down:
    """Return the form of a message to one client, from a federation of one, which needs no memory of others."""
    alone = problem.federation._replace(num_clients=1, per_round=1, sizes_N=problem.federation.sizes_N[:1])
    small = problem._replace(federation=alone)
    down_S, b_SR = messages(small, start(small), np.array([0]))
    return Down(row(down_S, 0), travelling(problem, b_SR[0]))


def up_template(problem: Problem, form: Form) -> Up:
    """Return the form of a reply, from a client with two placeholder samples."""
    alone = problem.federation._replace(num_clients=1, per_round=1, sizes_N=problem.federation.sizes_N[:1])
    small = problem._replace(
        federation=alone,
        dataset=form.placeholder(2),
        clients=Clients([np.arange(2)], [np.array([], dtype=np.int64)]),
        config=replace(problem.config, batch_size=2),
    )
    (arrival,) = arrivals(small, start(small), np.array([0]))
    trained = train(small, 0, arrival)
    assert trained is not None
    return Up(trained.up, travelling(problem, trained.buffers_R))


def travelling(problem: Problem, buffers_R: Tensor) -> Tensor:
    """Return the running statistics, unless they stay with each client."""
    return buffers_R[:0] if problem.buffer_rule == "personal" else buffers_R


def arrival_of(problem: Problem, u: int, message: Down, kept: Any) -> Arrival:
    buffers_R = kept.buffers_R if problem.buffer_rule == "personal" else message.buffers_R
    return Arrival(u, message.down, buffers_R, kept)


def constants_of(problem: Problem) -> dict[str, Any]:
    """Return the mark of the model's frozen weights, which are not sent, for the client to compare; {} without any."""
    mark = problem.model.constants_mark
    return {"constants": mark} if mark else {}


def check_constants(problem: Problem, theirs: object) -> None:
    """Raise ValueError if the server's mark, 0 without any, is not that of the frozen weights here."""
    if not isinstance(theirs, float) or not math.isclose(theirs, problem.model.constants_mark, rel_tol=1e-4):
        raise RefusedError(
            "constants",
            "the frozen weights or constant buffers of the model here are not the server's; they are never sent, so "
            "the model's function must give the same ones on every machine",
        )

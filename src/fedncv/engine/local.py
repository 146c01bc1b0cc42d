"""Local training of one client: the plan of its batches, the steps, the reply."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.engine.problem import Arrival, Kept, Problem
from fedncv.keys import Key, fold, key_for, permutation
from fedncv.layout import Layout
from fedncv.methods.base import Ask, Batch, Method, Phase, Work
from fedncv.optimizers import Optimizer
from fedncv.schedule import lr_factor
from fedncv.tree import tree_map


class Step(NamedTuple):
    phase: int
    rows: Tensor  # positions among the client's training samples
    number: int  # of the batch among the client's batches


class Trained(NamedTuple):
    y_P: Tensor
    buffers_R: Tensor
    up: Any
    kept: Kept
    samples: int
    gradients: int
    forwards: int
    loss: Tensor  # mean over the steps


def plan(method: Method, key: Key, num_samples: int, *, epochs: int, batch_size: int, smallest: int) -> list[Step]:
    """Return the batches of a client's round, in order, without batches that are too small for the model."""
    phases = method.phases(epochs)
    total = sum(phase.epochs for phase in phases)
    orders = permutation(fold(key, torch.arange(total)), num_samples)  # one row per epoch
    starts = range(0, num_samples, batch_size)
    steps, epoch = [], 0
    for phase_number, phase in enumerate(phases):
        for _ in range(phase.epochs):
            samples = torch.split(orders[0 if method.same_batches else epoch], batch_size)
            numbers = list(range(len(starts)))
            if method.same_batches:
                numbers = permutation(fold(key, total + epoch), len(starts)).tolist()
            steps += [Step(phase_number, samples[i], i) for i in numbers if len(samples[i]) >= smallest]
            epoch += 1
    return steps


def lr_of(problem: Problem, round: int) -> float:
    """Return the learning rate of a round; training measured after the last round uses that of the last round."""
    if problem.fixed_lr is not None:
        return problem.fixed_lr
    config = problem.config
    return config.lr * lr_factor(config.schedule, min(round, max(0, config.rounds - 1)), config.rounds)


def moves(phases: Sequence[Phase]) -> list[bool]:
    """Return for each phase whether its steps move the model; personal parameters behind it do not count."""
    return [bool({"body", "head"} & set(phase.trains)) for phase in phases]


def train(
    problem: Problem, round: int, arrival: Arrival, *, share: float = 1.0, smallest: int | None = None
) -> Trained | None:
    """Train a client for one round, or the first ``share`` of it; return None if that leaves no training step.

    A method that trains in none of its phases only looks at the data: then every batch is a step. ``smallest`` is the
    size of the smallest batch, if not what training needs.
    """
    config, method, model = problem.config, problem.method, problem.model
    u, down, buffers_R, kept = arrival
    index = torch.from_numpy(problem.clients.train[u])
    key = key_for(config.seed, "batches", round, u)
    steps = plan(
        method,
        key,
        len(index),
        epochs=config.epochs,
        batch_size=config.batch_size,
        smallest=model.smallest_batch if smallest is None else smallest,
    )
    steps = steps[: math.ceil(share * len(steps))]
    phases = method.phases(config.epochs)
    looks = not any(phase.trains for phase in phases)
    if not any(looks or phases[step.phase].trains for step in steps):
        return None
    moved = moves(phases)
    trained = [sum(s.phase == i for s in steps) if does else 0 for i, does in enumerate(moved)]
    inputs, targets = problem.dataset.inputs(index, problem.dtype), problem.dataset.y[index]
    step_keys = fold(key_for(config.seed, "step", round, u), torch.arange(len(steps))).to(inputs.device).unbind()
    ones = {size: inputs.new_ones(size, dtype=problem.dtype) for size in {len(step.rows) for step in steps}}
    lr = lr_of(problem, round)

    opening = problem.ask(u, buffers_R, round)
    own = kept.own
    y_P, scratch = method.begin(opening, down, own)
    state, phase_now = None, -1
    samples = gradients = forwards = 0
    losses = []
    for i, step in enumerate(steps):
        if step.phase != phase_now:
            state, phase_now = problem.optimizer.init(y_P), step.phase
        phase = phases[step.phase]
        ask = Ask(
            model,
            problem.task,
            buffers_R,
            client=opening.client,
            round=round,
            key=step_keys[i],
            num_batches=opening.num_batches,
            batch_size=opening.batch_size,
            phase=step.phase,
            mode=phase.mode,
        )
        rows = step.rows.to(inputs.device)
        x = inputs.index_select(0, rows)
        batch = Batch(x, targets.index_select(0, rows), ones[len(x)], step.number)
        g_P, scratch = method.direction(ask, y_P, batch, down, own, scratch)
        y_P, state = local_step(problem.optimizer, phase, model.layout, g_P, state, y_P, lr)
        buffers_R = ask.notes.buffers_R
        samples += len(x)
        gradients += ask.notes.num_gradients * len(x)
        forwards += ask.notes.num_forwards * len(x)
        if looks or phase.trains:
            losses.append(ask.notes.value)
    mass = total_step_of(problem.optimizer, trained, lr)
    moved_by = sum(len(step.rows) for step in steps if moved[step.phase])
    work = Work(sum(trained), moved_by, lr, mass)
    closing = problem.ask(u, buffers_R, round)
    up, own = method.finish(closing, y_P, work, down, own, scratch)
    own = tree_map(torch.clone, own)  # a slice of a model would keep the whole model in memory
    kept = Kept(own, buffers_R if problem.buffer_rule == "personal" else kept.buffers_R)
    return Trained(y_P, buffers_R, up, kept, samples, gradients, forwards, torch.stack(losses).mean())


def total_step_of(optimizer: Optimizer, steps_F: list[int], lr: float) -> float:
    """Return ``Work.total_step`` of these steps in each phase: NaN if the optimizer has none, never a wrong number."""
    if optimizer.total_step is None:
        return math.nan
    return sum(optimizer.total_step(steps, lr) for steps in steps_F)


def local_step(
    optimizer: Optimizer, phase: Phase, layout: Layout, g_P: Tensor, state: Any, y_P: Tensor, lr: float | Tensor
) -> tuple[Tensor, Any]:
    """Return parameters and state after the optimizer's step, on the slices that the phase trains."""
    if not phase.trains:
        return y_P, state
    slices = {"body": layout.body, "head": slice(layout.body.stop, layout.num_parameters)}
    if len(y_P) > layout.num_parameters:
        slices["own"] = slice(layout.num_parameters, len(y_P))
    if slices.keys() <= set(phase.trains):
        return optimizer.update(g_P, state, y_P, lr)

    def only(trained_P: Tensor, frozen_P: Tensor) -> Tensor:
        return torch.cat([(trained_P if name in phase.trains else frozen_P)[part] for name, part in slices.items()])

    new_P, state = optimizer.update(only(g_P, torch.zeros_like(g_P)), state, y_P, lr)
    return only(new_P, y_P), state  # a frozen slice keeps its exact bits

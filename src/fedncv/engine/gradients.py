"""Gradients of every client's samples, at the model the client receives. Measuring changes nothing.

    g_ui       gradient of the loss of sample i of client u at y_u, where u's local training would begin
    g_u        = mean_i g_ui
    spread_u   = sum_i ||g_ui - g_u||^2, in each layer

The loss is that of what client u predicts with: the study's loss of logits plus the offset that the method's
``predict`` gives, so that the label prior is in it. Where a method trains another loss (FedLC, MOON, FedGen) or
adds a correction (SCAFFOLD, FedNCV), neither is: it is the clients that are measured, not the remedy.

The mode is "eval". With the statistics of a batch, BatchNorm makes the loss of a sample depend on the others of
its batch, and a sample has no gradient of its own; with the running statistics it has. Dropout is off.

Where a model is made of layers that layer_gradients knows, no sample's gradient is ever made; otherwise all of them
are, by vmap of grad. Either way in chunks of at most ``CHUNK_BYTES``, on a GPU of an eighth of what is free if that is
less (about four such arrays live at a time); beside them the clients' mean gradients are kept, N x P numbers.

Shapes: N all clients, K some of them, B samples of a chunk, P parameters, L layers (the layout's names).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.engine.layer_gradients import Listening, listening, sample_bytes, sums, understood
from fedncv.engine.problem import Arrival, Problem, State, arrivals
from fedncv.flat import Layout, Model
from fedncv.tasks import Task

CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 31}

Moments = tuple[Tensor, Tensor]  # mean_KP and spread_KL of some clients
Inputs = Callable[[Tensor], tuple[Tensor, Tensor]]  # sample numbers -> scaled inputs, targets


class Gradients(NamedTuple):
    """Of all clients; a client without samples has zeros."""

    sizes_N: Tensor  # training samples, float64
    mean_NP: Tensor
    spread_NL: Tensor  # float64


class Standing(NamedTuple):
    """A model that one or more clients share, and each one's offset on the logits."""

    y_P: Tensor
    buffers_R: Tensor
    offset_KC: Tensor | None


def of_run(problem: Problem, state: State) -> Gradients:
    """One client after the other: what every engine's ``gradients`` gives."""
    problem = problem.at(state.round)
    holders = np.flatnonzero(problem.clients.sizes)
    return collected(problem, [of_client(problem, state.round, a) for a in arrivals(problem, state, holders)])


def of_client(problem: Problem, round: int, arrival: Arrival) -> Moments:
    """Mean gradient and spread of one client, K = 1."""
    u, down, buffers_R, kept = arrival
    ask = problem.ask(u, buffers_R, round)
    y_P, _ = problem.method.begin(ask, down, kept.own)
    _, offset_C = problem.method.predict(ask, y_P, down, kept.own)
    index = torch.from_numpy(problem.clients.train[u])
    at = Standing(y_P, buffers_R, None if offset_C is None else offset_C[None])
    return moments(problem.model, problem.task, _inputs(problem), at, [index])


def _inputs(problem: Problem) -> Inputs:
    return lambda index: (problem.dataset.inputs(index, problem.dtype), problem.dataset.y[index])


def collected(problem: Problem, found: Sequence[Moments]) -> Gradients:
    """Of all clients, from those of the clients that hold samples, in the order of their ids."""
    num_clients, layout = problem.federation.num_clients, problem.model.layout
    holders = torch.from_numpy(np.flatnonzero(problem.clients.sizes)).to(problem.model.start_P.device)
    mean_NP = problem.model.start_P.new_zeros(num_clients, layout.num_parameters)
    spread_NL = mean_NP.new_zeros(num_clients, len(layout.names), dtype=torch.float64)
    mean_NP[holders] = torch.cat([mean_KP for mean_KP, _ in found])
    spread_NL[holders] = torch.cat([spread_KL for _, spread_KL in found])
    return Gradients(problem.federation.sizes_N, mean_NP, spread_NL)


def moments(model: Model, task: Task, inputs: Inputs, at: Standing, parts: Sequence[Tensor]) -> Moments:
    """Of K clients at one model; ``parts`` are their sample numbers, none of them empty."""
    index = torch.cat(list(parts)).to(at.y_P.device)
    x, target = inputs(index[:2])
    layers = listening(model)
    if layers is not None and understood(layers, task, at.y_P, at.buffers_R, x, target):
        return _of_layers(layers, task, inputs, at, parts, sample_bytes(layers, at.y_P, at.buffers_R, x))
    return _of_samples(model, task, inputs, at, parts)


class Chunk(NamedTuple):
    """Some samples in a row, which lie client by client."""

    here: slice  # the clients they belong to
    member_KB: Tensor  # 1 where a sample is a client's
    x: Tensor
    target: Tensor
    offset_BC: Tensor | None


def chunks(inputs: Inputs, at: Standing, parts: Sequence[Tensor], size: int) -> Iterator[Chunk]:
    """All samples, ``size`` at a time. Nothing in here waits for the device."""
    device = at.y_P.device
    sizes_K = np.array([len(part) for part in parts])
    ends_K = np.cumsum(sizes_K)
    index = torch.cat(list(parts)).to(device)
    owner = torch.repeat_interleave(torch.from_numpy(sizes_K)).to(device)
    for first in range(0, len(index), size):
        last = min(first + size, len(index))
        k_first, k_last = np.searchsorted(ends_K, [first, last - 1], side="right").tolist()
        here = slice(k_first, k_last + 1)
        place_B = owner[first:last] - k_first
        member_KB = place_B == torch.arange(k_last + 1 - k_first, device=device)[:, None]
        offset_BC = None if at.offset_KC is None else at.offset_KC[here][place_B]
        yield Chunk(here, member_KB.to(at.y_P.dtype), *inputs(index[first:last]), offset_BC)


def _of_layers(
    layers: Listening, task: Task, inputs: Inputs, at: Standing, parts: Sequence[Tensor], bytes_each: int
) -> Moments:
    """By layer_gradients."""
    layout, y_P = layers[0].layout, at.y_P
    total_KP = y_P.new_zeros(len(parts), layout.num_parameters)
    squares_KL = y_P.new_zeros(len(parts), len(layout.names), dtype=torch.float64)
    for here, member_KB, x, target, offset_BC in chunks(inputs, at, parts, max(2, chunk_bytes(y_P) // bytes_each)):
        found = sums(layers, task, y_P, at.buffers_R, x, target, offset_BC, member_KB)
        total_KP[here] += found.total_KP
        squares_KL[here] += found.squares_KL
    n_K = torch.tensor([len(part) for part in parts], dtype=torch.float64).to(y_P.device)
    mean_KP = total_KP / n_K[:, None].to(y_P.dtype)
    spread_KL = (squares_KL - n_K[:, None] * by_layer(mean_KP, layout)).clamp(min=0)
    return mean_KP, torch.where(n_K[:, None] > 1, spread_KL, 0.0)  # a single sample has none, whatever the rounding


def _of_samples(model: Model, task: Task, inputs: Inputs, at: Standing, parts: Sequence[Tensor]) -> Moments:
    """With a gradient of every sample. Chunks are merged as in Chan, Golub and LeVeque (1983): with d the difference
    of the means of a and b,

        mean = mean_a + d n_b / n,    spread = spread_a + spread_b + d^2 n_a n_b / n,    n = n_a + n_b
    """
    layout, y_P = model.layout, at.y_P
    each = sample_gradients(model, task)
    mean_KP = y_P.new_zeros(len(parts), layout.num_parameters)
    spread_KL = y_P.new_zeros(len(parts), len(layout.names), dtype=torch.float64)
    n_K = y_P.new_zeros(len(parts))  # samples so far
    size = max(1, chunk_bytes(y_P) // (y_P.numel() * y_P.element_size()))
    for here, member_KB, x, target, offset_BC in chunks(inputs, at, parts, size):
        g_BP = each(y_P, at.buffers_R, x, target, offset_BC)
        n_new, n_old = member_KB.sum(1), n_K[here].clone()
        n_K[here] += n_new
        new_KP = member_KB @ g_BP / n_new[:, None]
        g_BP.addmm_(member_KB.T, new_KP, alpha=-1)
        d_KP = new_KP - mean_KP[here]
        share = n_new / n_K[here]
        mean_KP[here] += share[:, None] * d_KP
        spread_KL[here] += member_KB.double() @ by_layer(g_BP, layout)
        spread_KL[here] += (share * n_old).double()[:, None] * by_layer(d_KP, layout)
    return mean_KP, spread_KL


def chunk_bytes(y_P: Tensor) -> int:
    """What the arrays of one chunk may take."""
    limit = CHUNK_BYTES.get(y_P.device.type, CHUNK_BYTES["cpu"])
    return min(limit, torch.cuda.mem_get_info(y_P.device)[0] // 8) if y_P.is_cuda else limit


def by_layer(a_KP: Tensor, layout: Layout) -> Tensor:
    """Squared norm of each layer's part."""
    pieces = torch.split(a_KP, [shape.numel() for shape in layout.shapes], dim=1)
    return torch.stack([torch.linalg.vector_norm(piece, dim=1).double().square() for piece in pieces], dim=1)


def sample_gradients(model: Model, task: Task) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """(y_P, buffers_R, inputs, targets, offset_BC) -> the gradient of every sample's own loss."""

    def loss(y_P: Tensor, buffers_R: Tensor, x: Tensor, target: Tensor, offset_C: Tensor | None) -> Tensor:
        logits = model.forward(y_P, buffers_R, x[None], mode="eval")[0].logits_BC
        return task.loss(logits if offset_C is None else logits + offset_C, target[None]).sum()

    gradient = torch.func.grad(loss)

    def each(y_P: Tensor, buffers_R: Tensor, x: Tensor, target: Tensor, offset_BC: Tensor | None) -> Tensor:
        dims = (None, None, 0, 0, None if offset_BC is None else 0)
        g_BP: Tensor = torch.vmap(gradient, in_dims=dims)(y_P, buffers_R, x, target, offset_BC)
        return g_BP

    return each


def check(problem: Problem) -> None:
    """ValueError where a sample has no gradient of its own, or ``torch.vmap`` cannot compute it."""
    model, index = problem.model, torch.arange(min(2, len(problem.dataset.x)))
    x, target = _inputs(problem)(index)

    def logits(some: Tensor) -> Tensor:
        return model.forward(model.start_P, model.start_R, some, mode="eval")[0].logits_BC

    try:
        with torch.no_grad():
            together, alone = logits(x), torch.cat([logits(each[None]) for each in x])
        sample_gradients(model, problem.task)(model.start_P, model.start_R, x, target, None)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"probe: this model gives no gradients of single samples ({reason}); leave probe empty"
        ) from None
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-4):
        raise ValueError("probe: a layer of this model lets samples see each other in mode eval; leave probe empty")

"""Measure the gradients of every client's samples at the model that the client receives. Changes nothing.

    g_ui       gradient of the loss of sample i of client u at y_u, where u's local training would begin
    g_u        = mean_i g_ui
    spread_u   = sum_i ||g_ui - g_u||^2, in each layer

The loss is the study's loss of the logits plus the offset of the method's ``predict``, so it includes the label
prior. It does not include other training losses (FedLC, MOON, FedGen, FedRoD), corrections (SCAFFOLD, FedNCV), or what
a client decides by beside the model (pFedFDA, kNN-Per): the clients are measured, not the remedy.

The mode is "eval". With batch statistics, BatchNorm makes the loss of a sample depend on the other samples of its
batch, so a sample has no gradient of its own; with running statistics it has one. Dropout is off.

If layer_gradients knows all layers of the model, no sample's gradient is ever computed; otherwise vmap of grad
computes all of them. (Compiled layers are for training; here the model uses torch's own.) Both work in chunks whose
largest array has at most ``CHUNK_BYTES``, or on a GPU an eighth of the free memory if that is less (about four such
arrays exist at a time). In addition the clients' mean gradients are kept, N x P numbers.

Shapes: N all clients, K some of them, B samples of a chunk, P parameters, L layers (the layout's names).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.engine.layer_gradients import Listening, Sums, add, layers_of, listen, sum_by_client
from fedncv.engine.looking import surveyed
from fedncv.engine.problem import Arrival, Problem, State, arrivals
from fedncv.flat import Model
from fedncv.layout import Layout
from fedncv.tasks import Task

CHUNK_BYTES = {"cpu": 1 << 25, "cuda": 1 << 30}
"""Measured on an H200 with LeNet5: 4,096 sample gradients at a time (4,326 fit) are within 6 % of the fastest, 1,024
take three times as long; moments from layers gain only 2 % above 16,384 samples (19,972 fit).
`bench/probes.py --device cuda --seeds 1 --ways`"""

Moments = tuple[Tensor, Tensor]  # mean_KP and spread_KL of some clients
Inputs = Callable[[Tensor], tuple[Tensor, Tensor]]  # sample numbers -> scaled inputs, targets


class Gradients(NamedTuple):
    """Gradients of all clients; zeros for a client without samples."""

    sizes_N: Tensor  # training samples, float64
    mean_NP: Tensor
    spread_NL: Tensor  # float64


class Standing(NamedTuple):
    """A model that one or more clients share, and each one's offset on the logits."""

    y_P: Tensor
    buffers_R: Tensor
    offset_KC: Tensor | None


def of_run(problem: Problem, state: State) -> Gradients:
    """Measure one client after the other; every engine's ``gradients`` returns the same."""
    problem = problem.at(state.round)
    holders = problem.holders
    return collected(problem, [of_client(problem, state.round, a) for a in arrivals(problem, state, holders)])


def of_client(problem: Problem, round: int, arrival: Arrival) -> Moments:
    """Return mean gradient and spread of one client, K = 1."""
    u, down, buffers_R, kept = arrival
    ask = problem.ask(u, buffers_R, round)
    y_P, _ = problem.method.begin(ask, down, kept.own)
    ask = problem.ask(u, buffers_R, round, survey=surveyed(problem, round, arrival, y_P))
    offset_C = problem.method.predict(ask, y_P, down, kept.own).offset_C
    y_P = y_P[: problem.model.layout.num_parameters]
    index = torch.from_numpy(problem.clients.train[u])
    at = Standing(y_P, buffers_R, None if offset_C is None else offset_C[None])
    return moments(problem.plain or problem.model, problem.task, _inputs(problem), at, [index])


def _inputs(problem: Problem) -> Inputs:
    return lambda index: (problem.dataset.inputs(index, problem.dtype), problem.dataset.y[index])


def collected(problem: Problem, found: Iterable[Moments]) -> Gradients:
    """Combine the moments of the clients with samples, in the order of their ids, to those of all clients."""
    num_clients, layout = problem.federation.num_clients, problem.model.layout
    holders = torch.from_numpy(problem.holders).to(problem.model.start_P.device)
    mean_NP = problem.model.start_P.new_zeros(num_clients, layout.num_parameters)
    spread_NL = mean_NP.new_zeros(num_clients, len(layout.names), dtype=torch.float64)
    done = 0
    for mean_KP, spread_KL in found:
        here = holders[done : done + len(mean_KP)]
        mean_NP[here], spread_NL[here] = mean_KP, spread_KL
        done += len(mean_KP)
    assert done == len(holders)
    return Gradients(problem.federation.sizes_N, mean_NP, spread_NL)


def moments(model: Model, task: Task, inputs: Inputs, at: Standing, parts: Sequence[Tensor]) -> Moments:
    """Return the moments of K clients at one model; ``parts`` are their sample numbers, none of them empty."""
    told = layers_of(model, task, lambda: inputs(parts[0][:2].to(at.y_P.device)))
    if told is None:
        size = max(1, chunk_bytes(at.y_P) // (at.y_P.numel() * at.y_P.element_size()))
        return of_samples(model, task, inputs, at, parts, size)
    layers, bytes_each = told
    return of_layers(layers, task, inputs, at, parts, max(2, chunk_bytes(at.y_P) // bytes_each))


class Chunk(NamedTuple):
    """Consecutive samples, ordered by client."""

    here: slice  # the clients they belong to
    sizes: list[int]  # and how many are whose
    x: Tensor
    target: Tensor
    offset_BC: Tensor | None


def chunks(inputs: Inputs, at: Standing, parts: Sequence[Tensor], size: int) -> Iterator[Chunk]:
    """Yield all samples, ``size`` at a time, without waiting for the device."""
    ends_K = np.cumsum([len(part) for part in parts])
    index = torch.cat(list(parts)).to(at.y_P.device)
    offset_BC = None
    if at.offset_KC is not None:
        owner = torch.repeat_interleave(torch.tensor([len(part) for part in parts])).to(at.y_P.device)
    for first in range(0, len(index), size):
        last = min(first + size, len(index))
        k_first, k_last = np.searchsorted(ends_K, [first, last - 1], side="right").tolist()
        sizes = np.diff([first, *ends_K[k_first:k_last], last]).tolist()
        if at.offset_KC is not None:
            offset_BC = at.offset_KC[owner[first:last]]
        yield Chunk(slice(k_first, k_last + 1), sizes, *inputs(index[first:last]), offset_BC)


def of_layers(
    layers: Listening, task: Task, inputs: Inputs, at: Standing, parts: Sequence[Tensor], size: int
) -> Moments:
    """Return the moments by layer_gradients, ``size`` samples at a time."""
    layout, y_P = layers[0].layout, at.y_P
    n_K = torch.tensor([len(part) for part in parts], dtype=torch.float64).to(y_P.device)
    total_KP = y_P.new_zeros(len(parts), layout.num_parameters)
    squares_KL = y_P.new_zeros(len(parts), len(layout.names), dtype=torch.float64)
    for here, sizes, x, target, offset_BC in chunks(inputs, at, parts, size):
        calls = listen(layers, task, y_P, at.buffers_R, x, target, offset_BC)
        add(Sums(total_KP[here], squares_KL[here]), layout, calls, sizes)
    mean_KP = total_KP / n_K[:, None].to(y_P.dtype)
    spread_KL = (squares_KL - n_K[:, None] * by_layer(mean_KP, layout)).clamp(min=0)
    return mean_KP, torch.where(n_K[:, None] > 1, spread_KL, 0.0)  # a single sample has no spread, also after rounding


def of_samples(model: Model, task: Task, inputs: Inputs, at: Standing, parts: Sequence[Tensor], size: int) -> Moments:
    """Return the moments from the gradient of every sample. Chunks are merged as in Chan, Golub and LeVeque (1983):
    with d the difference of the means of a and b,

        mean = mean_a + d n_b / n,    spread = spread_a + spread_b + d^2 n_a n_b / n,    n = n_a + n_b
    """
    layout, y_P = model.layout, at.y_P
    each = sample_gradients(model, task)
    mean_KP = y_P.new_zeros(len(parts), layout.num_parameters)
    spread_KL = y_P.new_zeros(len(parts), len(layout.names), dtype=torch.float64)
    done_K = np.zeros(len(parts))  # samples so far
    for here, sizes, x, target, offset_BC in chunks(inputs, at, parts, size):
        g_BP = each(y_P, at.buffers_R, x, target, offset_BC)
        n_old, n_new = torch.from_numpy(np.stack([done_K[here], sizes])).to(y_P.device, non_blocking=True)
        done_K[here] += sizes
        share = n_new / (n_old + n_new)
        new_KP = sum_by_client(g_BP, sizes) / n_new[:, None].to(y_P.dtype)
        for g, new_P in zip(torch.split(g_BP, sizes), new_KP, strict=True):
            g -= new_P
        d_KP = new_KP - mean_KP[here]
        mean_KP[here] += share[:, None].to(y_P.dtype) * d_KP
        spread_KL[here] += sum_by_client(by_layer(g_BP, layout), sizes)
        spread_KL[here] += (share * n_old)[:, None] * by_layer(d_KP, layout)
    return mean_KP, spread_KL


def chunk_bytes(y_P: Tensor) -> int:
    """Return the bytes that the arrays of one chunk may use."""
    limit = CHUNK_BYTES.get(y_P.device.type, CHUNK_BYTES["cpu"])
    return min(limit, torch.cuda.mem_get_info(y_P.device)[0] // 8) if y_P.is_cuda else limit


def by_layer(a_KP: Tensor, layout: Layout) -> Tensor:
    """Return the squared norm of each layer's part."""
    pieces = torch.split(a_KP, [shape.numel() for shape in layout.shapes], dim=1)
    return torch.stack([torch.linalg.vector_norm(piece, dim=1).double().square() for piece in pieces], dim=1)


def sample_gradients(model: Model, task: Task) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return a function (y_P, buffers_R, inputs, targets, offset_BC) -> the gradient of every sample's own loss."""

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
    """Raise ValueError if a sample has no gradient of its own, or ``torch.vmap`` cannot compute it."""
    if problem.config.precision == "bf16":
        raise ValueError(
            "probe: the rounding of precision=bf16 would be measured as variance; use precision=torch or no probe"
        )
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
        raise ValueError("probe: in this model samples of a batch affect each other in eval mode; leave probe empty")

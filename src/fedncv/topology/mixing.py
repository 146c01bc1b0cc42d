"""Mixing matrices: W_uv is the weight with which client u takes what client v sends.

    metropolis   W_uv = 1 / (1 + max(d_u, d_v)),   W_uu = 1 - sum_v W_uv       d_u: neighbours of u
    received     W_uv = W_uu = 1 / (1 + r_u)                                   r_u: messages that u received

Rows always sum to one. With Metropolis weights on an undirected graph columns do too, because W is symmetric: then
mixing keeps the mean of all clients. Clients that are away take no part: the weights are those of the graph among the
others, and an absent client keeps what it has, W_uu = 1.

    spectral gap = 1 - ||(I - J) W||_2,    J = 1 1^T / N

It is the share of the disagreement that mixing surely removes: 1 for the complete graph, 0 for a graph in parts.
Matrices are sparse and in float64. Letters: N all clients, E links.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

from fedncv.topology.graphs import Links, among
from fedncv.tree import tree_map

DENSE = 1 / 8  # share of entries that are not zero from which on a dense product is faster
TOLERANCE = 1e-9  # of sums that should be one
SMALL = 256  # clients up to which the spectral gap is computed from the dense matrix


class Mixing(NamedTuple):
    """W as a sparse matrix, with the links that it was made of and the clients that are awake."""

    W_NN: csr_array
    num_links: int  # messages that cross
    awake_N: NDArray[np.bool_]


def metropolis(links: Links, awake_N: NDArray[np.bool_]) -> Mixing:
    """Return Metropolis weights of an undirected graph among the clients that are awake.

    >>> chain = np.array([[0, 1], [1, 0], [1, 2], [2, 1]])
    >>> (metropolis(chain, np.array([True] * 3)).W_NN.toarray() * 3).round(9).tolist()
    [[2.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 2.0]]
    """
    u, v = among(links, awake_N).T
    degree_N = np.bincount(u, minlength=len(awake_N))
    return _with_rest(u, v, 1 / (1 + np.maximum(degree_N[u], degree_N[v])), awake_N)


def received(links: Links, awake_N: NDArray[np.bool_]) -> Mixing:
    """Return the plain mean of a client's own model and those that it received."""
    u, v = among(links, awake_N).T
    return _with_rest(u, v, 1 / (1 + np.bincount(u, minlength=len(awake_N))[u]), awake_N)


def given(weights_NN: NDArray[np.float64]) -> Mixing:
    """Return a matrix of the user's own."""
    off = weights_NN - np.diag(np.diag(weights_NN))
    return Mixing(csr_array(weights_NN), int(np.count_nonzero(off)), np.ones(len(weights_NN), dtype=bool))


def halfway(mixing: Mixing) -> Mixing:
    """Return (I + W) / 2: its eigenvalues are above -1/3 and not negative if W is symmetric, as D² needs."""
    eye_NN = csr_array((np.ones(len(mixing.awake_N)), np.arange(len(mixing.awake_N)), range(len(mixing.awake_N) + 1)))
    return mixing._replace(W_NN=csr_array((eye_NN + mixing.W_NN) / 2))


def _with_rest(
    u: NDArray[np.int64], v: NDArray[np.int64], weight_E: NDArray[np.float64], awake_N: NDArray[np.bool_]
) -> Mixing:
    """Return W with these weights beside the diagonal, and on it what is left to one."""
    num_clients = len(awake_N)
    rest_N = 1 - np.bincount(u, weights=weight_E, minlength=num_clients)
    each = np.arange(num_clients)
    places = np.concatenate([u, each]), np.concatenate([v, each])
    W_NN = csr_array((np.concatenate([weight_E, rest_N]), places), shape=(num_clients, num_clients))
    W_NN.sort_indices()
    return Mixing(W_NN, len(u), awake_N)


def check_rows(W_NN: csr_array) -> None:
    """Raise ValueError unless W holds weights: finite, none negative, rows that sum to one."""
    if not np.isfinite(W_NN.data).all() or (W_NN.data < 0).any():
        raise ValueError("weights must be finite and not negative; make all numbers of the matrix at least 0")
    sums_N = np.asarray(W_NN.sum(axis=1))
    wrong = np.flatnonzero(np.abs(sums_N - 1) > TOLERANCE)
    if len(wrong):
        u = int(wrong[0])
        raise ValueError(f"row {u} of the mixing matrix sums to {sums_N[u]:.6g}; every row must sum to 1")


def spectral_gap(mixing: Mixing) -> float:
    """Return 1 - ||(I - J) W||_2 of the clients that are awake; 0 for fewer than two.

    >>> complete = np.array([[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]])
    >>> round(spectral_gap(metropolis(complete, np.array([True] * 3))), 12)
    1.0
    """
    awake = np.flatnonzero(mixing.awake_N)
    if len(awake) < 2:
        return 0.0
    W = mixing.W_NN[awake][:, awake]
    if len(awake) <= SMALL:
        dense = W.toarray()
        return _clipped(1 - float(np.linalg.norm(dense - dense.mean(axis=0), 2)))

    def away(x: NDArray[np.float64]) -> NDArray[np.float64]:
        y: NDArray[np.float64] = np.asarray(W @ x.ravel())
        return np.asarray(y - y.mean())

    def back(x: NDArray[np.float64]) -> NDArray[np.float64]:
        x = x.ravel()
        y: NDArray[np.float64] = W.T @ (x - x.mean())
        return y

    operator = LinearOperator(W.shape, matvec=away, rmatvec=back, dtype=np.float64)
    start = np.random.Generator(np.random.Philox(key=len(awake))).normal(size=len(awake))  # the same in every run
    largest = svds(operator, k=1, v0=start, return_singular_vectors=False, tol=1e-10)[0]
    return _clipped(1 - float(largest))


def _clipped(gap: float) -> float:
    """Return the gap without the last digits of rounding, which may put it below 0 or above 1."""
    return round(min(1.0, max(0.0, gap)), 12)


def effective_clients(mixing: Mixing) -> float:
    """Return N / ||W||_F^2: the number of clients whose mean has the variance that the mixed update has.

    If updates are independent with equal variance s, the variance of sum_v W_uv Delta_v is s * sum_v W_uv^2, on
    average over u.

    >>> effective_clients(metropolis(np.array([[0, 1], [1, 0]]), np.array([True] * 2)))
    2.0
    """
    return float(len(mixing.awake_N) / np.square(mixing.W_NN.data).sum())


# ---- products ------------------------------------------------------------------------------------------------


def operator(matrix: csr_array, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a matrix as a tensor for ``mixed``: sparse, or dense if few of its entries are zero."""
    if matrix.nnz > DENSE * matrix.shape[0] * matrix.shape[1]:
        return torch.from_numpy(matrix.toarray()).to(device, dtype)
    coo = matrix.tocoo()
    places = torch.from_numpy(np.stack([coo.row, coo.col]).astype(np.int64))
    values = torch.from_numpy(coo.data).to(dtype)
    return torch.sparse_coo_tensor(places, values, coo.shape, check_invariants=False).coalesce().to(device)


def mixed(matrix: csr_array, tree: Any) -> Any:
    """Return sum_v W_uv a_v for every tensor a of the tree whose first axis is the clients'.

    Tensors of whole numbers, such as keys, are not mixed.
    """
    made: dict[torch.dtype, Tensor] = {}

    def one(a_N: Tensor) -> Tensor:
        if not a_N.is_floating_point():
            return a_N
        if not a_N.numel():
            return a_N.new_zeros(matrix.shape[0], *a_N.shape[1:])
        if a_N.dtype not in made:
            made[a_N.dtype] = operator(matrix, dtype=a_N.dtype, device=a_N.device)
        flat: Tensor = made[a_N.dtype] @ a_N.reshape(len(a_N), -1)
        return flat.reshape(matrix.shape[0], *a_N.shape[1:])

    return tree_map(one, tree)

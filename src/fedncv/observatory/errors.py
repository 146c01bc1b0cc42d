"""The error of a server's step over the draw of clients, at one frozen state.

    step(S) = x - model(aggregate(server, answers of S))        the method's own aggregate, unchanged; the model
                                                                is the one that clients begin with
    error   = step(S) - step(all)                               all: all answer, each with probability 1

Most servers are affine in their answers, in one of three forms. With d_u = step({u}), the step if u alone answered:

    mean    step(S) = sum_S d_u / |S|
    ratio   step(S) = sum_S n_u d_u / sum_S n_u                 self-normalised weights
    sum     step(S) = b + sum_S (d_u - b)                       Horvitz-Thompson weights; b is known before the draw

A method does not declare its form: each form is tried against the method's aggregate, with every client in one of the
trials. If no form gives its steps up to rounding ("none": FedAdam, FedAdp, …), every draw goes through the aggregate.
In a form the error is sum_k a_k v_k with v known and a(S) random, so every moment of it needs only E[a], E[a a'] and
inner products:

    mean squared error  E|error|^2 = sum_kl E[a_k a_l] <v_k, v_l>  =  |E error|^2 + Var  =  bias^2 + variance

E[a a'] has a closed form for mean and sum under uniform draws; otherwise it is over all draws if they can be listed;
otherwise over keyed draws, the same for every method, with jackknife intervals (unit of resampling: the draw).

Letters: N clients that answer, D draws, K = N + 1 vectors (the last is constant), P parameters.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from math import comb
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedncv.config import short_name
from fedncv.engine import sampling
from fedncv.engine.problem import Problem, State, arrivals
from fedncv.estimators import uniform_joint_inclusion
from fedncv.keys import generator, key_for
from fedncv.methods.base import Replies, ServerAsk, aggregate
from fedncv.observatory.everyone import Everyone, doubled
from fedncv.observatory.remembered import named_rows
from fedncv.tree import row, tree_map

Form = Literal["mean", "ratio", "sum", "none"]
MOST_LISTED = 20_000  # draws; above this a sample of them is drawn
MOST_AGGREGATED = 200  # most draws that go through the aggregate one by one
ROUNDING = 1e-9  # tolerance of a form, relative to the largest step


class Interval(NamedTuple):
    """A number with its 95 % interval; an exact one has no width."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float | Tensor) -> "Interval":
        return cls(float(value), float(value), float(value))


class Draws(NamedTuple):
    in_DN: Tensor  # 1 where the client answers, float64
    listed: bool  # these are all possible draws, equally likely
    num_drawn: int | None  # m, if the draw is uniform: m of the N that answer

    @property
    def how(self) -> str:
        return f"all {len(self.in_DN):,} draws" if self.listed else f"{len(self.in_DN):,} draws"


class Weights(NamedTuple):
    """The random coefficients a(S) of an error, and their moments."""

    a_DK: Tensor
    mean_K: Tensor
    second_KK: Tensor  # E[a a']
    exact: bool  # moments over the whole design, not over a sample of draws


class Server(NamedTuple):
    """A frozen server and the answers of all clients."""

    x_P: Tensor
    state: object
    sizes_N: Tensor
    inclusion_N: Tensor
    answer: Callable[[Tensor, bool], object]
    """(places among the answers, whether all were certain to answer) -> the server's next state."""
    step: Callable[[Tensor, bool], Tensor]
    """The same arguments -> x - the model of the next state."""

    @property
    def p_N(self) -> Tensor:
        return self.sizes_N / self.sizes_N.sum()


def frozen_server(problem: Problem, state: State, answers: Everyone) -> Server:
    """Return the server at ``state``, in float64, with the method's own aggregate."""
    problem = problem.at(state.round)
    method, device = problem.method, answers.ids_N.device
    refuse_private(problem)
    server, ids = doubled(state.server), answers.ids_N
    first = int(ids[0])
    (arrival,) = arrivals(problem, state, np.array([first]))
    begins = problem.ask(first, arrival.buffers_R, state.round)
    own = tree_map(lambda leaf: leaf.to(device), doubled(arrival.kept.own))
    ask = ServerAsk(problem.model, state.round, key_for(problem.config.seed, "server", state.round).to(device))
    sizes_N = problem.federation.sizes_N.to(device)[ids]
    inclusion_N = torch.from_numpy(problem.inclusion_N).to(device)[ids] * (1 - problem.config.dropout)

    def answer(some: Tensor, certain: bool) -> object:
        inclusion_S = torch.ones_like(inclusion_N[some]) if certain else inclusion_N[some]
        ups = tree_map(lambda leaf: leaf[some], answers.ups)
        return aggregate(method, ask, server, Replies(ups, ids[some], sizes_N[some], inclusion_S)).server

    def model(server: object) -> Tensor:
        return method.begin(begins, row(method.broadcast(server, ids[:1]), 0), own)[0]

    x_P = model(server)

    def step(some: Tensor, certain: bool) -> Tensor:
        return x_P - model(answer(some, certain))

    return Server(x_P, server, sizes_N, inclusion_N, answer, step)


def refuse_private(problem: Problem) -> None:
    """Raise ValueError if the method adds noise for privacy: its step with all replies is not what a step aims at."""
    if problem.method.privacy is not None:
        raise ValueError(
            f"{short_name(problem.config.method)} cannot be compared with the step of all clients: it divides sums by "
            "the expected weight of a cohort, and adds noise; measure the method without +dp"
        )


# ---- draws ---------------------------------------------------------------------------------------------


def draws_of(problem: Problem, state: State, answers: Everyone, *, num_draws: int) -> Draws:
    """Return all draws of the study's sampling if they can be listed, else ``num_draws`` keyed by seed and round.

    A draw without an answer does not change the server, and is left out.
    """
    problem = problem.at(state.round)
    config, ids = problem.config, answers.ids_N.cpu().numpy()
    n, m = problem.federation.num_clients, config.per_round
    uniform = config.sampling == "uniform" and config.dropout == 0 and len(ids) == n
    if uniform and comb(n, m) <= MOST_LISTED:
        places_DS = torch.tensor(list(combinations(range(n), m)))
        in_DN = torch.zeros(len(places_DS), n, dtype=torch.float64).scatter(1, places_DS, 1.0)
        return Draws(in_DN.to(answers.ids_N.device), True, m)
    rng = generator(config.seed, "probe draws", state.round)
    in_DN = torch.zeros(num_draws, n, dtype=torch.float64)
    for d in range(num_draws):
        in_DN[d, torch.from_numpy(_draw(problem, rng))] = 1.0
    in_DN *= torch.from_numpy(rng.random((num_draws, n)) >= config.dropout)
    in_DN = in_DN[:, torch.from_numpy(ids)]
    return Draws(in_DN[in_DN.any(dim=1)].to(answers.ids_N.device), False, m if uniform else None)


def _draw(problem: Problem, rng: np.random.Generator) -> sampling.Ids:
    if problem.config.sampling == "uniform":
        return sampling.draw_uniform(rng, problem.federation.num_clients, problem.config.per_round)
    if problem.config.sampling == "poisson":
        return sampling.draw_poisson(rng, problem.federation.num_clients, problem.config.per_round)
    if problem.config.sampling == "weighted":
        return sampling.draw_systematic(rng, problem.inclusion_N)
    return sampling.draw_available(rng, problem.rates_N, problem.config.per_round)


def weights(form: Form, draws: Draws, n_N: Tensor) -> Weights:
    """Return a(S) of the form for every draw, followed by a constant 1, and its moments.

    Uniform draws of m: E[1_u] = m/N, E[1_u 1_v] = m(m-1)/(N(N-1)); mean divides by m, and by m^2.
    """
    in_DN, m = draws.in_DN, draws.num_drawn
    w_DN = in_DN
    if form != "sum":
        share_DN = in_DN * n_N if form == "ratio" else in_DN
        w_DN = share_DN / share_DN.sum(dim=1, keepdim=True)
    a_DK = torch.cat([w_DN, torch.ones_like(w_DN[:, :1])], dim=1)
    if m is None or form == "ratio":
        return Weights(a_DK, a_DK.mean(dim=0), a_DK.T @ a_DK / len(a_DK), draws.listed)
    scale = 1 / m if form == "mean" else 1.0
    joint_NN = uniform_joint_inclusion(len(n_N), m).to(in_DN.device)
    mean_N = scale * joint_NN.diagonal()
    mean_K = torch.cat([mean_N, mean_N.new_ones(1)])
    second_KK = torch.outer(mean_K, mean_K)
    second_KK[:-1, :-1] = scale**2 * joint_NN
    return Weights(a_DK, mean_K, second_KK, True)


# ---- the form of a server ------------------------------------------------------------------------------


class Errors(NamedTuple):
    """error = sum_k a_k v_k."""

    form: Form
    weights: Weights
    v_KP: Tensor
    how: str
    listed: bool  # the draws are all possible ones
    d_NP: Tensor  # the step if u alone answered
    base_P: Tensor  # b in the form "sum", 0 in others
    full_P: Tensor  # the step if all answered


def errors_of(server: Server, draws: Draws, answers: Everyone) -> Errors:
    """Return the errors of a server over these draws, in the simplest form that it has."""
    everybody = torch.arange(len(server.sizes_N), device=draws.in_DN.device)
    full_P, trials = server.step(everybody, True), _trials(server, draws)
    pair_P = server.step(everybody[:2], False)

    def tried(d_NP: Tensor) -> tuple[Form, Tensor, Tensor]:
        base_P = d_NP[0] + d_NP[1] - pair_P if len(everybody) > 1 else torch.zeros_like(full_P)
        return find_form(server, trials, d_NP, base_P), d_NP, base_P

    form, d_NP, base_P = next(
        (found for found in map(tried, guesses(server, answers)) if found[0] != "none"), None
    ) or tried(torch.stack([server.step(u[None], False) for u in everybody]))
    if form == "none":
        return _drawn_errors(server, draws, d_NP, full_P)
    if form == "sum":
        v_KP = torch.cat([d_NP - base_P, (base_P - full_P)[None]])
    else:  # the weights sum to one
        base_P = torch.zeros_like(full_P)
        v_KP = torch.cat([d_NP - full_P, base_P[None]])
    of_draws = weights(form, draws, server.sizes_N)
    how = draws.how if draws.listed or not of_draws.exact else "closed form"
    return Errors(form, of_draws, v_KP, how, draws.listed, d_NP, base_P, full_P)


class Trials(NamedTuple):
    """Steps of the aggregate itself: of groups that hold every client once, and of two draws."""

    in_TN: Tensor
    steps_TP: Tensor


def _trials(server: Server, draws: Draws) -> Trials:
    size = max(1, int(draws.in_DN[0].sum()))
    clients_NN = torch.eye(len(server.sizes_N), dtype=draws.in_DN.dtype, device=draws.in_DN.device)
    groups = [some_SN.sum(dim=0) for some_SN in torch.split(clients_NN, size)]
    in_TN = torch.stack([*groups, draws.in_DN[0], draws.in_DN[-1]])
    return Trials(in_TN, torch.stack([server.step(torch.nonzero(in_N)[:, 0], False) for in_N in in_TN]))


def find_form(server: Server, trials: Trials, d_NP: Tensor, base_P: Tensor) -> Form:
    """Return the first form that gives the aggregate's own steps in all trials, up to rounding."""
    in_TN, steps_TP = trials
    largest = torch.linalg.vector_norm(torch.cat([d_NP, steps_TP]), dim=1).max()
    forms: tuple[Form, ...] = ("mean", "ratio", "sum")
    for form in forms:
        w_TN = weights(form, Draws(in_TN, False, None), server.sizes_N).a_DK[:, :-1]
        made_TP = base_P + w_TN @ (d_NP - base_P) if form == "sum" else w_TN @ d_NP
        if bool((torch.linalg.vector_norm(made_TP - steps_TP, dim=1) <= ROUNDING * largest).all()):
            return form
    return "none"


def guesses(server: Server, answers: Everyone) -> Iterator[Tensor]:
    """Yield d_u = k + omega_u (Delta_u - beta h_u): the steps of servers with a memory, and with beta = 0 without one.

    k and beta fit the steps of two clients; omega_u = 1 or p_u / P(u in S); a client never seen has h_u = 0 or the
    mean of those seen. Only the trials, which hold every client, confirm a guess. A right guess saves aggregating
    every client alone.
    """
    delta_NP, p_N = answers.delta_NP, server.p_N
    everybody = torch.arange(len(p_N), device=delta_NP.device)
    h = named_rows(server.state, "h", answers.ids_N)
    if h is not None and (len(h.places_M) < 2 or h.rows_M.shape[1:] != delta_NP.shape[1:]):
        h = None
    i, j = (int(u) for u in h.places_M[:2]) if h is not None else (0, len(p_N) - 1)
    d_iP, d_jP = (server.step(everybody[u : u + 1], False) for u in (i, j))
    memories = [torch.zeros_like(delta_NP)]
    if h is not None:
        mean_P = p_N[h.places_M] @ h.rows_M / p_N[h.places_M].sum()
        memories = [rest_P.expand_as(delta_NP).index_copy(0, h.places_M, h.rows_M) for rest_P in (mean_P, 0 * mean_P)]
    for omega_N in (torch.ones_like(p_N), p_N / server.inclusion_N):
        fresh_NP = omega_N[:, None] * delta_NP
        for h_NP in memories:
            known_NP = omega_N[:, None] * h_NP
            apart_P, old_P = fresh_NP[i] - fresh_NP[j] - (d_iP - d_jP), known_NP[i] - known_NP[j]
            beta = (apart_P @ old_P) / old_P.square().sum().clamp(min=1e-300)
            d_NP = fresh_NP - beta * known_NP
            yield d_NP + (d_iP - d_NP[i])


def _drawn_errors(server: Server, draws: Draws, d_NP: Tensor, full_P: Tensor) -> Errors:
    """Pass each draw through the aggregate: the errors themselves are the vectors, each drawn once."""
    chosen_DN, listed = draws.in_DN, draws.listed
    if len(chosen_DN) > MOST_AGGREGATED:
        places = np.random.Generator(np.random.Philox(key=len(chosen_DN))).permutation(len(chosen_DN))
        chosen_DN, listed = chosen_DN[torch.from_numpy(np.sort(places[:MOST_AGGREGATED])).to(full_P.device)], False
    e_DP = torch.stack([server.step(torch.nonzero(in_N)[:, 0], False) - full_P for in_N in chosen_DN])
    one_DD = torch.eye(len(e_DP), dtype=e_DP.dtype, device=e_DP.device)
    each = Weights(one_DD, one_DD.mean(dim=0), one_DD / len(e_DP), listed)
    how = Draws(chosen_DN, listed, None).how + " through the aggregate"
    return Errors("none", each, e_DP, how, listed, d_NP, torch.zeros_like(full_P), full_P)


# ---- moments and intervals -----------------------------------------------------------------------------


class Spread(NamedTuple):
    """second = bias2 + variance, exactly."""

    second: Interval  # E<error, other>
    bias2: Interval  # <E error, E other>
    variance: Interval  # Cov(error, other)


def spread(of: Weights, v_KP: Tensor, other_KP: Tensor | None = None) -> Spread:
    """Return moments of sum_k a_k v_k, or of it and another error with the same coefficients.

    Exact:   second = sum_kl E[a_k a_l] <v_k, w_l>,  bias2 = <sum E[a_k] v_k, sum E[a_k] w_k>,  variance the rest.
    Drawn:   with e_i, f_i of the D draws, second = mean <e_i, f_i>, and without the noise of the mean in them
             variance = (sum <e_i, f_i> - <sum e, sum f> / D) / (D - 1),   bias2 = second - variance.
    """
    other_KP = v_KP if other_KP is None else other_KP
    gram_KK = v_KP @ other_KP.T
    if of.exact:
        second, bias2 = (of.second_KK * gram_KK).sum(), (of.mean_K @ v_KP) @ (of.mean_K @ other_KP)
        return Spread(Interval.exact(second), Interval.exact(bias2), Interval.exact(second - bias2))
    each_D, sum_K = each_product(of, gram_KK), of.a_DK.sum(dim=0)
    total, squared = each_D.sum(), sum_K @ gram_KK @ sum_K
    squared_D = squared - of.a_DK @ (gram_KK @ sum_K) - of.a_DK @ (gram_KK.T @ sum_K) + each_D  # without draw i
    num = len(each_D)
    second, second_D = total / num, (total - each_D) / (num - 1)
    variance = (total - squared / num) / (num - 1)
    variance_D = (total - each_D - squared_D / (num - 1)) / (num - 2)
    return Spread(
        jackknife(second, second_D),
        jackknife(second - variance, second_D - variance_D),
        jackknife(variance, variance_D),
    )


def each_product(of: Weights, gram_KK: Tensor) -> Tensor:
    """Return <e_i, f_i> of every draw i."""
    return ((of.a_DK @ gram_KK) * of.a_DK).sum(dim=1)


def jackknife(value: Tensor, without_D: Tensor) -> Interval:
    """value ± 1.96 sqrt((D - 1)/D sum_i (theta_i - mean theta)^2), theta_i the value without unit i."""
    num = len(without_D)
    half = 1.96 * float(((num - 1) / num * (without_D - without_D.mean()).square().sum()).sqrt())
    return Interval(float(value), float(value) - half, float(value) + half)


def of_means(function: Callable[..., Tensor], *scalars_D: Tensor, exact: bool) -> Interval:
    """Return ``function`` of the means over draws of these scalars, with its jackknife interval."""
    value = function(*(x_D.mean() for x_D in scalars_D))
    if exact:
        return Interval.exact(value)
    num = len(scalars_D[0])
    return jackknife(value, function(*((x_D.sum() - x_D) / (num - 1) for x_D in scalars_D)))

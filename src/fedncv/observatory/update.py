"""Probe the update: train all clients from a frozen state and compare the server's step with full participation.

With Delta_u = x - y_u, p_u = n_u / n, g = sum_u p_u Delta_u (full participation), and errors as in errors.py:

    full2        |g|^2, the reference for all squared numbers
    mse, bias2, variance    of the step over the draw, around the method's own step with all replies
                 mse = bias2 + variance
    offset2      |step(all) - g|^2: what the server adds or reweighs on purpose (velocity, SCAFFOLD's equal weights)
    aims         is step(all) = g + a term known before the draw? Otherwise mse is around another target or scale.
                 Tested by a second training of all clients: step(all) must change by as much as g does
    plain, …     the same for FedAvg's self-normalised weights p_u / sum_S p_v on the same Delta_u
    times        plain / mse
    cosine       E cos(g + error, g)                                       (unit: the draw, unless all were listed)
    drift        sqrt(sum_u p_u |Delta_u|^2), length of the clients' updates        (unit of resampling: the client)
    apart        sum_u p_u |Delta_u - g|^2, spread of the clients' updates          (unit: the client)
    within       E_S Var(step | S) over batch orders;   between   Var_S(E[step | S]);   together the variance over both.
                 From two independent trainings d, d' of all clients, with w the weights of the draw:
                 within = E|sum_u w_u (d_u - d'_u)|^2 / 2,   between = Cov_S(sum_u w_u d_u, sum_u w_u d'_u)
    beta         the factor of the stored updates h_u in the step (found from the step itself)
    beta_best    E<e_Delta, e_h> / E|e_h|^2, which minimises mse: e_Delta, e_h the errors of Delta and h under the
                 method's weights, since mse(beta) = E|e_Delta|^2 - 2 beta E<e_Delta, e_h> + beta^2 E|e_h|^2
    without      mse(0), the error without the memory
    best         mse(beta_best) = (1 - rho2) mse(0)
    alpha        of every client seen, in use;   alpha_best   <c_u' - c', c_u - c> / |c_u - c|^2 in [0, 1], with the
                 gradients c_u' that this training found
    drift_…      sum_u p_u |c_u' - c' - alpha_u (c_u - c)|^2 with alpha_u = 0 (without), in use (with) and best
    layer_…      mse, plain and full2 by module: the sum over its parameters

All are conditional on the frozen state and on the batches of the next round. Lists, `layer_` and `drift_` have no
interval; others are name, name_low, name_high, 95 %, over the row's `unit` unless stated otherwise above.

A server's memory is found by its name: rows `h` (or `h_NP`), `c` and `alpha` of its state, as in docs/theory.md.
"""

from typing import Any

import torch
from torch import Tensor

from fedncv.engine.problem import Problem, State
from fedncv.estimators import learned_alpha
from fedncv.observatory.errors import (
    Draws,
    Errors,
    Interval,
    Server,
    Weights,
    draws_of,
    each_product,
    errors_of,
    frozen_server,
    jackknife,
    of_means,
    spread,
    weights,
)
from fedncv.observatory.everyone import Everyone
from fedncv.observatory.remembered import named_rows

Row = dict[str, Any]
SAME = 1e-4  # of an update's length: far above float32 rounding, far below a relevant difference
IN_USE = 1e-2  # above this beta the step shows the memory of clients never seen


def probe(
    problem: Problem, state: State, answers: Everyone, again: Everyone | None = None, *, num_draws: int = 2000
) -> Row:
    """Return all numbers above as one row; ``again`` is a second training of all clients, for within and between."""
    server = frozen_server(problem, state, answers)
    draws = draws_of(problem, state, answers, num_draws=num_draws)
    errors = errors_of(server, draws, answers)
    delta_NP, p_N = answers.delta_NP, server.p_N
    g_P = p_N @ delta_NP
    row: Row = {
        "form": errors.form,
        "how": errors.how,
        "unit": "none" if errors.weights.exact else "draw",
        "clients_answering": len(p_N),
        "full2": float(g_P.square().sum()),
        "offset2": float((errors.full_P - g_P).square().sum()),
    }
    main = spread(errors.weights, errors.v_KP)
    row |= _named(mse=main.second, bias2=main.bias2, variance=main.variance)
    fedavg = weights("ratio", draws, server.sizes_N)
    plain_KP = _padded(delta_NP - g_P)
    plain = spread(fedavg, plain_KP)
    row |= _named(plain=plain.second, plain_bias2=plain.bias2, plain_variance=plain.variance)
    row |= _named(times=_times(errors, main.second, fedavg, plain_KP), cosine=_cosine(errors, g_P))
    row |= _named(**_clients_apart(delta_NP, server.sizes_N))
    row |= _layers(problem, errors, fedavg, plain_KP, g_P)
    row |= _memory(server, errors, draws, answers)
    row |= _drift_correction(server, answers)
    if again is not None:
        row |= _batch_orders(problem, state, errors, answers, again)
    return row


def _named(**numbers: Interval) -> Row:
    """Return name, name_low, name_high of each."""
    parts = (("", "value"), ("_low", "low"), ("_high", "high"))
    return {name + end: getattr(number, part) for name, number in numbers.items() for end, part in parts}


def _padded(v_NP: Tensor) -> Tensor:
    """Append a constant part of zero."""
    return torch.cat([v_NP, torch.zeros_like(v_NP[:1])])


def _times(errors: Errors, mse: Interval, fedavg: Weights, plain_KP: Tensor) -> Interval:
    """plain / mse. The jackknife leaves out one draw of both if both are over the same draws."""
    if mse.value <= 0:
        return Interval.exact(float("nan"))
    plain_D = each_product(fedavg, plain_KP @ plain_KP.T)
    if errors.weights.exact or errors.form == "none":
        return of_means(lambda plain: plain / mse.value, plain_D, exact=fedavg.exact)
    own_D = each_product(errors.weights, errors.v_KP @ errors.v_KP.T)
    return of_means(lambda plain, own: plain / own, plain_D, own_D, exact=fedavg.exact)


def _cosine(errors: Errors, g_P: Tensor) -> Interval:
    """cos(g + e, g) = (|g|^2 + <e, g>) / (|g| |g + e|), mean over the draws."""
    of, v_KP = errors.weights, errors.v_KP
    g2, eg_D, e2_D = g_P.square().sum(), of.a_DK @ (v_KP @ g_P), each_product(of, v_KP @ v_KP.T)
    length_D = (g2 * (g2 + 2 * eg_D + e2_D).clamp(min=0)).sqrt()
    cosine_D = torch.where(length_D > 0, (g2 + eg_D) / length_D.clamp(min=1e-300), 0.0)
    return of_means(lambda cosine: cosine, cosine_D, exact=errors.listed)


def _clients_apart(delta_NP: Tensor, n_N: Tensor) -> dict[str, Interval]:
    """drift and apart. Without client u: the sums over the others."""
    square_N, total_P = delta_NP.square().sum(dim=1), n_N @ delta_NP
    n, sum2, total2 = n_N.sum(), n_N @ square_N, total_P.square().sum()
    drift, apart = (sum2 / n).sqrt(), sum2 / n - total2 / n**2
    if len(n_N) < 3:
        return {"drift": Interval.exact(drift), "apart": Interval.exact(apart)}
    rest_N, rest2_N = n - n_N, sum2 - n_N * square_N
    total2_N = total2 - 2 * n_N * (delta_NP @ total_P) + n_N.square() * square_N
    apart_N = rest2_N / rest_N - total2_N / rest_N.square()
    return {"drift": jackknife(drift, (rest2_N / rest_N).clamp(min=0).sqrt()), "apart": jackknife(apart, apart_N)}


def _layers(problem: Problem, errors: Errors, fedavg: Weights, plain_KP: Tensor, g_P: Tensor) -> Row:
    """E|error|^2 of each parameter is v_p' E[a a'] v_p; summed by module."""
    layout = problem.model.layout
    modules = [name.rpartition(".")[0] or name for name in layout.names]
    names = list(dict.fromkeys(modules))
    owner_P = torch.repeat_interleave(
        torch.tensor([names.index(module) for module in modules]),
        torch.tensor([shape.numel() for shape in layout.shapes]),
    ).to(g_P.device)

    def by_module(of: Weights, v_KP: Tensor) -> list[float]:
        return summed(((of.second_KK @ v_KP) * v_KP).sum(dim=0))

    def summed(x_P: Tensor) -> list[float]:
        sums: list[float] = x_P.new_zeros(len(names)).index_add(0, owner_P, x_P).tolist()
        return sums

    return {
        "layers": names,
        "layer_mse": by_module(errors.weights, errors.v_KP),
        "layer_plain": by_module(fedavg, plain_KP),
        "layer_full2": summed(g_P.square()),
    }


# ---- batch orders --------------------------------------------------------------------------------------


def _batch_orders(problem: Problem, state: State, errors: Errors, answers: Everyone, again: Everyone) -> Row:
    """aims; and the law of total variance, from the steps d_u and those of a second training d'_u."""
    server = frozen_server(problem, state, again)
    places = torch.arange(len(again.ids_N), device=again.ids_N.device)
    moved_P = server.step(places, True) - errors.full_P
    expected_P = server.p_N @ (again.delta_NP - answers.delta_NP)
    row: Row = {"aims": bool((moved_P - expected_P).square().sum() <= SAME**2 * expected_P.square().sum())}
    if errors.form == "none":
        return row
    again_NP = _steps_again(server, errors, answers, again)
    d_KP, again_KP = _padded(errors.d_NP - errors.base_P), _padded(again_NP - errors.base_P)
    apart = spread(errors.weights, (d_KP - again_KP) / 2**0.5)
    return row | _named(within=apart.second, between=spread(errors.weights, d_KP, again_KP).variance)


def _steps_again(server: Server, errors: Errors, answers: Everyone, again: Everyone) -> Tensor:
    """d'_u. Most servers do not change an update: d'_u - d_u = omega_u (Delta'_u - Delta_u), tried on two clients."""
    omega_N = server.p_N / server.inclusion_N if errors.form == "sum" else torch.ones_like(server.p_N)
    moved_NP = omega_N[:, None] * (again.delta_NP - answers.delta_NP)
    places = torch.arange(len(moved_NP), device=moved_NP.device)
    trials = [0, len(places) - 1]
    tried_TP = torch.stack([server.step(places[u : u + 1], False) - errors.d_NP[u] for u in trials])
    if (tried_TP - moved_NP[trials]).square().sum() <= SAME**2 * tried_TP.square().sum():
        return errors.d_NP + moved_NP
    return torch.stack([server.step(places[u : u + 1], False) for u in range(len(places))])


# ---- memory of the server ------------------------------------------------------------------------------


def _memory(server: Server, errors: Errors, draws: Draws, answers: Everyone) -> Row:
    """Return the coefficient of the stored updates: in use, best, and their effect on the error."""
    remembered = named_rows(server.state, "h", answers.ids_N)
    if remembered is None or len(remembered.places_M) < 2 or errors.form == "none":
        return {}
    delta_NP, p_N, places_M = answers.delta_NP, server.p_N, remembered.places_M
    if remembered.rows_M.shape[1:] != delta_NP.shape[1:]:
        return {}
    # the control variate as used in the step: beta h_u up to a constant; otherwise it is not a memory of updates
    control_NP = delta_NP - errors.d_NP
    omega_N = p_N / server.inclusion_N
    if errors.form == "sum":
        control_NP = delta_NP - (errors.d_NP - errors.base_P) / omega_N[:, None]
    rows_MP, seen_MP = remembered.rows_M, control_NP[places_M]
    c_MP, h_MP = seen_MP - seen_MP.mean(dim=0), rows_MP - rows_MP.mean(dim=0)
    length2 = h_MP.square().sum()
    if length2 <= 0:
        return {}
    beta = float((c_MP * h_MP).sum() / length2)
    if (c_MP - beta * h_MP).square().sum() > SAME**2 * delta_NP[places_M].square().sum():
        return {}
    # a client never seen: as in the step or, if the step hardly shows it, the mean of the clients seen
    unseen_NP = (p_N[places_M] @ rows_MP / p_N[places_M].sum()).expand_as(delta_NP)
    if abs(beta) > IN_USE:
        unseen_NP = (control_NP - seen_MP.mean(dim=0)) / beta + rows_MP.mean(dim=0)
    h_NP = unseen_NP.index_copy(0, places_M, rows_MP)
    of = weights(errors.form, draws, server.sizes_N)
    t_N = p_N if errors.form == "ratio" else torch.full_like(p_N, 1 / len(p_N))

    def error_vectors(a_NP: Tensor) -> Tensor:
        if errors.form == "sum":
            return torch.cat([omega_N[:, None] * a_NP, -(p_N @ a_NP)[None]])
        return _padded(a_NP - t_N @ a_NP)

    return {"beta": beta, "remembered": len(places_M)} | _coefficient(of, error_vectors(delta_NP), error_vectors(h_NP))


def _coefficient(of: Weights, a_KP: Tensor, b_KP: Tensor) -> Row:
    """beta_best, rho2, without, best and the three numbers of mse(beta)."""
    grams = a_KP @ a_KP.T, a_KP @ b_KP.T, b_KP @ b_KP.T
    if of.exact:
        moments = [(of.second_KK * gram_KK).sum()[None] for gram_KK in grams]
    else:
        moments = [each_product(of, gram_KK) for gram_KK in grams]
    numbers = {
        "beta_best": lambda aa, ab, bb: ab / bb,
        "rho2": lambda aa, ab, bb: ab**2 / (aa * bb),
        "without": lambda aa, ab, bb: aa,
        "best": lambda aa, ab, bb: aa - ab**2 / bb,
    }
    if float(moments[0].mean()) <= 0 or float(moments[2].mean()) <= 0:
        return {}
    found = {name: of_means(function, *moments, exact=of.exact) for name, function in numbers.items()}
    return _named(**found) | {"curve": [float(moment.mean()) for moment in moments]}


def _drift_correction(server: Server, answers: Everyone) -> Row:
    """alpha_u in use and best, of every client seen, and the spread of the clients' gradients under them."""
    alpha, old = (named_rows(server.state, name, answers.ids_N) for name in ("alpha", "c"))
    if alpha is None or old is None or not torch.equal(alpha.places_M, old.places_M):
        return {}
    everybody = torch.arange(len(answers.ids_N), device=answers.ids_N.device)
    new = named_rows(server.answer(everybody, True), "c", answers.ids_N)
    if new is None or len(new.places_M) != len(everybody):
        return {}
    p_N, seen_M = server.p_N, old.places_M
    p_M = p_N[seen_M] / p_N[seen_M].sum()
    mean_new_P, mean_old_P = p_N @ new.rows_M, p_M @ old.rows_M
    fresh_MP, known_MP = new.rows_M[seen_M] - mean_new_P, old.rows_M - mean_old_P
    length_M = known_MP.square().sum(dim=1)
    seen = torch.ones_like(length_M, dtype=torch.bool)
    best_M = learned_alpha(fresh_MP, known_MP, torch.zeros_like(mean_new_P), seen)
    spreads = {
        name: float(p_M @ (fresh_MP - alpha_M[:, None] * known_MP).square().sum(dim=1))
        for name, alpha_M in {"without": torch.zeros_like(best_M), "with": alpha.rows_M, "best": best_M}.items()
    }
    return {
        "alpha_clients": answers.ids_N[seen_M].tolist(),
        "alpha": alpha.rows_M.tolist(),
        "alpha_best": best_M.tolist(),
    } | {f"drift_{name}": value for name, value in spreads.items()}

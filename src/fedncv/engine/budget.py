"""Account for the differential privacy of a run: what its rounds have spent, and how many more its budget allows."""

import math
from typing import Any

from fedncv import accountant
from fedncv.accountant import Release
from fedncv.engine.problem import Problem, State
from fedncv.methods.base import Privacy
from fedncv.methods.switches.differential_privacy import release_of

EPSILON = "epsilon"  # the name in rows: that of clients


def release(problem: Problem, state: State) -> Release:
    """Return what each round of the run releases."""
    return release_of(problem.federation, _privacy(problem).noise(state.server))


def spent(problem: Problem, state: State, rounds: int) -> float:
    """Return the epsilon of so many rounds."""
    privacy = _privacy(problem)
    return accountant.epsilon(release(problem, state), rounds, privacy.delta, privacy.accountant)


def row(problem: Problem, state: State) -> dict[str, Any]:
    """Return what the rounds so far have spent, epsilon at delta, for the row of a round; None without noise."""
    if problem.method.privacy is None:
        return {}
    value = spent(problem, state, state.round)
    return {EPSILON: value if math.isfinite(value) else None, "delta": problem.method.privacy.delta}


def rounds_within(problem: Problem, state: State) -> int:
    """Return how many of the planned rounds the budget allows."""
    privacy, planned = problem.method.privacy, problem.config.rounds
    if privacy is None or privacy.epsilon == math.inf:
        return planned
    return accountant.rounds_within(lambda rounds: spent(problem, state, rounds), privacy.epsilon, planned)


def entry(problem: Problem, state: State) -> dict[str, Any]:
    """Return what the ledger says of the next round, before its noise is drawn."""
    privacy, each = _privacy(problem), release(problem, state)
    total = spent(problem, state, state.round + 1)
    return {
        "round": state.round + 1,
        "unit": "client",
        "neighbours": each.relation,
        "noise": each.noise,
        "drawn": each.drawn,
        "clients": each.clients,
        "delta": privacy.delta,
        "accountant": privacy.accountant,
        EPSILON: total if math.isfinite(total) else None,
    }


def words(problem: Problem, state: State) -> str:
    """Return a line for the start of a run: its noise, what its rounds will spend, and whether the budget lasts."""
    privacy, planned = problem.method.privacy, problem.config.rounds
    if privacy is None or not planned:
        return ""
    each, allowed = release(problem, state), rounds_within(problem, state)
    if each.noise == 0:
        return "note: without noise there is no differential privacy; epsilon is infinite"
    chances = "amplified by sampling" if each.is_amplified else "no amplification by sampling"
    how = f"noise {each.noise:.5g}, delta {privacy.delta:g}, neighbours {each.relation} client, {chances}"
    if allowed < planned:
        return (
            f"note: the privacy budget, epsilon {privacy.epsilon:g}, lasts for {allowed} of {planned} rounds ({how}); "
            f"with --rounds {allowed} the last model is scored"
        )
    return f"note: {planned} rounds spend epsilon {spent(problem, state, planned):.4g} ({how})"


def refuse_more(problem: Problem, planned: int) -> None:
    """Raise ValueError if a run that was planned with ``planned`` rounds must not have as many as ``problem`` has."""
    privacy, rounds = problem.method.privacy, problem.config.rounds
    if privacy is None or privacy.epsilon == math.inf or rounds <= planned:
        return
    if privacy.found:
        raise ValueError(
            f"{planned} rounds spend the budget of the run, epsilon {privacy.epsilon:g}: its noise was found for them; "
            f"start another run with {rounds} rounds, and add up what both spend"
        )
    state = State(0, problem.method.init(problem.model.start_P, problem.federation), (), {})
    if (allowed := rounds_within(problem, state)) < rounds:
        raise ValueError(
            f"{rounds} rounds spend epsilon {spent(problem, state, rounds):.3g}, more than the budget "
            f"{privacy.epsilon:g}; it allows {allowed} rounds"
        )


def _privacy(problem: Problem) -> Privacy:
    assert problem.method.privacy is not None, "only for methods with differential privacy"
    return problem.method.privacy

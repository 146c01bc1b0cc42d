"""The trials of a method: random settings from its space, the same draws for every method and column.

    trial 1         the method as it is named, at the learning rate of the settings
    trials 2 to n   a learning rate each, at the share  u_k = (pi_k + U_k) / (n - 1)  of its range
    the last half   also every other knob, in the same way: of 8 trials the last 4

pi is a random permutation and U_k uniform in [0, 1), so that the values of a knob are spread over its whole range
(Latin hypercube; McKay, Beckman and Conover, Technometrics 1979). Both are keyed by (first tuning seed, name of the
knob). So methods share the learning rates, methods with a common part share its values, and a method that is added
later gets the draws that it would have got at first.

Values that would need more local epochs than the method's default are left out of a list of values.
"""

from typing import Any

from fedncv.config import Settings
from fedncv.keys import generator
from fedncv.methods import find_method
from fedncv.methods.space import SETTINGS, Even, Log, Range, value_at
from fedncv.methods.spaces import space_of, with_values
from fedncv.study import Study, Tuning

Values = dict[str, Any]  # knob -> value, with lr and other settings by their names


def trials(method: str, tuning: Tuning, settings: Settings) -> list[Values]:
    """Return the values of each trial of a method. Without trials: each learning rate of the grid."""
    if not tuning.trials:
        return [{"lr": lr} for lr in tuning.grid]
    found: list[Values] = [{"lr": settings.lr}, *({} for _ in range(tuning.trials - 1))]
    for knob, over in space(method, settings).items():
        some = found[1:] if knob == "lr" else found[max(1, tuning.trials // 2) :]
        for trial, u in zip(some, shares(tuning.seeds[0], knob, len(some)), strict=True):
            trial[knob] = value_at(over, u)
    return found


def space(method: str, settings: Settings) -> dict[str, Range]:
    """Return the method's space, without values that need more local epochs than its default."""
    most = _epochs(method, settings)
    found: dict[str, Range] = {}
    for knob, over in space_of(method).items():
        if isinstance(over, Log | Even):
            found[knob] = over
        elif fair := tuple(each for each in over if _epochs(with_values(method, {knob: each}), settings) <= most):
            found[knob] = fair
    return found


def _epochs(method: str, settings: Settings) -> int:
    return sum(phase.epochs for phase in find_method(method).phases(settings.epochs))


def shares(seed: int, knob: str, n: int) -> list[float]:
    """Return n numbers in [0, 1), one in each of n equal parts, in random order."""
    rng = generator(seed, f"tuning {knob}")
    places = rng.permutation(n)
    return [float((place + u) / n) for place, u in zip(places, rng.random(n), strict=True)]


def as_settings(method: str, values: Values) -> Values:
    """Return the trial as settings of its runs: knobs become part of the method's text."""
    text = with_values(method, values)
    found = {name: value for name, value in values.items() if name in SETTINGS}
    return found if text == method else found | {"method": text}


def of_study(study: Study, column: str, method: str) -> dict[str, Values]:
    """Return folder -> values of each trial of a method in a column."""
    assert study.tuning is not None
    settings = study.trial_columns()[column]
    return dict(zip(study.tuning.names, trials(method, study.tuning, settings), strict=True))

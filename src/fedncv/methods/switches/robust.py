"""What robust switches share: apply a rule to every field of the replies, before the server averages them.

A rule replaces rows: a_SP, w_S -> a'_SP with sum_S w_u a'_u / sum_S w_u = the robust mean. So the server's own average
of the new rows is the robust mean, and no row holds what the rule does not trust. A ``Screen`` has two rules: one for
arrays, and one for fields of one number and for running statistics, where norms and distances mean nothing. The second
goes by the order of the numbers, so a variance becomes negative only if too many clients send negative ones.

f, the number of bad replies that a rule withstands, follows in every round from the number of replies.

Letters: S = clients of the round, P = parameters.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.methods.base import Method, Replies, Screen, ServerAsk, Stepped, combined
from fedncv.methods.switches.through import ROBUST
from fedncv.tree import tree_map_named

Numbers = Mapping[str, float | Tensor]


class Robust(NamedTuple):
    """The last argument of the method's step, and numbers for the row of the round."""

    combined: Any
    numbers: Numbers


def check_share(share: float) -> None:
    """Raise ValueError unless the share is less than half."""
    if not 0 <= share < 0.5:
        raise ValueError(f"share must be at least 0 and below 0.5, not {share}: no rule withstands a bad majority")


def withstood(share: float, num_replies: int, most: int) -> int:
    """Return f: ``share`` of the replies, rounded up, and at most ``most``.

    >>> withstood(0.2, 10, 4), withstood(0.2, 11, 5), withstood(0.2, 2, 0)
    (2, 3, 0)
    """
    return min(math.ceil(share * num_replies - 1e-9), max(most, 0))


def fields_screened(method: Method, screen: Screen, replies: Replies) -> Replies:
    """Return the replies with the rule applied to each field, with the weights that the method gives to it."""
    sizes_S = replies.sizes_S

    def screened(name: str, a_S: Tensor) -> Tensor:
        w_S = sizes_S if method.weights.get(name, "samples") == "samples" else sizes_S.new_ones(len(sizes_S))
        rule = screen.rows if a_S.dim() > 1 else screen.coordinates
        return rule(a_S.reshape(len(a_S), -1), w_S).reshape(a_S.shape)

    return replies._replace(ups=tree_map_named(screened, replies.ups))


def with_screen(method: Method, name: str, screen: Screen, numbers: Callable[[Replies], Numbers]) -> Method:
    """Return ``method`` whose server combines the rows that ``screen`` makes of the replies."""
    if method.screen is not None:
        first = next(each for each in method.switches if each in ROBUST)
        raise ValueError(f"{first} and {name} both replace the mean of the replies; use one, as in fedavg+{name}")
    if method.combine is not None or not method.reveals:
        raise ValueError(f"{name} needs a method whose server averages the replies, as in fedavg+{name}")

    def combine(server: Any, replies: Replies) -> Robust:
        return Robust(combined(method, server, fields_screened(method, screen, replies)), numbers(replies))

    def step(ask: ServerAsk, server: Any, robust: Robust) -> Stepped:
        stepped = method.step(ask, server, robust.combined)
        return stepped._replace(numbers={**stepped.numbers, **robust.numbers})

    return method._replace(combine=combine, step=step, screen=screen, switches=(*method.switches, name))

"""Wrap a method's server state in the state of a switch.

The switch's state is a NamedTuple with a field ``server``, the method's own state. ``through`` returns the method whose
server functions read that field; the switch then replaces ``init``, ``step`` and everything else that it changes.
"""

from typing import Any

import torch
from torch import Tensor

from fedncv.methods.base import BufferRule, Method

ROBUST = ("median", "trimmed", "krum", "clipped")
"""Switches that set ``Method.screen``."""


def through(method: Method) -> Method:
    """Return ``method`` with its server's state one level down, in the field ``server``."""
    combine, hand_out, model, with_model = method.combine, method.hand_out, method.model, method.with_model
    return method._replace(
        broadcast=lambda state, ids_S: method.broadcast(state.server, ids_S),
        shared=lambda state: method.shared(state.server),
        combine=combine and (lambda state, replies: combine(state.server, replies)),
        hand_out=hand_out and (lambda state, ids_S: hand_out(state.server, ids_S)),
        model=model and (lambda state: model(state.server)),
        with_model=with_model and (lambda state, x_P: state._replace(server=with_model(state.server, x_P))),
        buffers=_rule_through(method.buffers),
    )


def refuse_robust(method: Method, name: str, why: str) -> None:
    """Raise ValueError if the method combines its replies robustly."""
    found = [each for each in ROBUST if each in method.switches]
    if found:
        raise ValueError(f"{name} cannot be used with {found[0]}: {name} {why}; leave one out, as in fedavg+{found[0]}")


def revealing(method: Method, **fields: str) -> dict[str, str]:
    """Return what clients reveal with these fields added; sums find a field by its name, so it must be a new one."""
    for field in fields:
        if field in method.reveals:
            raise ValueError(f"the method sends a field {field!r} already, which this switch would add; rename it")
    return {**method.reveals, **fields}


def corrected(d_P: Tensor, e_P: Tensor) -> Tensor:
    """Return the direction d - e; personal parameters behind the model's, which have no correction, keep theirs."""
    if len(d_P) == len(e_P):
        return d_P - e_P
    return torch.cat([d_P[: len(e_P)] - e_P, d_P[len(e_P) :]])


def _rule_through(rule: Any) -> Any:
    if not isinstance(rule, BufferRule):
        return rule
    return rule._replace(
        broadcast=lambda statistics, state, ids_S: rule.broadcast(statistics, state.server, ids_S),
        step=lambda ask, statistics, state, combined: rule.step(ask, statistics, state.server, combined),
    )

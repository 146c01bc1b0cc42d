"""Local optimizers: two pure functions on one flat vector of parameters.

    state    = init(y)                         at the beginning of a client's round
    y, state = update(g, state, y, lr)         in every step, with the method's direction g

The state is a tree of tensors and lives for one round at one client: moments are never sent, averaged or stored. The
functions contain no Python branch on the value of a tensor, so that ``torch.vmap`` can run all clients at once.

    sgd       v <- momentum v + g;                                              y <- y - lr v
    adam      m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
              y <- y - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    adamw     y <- y - lr weight_decay y, then adam's step
    rmsprop   v <- alpha v + (1 - alpha) g^2;  b <- momentum b + g / (sqrt(v) + eps);    y <- y - lr b
    adagrad   v <- v + g^2 from v = initial;                                    y <- y - lr g / (sqrt(v) + eps)

All but adamw add weight_decay y to g first. The numbers are those of ``torch.optim``, to rounding.

>>> init, update, _ = find_optimizer("adam")
>>> y, state = update(torch.tensor([3.0, -4.0]), init(torch.zeros(2)), torch.zeros(2), 0.1)
>>> y  # the first step has the length lr in every coordinate
tensor([-0.1000,  0.1000])
"""

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedncv.imports import make_own, own
from fedncv.spec import nearest, parse
from fedncv.tree import leaves

SGD = "sgd"


class Optimizer(NamedTuple):
    init: Callable[[Tensor], Any]  # y_P -> state, a tree of tensors
    update: Callable[[Tensor, Any, Tensor, float | Tensor], tuple[Tensor, Any]]  # g_P, state, y_P, lr -> y_P, state
    total_step: Callable[[int, float], float] | None = None
    """num_steps, lr -> the sum of the factors with which the directions enter x - y. None: x - y is not such a sum,
    and methods that need SGD refuse the optimizer."""


def sgd(weight_decay: float = 0.0, momentum: float = 0.0) -> Optimizer:
    def init(y_P: Tensor) -> Any:
        return torch.zeros_like(y_P) if momentum else ()

    def update(g_P: Tensor, v_P: Any, y_P: Tensor, lr: float | Tensor) -> tuple[Tensor, Any]:
        g_P = _decayed(g_P, y_P, weight_decay)
        if momentum:
            g_P = v_P = momentum * v_P + g_P
        return _step(y_P, g_P, lr), v_P

    return Optimizer(init, update, lambda num_steps, lr: total_step(num_steps, lr, momentum))


def _step(y_P: Tensor, g_P: Tensor, lr: float | Tensor) -> Tensor:
    """Return y - lr g, in one pass over memory where torch has an operation for it."""
    if not isinstance(lr, Tensor):
        return torch.add(y_P, g_P, alpha=-lr)
    return torch.addcmul(y_P, g_P, lr, value=-1) if y_P.is_cuda else y_P - lr * g_P


def total_step(num_steps: int, lr: float, momentum: float) -> float:
    """Return the sum of the factors with which ``num_steps`` gradients enter x - y in SGD.

    The k-th of K gradients enters with lr (1 + m + … + m^(K-k)) = lr (1 - m^(K-k+1)) / (1 - m).
    """
    if momentum == 0:
        return num_steps * lr
    return lr * (num_steps - momentum * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)


class Moments(NamedTuple):
    m_P: Tensor  # mean of the gradients
    v_P: Tensor  # mean of their squares
    steps: Tensor  # float64: in single precision 1 - beta2 would lose four digits


def adam(weight_decay: float = 0.0, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    return _adam(0.0, weight_decay, beta1, beta2, eps)


def adamw(weight_decay: float = 0.0, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    return _adam(weight_decay, 0.0, beta1, beta2, eps)


def _adam(decoupled: float, weight_decay: float, beta1: float, beta2: float, eps: float) -> Optimizer:
    _check(beta1=beta1, beta2=beta2)
    _check_above_zero(eps=eps)

    def init(y_P: Tensor) -> Moments:
        return Moments(torch.zeros_like(y_P), torch.zeros_like(y_P), y_P.new_zeros((), dtype=torch.float64))

    def update(g_P: Tensor, state: Moments, y_P: Tensor, lr: float | Tensor) -> tuple[Tensor, Moments]:
        g_P = _decayed(g_P, y_P, weight_decay)
        if decoupled:
            y_P = y_P - lr * decoupled * y_P
        steps = state.steps + 1
        m_P = beta1 * state.m_P + (1 - beta1) * g_P
        v_P = beta2 * state.v_P + (1 - beta2) * g_P.square()
        m_share, v_share = ((1 - beta**steps).to(y_P.dtype) for beta in (beta1, beta2))
        return y_P - lr * (m_P / m_share) / ((v_P / v_share).sqrt() + eps), Moments(m_P, v_P, steps)

    return Optimizer(init, update)


class Squares(NamedTuple):
    v_P: Tensor  # mean of the gradients' squares
    b_P: Any  # momentum; () without


def rmsprop(weight_decay: float = 0.0, *, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0) -> Optimizer:
    _check(alpha=alpha, momentum=momentum)
    _check_above_zero(eps=eps)

    def init(y_P: Tensor) -> Squares:
        return Squares(torch.zeros_like(y_P), torch.zeros_like(y_P) if momentum else ())

    def update(g_P: Tensor, state: Squares, y_P: Tensor, lr: float | Tensor) -> tuple[Tensor, Squares]:
        g_P = _decayed(g_P, y_P, weight_decay)
        v_P = alpha * state.v_P + (1 - alpha) * g_P.square()
        step_P, b_P = g_P / (v_P.sqrt() + eps), state.b_P
        if momentum:
            step_P = b_P = momentum * b_P + step_P
        return y_P - lr * step_P, Squares(v_P, b_P)

    return Optimizer(init, update)


def adagrad(weight_decay: float = 0.0, *, eps: float = 1e-10, initial: float = 0.0) -> Optimizer:
    _check_above_zero(eps=eps)
    if not 0 <= initial <= 1e30:
        raise ValueError(f"initial must be at least 0 and at most 1e30, not {initial}")

    def init(y_P: Tensor) -> Tensor:
        return torch.full_like(y_P, initial)

    def update(g_P: Tensor, v_P: Tensor, y_P: Tensor, lr: float | Tensor) -> tuple[Tensor, Tensor]:
        g_P = _decayed(g_P, y_P, weight_decay)
        v_P = v_P + g_P.square()
        return y_P - lr * g_P / (v_P.sqrt() + eps), v_P

    return Optimizer(init, update)


def _decayed(g_P: Tensor, y_P: Tensor, weight_decay: float) -> Tensor:
    return g_P + weight_decay * y_P if weight_decay else g_P


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, not {value}")


def _check_above_zero(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, not {value}")


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    SGD: sgd,
    "adamw": adamw,
    "adam": adam,
    "rmsprop": rmsprop,
    "adagrad": adagrad,
}
MOMENTUM = {"adamw": "beta1 is its momentum", "adam": "beta1 is its momentum", "rmsprop": "use rmsprop:momentum={}"}


def find_optimizer(text: str, *, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Return the optimizer that ``name``, ``name:knob=value,…`` or ``package.module:function`` names.

    The function returns an ``Optimizer``; its keyword-only parameters are knobs. ``momentum`` and ``weight_decay`` are
    the settings of the run; raise ValueError if the optimizer does not use one that is not 0.
    """
    name = text.partition(":")[0]
    if name in OPTIMIZERS and name != SGD and momentum:
        remedy = MOMENTUM.get(name, "leave momentum at 0").format(momentum)
        raise ValueError(f"momentum {momentum} is a setting of sgd, not of {name}; {remedy}")
    if name == SGD:
        if text != SGD:
            raise ValueError(f"optimizer {text!r}: sgd has no knobs; use the settings momentum and weight_decay")
        return sgd(weight_decay, momentum)
    if name in OPTIMIZERS:
        _, knobs = parse(text, OPTIMIZERS, what="optimizer")
        try:
            return OPTIMIZERS[name](weight_decay, **knobs)
        except ValueError as error:
            raise ValueError(f"optimizer {text!r}: {error}") from None
    found = own(text)
    if found is None:
        raise ValueError(nearest(name, OPTIMIZERS, what="optimizer") + "; or name your own as package.module:function")
    check_settings(momentum, weight_decay)
    made: Optimizer = make_own(found, Optimizer, what="optimizer")
    return made


def check_settings(momentum: float, weight_decay: float) -> None:
    """Raise ValueError if settings of the built-in optimizers are given beside an optimizer of one's own."""
    for name, value in (("momentum", momentum), ("weight_decay", weight_decay)):
        if value:
            raise ValueError(f"{name} is {value}, but an optimizer of your own has its own; leave {name} at 0")


def try_optimizer(name: str, optimizer: Optimizer, start_P: Tensor) -> None:
    """Raise ValueError unless one step returns parameters and state of the form that it was given."""
    state = optimizer.init(start_P)
    _check_tensors(name, "init", state)
    try:
        y_P, after = optimizer.update(torch.zeros_like(start_P), state, start_P, 0.1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"optimizer {name!r}: update(g_P, state, y_P, lr) fails ({str(error).splitlines()[0]}); "
            "it returns (y_P, state)"
        ) from None
    _check_tensors(name, "update", after)
    given, returned = (_form({"y_P": y, "state": state}) for y, state in ((start_P, state), (y_P, after)))
    if given != returned:
        here, there = next(pair for pair in zip_longest(given, returned, fillvalue="nothing") if pair[0] != pair[1])
        raise ValueError(f"optimizer {name!r}: update returns {there} for {here}; shapes and types must not change")


def _check_tensors(name: str, what: str, state: Any) -> None:
    for path, leaf in leaves(state):
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"optimizer {name!r}: {what} returns a state with {path or 'a'} {type(leaf).__name__}; a state is made "
                "of tensors, tuples and NamedTuples, so count steps with y_P.new_zeros(())"
            )


def _form(tree: Any) -> list[str]:
    return [f"{path} {tuple(leaf.shape)} {leaf.dtype}" for path, leaf in leaves(tree)]

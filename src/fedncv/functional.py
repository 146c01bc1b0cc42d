"""Torch's functions that draw random numbers, or that ``torch.vmap`` cannot run, in a form that repeats and stacks.

Inside ``with Rewritten()`` a module that calls them gets

    dropout of every kind      masks from the step's key instead of a global generator
    attention                  the same with keyed dropout; under vmap written out, without fused kernels
    LSTM, GRU, RNN             keyed dropout between their layers; under vmap written out as a loop over time

A function that neither draws nor is vmapped is called as it is, so its bits are torch's own.
"""

import warnings
from collections.abc import Callable
from functools import partial
from math import prod, sqrt
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedncv.keys import WORD, Key, fold, uniform

ALPHA = 1.7580993408473766  # of SELU: what alpha dropout sets dropped values to is -ALPHA, before rescaling

WITH_DROPOUT = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    F.multi_head_attention_forward,
)  # fmt: skip
"""Functions that torch writes in Python, around the ones below."""

# cuDNN copies the weights together in every call, because ours are slices of one vector; users cannot change that
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk of memory")


class Rewritten(TorchFunctionMode):
    """While it is entered, torch's functions above are replaced. ``key`` is that of the step, None outside training."""

    def __init__(self) -> None:
        super().__init__()
        self.key: Key | None = None
        self.calls = 0  # draws in this forward pass
        self.off = False  # whether dropout does nothing
        self.heard = False  # whether any of the functions was called
        primitives = {
            torch.dropout: self._dropout,
            torch.feature_dropout: self._feature_dropout,
            torch.alpha_dropout: self._alpha_dropout,
            torch.feature_alpha_dropout: self._feature_alpha_dropout,
        }
        in_place = {getattr(torch, f"{f.__name__}_"): _in_place(g) for f, g in primitives.items()}
        # the code of torch's own functions, in which the names of the primitives mean ours
        names = dict(vars(F))
        names["_VF"] = SimpleNamespace(**{f.__name__: g for f, g in (primitives | in_place).items()})
        names["has_torch_function"] = names["has_torch_function_unary"] = lambda *_: False
        names["scaled_dot_product_attention"] = self._attention
        ours: dict[Any, Callable[..., Any]] = {function: _with_names(function, names) for function in WITH_DROPOUT}
        names["dropout"] = ours[F.dropout]
        self._ours = primitives | in_place | ours | {F.scaled_dot_product_attention: self._attention}
        for kind in STEPS:
            self._ours[getattr(torch, kind)] = partial(self._recurrent, kind)
            self._ours[getattr(torch, f"{kind}_cell")] = partial(_cell, kind)
        self._ours[torch._pack_padded_sequence] = _pack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = self._ours.get(func)
        if ours is None:
            return func(*args, **(kwargs or {}))
        self.heard = True
        return ours(*args, **(kwargs or {}))

    def _next_key(self) -> Key:
        assert self.key is not None, "a training step must give random functions their key"
        self.calls += 1
        return fold(fold(self.key, WORD), self.calls)  # WORD: no nn.Dropout has this number

    # ---- dropout -----------------------------------------------------------------------------------------

    def _dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        return dropout(x, p, self._next_key()) if train and p and not self.off else x

    def _feature_dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        return dropout(x, p, self._next_key(), whole_features=True) if train and p and not self.off else x

    def _alpha_dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        return alpha_dropout(x, p, self._next_key()) if train and p and not self.off else x

    def _feature_alpha_dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        return alpha_dropout(x, p, self._next_key(), whole_features=True) if train and p and not self.off else x

    # ---- attention and recurrent layers ------------------------------------------------------------------

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not dropout_p and not _vmapped():
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        weights = attention_weights(query, key, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        weights = self._dropout(weights, dropout_p, True)
        return weights @ (_repeated(value, query) if enable_gqa else value)

    def _recurrent(self, kind: str, *args: Any) -> tuple[Tensor, ...]:
        """Run torch's LSTM, GRU or RNN layer by layer if it draws between layers, step by step if it is vmapped."""
        packed = not isinstance(args[3], bool)
        x, sizes, state, weights, bias, layers, p, train, both_ways, *rest = (
            args if packed else (args[0], None, *args[1:])
        )
        batch_first = bool(rest and rest[0])
        written_out = _vmapped()  # then nothing is packed: `_pack` refuses
        if not written_out and not (train and p and layers > 1):
            return getattr(torch, kind)(*args)  # type: ignore[no-any-return]
        states = list(state) if kind == "lstm" else [state]
        directions, share = 2 if both_ways else 1, len(weights) // layers
        ends: list[list[Tensor]] = [[] for _ in states]
        for layer in range(layers):
            if layer and train and p and not self.off:
                x = _batch_first(x, batch_first or packed, lambda some: dropout(some, p, self._next_key()))
            mine = [s[layer * directions : (layer + 1) * directions] for s in states]
            here = weights[layer * share : (layer + 1) * share]
            if written_out:
                x, *last = recurrent_layer(kind, x, mine, here, directions, bias, batch_first)
            else:
                start = mine if kind == "lstm" else mine[0]
                front = (x, sizes, start) if packed else (x, start)
                back = () if packed else (batch_first,)
                x, *last = getattr(torch, kind)(*front, here, bias, 1, 0.0, train, both_ways, *back)
            for end, new in zip(ends, last, strict=True):
                end.append(new)
        return x, *map(torch.cat, ends)


def dropout(x: Tensor, p: float, key: Key, *, whole_features: bool = False) -> Tensor:
    """Return x with each value 0 with probability ``p``, else divided by 1 - p; or all values of a feature together."""
    if p == 1:
        return x * 0
    return x * _keep(x, p, key, whole_features) / (1 - p)


def alpha_dropout(x: Tensor, p: float, key: Key, *, whole_features: bool = False) -> Tensor:
    """Return x with values dropped as in Klambauer et al., "Self-normalizing neural networks", 2017, section 4."""
    if p == 1:
        return x * 0
    keep = _keep(x, p, key, whole_features).to(x.dtype)
    a = 1 / sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    return x * (keep * a) + (keep - 1 + p) * (ALPHA * a)


def _keep(x: Tensor, p: float, key: Key, whole_features: bool) -> Tensor:
    shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if whole_features else x.shape
    return (uniform(key, prod(shape), dtype=torch.float32) >= p).reshape(shape)


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None, enable_gqa: bool = False
) -> Tensor:
    """Return softmax(q k^T scale + mask). A row in which everything is masked is 0, as in torch.

    Raise RuntimeError, as torch does, if there is a mask beside the causal one.
    """
    if is_causal and mask is not None:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    if enable_gqa:
        k = _repeated(k, q)
    scores = (q * (1 / sqrt(q.shape[-1]) if scale is None else scale)) @ k.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return torch.softmax(scores, -1)
    hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    if mask.dtype != torch.bool:
        scores = scores + mask.masked_fill(hidden, 0)
    # a finite number: a row of infinities has no softmax, and no gradient
    weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1)
    return weights.masked_fill(hidden.all(-1, keepdim=True), 0)


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with as many heads as the queries."""
    return k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)


# ---- recurrent layers, written out -----------------------------------------------------------------------

States = list[Tensor]
Step = Callable[[Tensor, States, Callable[[Tensor], Tensor]], States]
"""(W_ih x + b_ih, states, h -> W_hh h + b_hh) -> new states, the output first."""


def _lstm_step(given: Tensor, states: States, recur: Callable[[Tensor], Tensor]) -> States:
    i, f, g, o = (given + recur(states[0])).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def _gru_step(given: Tensor, states: States, recur: Callable[[Tensor], Tensor]) -> States:
    (r, z, n), (hr, hz, hn) = given.chunk(3, -1), recur(states[0]).chunk(3, -1)
    z = (z + hz).sigmoid()
    n = (n + (r + hr).sigmoid() * hn).tanh()
    return [(1 - z) * n + z * states[0]]


def _tanh_step(given: Tensor, states: States, recur: Callable[[Tensor], Tensor]) -> States:
    return [(given + recur(states[0])).tanh()]


def _relu_step(given: Tensor, states: States, recur: Callable[[Tensor], Tensor]) -> States:
    return [(given + recur(states[0])).relu()]


STEPS: dict[str, Step] = {"lstm": _lstm_step, "gru": _gru_step, "rnn_tanh": _tanh_step, "rnn_relu": _relu_step}


def recurrent_layer(
    kind: str, x: Tensor, states: list[Tensor], weights: list[Tensor], directions: int, bias: bool, batch_first: bool
) -> list[Tensor]:
    """Return the outputs of one layer, and its states after the last step with the directions first."""
    sequence = x.transpose(0, 1) if batch_first else x
    share = len(weights) // directions
    outputs, ends = [], []
    for d in range(directions):
        w_ih, w_hh, *more = weights[d * share : (d + 1) * share]
        b_ih, b_hh = more[:2] if bias else (None, None)
        projection = more[-1] if len(more) % 2 else None
        given = F.linear(sequence, w_ih, b_ih).unbind(0)
        now, seen = [s[d] for s in states], []
        for t in reversed(range(len(given))) if d else range(len(given)):
            now = STEPS[kind](given[t], now, partial(F.linear, weight=w_hh, bias=b_hh))
            if projection is not None:
                now[0] = F.linear(now[0], projection)
            seen.append(now[0])
        outputs.append(torch.stack(seen[::-1] if d else seen))
        ends.append(now)
    out = torch.cat(outputs, -1)
    return [out.transpose(0, 1) if batch_first else out, *(torch.stack(end) for end in zip(*ends, strict=True))]


def _cell(kind: str, x: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None) -> Any:
    if not _vmapped():
        return getattr(torch, f"{kind}_cell")(x, state, w_ih, w_hh, *biases)
    b_ih, b_hh = biases or (None, None)
    states = list(state) if kind == "lstm" else [state]
    new = STEPS[kind](F.linear(x, w_ih, b_ih), states, partial(F.linear, weight=w_hh, bias=b_hh))
    return tuple(new) if kind == "lstm" else new[0]


def _pack(*args: Any) -> Any:
    if _vmapped():
        raise NotImplementedError("packed sequences have as many steps as their lengths say, so they cannot be stacked")
    return torch._pack_padded_sequence(*args)


# ---- values -----------------------------------------------------------------------------------------------


class NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, code or shapes that depend on values on this kind of device raise an error.

    A step with such code cannot be recorded, and other samples in the batch, or padding, may change its result.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]
        )
        reads = by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal")
        if reads and args[0].device.type == self._kind:
            raise RuntimeError("its code or the shapes in it depend on values of the batch (if, .item(), x[x > 0])")
        return func(*args, **(kwargs or {}))


# ---- helpers ---------------------------------------------------------------------------------------------


def _vmapped() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def _batch_first(x: Tensor, already: bool, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``function`` with the samples on the first axis: then padding them changes no draw of the others."""
    return function(x) if already else function(x.transpose(0, 1)).transpose(0, 1)


def _in_place(function: Callable[[Tensor, float, bool], Tensor]) -> Callable[[Tensor, float, bool], Tensor]:
    def changing(x: Tensor, p: float, train: bool) -> Tensor:
        return x.copy_(function(x, p, train)) if train and p else x

    return changing


def _with_names(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a Python function whose global names are ``names``."""
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied

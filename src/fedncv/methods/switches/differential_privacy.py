"""Differential privacy of clients: clip what each client sends, and add noise to the sums.

    client   a_u = (Delta_u, control * (c_u' - c_u), …)      all fields that leave the client, as one vector
             a_u <- a_u * min(1, C / |a_u|);   sends w_u a_u;   keeps the c_u that belongs to the change it sent
    server   A = sum_S w_u a_u + N(0, (noise * C)^2)          also in a round without replies
             mean = A / W                                      W = expected sum of w_u in a round, fixed
    weights  w_u = 1, or min(n_u / cap, 1)
    clip     C = clip;   with adapt above 0 clients also send b_u = [|a_u| <= C] - 1/2, and
             b = (sum_S b_u + N(0, count_noise^2)) / m + 1/2,      m = expected replies
             C <- C * exp(-adapt * (b - quantile))
             The fields have noise (noise^-2 - (2 * count_noise)^-2)^-1/2, so that the whole round has ``noise``
    decay    clients send d_u = c_u' - (1 - decay) * c_u instead of c_u' - c_u, and keep (1 - decay) * c_u + d_u
             c_bar <- (1 - decay * m/N) * c_bar + sum_S d_u / N       old noise fades; 0 sends changes, 1 all of c_u'

It protects a client as a whole against everybody who sees the models of all rounds, but not against the server. The
epsilon spent is in every row; docs/privacy.md says what it means. Running statistics of BatchNorm stay at the clients.
The noise of a simulation is keyed by its seed, so that runs repeat: who knows the seed can remove it.

McMahan et al., ICLR 2018, https://arxiv.org/abs/1710.06963 (DP-FedAvg, with its fixed denominator); adaptive clipping:
Andrew et al., NeurIPS 2021, https://arxiv.org/abs/1905.03871. Departures from the papers: one clip for all fields;
control variates; all clients count as seen with c_u = 0 from the first round on, because a count would need noise too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedncv import accountant
from fedncv.accountant import Accountant, Release
from fedncv.keys import fold, normal
from fedncv.methods.base import (
    Ask,
    Batch,
    Federation,
    Method,
    Prediction,
    Privacy,
    ServerAsk,
    Stepped,
    Sums,
    Work,
    field_of,
    for_all,
)
from fedncv.methods.switches.through import revealing, through
from fedncv.tree import leaves, tree_map

NOISE, COUNT = 0x6E6F6973, 0x636F756E  # parts of the server's key, beside what a method may take
SINGLE = ("memory", "labels", "ht", "calibrated")  # switches that need single replies


@dataclass(frozen=True, kw_only=True)
class Config:
    clip: float = 1.0
    """Largest length C of what a client sends, above 0; with adapt, of the first round. inf does not clip."""
    noise: float | Literal["auto"] = "auto"
    """Deviation of the noise of a sum, in units of the clip, at least 0. auto: the least that keeps the planned rounds
    within epsilon, or 1 if epsilon is inf."""
    epsilon: float = math.inf
    """Budget, above 0: the run stops before it is exceeded. inf: none; the rows say what is spent."""
    delta: float = 1e-5
    """Probability with which the bound epsilon may fail, above 0 and below 1 / clients."""
    cap: float = 0.0
    """0: every client counts once. Above 0: client u counts min(n_u / cap, 1), for its n_u samples."""
    control: float = 1.0
    """Factor of the control variates in the length, above 0. A small one leaves the clip to the update, and raises the
    noise of the control variates by 1 / control."""
    decay: float = 0.0
    """Share of its last control variate that a client sends again, from 0 to 1, so that old noise in their mean fades;
    0: noise adds up over rounds."""
    adapt: float = 0.0
    """Rate of adaptive clipping, at least 0, such as 0.2; 0 keeps the clip."""
    quantile: float = 0.5
    """adapt: share of the clients whose length is to be below the clip, above 0 and below 1."""
    count_noise: float = 0.0
    """adapt: deviation of the noise of the count of clipped clients; 0: a twentieth of the expected replies, but at
    least the noise."""
    accountant: Accountant = "pld"
    """With sampling=poisson: privacy loss distributions (the smaller epsilon), or Renyi differential privacy (rdp)."""

    def __post_init__(self) -> None:
        needs: list[tuple[bool, str, str]] = [
            (self.clip > 0, "clip", "above 0"),
            (self.noise == "auto" or 0 <= self.noise < math.inf, "noise", "at least 0 and finite, or auto"),
            (self.epsilon > 0, "epsilon", "above 0"),
            (0 < self.delta < 1, "delta", "above 0 and below 1 / clients"),
            (0 <= self.cap < math.inf, "cap", "at least 0 and finite"),
            (0 < self.control < math.inf, "control", "above 0 and finite"),
            (0 <= self.decay <= 1, "decay", "from 0 to 1"),
            (0 <= self.adapt < math.inf, "adapt", "at least 0 and finite"),
            (0 < self.quantile < 1, "quantile", "above 0 and below 1"),
            (0 <= self.count_noise < math.inf, "count_noise", "at least 0 and finite"),
        ]
        for right, name, remedy in needs:
            if not right:
                raise ValueError(f"{name} must be {remedy}, not {getattr(self, name)}")
        if self.clip == math.inf and self.noise != 0:
            raise ValueError("clip=inf has no bound that noise could hide; set a clip, or noise=0")
        if self.clip == math.inf and self.adapt:
            raise ValueError("adapt needs a finite clip to start from, such as clip=0.1")
        if self.noise == 0 and self.epsilon < math.inf:
            raise ValueError(f"noise=0 has no finite epsilon; leave epsilon={self.epsilon:g} out, or set noise=auto")


class Private(NamedTuple):
    server: Any  # the method's own
    noise: float  # of all that a round releases together
    spread: float  # of the fields: more than ``noise`` if a count has its share
    count_noise: float
    expected: float  # m, replies of a round
    weight: float  # W, sum of their w_u
    whole: float  # sum of w_u over all clients
    once: float  # clients / whole: the sum of a field that counts clients once is per client
    C: Tensor
    added_P: Any  # sum of all changes so far, with decay; otherwise ()


class Down(NamedTuple):
    down: Any  # the method's own
    C: Any  # () if it is fixed


class Up(NamedTuple):
    up: Any  # the method's own
    inside: Any  # b_u; () if the clip is fixed


def release_of(federation: Federation, noise: float) -> Release:
    """Return what a round releases. Only uniform and Poisson draws without drop-outs are amplified by sampling."""
    n = federation.num_clients
    by_chance = federation.sampling in ("uniform", "poisson") and not federation.drops_out
    return Release(noise, federation.per_round if by_chance else n, n, replace=federation.sampling != "poisson")


def noise_of(config: Config, federation: Federation) -> float:
    """Return the noise of the config; ``auto`` is found for the planned rounds."""
    if config.noise != "auto":
        return config.noise
    if config.epsilon == math.inf:
        return 1.0
    return accountant.least_noise(
        release_of(federation, 0.0),
        federation.rounds,
        budget=config.epsilon,
        delta=config.delta,
        accountant=config.accountant,
    )


def with_dp(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` with client-level differential privacy."""
    _refuse(method)
    if config.decay and (method.changes is None or len(method.reveals) < 2):
        raise ValueError("dp: decay is for control variates, which this method does not send; leave it out")
    changes, adapts, weights = method.changes, config.adapt > 0, method.weights
    silent = changes.new if changes else ""  # a field that is not sent
    fields = tuple(name for name in method.reveals if name != silent)
    updates = [name for name in fields if not changes or name != changes.field]
    factor = {name: 1.0 if name in updates or not updates else config.control for name in fields}
    found = config.noise == "auto" and config.epsilon < math.inf

    def init(x_P: Tensor, federation: Federation) -> Private:
        n = federation.num_clients
        noise = noise_of(config, federation)
        w_N = torch.ones_like(federation.sizes_N)
        if config.cap:
            w_N = (federation.sizes_N / config.cap).clamp(max=1.0)
        pi_N = torch.full_like(w_N, federation.per_round / n)
        if federation.inclusion_N is not None:
            pi_N = federation.inclusion_N.to(w_N)
        expected = float(pi_N.sum())
        count_noise = (config.count_noise or max(expected / 20, noise)) if adapts and noise else 0.0
        if 0 < 2 * count_noise <= noise:
            raise ValueError(
                f"+dp: count_noise is {count_noise:g}, but must be above half the noise ({noise:g} / 2) to leave noise "
                "for the other fields"
            )
        spread = (noise**-2 - (2 * count_noise) ** -2) ** -0.5 if count_noise else noise
        C = x_P.new_tensor(config.clip)
        added = torch.zeros_like(x_P) if config.decay and changes else ()
        weight, whole = float((pi_N * w_N).sum()), float(w_N.sum())
        # the method's own server must not use what single clients hold
        blind = federation._replace(sizes_N=torch.full_like(w_N, whole / n), label_counts=None)
        server = method.init(x_P, blind)
        return Private(server, noise, spread, count_noise, expected, weight, whole, n / whole, C, added)

    def broadcast(private: Private, ids_S: Tensor) -> Down:
        return Down(method.broadcast(private.server, ids_S), for_all(private.C, ids_S) if adapts else ())

    def hand_out(private: Private, ids_S: Tensor) -> Down:
        assert method.hand_out is not None
        return Down(method.hand_out(private.server, ids_S), for_all(private.C, ids_S) if adapts else ())

    def begin(ask: Ask, down: Down, own: Any) -> tuple[Tensor, Any]:
        return method.begin(ask, down.down, own)

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, own: Any, scratch: Any) -> tuple[Tensor, Any]:
        return method.direction(ask, y_P, batch, down.down, own, scratch)

    def predict(ask: Ask, y_P: Tensor, down: Down, own: Any) -> Prediction:
        return method.predict(ask, y_P, down.down, own)

    def finish(ask: Ask, y_P: Tensor, work: Work, down: Down, own: Any, scratch: Any) -> tuple[Up, Any]:
        up, kept = method.finish(ask, y_P, work, down.down, own, scratch)
        C = down.C if adapts else config.clip
        if changes and config.decay:
            again_P = config.decay * changes.kept(own)
            up = _changed(up, changes.field, lambda a_P: a_P + again_P)
        length = joint_length(up, factor)
        sent = tree_map(lambda a: a * torch.clamp(C / length, max=1.0), up)
        if changes:
            change_P = field_of(sent, changes.field)
            kept = changes.keep(own, kept, change_P - again_P if config.decay else change_P)
        if config.cap:
            w = torch.clamp(ask.client.num_samples / config.cap, max=1.0)
            sent = tree_map(lambda a: a * w, sent)
        inside = (length <= C).to(length) - 0.5 if adapts else ()
        return Up(_changed(sent, silent, torch.zeros_like), inside), kept

    def step(ask: ServerAsk, private: Private, sums: Sums) -> Stepped:
        key = fold(ask.key, NOISE)
        deviation = private.spread * float(private.C) if private.spread else 0.0
        noised = {name: sums.sum(name) for name in fields}
        if deviation:
            noised = {
                name: total + deviation / factor[name] * _normal(fold(key, i), total)
                for i, (name, total) in enumerate(noised.items())
            }
        added = private.added_P
        totals = {name: total * (private.once if weights.get(name) == "one" else 1.0) for name, total in noised.items()}
        if changes and config.decay:
            totals[changes.field] = totals[changes.field] - config.decay * private.weight / private.whole * added
            added = added + totals[changes.field]
        if silent:  # all clients are new in the first round
            totals[silent] = private.C.new_tensor(private.whole if ask.round == 0 else 0.0)
        given = Sums(
            mean=lambda name: noised[name] / private.weight,
            sum=totals.__getitem__,
            samples=private.C.new_tensor(private.weight),
            num_replies=round(private.expected),
        )
        stepped = method.step(ask, private.server, given)
        private = private._replace(server=stepped.server, added_P=added)
        if not adapts:
            return stepped._replace(server=private)
        count = sums.sum("inside")
        if private.count_noise:
            count = count + private.count_noise * _normal(fold(ask.key, COUNT), count)
        share = float(count) / private.expected + 0.5
        numbers = {**stepped.numbers, "clip": float(private.C), "clip_inside": share}
        C = private.C * math.exp(-config.adapt * (share - config.quantile))
        return stepped._replace(server=private._replace(C=C), numbers=numbers)

    return through(method)._replace(
        init=init,
        broadcast=broadcast,
        hand_out=hand_out if method.hand_out else None,
        begin=begin,
        direction=direction,
        finish=finish,
        predict=predict,
        step=step,
        buffers="personal",
        fixed_sizes=method.fixed_sizes or config.cap > 0,
        reveals=revealing(method, inside="whether what it sends is within the clip") if adapts else method.reveals,
        weights=dict.fromkeys([*method.reveals, *(["inside"] if adapts else [])], "one"),
        privacy=Privacy(config.epsilon, config.delta, lambda private: private.noise, config.accountant, found),
        switches=(*method.switches, "dp"),
    )


def joint_length(up: Any, factor: dict[str, float]) -> Tensor:
    """Return |a_u|, the length of all fields in ``factor`` as one vector."""
    squares = [
        (factor[name] * leaf).square().sum()
        for name, leaf in ((path.rpartition(".")[2], leaf) for path, leaf in leaves(up))
        if name in factor
    ]
    return torch.stack(squares).sum().sqrt()


def _normal(key: Tensor, like: Tensor) -> Tensor:
    return normal(key, like.numel()).reshape(like.shape).to(like)


def _changed(tree: Any, name: str, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the tree with another value in the field ``name``."""
    if not isinstance(tree, tuple) or not hasattr(tree, "_fields"):
        return tree
    parts = zip(tree._fields, tree, strict=True)
    return type(tree)(*(change(part) if field == name else _changed(part, name, change) for field, part in parts))


def _refuse(method: Method) -> None:
    """Raise ValueError if the guarantee would not hold, or if a method's fields cannot be clipped together."""
    single = [f"+{name}" for name in SINGLE if name in method.switches]
    if method.form != "sums":
        raise ValueError(
            f"dp adds noise to sums over clients, but {' and '.join(single) or 'this method'} needs single replies; "
            "use a method in the sums form, as in fedavg+dp, scaffold+dp or fedncv-sums+dp"
        )
    if "poisoned" in method.switches:
        raise ValueError("dp relies on clients that clip, and those of +poisoned would not; leave one of them out")
    if method.joining:
        told = " and ".join(method.joining.values())
        raise ValueError(f"dp cannot protect what clients tell when they join ({told}); use another method")
    if not method.reveals:
        raise ValueError("dp has nothing to protect: clients of this method send nothing")
    mine = (method.changes.field, method.changes.new) if method.changes else ()
    if len(others := [name for name in method.reveals if name not in mine]) > 1:
        raise ValueError(
            f"dp clips an update and its control variate together, but this method sends {', '.join(others)}, which "
            "clipping would make disagree; use fedavg+dp, scaffold+dp or fedncv-sums+dp"
        )

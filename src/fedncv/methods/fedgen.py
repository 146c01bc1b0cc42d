"""FedGen: a generator of features, trained on the clients' heads, passes knowledge between clients.

    G_w(noise, label) -> features, one hidden layer of rectified units; the head of y maps features to logits
    client   y <- y - lr * gradient of  loss(y) + decay^t * ( alpha * mean_k CE(head_y(G(e_k, c_k)), c_k)
                                                            + beta * KL( head_y(G(e, label)) || model_y(x) ) )
             c_k ~ p_hat, e standard normal; the first argument of KL is a constant
             sends also how many samples of each class it holds, n_{u,c}
    server   x as FedAvg;  p_hat(c) = sum_S n_{u,c} / sum_S n_u
             w <- Adam, some steps on   E_{c ~ p_hat, e} sum_S n_{u,c} / sum_S n_{v,c} * CE(head_{y_u}(G(e, c)), c)
                                        + eta * exp(-mean_{j,k}( |e_j - e_k|^2 * |G_j - G_k| ))

Zhu et al., ICML 2021, https://arxiv.org/abs/2105.10056, Algorithm 1, with the diversity term, the latent
regulariser (KL) and the constants of the authors' code.
Departures from the paper: the generator has no BatchNorm (its statistics would have to be sent) and no weight
decay. The cross-entropies of the heads are averaged, as in the authors' code; the paper averages the logits.
Clients draw c from p_hat; the authors' code draws uniformly from the classes seen. Clients add the two extra
losses only after the generator has been trained.

Letters: G = parameters of the generator, Z = noise, F = features, K = generated samples.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedncv.flat import Model
from fedncv.keys import Key, fold, normal, uniform
from fedncv.methods.base import (
    Ask,
    Batch,
    Federation,
    Method,
    Replies,
    ServerAsk,
    Stepped,
    Work,
    for_all,
    weighted_sum,
)
from fedncv.methods.fedavg import fedavg

GENERATED = 1 << 20  # keeps the method's draws apart from the dropout layers of the same step
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's


@dataclass(frozen=True, kw_only=True)
class Config:
    alpha: float = 10.0
    """Weight of the cross-entropy on generated features, at least 0. alpha = beta = 0 is FedAvg."""
    beta: float = 10.0
    """Weight of the KL term between predictions on samples and on generated features, at least 0."""
    decay: float = 0.98
    """Factor on alpha, beta and generator_lr per round, above 0 and at most 1."""
    eta: float = 1.0
    """Weight of the diversity of generated features, at least 0."""
    generated: int = 32
    """Features generated per step, at the server and at each client, at least 1."""
    noise: int = 32
    """Dimensions of the noise, at least 1."""
    hidden: int = 256
    """Hidden units of the generator, at least 1."""
    generator_lr: float = 3e-4
    """Adam's learning rate for the generator, above 0."""
    generator_steps: int = 50
    """Steps of Adam per round, at least 1."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "eta"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        for name in ("generated", "noise", "hidden", "generator_steps"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, not {self.decay}")
        if not self.generator_lr > 0:
            raise ValueError(f"generator_lr must be above 0, not {self.generator_lr}")


class Server(NamedTuple):
    x_P: Tensor  # global model
    w_G: Tensor  # generator
    m_G: Tensor  # Adam's moments
    v_G: Tensor
    p_C: Tensor  # p_hat
    trainings: int  # rounds in which the generator was trained


class Down(NamedTuple):
    x_P: Tensor
    w_G: Tensor
    p_C: Tensor
    decay: Tensor  # decay^t; 0 until the generator has been trained


class Up(NamedTuple):
    delta_P: Tensor  # x - y
    n_C: Tensor


class Drawn(NamedTuple):
    """Random inputs of one generator step; the server holds one row per step."""

    e_KZ: Tensor
    labels_K: Tensor
    number: Tensor  # of the step, from 1 over all rounds; float64


class Taught(NamedTuple):
    """Teachers of the generator in one round."""

    y_SP: Tensor  # the clients' models: their heads
    share_SC: Tensor  # of a class's samples that each client holds
    lr: Tensor  # float64


class Shape(NamedTuple):
    noise: int
    classes: int
    hidden: int
    features: torch.Size  # of one sample

    @property
    def layers(self) -> list[int]:
        width = self.features.numel()
        return [self.hidden * (self.noise + self.classes), self.hidden, width * self.hidden, width]


def start(shape: Shape, key: Key, dtype: torch.dtype) -> Tensor:
    """Return initial weights: uniform in +-1/sqrt(inputs), as in torch's linear layers."""
    bounds = [1 / math.sqrt(shape.noise + shape.classes)] * 2 + [1 / math.sqrt(shape.hidden)] * 2
    layers = zip(shape.layers, bounds, strict=True)
    return torch.cat([b * (2 * uniform(fold(key, i), n, dtype=dtype) - 1) for i, (n, b) in enumerate(layers)])


def generate(shape: Shape, w_G: Tensor, e_KZ: Tensor, labels_K: Tensor) -> Tensor:
    """Return features, one row per label."""
    W1, b1, W2, b2 = torch.split(w_G, shape.layers)
    onehot_KC = (labels_K[:, None] == torch.arange(shape.classes, device=w_G.device)).to(w_G.dtype)
    hidden_KH = torch.relu(torch.cat([e_KZ, onehot_KC], dim=1) @ W1.reshape(-1, shape.hidden) + b1)
    return (hidden_KH @ W2.reshape(shape.hidden, -1) + b2).reshape(len(labels_K), *shape.features)


def draw_noise(key: Key, num: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    return normal(key, num * shape.noise, dtype=dtype).reshape(num, shape.noise)


def draw_labels(key: Key, num: int, p_C: Tensor) -> Tensor:
    """Return labels drawn from p: count the cumulated probabilities that a uniform number exceeds."""
    below_C = torch.cumsum(p_C, dim=0)[:-1]
    return (uniform(key, num, dtype=p_C.dtype)[:, None] >= below_C).sum(dim=1)


def sameness(e_KZ: Tensor, z_KF: Tensor) -> Tensor:
    """Return exp(-mean_{j,k}( |e_j - e_k|^2 * |z_j - z_k| )); distances are means over coordinates."""
    noise_KK = (e_KZ[:, None] - e_KZ).square().mean(dim=2)
    feature_KK = (z_KF[:, None] - z_KF).abs().mean(dim=2)
    return torch.exp(-(noise_KK * feature_KK).mean())


def adam(server: Server, g_G: Tensor, step: int | Tensor, lr: float | Tensor) -> Server:
    m_G = BETA1 * server.m_G + (1 - BETA1) * g_G
    v_G = BETA2 * server.v_G + (1 - BETA2) * g_G**2
    unbiased_m_G, unbiased_v_G = m_G / (1 - BETA1**step), v_G / (1 - BETA2**step)
    return server._replace(w_G=server.w_G - lr * unbiased_m_G / (torch.sqrt(unbiased_v_G) + EPSILON), m_G=m_G, v_G=v_G)


def fedgen(config: Config = Config()) -> Method:
    def shape_of(num_classes: int, features: torch.Size) -> Shape:
        return Shape(config.noise, num_classes, config.hidden, features)

    def init(x_P: Tensor, federation: Federation) -> Server:
        shape = shape_of(federation.num_classes, federation.layout.features)
        w_G = start(shape, federation.key, x_P.dtype).to(x_P.device)
        p_C = x_P.new_ones(federation.num_classes) / federation.num_classes
        return Server(x_P, w_G, torch.zeros_like(w_G), torch.zeros_like(w_G), p_C, 0)

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        decay = config.decay**server.trainings if server.trainings else 0.0
        parts = server.x_P, server.w_G, server.p_C, server.x_P.new_tensor(decay)
        return Down(*(for_all(part, ids_S) for part in parts))

    def begin(_ask: Ask, down: Down, _own: Any) -> tuple[Tensor, Any]:
        return down.x_P, ()

    def direction(ask: Ask, y_P: Tensor, batch: Batch, down: Down, _own: Any, scratch: Any) -> tuple[Tensor, Any]:
        if batch.y.is_floating_point():
            raise ValueError("fedgen generates features of classes: the targets must be labels, not numbers")
        shape, num = shape_of(down.p_C.shape[0], ask.layout.features), config.generated
        labels_K = draw_labels(fold(ask.key, GENERATED), num, down.p_C)
        e = draw_noise(fold(ask.key, GENERATED + 1), num + batch.y.shape[0], shape, y_P.dtype)
        z = generate(shape, down.w_G, e, torch.cat([labels_K, batch.y]))
        z_KF, z_BF = z[:num], z[num:]
        target_BC = torch.softmax(ask.head(y_P, z_BF), dim=1)

        def loss(y_P: Tensor) -> Tensor:
            logits_BC = ask.forward(y_P, batch).logits_BC
            taught = F.cross_entropy(ask.head(y_P, z_KF), labels_K)
            latent_B = F.kl_div(torch.log_softmax(logits_BC, dim=1), target_BC, reduction="none").sum(dim=1)
            latent = (batch.weight_B * latent_B).sum() / batch.size
            plain = (batch.weight_B * ask.losses(logits_BC, batch)).sum() / batch.size
            return plain + down.decay * (config.alpha * taught + config.beta * latent)

        return ask.grad_of(loss, y_P), scratch

    def finish(ask: Ask, y_P: Tensor, _work: Work, down: Down, own: Any, _scratch: Any) -> tuple[Up, Any]:
        return Up(down.x_P - y_P, ask.client.label_counts_C), own

    def train_generator(model: Model, server: Server, drawn: Drawn, taught: Taught) -> Server:
        """Take one step of Adam against the heads that the clients sent."""
        e_KZ, labels_K, number = drawn
        shape, heads = shape_of(len(server.p_C), model.layout.features), torch.vmap(model.head, in_dims=(0, None))

        def loss(w_G: Tensor) -> Tensor:
            z_KF = generate(shape, w_G, e_KZ, labels_K)
            log_p_SKC = torch.log_softmax(heads(taught.y_SP, z_KF), dim=2)
            losses_SK = -log_p_SKC.gather(2, labels_K.expand(len(log_p_SKC), -1)[:, :, None]).squeeze(2)
            mistaken = (taught.share_SC[:, labels_K] * losses_SK).sum(dim=0).mean()
            return mistaken + config.eta * sameness(e_KZ, z_KF.flatten(1))

        return adam(server, torch.func.grad(loss)(server.w_G), number, taught.lr)

    def combine(_server: Server, replies: Replies) -> Replies:
        return replies  # the generator learns from every client's head

    def step(ask: ServerAsk, server: Server, replies: Replies) -> Stepped:
        delta_SP: Tensor = replies.ups.delta_P
        n_SC: Tensor = replies.ups.n_C
        y_SP, n_C = server.x_P - delta_SP, n_SC.sum(dim=0)
        p_C, share_SC = n_C / n_C.sum(), n_SC / n_C.clamp(min=1)
        move_P = weighted_sum(replies.weight_S, delta_SP)
        x_P = server.x_P - move_P
        following = server._replace(x_P=x_P, p_C=p_C, trainings=server.trainings + 1)
        steps, shape = config.generator_steps, shape_of(len(p_C), ask.model.layout.features)
        labels = draw_labels(fold(ask.key, 0), steps * config.generated, p_C)
        e = draw_noise(fold(ask.key, 1), steps * config.generated, shape, x_P.dtype)
        number = torch.arange(1, steps + 1, dtype=torch.float64, device=x_P.device) + server.trainings * steps
        lr = number.new_tensor(config.generator_lr * config.decay**server.trainings)
        drawn = Drawn(e.view(steps, -1, config.noise), labels.view(steps, -1), number)
        return Stepped(ask.loop(train_generator, following, drawn, Taught(y_SP, share_SC, lr)), move_P)

    return fedavg()._replace(
        init=init,
        broadcast=broadcast,
        begin=begin,
        direction=direction,
        finish=finish,
        combine=combine,
        step=step,
        reveals={"delta_P": "the client's model update", "n_C": "how many samples of each class it holds"},
    )

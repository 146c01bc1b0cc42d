"""FedDyn: dynamic regularisation that makes the clients' optima agree with the global one.

    client   y <- y - lr * (grad_u(y) - lambda_u + alpha * (y - x))      the gradient of
                  loss - <lambda_u, y> + alpha/2 * ||y - x||^2
             lambda_u <- lambda_u - alpha * (y - x)
    server   h <- h - alpha/N * sum_S (y_u - x)
             x <- mean_S y_u - h / alpha

Acar et al., ICLR 2021, https://arxiv.org/abs/2111.04263, Algorithm 1.
Departures from the paper: the local minimum is approximated by the study's local steps, as in the authors'
experiments. The paper uses alpha = 0.1 or 0.01 depending on the dataset; here 0.01, its value for CIFAR.
At the fixed point y_u = x for every client, so lambda_u is its gradient at x and h = mean lambda = 0: this is the
optimum, for any alpha above 0. Convergence takes about 1/alpha rounds; alpha = 0 is not defined.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedncv.methods.base import Ask, Batch, Changes, Federation, Method, ServerAsk, Stepped, Sums, Work, for_all
from fedncv.methods.fedavg import Down, Up, fedavg


@dataclass(frozen=True, kw_only=True)
class Config:
    alpha: float = 0.01
    """Strength of the regulariser, above 0. Larger values shorten local moves and learn lambda_u faster."""

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, not {self.alpha}")


class Server(NamedTuple):
    x_P: Tensor  # global model
    h_P: Tensor  # mean of all lambda_u
    num_clients: int


def feddyn(config: Config = Config()) -> Method:
    alpha = config.alpha

    def init(x_P: Tensor, federation: Federation) -> Server:
        return Server(x_P, x_P.new_zeros(x_P.shape), federation.num_clients)

    def init_own(_ask: Ask, x_P: Tensor) -> Tensor:
        return x_P.new_zeros(x_P.shape)  # lambda_u

    def broadcast(server: Server, ids_S: Tensor) -> Down:
        return Down(for_all(server.x_P, ids_S))

    def direction(
        ask: Ask, y_P: Tensor, batch: Batch, down: Down, lambda_P: Tensor, scratch: Any
    ) -> tuple[Tensor, Any]:
        return ask.grad(y_P, batch) - lambda_P + alpha * (y_P - down.x_P), scratch

    def finish(_ask: Ask, y_P: Tensor, _work: Work, down: Down, lambda_P: Tensor, _scratch: Any) -> tuple[Up, Tensor]:
        return Up(down.x_P - y_P), lambda_P - alpha * (y_P - down.x_P)

    def step(_ask: ServerAsk, server: Server, sums: Sums) -> Stepped:
        h_P = server.h_P + alpha / server.num_clients * sums.sum("delta_P")  # delta_u = x - y_u
        mean_P = server.x_P - sums.mean("delta_P")
        return Stepped(server._replace(x_P=mean_P - h_P / alpha, h_P=h_P))

    return fedavg()._replace(
        init=init,
        init_own=init_own,
        broadcast=broadcast,
        direction=direction,
        finish=finish,
        step=step,
        weights={"delta_P": "one"},
        changes=Changes(
            "delta_P", lambda lambda_P: lambda_P, lambda lambda_P, _after_P, sent_P: lambda_P + alpha * sent_P
        ),
        switches=("drift",),
    )

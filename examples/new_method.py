"""Write your own method: FedAvg whose clients follow the sign of their gradient.

A method is FedAvg with some pieces replaced. The top of fedncv/methods/base.py explains the pieces and what each
may ask for.

    client   y <- y - lr * scale * sign(grad_u(y))
    server   as FedAvg
"""

from typing import Any

from torch import Tensor

import fedncv
from fedncv.methods.base import Ask, Batch, Method
from fedncv.methods.fedavg import Down, fedavg


def signed(scale: float = 0.05) -> Method:
    def direction(ask: Ask, y_P: Tensor, batch: Batch, _down: Down, _own: Any, scratch: Any) -> tuple[Tensor, Any]:
        return scale * ask.grad(y_P, batch).sign(), scratch

    return fedavg()._replace(direction=direction)


if __name__ == "__main__":
    result = fedncv.simulate(method=signed(), model="mlp", clients=20, per_round=5, rounds=10, lr=0.05)
    for row in result.rows:
        if "before" in row:
            print(f"round {row['round']:3}  before {row['before']:.3f}")

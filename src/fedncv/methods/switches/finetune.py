"""Fine-tuning of its own for the score after local training: another learning rate, other epochs.

    after    begin as in a round, then local training with ``epochs`` epochs at the constant rate ``lr``

Training and messages do not change, nor does the score before. The score "after" answers what a client gains that
receives the model and trains it once more before it uses it; the best rate and number of epochs for this are rarely
those of a round. As any measurement it is not counted as work: a client that does it spends ``epochs`` times its
samples in gradients, once.

A baseline of Oh et al., ICLR 2022, https://arxiv.org/abs/2106.06042 (FedAvg and FedBABU, fine-tuned).
"""

import math
from dataclasses import dataclass

from fedncv.methods.base import FineTuning, Method, Phase


@dataclass(frozen=True, kw_only=True)
class Config:
    lr: float = 0.0
    """Learning rate of every step, above 0; 0 is the study's rate in that round."""
    epochs: int = 0
    """Local epochs, at least 1; 0 is as many as in a round. lr = 0 with epochs = 0 leaves the method unchanged."""

    def __post_init__(self) -> None:
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"lr must be at least 0 and finite, not {self.lr}")
        if not self.epochs >= 0:
            raise ValueError(f"epochs must be at least 0, not {self.epochs}")


def with_finetune(method: Method, config: Config = Config()) -> Method:
    """Return ``method`` whose score after local training is that of another local training."""
    if config.lr == 0 and config.epochs == 0:
        return method
    plain = FineTuning(method.phases) if method.finetune is None else method.finetune

    def phases(epochs: int) -> tuple[Phase, ...]:
        return plain.phases(config.epochs or epochs)

    tuning = FineTuning(phases, config.lr or plain.lr)
    return method._replace(finetune=tuning, switches=(*method.switches, "finetune"))

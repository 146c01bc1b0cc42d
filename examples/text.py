"""Text: predict the next character of Shakespeare's plays, with speakers as clients.

A sample is a window of characters, its target is the character that follows, and its owner is the speaker. With the
whole file `shakespeare.txt` in a folder, and LEAF's LSTM:

    fedncv run --data shakespeare --data-dir FOLDER --partition natural --clients 100 --model char_lstm --lr 0.5

Here three sonnets stand for three speakers, and a small GRU of our own learns from windows of 16 characters.
"""

import tempfile
from pathlib import Path

from torch import Tensor, nn

import fedncv

SPEECHES = """
Eighteen:
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;

Twenty-nine:
When, in disgrace with fortune and men's eyes,
I all alone beweep my outcast state,
And trouble deaf heaven with my bootless cries,
And look upon myself, and curse my fate,
Wishing me like to one more rich in hope,
Featur'd like him, like him with friends possess'd,
Desiring this man's art and that man's scope,
With what I most enjoy contented least;

Hundred and sixteen:
Let me not to the marriage of true minds
Admit impediments. Love is not love
Which alters when it alteration finds,
Or bends with the remover to remove:
O no! it is an ever-fixed mark
That looks on tempests and is never shaken;
It is the star to every wandering bark,
Whose worth's unknown, although his height be taken.
"""


class NextCharacter(nn.Module):
    def __init__(self, _shape: tuple[int, ...], alphabet: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, 8)
        self.gru = nn.GRU(8, 64, batch_first=True)
        self.head = nn.Linear(64, alphabet)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(x))[0][:, -1])  # type: ignore[no-any-return]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "shakespeare.txt").write_text(SPEECHES, encoding="utf-8")
        result = fedncv.simulate(
            method="fedavg",
            data="shakespeare:length=16,stride=2,min_chars=200",
            data_dir=folder,
            partition="natural",
            clients=3,
            per_round=3,
            rounds=6,
            epochs=3,
            batch_size=16,
            model=NextCharacter,
            optimizer="adam",
            lr=0.02,
            metrics=["top5"],
        )
    for row in result.rows:
        if "before" in row:
            print(f"round {row['round']:3}  before {row['before']:.3f}  in the first five {row['before_top5']:.3f}")

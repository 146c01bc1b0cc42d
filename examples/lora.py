"""Fine-tune a Hugging Face model with low-rank adapters: the base stays frozen, and only adapters are sent.

The model here is small and random, made from a config, so that nothing is downloaded. With a real one, write
`BertForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=outputs)` and the targets of its layers.
Needs `pip install -e ".[lora]"`.
"""

import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification

import fedncv


def adapted(shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
    config = BertConfig(
        vocab_size=17, max_position_embeddings=shape[0],
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    )  # fmt: skip
    config.num_labels = outputs
    base = BertForSequenceClassification(config)
    return fedncv.lora(fedncv.models.Logits(base), rank=4, targets=("query", "value"), train=("classifier",))


digits = load_digits()  # a picture as a text of 64 tokens from 0 to 16
tokens, labels = torch.from_numpy(digits.data).long(), torch.from_numpy(digits.target).long()
data = fedncv.Dataset("digits as text", tokens[:200], labels[:200], 10)
result = fedncv.simulate(data=data, model=adapted, clients=4, per_round=2, rounds=2, epochs=1, lr=0.1)
model = result.problem.model
print(f"{model.layout.num_parameters:,} of {model.num_weights:,} parameters train")
print(f"before {result.last['before']:.3f}  after {result.last['after']:.3f}  {result.last['bytes_up']:,} bytes up")

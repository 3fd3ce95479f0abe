"""The ledger of any model: its tokens are those of the input, whatever else is in the batch."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, default_data_collator

from mst_scale.flops.any_model import ModelLedger
from mst_scale.hybrid_sparse_attention.pattern import Pattern

SEQUENCES, LENGTH = 8, 64
DENSE = Pattern("dense")
SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}


def spent_on(model, *args, pattern=DENSE, **named):
    """The ledger after one step of one forward."""
    ledger = ModelLedger(model.train())
    model(*args, **named)
    ledger.add(pattern, {})
    return ledger.spent


def classified():
    """A batch of transformers' default_data_collator: the labels, one per sequence, come first."""
    texts = [{"label": i % 2, "input_ids": [1 + i] * LENGTH, "attention_mask": [1] * LENGTH} for i in range(SEQUENCES)]
    return default_data_collator(texts)


@pytest.mark.parametrize(
    "order", [("labels", "input_ids", "attention_mask"), ("attention_mask", "labels", "input_ids"), ("input_ids",)]
)
def test_tokens_are_those_of_the_input_and_not_of_the_labels(order):
    batch = classified()
    assert next(iter(batch)) == "labels"
    spent = spent_on(LlamaForSequenceClassification(LlamaConfig(**SHAPE)), **{key: batch[key] for key in order})
    d, f = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    matrices = 4 * (2 * d - 1) * d + 2 * (2 * d - 1) * f + (2 * f - 1) * d  # q, k, v, o; gate, up; down
    pairs = SEQUENCES * LENGTH * LENGTH
    head = SEQUENCES * LENGTH * (2 * d - 1) * 2  # two classes of every token
    expected = 3 * (2 * (SEQUENCES * LENGTH * matrices + 4 * pairs * d) + head)
    assert spent["tokens"] == SEQUENCES * LENGTH
    assert spent["flops_dense"] == pytest.approx(expected, rel=1e-12)


class Takes(nn.Module):
    """Any model of which only the inputs matter here."""

    def forward(self, *args, **named):
        return torch.zeros(())


@pytest.mark.parametrize(
    ("args", "tokens"),
    [
        (({"labels": torch.zeros(3, dtype=torch.long), "input_ids": torch.zeros(3, 5, dtype=torch.long)},), 15),
        (({"position_ids": torch.zeros(1, 9, dtype=torch.long), "input_ids": torch.zeros(20, dtype=torch.long)},), 20),
        ((torch.zeros(3, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long)), 15),
        ((torch.zeros(3, 5, 7), torch.zeros(3, dtype=torch.long)), 3),
        ((torch.zeros(3, 5, 7), torch.zeros(3, 5, dtype=torch.bool)), 15),
        ((None,), 0),
    ],
    ids=["a mapping", "by name", "a matrix", "a vector", "floats", "nothing"],
)
def test_which_tensor_of_a_batch_holds_the_tokens(args, tokens):
    assert spent_on(Takes(), *args)["tokens"] == tokens

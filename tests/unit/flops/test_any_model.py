"""The ledger of any model: its tokens are those of the input, whatever else is in the batch."""

import pytest
import torch
import transformers
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


DISTIL = {"n_layers": 2, "n_heads": 2, "dim": 16, "hidden_dim": 32, "vocab_size": 50}
SPLIT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "shape", "layers"),
    [
        ("LlamaForCausalLM", SHAPE, [(16, True)] * 2),
        ("LlamaForCausalLM", {**SHAPE, "head_dim": 12}, [(24, True)] * 2),
        ("GPTNeoXForCausalLM", SHAPE, [(16, True)] * 2),
        ("BertForMaskedLM", SHAPE, [(16, False)] * 2),
        ("BertLMHeadModel", {**SHAPE, "is_decoder": True}, [(16, True)] * 2),
        ("RobertaForMaskedLM", SHAPE, [(16, False)] * 2),
        ("DistilBertForMaskedLM", DISTIL, [(16, False)] * 2),
        ("DeepseekV3ForCausalLM", {**SHAPE, **SPLIT, "first_k_dense_replace": 2}, []),
    ],
)
def test_attention_layers_are_found_whatever_their_head_size_is_called(kind, shape, layers):
    made = getattr(transformers, kind)
    assert ModelLedger(made(made.config_class(**shape))).attention == layers


@pytest.mark.parametrize(("kind", "causal"), [("GPTNeoXForCausalLM", True), ("BertForMaskedLM", False)])
def test_sparse_attention_counts_its_pairs(kind, causal):
    made = getattr(transformers, kind)
    tokens = torch.ones(SEQUENCES, LENGTH, dtype=torch.long)
    spent = spent_on(made(made.config_class(**SHAPE)), tokens, pattern=Pattern("strided", 8))
    left_out = LENGTH * LENGTH - Pattern("strided", 8).pairs(LENGTH, causal)
    saved = 3 * 2 * 4 * SEQUENCES * left_out * SHAPE["hidden_size"]  # backward twice as many, in two layers
    assert spent["flops_dense"] - spent["flops"] == pytest.approx(saved, rel=1e-9)


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

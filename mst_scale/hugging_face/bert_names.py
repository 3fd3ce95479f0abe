"""Maps our BERT's tensors to those of Hugging Face's BERT, and back.

Both hold the same network. `BertForMaskedLM` has three matrices where we have one `qkv` (rows: all of q, all of k, all
of v), always has biases (a model without them is exported with zeros, which computes the same) and knows no padding of
the vocabulary. The decoder's weight and bias have two names each; where the head is not tied, `decoder.*` are in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.hugging_face.gpt2_names import Entry, padded
from mst_scale.models.bert import EPS, TOKEN_TYPES

LAYER = {  # our module → theirs; all three of qkv in the order of its rows
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.proj": ("attention.output.dense",),
    "ln_1": ("attention.output.LayerNorm",),
    "mlp.up": ("intermediate.dense",),
    "mlp.down": ("output.dense",),
    "ln_2": ("output.LayerNorm",),
}
EMBEDDINGS = {"wte": "word_embeddings", "wpe": "position_embeddings", "wtt": "token_type_embeddings"}
HEAD = "cls.predictions."
DECODER, DECODER_BIAS, BIAS = HEAD + "decoder.weight", HEAD + "decoder.bias", HEAD + "bias"
WORDS = "bert.embeddings.word_embeddings.weight"
# What older and other checkpoints hold beside: the pooler and the next-sentence head, and a buffer of 0, 1, 2, …
WITHOUT_PLACE_HERE = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")
OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
VOCABULARY = ("wte.weight", "lm_head.weight", "head_bias")  # those with a row, or a number, per id


def entries(config: ModelConfig) -> list[Entry]:
    """Every parameter of a model with biases, in our order."""
    table = [Entry(f"{ours}.weight", f"bert.embeddings.{theirs}.weight") for ours, theirs in EMBEDDINGS.items()]
    table += [Entry(f"ln_e.{kind}", f"bert.embeddings.LayerNorm.{kind}") for kind in ("weight", "bias")]
    for layer in range(config.n_layer):
        for ours, theirs in LAYER.items():
            table += [
                Entry(
                    f"blocks.{layer}.{ours}.{kind}",
                    f"bert.encoder.layer.{layer}.{name}.{kind}",
                    part=part,
                    parts=len(theirs),
                )
                for kind in ("weight", "bias")
                for part, name in enumerate(theirs)
            ]
    for ours, name in (("transform", "dense"), ("ln_h", "LayerNorm")):
        table += [Entry(f"{ours}.{kind}", f"{HEAD}transform.{name}.{kind}") for kind in ("weight", "bias")]
    if config.tied_head:
        return [*table, Entry("head_bias", BIAS)]
    return [*table, Entry("lm_head.weight", DECODER), Entry("head_bias", DECODER_BIAS)]


def from_hugging_face(state: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """A state dict of `BertForMaskedLM` or `BertForPreTraining` as ours; `config` says which shape is meant, and every
    tensor must fit it. What masked-language modelling does not use (pooler, next sentence) is left behind.

    Rows that pad the vocabulary become the mean of the real rows, their bias the mean bias: each has then at most the
    average probability (Jensen).
    """
    given = {_new_name(name): tensor for name, tensor in state.items() if not name.startswith(WITHOUT_PLACE_HERE)}
    if DECODER_BIAS not in given and BIAS in given:
        given[DECODER_BIAS] = given[BIAS]  # older checkpoints
    table = entries(config)
    if missing := [entry.theirs for entry in table if entry.theirs not in given]:
        raise UserError(f"{missing[0]} is missing: this is no masked-language BERT of {config.n_layer} layers")
    if unknown := given.keys() - {entry.theirs for entry in table} - {DECODER, DECODER_BIAS, BIAS}:
        raise UserError(f"{sorted(unknown)[0]} has no place in a BERT of {config.n_layer} layers")
    if config.tied_head and DECODER in given and not torch.equal(given[DECODER], given[WORDS]):
        raise UserError(f"{DECODER} differs from the word embedding: set model.tied_head = false")
    pieces: dict[str, list[torch.Tensor]] = {}
    for entry in table:
        tensor = given[entry.theirs]
        if entry.ours.endswith("bias") and not config.bias:
            if tensor.any():
                raise UserError(f"{entry.theirs} is not zero: set model.bias = true")
            continue
        pieces.setdefault(entry.ours, []).append(padded(tensor, config) if entry.ours in VOCABULARY else tensor)
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def hugging_face_config(config: ModelConfig, end_of_text: int | None = None) -> dict[str, Any]:
    """The arguments of `BertConfig` (with `model_type` and `architectures`: the contents of a config.json).

    `end_of_text` is the tokenizer's [SEP], or what stands for it.
    """
    named = {} if end_of_text is None else {"sep_token_id": end_of_text}
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "intermediate_size": config.ffw,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "max_position_embeddings": config.seq_length,
        "type_vocab_size": TOKEN_TYPES,
        "layer_norm_eps": EPS,
        "tie_word_embeddings": config.tied_head,
        **named,
    }


def _new_name(name: str) -> str:
    for old, new in OLD_NAMES:
        name = name.replace(old, new)
    return name

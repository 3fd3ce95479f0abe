"""Maps the tensors of our GPT and BERT to those of Hugging Face's GPT-2 and BERT, and back.

Both sides hold the same networks. Theirs always have biases (a model without them is exported with zeros, which
computes the same) and know no padding of the vocabulary.

- `GPT2LMHeadModel` stores its projections as Conv1D, (inputs, outputs), ours are nn.Linear, (outputs, inputs): those
  are transposed.
- `BertForMaskedLM` has three matrices where we have one `qkv` (rows: all of q, all of k, all of v). The decoder's
  weight and bias have two names each; if the head is not tied, `decoder.*` are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.models.bert import EPS, TOKEN_TYPES

VOCABULARY = ("wte.weight", "lm_head.weight", "head_bias")  # those with a row, or a number, per id

GPT2_LAYER = {  # our module → (theirs, transposed)
    "ln_1": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.proj": ("attn.c_proj", True),
    "ln_2": ("ln_2", False),
    "mlp.up": ("mlp.c_fc", True),
    "mlp.down": ("mlp.c_proj", True),
}
GPT2 = "transformer."  # checkpoints of the hub leave it out, `GPT2LMHeadModel.state_dict()` has it
GPT2_HEAD = "lm_head.weight"  # the one name that both sides share and that has no prefix
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")  # older checkpoints store the causal mask under these names

BERT_LAYER = {  # our module → theirs; all three of qkv in the order of its rows
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.proj": ("attention.output.dense",),
    "ln_1": ("attention.output.LayerNorm",),
    "mlp.up": ("intermediate.dense",),
    "mlp.down": ("output.dense",),
    "ln_2": ("output.LayerNorm",),
}
EMBEDDINGS = {"wte": "word_embeddings", "wpe": "position_embeddings", "wtt": "token_type_embeddings"}
PREDICTIONS = "cls.predictions."
DECODER, DECODER_BIAS, BIAS = (PREDICTIONS + name for name in ("decoder.weight", "decoder.bias", "bias"))
# What other checkpoints hold too: the pooler and the next-sentence head, and a buffer of 0, 1, 2, …
NOT_OURS = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")
OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


class Entry(NamedTuple):
    """One tensor of theirs, and what it is of ours: an equal part of the rows, or all of them."""

    ours: str
    theirs: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


def entries(config: ModelConfig) -> list[Entry]:
    """Return every parameter of a model with biases, in our order; the head comes last if it is not tied."""
    return _gpt2_entries(config) if config.causal else _bert_entries(config)


def _gpt2_entries(config: ModelConfig) -> list[Entry]:
    table = [Entry(f"{name}.weight", f"{GPT2}{name}.weight") for name in ("wte", "wpe")]
    for layer in range(config.n_layer):
        for ours, (theirs, transposed) in GPT2_LAYER.items():
            a, b = f"blocks.{layer}.{ours}", f"{GPT2}h.{layer}.{theirs}"
            table += [Entry(a + ".weight", b + ".weight", transposed), Entry(a + ".bias", b + ".bias")]
    table += [Entry(f"ln_f.{kind}", f"{GPT2}ln_f.{kind}") for kind in ("weight", "bias")]
    return table if config.tied_head else [*table, Entry(GPT2_HEAD, GPT2_HEAD)]


def _bert_entries(config: ModelConfig) -> list[Entry]:
    both = ("weight", "bias")
    table = [Entry(f"{ours}.weight", f"bert.embeddings.{theirs}.weight") for ours, theirs in EMBEDDINGS.items()]
    table += [Entry(f"ln_e.{kind}", f"bert.embeddings.LayerNorm.{kind}") for kind in both]
    for layer in range(config.n_layer):
        for ours, theirs in BERT_LAYER.items():
            a, b = f"blocks.{layer}.{ours}", f"bert.encoder.layer.{layer}"
            table += [
                Entry(f"{a}.{kind}", f"{b}.{name}.{kind}", part=part, parts=len(theirs))
                for kind in both
                for part, name in enumerate(theirs)
            ]
    for ours, name in (("transform", "dense"), ("ln_h", "LayerNorm")):
        table += [Entry(f"{ours}.{kind}", f"{PREDICTIONS}transform.{name}.{kind}") for kind in both]
    if config.tied_head:
        return [*table, Entry("head_bias", BIAS)]
    return [*table, Entry("lm_head.weight", DECODER), Entry("head_bias", DECODER_BIAS)]


def from_hugging_face(state: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return a state dict of theirs under our names.

    Rows that pad the vocabulary become the mean of the real rows, their bias the mean bias: each id has then at most
    the average probability (Jensen). Zeros would not do: GPT-2's logits are far below 0.

    Args:
        state: Of GPT-2, or of `BertForMaskedLM` or `BertForPreTraining`; what our models do not have is left out.
        config: The shape that every tensor must fit.

    Raises:
        UserError: if a tensor is missing, has no place in the model, or does not fit it.
    """
    if config.causal:
        given = {
            name if name == GPT2_HEAD or name.startswith(GPT2) else GPT2 + name: tensor
            for name, tensor in state.items()
            if not name.endswith(MASK_BUFFERS)
        }
        kind, head, embedding, optional = "GPT-2", GPT2_HEAD, GPT2 + "wte.weight", {GPT2_HEAD}
    else:
        given = {_new_name(name): tensor for name, tensor in state.items() if not name.startswith(NOT_OURS)}
        if DECODER_BIAS not in given and BIAS in given:
            given[DECODER_BIAS] = given[BIAS]  # older checkpoints
        kind, head, embedding = "BERT", DECODER, "bert.embeddings.word_embeddings.weight"
        optional = {DECODER, DECODER_BIAS, BIAS}
    table = entries(config)
    if missing := [entry.theirs for entry in table if entry.theirs not in given]:
        raise UserError(f"{missing[0]} is missing: this is no {kind} of {config.n_layer} layers")
    if unknown := given.keys() - {entry.theirs for entry in table} - optional:
        raise UserError(f"{sorted(unknown)[0]} has no place in a {kind} of {config.n_layer} layers")
    if config.tied_head and head in given and not torch.equal(given[head], given[embedding]):
        raise UserError(f"{head} differs from the token embedding: set model.tied_head = false")
    parts: dict[str, list[torch.Tensor]] = {}
    for entry in table:
        tensor = given[entry.theirs]
        if entry.ours.endswith("bias") and not config.bias:
            if tensor.any():
                raise UserError(f"{entry.theirs} is not zero: set model.bias = true")
            continue
        tensor = tensor.t().contiguous() if entry.transposed else tensor
        parts.setdefault(entry.ours, []).append(_padded(tensor, config) if entry.ours in VOCABULARY else tensor)
    return {name: some[0] if len(some) == 1 else torch.cat(some) for name, some in parts.items()}


def _new_name(name: str) -> str:
    for old, new in OLD_NAMES:
        name = name.replace(old, new)
    return name


def _padded(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """`rows` and the rows (or numbers) that pad the vocabulary: each is the mean of the others."""
    if len(rows) not in (config.vocab_size, config.padded_vocab):
        raise UserError(f"the vocabulary has {len(rows)} rows: set model.vocab_size = {len(rows)}")
    padding = rows.mean(0, keepdim=True).expand(config.padded_vocab - len(rows), *rows.shape[1:])
    return torch.cat([rows, padding])


def hugging_face_config(config: ModelConfig, end_of_text: int | None = None) -> dict[str, Any]:
    """Return the contents of a config.json: the arguments of `GPT2Config` or `BertConfig`, and the model's type.

    `end_of_text` is the tokenizer's: 50256 of `gpt2`, 256 of `byte`, [SEP] of word pieces. None names no special token.
    """
    if not config.causal:
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
            **({} if end_of_text is None else {"sep_token_id": end_of_text}),
        }
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.seq_length,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.ffw,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": end_of_text,  # GPT-2 begins a document with the token that ends one
        "eos_token_id": end_of_text,
    }

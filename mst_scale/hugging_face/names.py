"""Maps the tensors of our GPT and BERT to those of Hugging Face's GPT-2 and BERT, and back.

The networks are the same. Those of transformers always have biases (a model without them is exported with zeros, which
is equivalent) and do not pad the vocabulary.

- `GPT2LMHeadModel` stores its projections as Conv1D, (inputs, outputs), and ours are nn.Linear, (outputs, inputs), so
  they are transposed.
- `BertForMaskedLM` has three matrices instead of our `qkv` (rows: all of q, all of k, all of v). The decoder's weight
  and bias have two names each; if the head is not tied, `decoder.*` are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.models.bert import EPS, TOKEN_TYPES

VOCABULARY = ("wte.weight", "lm_head.weight", "head_bias")  # tensors with one row or number per token id

GPT2_LAYER = {  # our module → (theirs, transposed)
    "ln_1": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.proj": ("attn.c_proj", True),
    "ln_2": ("ln_2", False),
    "mlp.up": ("mlp.c_fc", True),
    "mlp.down": ("mlp.c_proj", True),
}
GPT2 = "transformer."  # prefix in `GPT2LMHeadModel.state_dict()`, but not in checkpoints on the hub
GPT2_HEAD = "lm_head.weight"  # the only name without the prefix
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
# Additional tensors of other checkpoints: the pooler, the next-sentence head, and a buffer of 0, 1, 2, …
NOT_OURS = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")
OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


class Entry(NamedTuple):
    """A tensor of transformers, and our tensor that it is one of `parts` equal parts (of rows) of."""

    ours: str
    theirs: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


def entries(config: ModelConfig) -> list[Entry]:
    """Return every parameter of a model with biases, in our order; a head that is not tied is last."""
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
    """Convert a state dict of transformers to our names.

    Rows that pad the vocabulary become the mean of the real rows, and their bias the mean bias, so that each padding id
    has at most the average probability (Jensen's inequality). Zeros would be wrong, as GPT-2's logits are far below 0.

    Args:
        state: The state dict of GPT-2, `BertForMaskedLM` or `BertForPreTraining`; tensors that our models do not have
            are left out.
        config: The shape of our model.

    Raises:
        UserError: if a tensor is missing, unknown, or has another shape.
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
        raise UserError(f"{missing[0]} is missing: this is not a {kind} with {config.n_layer} layers")
    if unknown := given.keys() - {entry.theirs for entry in table} - optional:
        raise UserError(f"{sorted(unknown)[0]} does not exist in a {kind} with {config.n_layer} layers")
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
    """Append the rows (or numbers) that pad the vocabulary, each of which is the mean of `rows`."""
    if len(rows) not in (config.vocab_size, config.padded_vocab):
        raise UserError(f"the vocabulary has {len(rows)} rows: set model.vocab_size = {len(rows)}")
    padding = rows.mean(0, keepdim=True).expand(config.padded_vocab - len(rows), *rows.shape[1:])
    return torch.cat([rows, padding])


def hugging_face_config(config: ModelConfig, end_of_text: int | None = None) -> dict[str, Any]:
    """Return the contents of a config.json: the arguments of `GPT2Config` or `BertConfig`, and the model's type.

    `end_of_text` is the tokenizer's token id (50256 for `gpt2`, 256 for `byte`, [SEP] for word pieces), if it has one.
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

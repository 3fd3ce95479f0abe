"""Maps our GPT's tensors to those of Hugging Face's GPT-2, and back.

Both hold the same network. `GPT2LMHeadModel` stores its projections as Conv1D, (inputs, outputs), where we have
nn.Linear, (outputs, inputs): those are transposed. It always has biases (a model without them is exported with zeros,
which computes the same) and knows no padding of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError

LAYER = {  # our module → (theirs, transposed)
    "ln_1": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.proj": ("attn.c_proj", True),
    "ln_2": ("ln_2", False),
    "mlp.up": ("mlp.c_fc", True),
    "mlp.down": ("mlp.c_proj", True),
}
PREFIX = "transformer."  # checkpoints of the hub leave it out, `GPT2LMHeadModel.state_dict()` has it
HEAD = "lm_head.weight"  # the one name that both sides share and that has no prefix
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")  # older checkpoints store the causal mask under these names


class Entry(NamedTuple):
    """One tensor of theirs, and what it is of ours: an equal part of the rows, or all of them."""

    ours: str
    theirs: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


def entries(config: ModelConfig) -> list[Entry]:
    """Every parameter of a model with biases and a tied head, in our order; `lm_head.weight` comes last if untied."""
    table = [Entry("wte.weight", PREFIX + "wte.weight", False), Entry("wpe.weight", PREFIX + "wpe.weight", False)]
    for layer in range(config.n_layer):
        for ours, (theirs, transposed) in LAYER.items():
            a, b = f"blocks.{layer}.{ours}", f"{PREFIX}h.{layer}.{theirs}"
            table += [Entry(a + ".weight", b + ".weight", transposed), Entry(a + ".bias", b + ".bias", False)]
    table += [Entry(f"ln_f.{kind}", f"{PREFIX}ln_f.{kind}", False) for kind in ("weight", "bias")]
    return table if config.tied_head else [*table, Entry(HEAD, HEAD, False)]


def from_hugging_face(state: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """A state dict of Hugging Face's GPT-2 as ours; `config` says which shape is meant, and every tensor must fit it.

    Rows that pad the vocabulary become the mean of the real rows: their logits are then the mean logit, so each has
    at most the average probability (Jensen). Zeros would not do: GPT-2's logits are far below 0.
    """
    given = {
        name if name == HEAD or name.startswith(PREFIX) else PREFIX + name: tensor
        for name, tensor in state.items()
        if not name.endswith(MASK_BUFFERS)
    }
    table = entries(config)
    known = {entry.theirs for entry in table} | {HEAD}
    if missing := [entry.theirs for entry in table if entry.theirs not in given]:
        raise UserError(f"{missing[0]} is missing: this is no GPT-2 of {config.n_layer} layers")
    if unknown := given.keys() - known:
        raise UserError(f"{sorted(unknown)[0]} has no place in a GPT-2 of {config.n_layer} layers")
    if config.tied_head and HEAD in given and not torch.equal(given[HEAD], given[PREFIX + "wte.weight"]):
        raise UserError(f"{HEAD} differs from the token embedding: set model.tied_head = false")
    result = {}
    for ours, theirs, transposed, *_ in table:
        tensor = given[theirs].t().contiguous() if transposed else given[theirs]
        if ours.endswith(".bias") and not config.bias:
            if tensor.any():
                raise UserError(f"{theirs} is not zero: set model.bias = true")
            continue
        result[ours] = padded(tensor, config) if ours in ("wte.weight", HEAD) else tensor
    return result


def hugging_face_config(config: ModelConfig, end_of_text: int | None = None) -> dict[str, Any]:
    """The arguments of `GPT2Config` (with `model_type` and `architectures`: the contents of a config.json).

    `end_of_text` is the tokenizer's: 50256 of `gpt2`, 256 of `byte`. None: the model names no special token.
    """
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


def padded(rows: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """`rows` and the rows (or numbers) that pad the vocabulary: each is the mean of the others."""
    if len(rows) not in (config.vocab_size, config.padded_vocab):
        raise UserError(f"the vocabulary has {len(rows)} rows: set model.vocab_size = {len(rows)}")
    padding = rows.mean(0, keepdim=True).expand(config.padded_vocab - len(rows), *rows.shape[1:])
    return torch.cat([rows, padding])

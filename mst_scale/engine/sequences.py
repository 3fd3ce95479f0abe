"""Gives a model its part of every sequence if an mpu splits sequences over ranks; unsupported models are rejected.

Models of mst_scale split sequences with `sequence_parallel`. Models of transformers do so with DeepSpeed's
UlyssesSPAttentionHF, which has already changed them and is recognized by its mpu.
"""

from __future__ import annotations

from typing import Any

import deepspeed
from torch import nn

from mst_scale.comm import logger
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import SequenceShard, sequence_parallel
from mst_scale.hybrid_sparse_attention.sequence_shards import whole_sequences

_CUT = "mst_sequences_are_cut"  # of a model
JOINED = ("gpt2",)  # their attention joins heads by a reshape of its own, after Ulysses has joined them


def cut_sequences(model: nn.Module, mpu: Any) -> None:
    """Split the model's sequences over the ranks of an mpu; None if there is none."""
    ranks_of = getattr(mpu, "get_sequence_parallel_world_size", None)
    parts = 1 if ranks_of is None else int(ranks_of())
    if parts == 1 or isinstance(model, deepspeed.PipelineModule):
        if vars(model).pop(_CUT, False):  # of an earlier engine
            whole_sequences(model)
        return
    theirs = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    if theirs:
        if not hasattr(mpu, "initialize_sequence_parallel"):
            raise UserError(
                f"{type(theirs[0]).__name__} would attend only within its part of a sequence: let DeepSpeed split the "
                "sequences, and pass the mpu that UlyssesSPAttentionHF.register_with_transformers returns"
            )
        for module in theirs:
            if getattr(module.config, "model_type", "") in JOINED:
                raise UserError(
                    f"{type(module).__name__} does not support split sequences: it reshapes the result of attention by "
                    "heads, which UlyssesSPAttentionHF has already joined. Train it without sequence parallelism, or "
                    "initialize the GPT of mst_scale with its weights"
                )
        return
    attends = sequence_parallel(model, mpu.get_sequence_parallel_group())
    setattr(model, _CUT, True)
    knows = any(isinstance(getattr(module, "part", None), SequenceShard) for module in model.modules())
    if not (attends and knows):
        logger.warning(
            "sequences are split over %d ranks: %s %s",
            parts,
            type(model).__name__,
            "must itself compute positions and average its loss over the ranks (SequenceShard)"
            if attends
            else "has no attention layers of mst_scale and must itself combine the parts",
        )

"""Lists what one rank holds of a model that several ranks share: its cut matrices, its stage's layers.

Over t tensor-parallel ranks qkv and the MLP's first matrix are cut by rows, with their biases, attention's projection
and the MLP's second by columns; embeddings, norms and the head are whole on each. A pipeline gives the first stages one
layer more where they do not divide; the first holds the embeddings, the last the final norm and the head, which if tied
is a second copy of the token embedding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache

from mst_scale.config import ModelConfig
from mst_scale.plan.activations import Share
from mst_scale.plan.parameters import Parameter, parameters
from mst_scale.plan.setting import Setting

BY_ROWS, BY_COLUMNS = ("attention.qkv", "mlp.up"), ("attention.proj", "mlp.down")


def held(model: ModelConfig, s: Setting, stage: int = 0) -> list[Parameter]:
    """What each rank of a stage holds before ZeRO cuts it further."""
    return list(_held(model, s.tensor, s.pipeline, stage))


def ends(s: Setting) -> tuple[int, ...]:
    """The stages that can be the fullest: the first and the last."""
    return (0,) if s.pipeline == 1 else (0, s.pipeline - 1)


def share(model: ModelConfig, s: Setting, stage: int) -> Share:
    """What each rank of a stage computes of a forward pass."""
    if s.pipeline == 1:
        return Share(s.tensor, s.sequence)
    on_their_way = min(s.pipeline - stage, s.accumulation)
    return Share(s.tensor, s.sequence, layers_of(model, s, stage), stage == s.pipeline - 1, on_their_way, True)


def layers_of(model: ModelConfig, s: Setting, stage: int) -> int:
    return model.n_layer // s.pipeline + (stage < model.n_layer % s.pipeline)


@cache
def _held(model: ModelConfig, tensor: int, pipeline: int, stage: int) -> tuple[Parameter, ...]:
    found = parameters(model)
    if pipeline > 1:
        found = _stage(model, found, pipeline, stage)
    return tuple(_cut(p, tensor) for p in found) if tensor > 1 else tuple(found)


def _stage(model: ModelConfig, found: list[Parameter], pipeline: int, stage: int) -> list[Parameter]:
    each, more = divmod(model.n_layer, pipeline)
    first = stage * each + min(stage, more)
    mine = {f"blocks.{i}" for i in range(first, first + each + (stage < more))}
    parts: dict[str, list[Parameter]] = defaultdict(list)
    for p in found:
        words = p.name.split(".")
        kind = "blocks" if words[0] == "blocks" else "begin" if words[0] in ("wte", "wpe", "wtt", "ln_e") else "end"
        if kind != "blocks" or ".".join(words[:2]) in mine:
            parts[kind].append(p)
    begin = parts["begin"] if stage == 0 else []
    if stage < pipeline - 1:
        return begin + parts["blocks"]
    tied = [p for p in parts["begin"] if p.name == "wte.weight"] if model.tied_head and not begin else []
    return tied + begin + parts["blocks"] + parts["end"]


def _cut(p: Parameter, tensor: int) -> Parameter:
    module, _, kind = p.name.rpartition(".")
    if module.endswith(BY_ROWS):
        return Parameter(p.name, (math.ceil(p.shape[0] / tensor), *p.shape[1:]))
    if module.endswith(BY_COLUMNS) and kind == "weight":
        return Parameter(p.name, (p.shape[0], math.ceil(p.shape[1] / tensor)))
    return p

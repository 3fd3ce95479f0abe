"""Merges peft adapters (such as LoRA) into a sparse base model and keeps its zeros."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mst_scale.checkpoints.open_masks import OpenMasks
from mst_scale.comm import logger
from mst_scale.engine.adapters import REPLACED, adapters_of, base_name
from mst_scale.errors import UserError


@torch.no_grad()
def merge_adapters(model: Any, masks: Mapping[str, torch.Tensor] | str | Path | None = None) -> nn.Module:
    """Merge a peft model's adapters into its base model, and keep the zeros of the base.

    peft's `merge_and_unload` adds a dense matrix to each weight, so no zeros remain. This function drops the part of an
    adapter that belongs to inactive weights, so the merged model should be evaluated again.

    Args:
        model: A model that peft has wrapped.
        masks: The active weights: bool tensors by parameter name, or a file of them (`mst masks`). By default, these
            are the nonzero weights of the base.

    Returns:
        The base model.

    Raises:
        UserError: if there is nothing to merge, ZeRO-3 has partitioned the weights, or a mask does not fit.
    """
    if not hasattr(model, "merge_and_unload"):
        if type(model).__module__.startswith("peft."):
            raise UserError("merge_adapters cannot merge these adapters, because they do not change weights (prompts)")
        raise UserError(f"merge_adapters requires a model that peft has wrapped, not a {type(model).__name__}")
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise UserError(
            "merge_adapters needs whole weights, but ZeRO-3 has partitioned these: save the adapters "
            "(model.save_pretrained), and merge them in a process without DeepSpeed"
        )
    kept = _zeros_of(model) if masks is None else _given(masks)
    merged: nn.Module = model.merge_and_unload()
    parameters = dict(merged.named_parameters())
    filled = zeros = 0
    lost = whole = 0.0  # squares of the merged matrices' entries: on inactive weights, and in all
    for name, mask in kept.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.0)
            raise UserError(
                f"merge_adapters: the merged model has no parameter {name!r} for a mask of shape {tuple(mask.shape)}: "
                f"the nearest is {near[0]!r} of shape {tuple(parameters[near[0]].shape)}. The adapters are merged, no "
                "mask is applied: load base and adapters again"
            )
    for name, mask in kept.items():
        weight = parameters[name]
        inactive = ~mask.to(weight.device)
        filled += int(weight[inactive].count_nonzero())
        whole += float(weight.double().square().sum())
        lost += float(weight[inactive].double().square().sum())
        zeros += int(inactive.sum())
        weight.masked_fill_(inactive, 0)
    logger.info("merged: %s weights of %d matrices stay 0", f"{zeros:,}", len(kept))
    if filled:
        logger.warning(
            "the adapters had filled %s of these zeros with %.2g of the matrices' norm; that part of the adapters is "
            "lost: evaluate the merged model again",
            f"{filled:,}", (lost / whole) ** 0.5,
        )  # fmt: skip
    return merged


def _zeros_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return masks of the nonzero weights of base matrices that have zeros, by their names after merging.

    A matrix of zeros was never trained, and has no mask. Nor has one of which peft trains a copy (`modules_to_save`) or
    rows (`trainable_token_indices`) instead of adding to it.
    """
    if any(getattr(m, "merged", False) is True for m in model.modules() if hasattr(m, "adapter_layer_names")):
        raise UserError(
            "merge_adapters: the adapters have already been merged, so the zeros of the base are lost: call "
            "model.unmerge_adapter() first, or pass masks"
        )
    adapters = adapters_of(model)
    base = {n: p for n, p in model.named_parameters() if id(p) not in adapters and not REPLACED.search(n)}
    matrices = {base_name(n): p for n, p in base.items() if p.dim() > 1 and p.is_floating_point()}
    return {n: p != 0 for n, p in matrices.items() if p.any() and not p.all()}


def _given(masks: Mapping[str, torch.Tensor] | str | Path) -> dict[str, torch.Tensor]:
    named = dict(masks.items() if isinstance(masks, Mapping) else OpenMasks(Path(masks)))
    for name, mask in named.items():
        if not isinstance(mask, torch.Tensor):
            raise UserError(f"merge_adapters: the mask of {name!r} is not a tensor but of type {type(mask).__name__}")
    return {base_name(name): mask != 0 for name, mask in named.items()}

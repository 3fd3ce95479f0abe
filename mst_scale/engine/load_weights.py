"""Changes the weights of a run between its steps, at every ZeRO stage and in every precision.

`module.load_state_dict` writes the weights of the forward pass and ignores the masks. Under ZeRO, bf16 or fp16, the
next step overwrites them from the master copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.comm import SharedMistake
from mst_scale.comm.exchange import Stages
from mst_scale.engine.types import Engine
from mst_scale.shard import Shard


def load_weights(engine: Engine, state_dict: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Replace the weights and buffers of the engine's model between two steps.

    The master weights are replaced as well. Masks do not change: inactive weights are 0 whatever the state dict
    contains. Step, schedule and optimizer states stay as they are. Call it on every rank.

    Args:
        engine: The engine that `mst_scale.initialize` returned.
        state_dict: Complete tensors, the same on every rank, with the names and the meaning that they have in
            `engine.module.state_dict()`. (With some values of `mst.method`, layers multiply by a function of the
            tensor that they store.)
        strict: Require all names of the model and no others. If False, missing tensors stay as they are and unknown
            ones are ignored.

    Raises:
        UserError: A name or a shape does not match. Nothing has been written then.
    """
    of: Any = engine
    if not hasattr(of, "mst"):
        raise SharedMistake("load_weights() needs an engine returned by mst_scale.initialize: this one has no .mst")
    parameters = dict(zero_shards.named_parameters(of.module))
    named = dict(of.module.state_dict(keep_vars=True))
    buffers = {name: value for name, value in of.module.named_buffers() if name in named}
    found = _with_tied_names(state_dict, named, parameters)
    missing = sorted((parameters.keys() | buffers.keys()) - found.keys())
    unknown = sorted(found.keys() - parameters.keys() - buffers.keys() - named.keys())
    if zero_shards.stage_count(of) > 1:  # of the whole model, of which a stage has some layers
        unknown = []

    def check() -> None:
        if strict and (missing or unknown):
            what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which this model does not"
            raise SharedMistake(
                f"load_weights: the state dict {what} ({len(missing)} missing, {len(unknown)} unknown names); "
                "strict=False loads only the names that match"
            )
        shapes = {name: tuple(zero_shards.shape_of(p)) for name, p in parameters.items()}
        shapes |= {name: tuple(value.shape) for name, value in buffers.items()}
        for name, shape in shapes.items():
            if name in found and tuple(found[name].shape) != shape:
                there = tuple(found[name].shape)
                raise SharedMistake(
                    f"load_weights: {name} has shape {there} in the state dict and {shape} in this model"
                )

    # a stage of a pipeline sees its own layers only, and nothing is written if another one rejects the weights
    Stages(zero_shards.groups_of(of).stages).agree(check)

    def values(shard: Shard) -> torch.Tensor:
        flat = found[shard.name].detach().reshape(-1)
        start = shard.in_a_row
        if start is not None:
            return flat[start : start + shard.length].float()
        return flat[shard.logical(torch.arange(shard.length)).to(flat.device)].float()

    zero_shards.put_weights(of, found.keys() & parameters.keys(), values)
    with torch.no_grad():
        for name in buffers.keys() & found.keys():
            buffers[name].copy_(found[name])
    of.mst.weights_written()


def _with_tied_names(
    state_dict: Mapping[str, torch.Tensor], named: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Add the first name of each tied tensor to a state dict that has only another one, as safetensors does."""
    first = {id(p): name for name, p in parameters.items()}
    found = dict(state_dict)
    for name, value in named.items():
        if name in found and (own := first.get(id(value))) is not None:
            found.setdefault(own, found[name])
    return found

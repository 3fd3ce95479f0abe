"""Continues a run, or begins one, from a checkpoint's weights without its optimizer states.

`mst reshape` converts the states of Adam and similar optimizers for other ranks and ZeRO stages. For another optimizer,
or a model with frozen parameters, `warm_start` loads from the checkpoint what does not depend on the optimizer: fp32
weights, frozen parameters and buffers, masks, step, and the position in the learning-rate schedule. Optimizer states
are empty, as at step 0.
A checkpoint without masks (of dense training) gets those that the schedule asks for at its step, by magnitude. With
`weights_only` the run starts at step 0 of its own schedule with these weights: from dense to sparse training.

Called after `mst_scale.initialize`, before the first step, with the mst block and training.steps of the checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale._deprecated import renamed_arguments
from mst_scale.checkpoints import manifests, mask_files
from mst_scale.checkpoints.multiplied import functions_of, multiplied_weights_of
from mst_scale.comm import logger
from mst_scale.errors import UserError
from mst_scale.shard import Shard
from mst_scale.zero_shards.weight_files import Weights, untrained_of, weights_of

CONFIG = "mst_config"  # in a checkpoint's client_state: the keys that it was trained with (engine.config_record)


@renamed_arguments(anew="weights_only")
def warm_start(engine: Any, checkpoint: Path | str, *, weights_only: bool = False) -> int:
    """Continue from the weights, masks and step of a checkpoint, without its optimizer states.

    Call it on every rank, after `mst_scale.initialize` and before the first step.

    Args:
        engine: The engine that `mst_scale.initialize` returned.
        checkpoint: The folder of one checkpoint, of any ZeRO stage and number of ranks.
        weights_only: Take only the weights and start at step 0, with the initial masks of this run.

    Returns:
        The step at which the run continues.

    Raises:
        UserError: The engine has already taken a step, a step is under way, or a parameter has another shape in the
            checkpoint.
        Damaged: A file of the checkpoint is damaged.
    """
    source = Path(checkpoint)
    if engine.global_steps:
        raise UserError("call warm_start before the first step: this engine has already taken steps")
    zero_shards.check_no_step_under_way(engine, "warm_start")
    if not weights_only:
        engine.mst.loading(source)
    functions = None if weights_only or engine.mst.functions is None else functions_of(source)
    stored = functions is not None and engine.mst.functions.has_saved(functions)
    state = take_weights(engine, source, stored=stored)
    if weights_only:
        engine.mst.begin_with_these_weights()
        logger.info("%s: weights loaded; the run begins at step 0", source)
        return 0
    masked = (source / mask_files.FOLDER).is_dir()
    if masked:
        engine.mst.take_masks(source)
    engine.global_steps = int(state["global_steps"])
    engine.global_samples = int(state["global_samples"])
    if engine.lr_scheduler is not None and state.get("lr_scheduler") is not None:
        zero_shards.place_scheduler(engine, state["lr_scheduler"])
    if masked:
        engine.mst.masks_replaced()
        if not stored:
            engine.mst.weights_taken()
        engine.mst.record.load_state_dict(state.get(CONFIG))
    elif not stored:
        engine.mst.begin_with_these_weights()
    if stored:
        engine.mst.functions.load_state_dict(functions)
    what = "weights, masks and" if masked else "weights (it has no masks) and"
    logger.info("%s: %s step %d loaded; the optimizer starts with empty states", source, what, engine.global_steps)
    return int(engine.global_steps)


def take_weights(engine: Any, source: Path, *, stored: bool = False) -> dict[str, Any]:
    """Load the weights, frozen parameters and buffers of a checkpoint into the engine.

    Any ZeRO stage and number of ranks may have saved it. Returns the other contents of its first file. If the layers
    multiply by functions of what they store, the weights are the results, or with `stored` what they store.
    """
    manifests.check(source)
    trained = weights_of(source) if stored else multiplied_weights_of(source)
    state, untrained = untrained_of(source)
    _fill(engine, source, trained, untrained)
    return state


def _fill(engine: Any, source: Path, trained: Weights, untrained: dict[str, torch.Tensor]) -> None:
    parameters = dict(zero_shards.named_parameters(engine.module))
    for name, parameter in parameters.items():
        shape = trained.shapes.get(name) or (tuple(untrained[name].shape) if name in untrained else None)
        if shape != tuple(zero_shards.shape_of(parameter)):
            here = tuple(zero_shards.shape_of(parameter))
            raise UserError(f"{source}: {name} has shape {shape} in the checkpoint, but {here} in this model")

    def read(shard: Shard) -> torch.Tensor:
        if shard.name in trained.shapes:
            return trained.shard(shard)
        return untrained[shard.name].view(-1)[shard.logical(torch.arange(shard.length))].float()

    zero_shards.put_weights(engine, parameters, read)
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            if name in untrained:
                buffer.copy_(untrained[name])

"""Builds the model of a run, and DeepSpeed's engine around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from mst_scale import zero_shards
from mst_scale.checkpoints import mask_files
from mst_scale.comm import Mesh
from mst_scale.config import Experiment
from mst_scale.config.parallel import without_sizes
from mst_scale.engine.api import initialize
from mst_scale.engine.targets import choose_targets
from mst_scale.hugging_face import start_from
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.masks import assemble
from mst_scale.models import blocks_of, build
from mst_scale.pretrain.learning_rate import MASKED
from mst_scale.run_logging.metrics import OptionalWrites
from mst_scale.tensor_parallel import TensorGroup


def build_engine(
    experiment: Experiment, monitors: Any, weights: dict[str, Tensor] | None, mesh: Mesh | None, source: Path | None
) -> Any:
    """Return DeepSpeed's engine around the experiment's model, filled with the initial weights if there are any.

    The weights of the checkpoint `source` come later.
    """
    torch.manual_seed(experiment.training.seed)
    model = _build_model(experiment, mesh)
    if weights is not None:
        start_from.fill(model, weights or None)
    if source is not None and experiment.mst.masks is not None and experiment.mst.compute.compact != "off":
        _put_zeros(model, source)
    if "activation_checkpointing" in experiment.deepspeed:
        deepspeed.checkpointing.configure(None, deepspeed_config=experiment.deepspeed)
    with zero_shards.engine_takes(monitors):
        engine: Any = initialize(
            model=model,
            model_parameters=parameter_groups(model, experiment),
            config=experiment,
            # a pipeline has its own mpu with the same ranks
            mpu=None if isinstance(model, deepspeed.PipelineModule) else mesh,
        )[0]
    if experiment.training.compile:
        for block in blocks_of(engine.module):
            block.compile()
    return engine


def with_defaults(experiment: Experiment, out: Path) -> Experiment:
    """Return the experiment with our defaults for DeepSpeed: it prints nothing, and writes TensorBoard's files.

    They are next to the metrics unless the config decides otherwise.
    """
    tensorboard = {"enabled": True, "output_path": str(out / "tensorboard"), "job_name": ""}
    defaults = {"tensorboard": tensorboard, "steps_per_print": 2**31}
    return replace(experiment, deepspeed={**defaults, **without_sizes(experiment.deepspeed)})


def open_monitors(config: dict[str, Any]) -> Any:
    """Open the monitors of DeepSpeed's config; where one cannot write, only its numbers are lost."""
    monitors = zero_shards.open_monitors(config)
    zero_shards.write_separately(monitors, OptionalWrites().attempt)
    return monitors


def _put_zeros(model: torch.nn.Module, checkpoint: Path) -> None:
    """Give the model the zeros of a checkpoint's masks: compact layers have to know them before it is loaded."""
    if not mask_files.file_of(checkpoint, 0).is_file():
        return
    masks = mask_files.read_all(checkpoint)
    for name, parameter in zero_shards.named_parameters(model):
        if name not in masks.head["names"]:
            continue
        with zero_shards.whole(parameter) as writable, torch.no_grad():
            if writable:
                flags = packed_bits.unpack(assemble(masks.shards(name), name), parameter.numel())
                parameter.copy_(flags.view(parameter.shape))


def _build_model(experiment: Experiment, mesh: Mesh | None) -> torch.nn.Module:
    """Return the model with random weights, or this rank's part of it."""
    if mesh is not None and mesh.sizes.pipeline > 1:
        from mst_scale.models.pipelined_gpt import PipelinedGPT

        return PipelinedGPT(experiment.model, mesh)
    with zero_shards.partitioned_construction(experiment.deepspeed, mesh):
        return build(experiment.model, None if mesh is None else TensorGroup.of(mesh))


def parameter_groups(model: torch.nn.Module, experiment: Experiment) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: matrices with its weight decay, norms and biases without.

    Matrices that can be masked form a third group if the experiment treats them differently (training.sparse_rate).
    """
    matrices = [p for p in model.parameters() if zero_shards.is_matrix(p)]
    vectors = [p for p in model.parameters() if not zero_shards.is_matrix(p)]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if experiment.treats_masked_apart:
        masked = {id(p) for p in choose_targets(model, experiment.mst.targets).values()}
        groups[0]["params"] = [p for p in matrices if id(p) not in masked]
        groups.append({"params": [p for p in matrices if id(p) in masked], MASKED: True})
    return groups

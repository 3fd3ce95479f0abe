"""Where does DeepSpeed keep what we need? The only package that reads its internals (0.19.x).

parameters    construction under ZeRO-3, full shapes, filling what is cut up
step          the optimizer step: its hooks, its norm and loss scale, what stage 0 lacks
slices        for every sparse parameter this rank's slice, with live views of its master weight, reduced gradient
              and optimizer states, at every stage; what cannot be right is refused
checkpoints   saves that fail together, loads that read data only, universal checkpoints at every stage
"""

from mst_scale.zero_shards.parameters import is_matrix, partitioned_construction, shape_of, whole, zero_stage
from mst_scale.zero_shards.saving import (
    after_loading,
    errors_after_saving,
    fit_universal_checkpoints,
    load_checkpoint,
    saved_classes,
)
from mst_scale.zero_shards.slices import (
    Shards,
    group_of,
    put_reads,
    refuse_arguments,
    shards_of,
    updates_of,
    zero_inactive,
)
from mst_scale.zero_shards.step import (
    NamedCollectives,
    after_master_update,
    around_model_step,
    base_optimizer,
    clip_factor,
    data_parallel_group,
    grad_norm,
    guard_plain_step,
    has_moments,
    hold_updates,
    loss_scale,
    optimized,
    optimizer_name,
    refuse_unoptimized,
    scale_plain_loss,
)

__all__ = [
    "NamedCollectives",
    "Shards",
    "after_loading",
    "after_master_update",
    "around_model_step",
    "base_optimizer",
    "clip_factor",
    "data_parallel_group",
    "errors_after_saving",
    "fit_universal_checkpoints",
    "grad_norm",
    "group_of",
    "guard_plain_step",
    "has_moments",
    "hold_updates",
    "is_matrix",
    "load_checkpoint",
    "loss_scale",
    "optimized",
    "optimizer_name",
    "partitioned_construction",
    "put_reads",
    "refuse_arguments",
    "refuse_unoptimized",
    "saved_classes",
    "scale_plain_loss",
    "shape_of",
    "shards_of",
    "updates_of",
    "whole",
    "zero_inactive",
    "zero_stage",
]

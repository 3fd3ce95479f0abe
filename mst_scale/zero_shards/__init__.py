"""The interface to DeepSpeed (0.19.x): the only package that reads its internals, live and on disk.

start         checks and prepares a process: versions of DeepSpeed and torch, half-precision types, architectures
hooks         every change to a live engine, in one ordered list
logical       what each parameter is of the logical model: its name, its shape, its rows and columns
groups        which ranks hold the rest of it
autotp        DeepSpeed's AutoTP layers, with another product; what it cannot cut
step          the optimizer step: where it is hooked, its norm and loss scale, what stage 0 lacks
held_values   the values that a rank keeps from one step to the next, and which of them other ranks have too
monitors      opens DeepSpeed's monitors before its engine does
recompute     computes a micro-batch a second time, next to training
byte_counts   bytes of optimizer states, master weights and gradients on this rank, and bytes handed to collectives
supported     checks that an engine has no feature of DeepSpeed with which sparse training would not be exact
dense_store   for every sparse parameter this rank's slice, with live views of its master weight, reduced gradient
              and optimizer states, at every stage
compact_marks marks compact parameters with their index
compact_store the same slices for parameters that store their active weights alone; chooses the store of an engine
borders       which values cross a border between two ranks when the index changes
compact_files which weights those are, in a checkpoint
put_weights   writes weights and optimizer states into a live engine; makes and fills parameters under ZeRO-3
handover      hands them from one engine to the next in the same process, and frees the first
muon          Muon in one place at every stage
powers        Adam's powers of its betas on a CPU, from the count of updates alone
backward_passes rejects a backward pass that would replace the gradient of another one, and loads within a step
tied_gradients one gradient of a tied parameter on all stages of a pipeline that hold it
unused_layers a gradient of zero for parameters that a step does not use, at stage 3 and with offload
optimizer_checks an optimizer that DeepSpeed or torch would reject with a traceback
adagrad       keeps Adagrad's parameter groups, which DeepSpeed drops at stages 1 to 3, and only the states of masters
padding       zeros after the end of a rank's parts of parameters at stage 3
settings      settings of the optimizer that differ from those of a checkpoint
same_optimizer rejects optimizer states that belong to other parameters or to another optimizer
own_loop_state DeepSpeed's values and a loop's client_state apart; a scheduler that does not fit
saving        saves that fail together, loads that carry masks, universal checkpoints at every stage
other_layout  what to do with a checkpoint of other ranks or another stage
safe_load     checkpoints are data, and run nothing
weight_files  where a checkpoint's weights lie on disk
universal     DeepSpeed's universal layout, for every stage
"""

# ruff: noqa: F401 (the names that other packages use)

from mst_scale.zero_shards.adagrad import keeping_groups
from mst_scale.zero_shards.autotp import (
    FORWARDS,
    asserted_of_cutting,
    check_cuttable,
    check_no_shared_dropout,
    is_linear,
)
from mst_scale.zero_shards.backward_passes import check_no_step_under_way
from mst_scale.zero_shards.byte_counts import comm_bytes, state_bytes
from mst_scale.zero_shards.compact_marks import index_of, indexes_of, is_compact, mark, mark_model
from mst_scale.zero_shards.compact_store import CompactStore, Store, shards_of
from mst_scale.zero_shards.groups import (
    exchanges_of,
    groups_of,
    sequences_a_step,
    stage_count,
    stage_number,
    stages_of,
    tensor_slices,
)
from mst_scale.zero_shards.handover import Handover, is_freed, release
from mst_scale.zero_shards.held_values import HeldValue, held_values
from mst_scale.zero_shards.hooks import HOOKS, install
from mst_scale.zero_shards.logical import TABLES, cut_of, is_cut, named_parameters, shape_of
from mst_scale.zero_shards.monitors import engine_takes, open_monitors, write_separately
from mst_scale.zero_shards.muon import shapes as muon_shapes
from mst_scale.zero_shards.optimizer_checks import check_configured_optimizer, checked_optimizer
from mst_scale.zero_shards.other_layout import checkpoint_to_reshape
from mst_scale.zero_shards.put_weights import (
    is_matrix,
    partitioned_construction,
    put_reads,
    put_weights,
    read_stored,
    stamp,
    whole,
)
from mst_scale.zero_shards.recompute import Recomputation
from mst_scale.zero_shards.saving import (
    blocking_reason,
    carry_state,
    errors_after_saving,
    load_checkpoint,
    replace_method,
)
from mst_scale.zero_shards.settings import Settings
from mst_scale.zero_shards.start import (
    check_precision,
    check_versions,
    forget_mpu,
    hasten,
    use_readable_architectures,
)
from mst_scale.zero_shards.step import (
    TORCH_FUSED,
    NamedCollectives,
    adam_of,
    around_model_step,
    around_passes,
    base_optimizer,
    check_optimized,
    clip_factor,
    grad_norm,
    has_constant_scale,
    has_engine,
    has_gradients,
    has_moments,
    loss_scale,
    on_cpu,
    on_zero_grad,
    optimized,
    optimizer_name,
    pipeline_losses,
    place_scheduler,
    sets_boundaries,
    watch_losses,
)
from mst_scale.zero_shards.supported import check_arguments, uses_muon

"""Lists every change that sparse training makes to a live DeepSpeed engine, in the order in which it is made.

A later hook may wrap an earlier one. Each names the part of DeepSpeed that it changes, the behavior that it relies on,
and the versions in which that behavior was observed; tests/ranks/zero_shards/test_hooks.py fails when DeepSpeed behaves
otherwise. Three more changes last for one call: `adagrad.keeping_groups`, `saving.errors_after_saving` and
`safe_load.data_only`. Changes that only some runs need come after all of these: functions of weights keep a state in
checkpoints (`saving.carry_state`), `mst.on_step` follows steps where nothing else does, and `record` reads losses
(`step.watch_losses`) and keeps its counts in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from mst_scale.zero_shards import (
    backward_passes,
    compact_marks,
    groups,
    handover,
    logical,
    muon,
    own_loop_state,
    padding,
    powers,
    same_optimizer,
    saving,
    start,
    step,
    supported,
    tied_gradients,
    unused_layers,
)


class HookTarget(Protocol):
    """The interface of `engine.mst` to the hooks, which call it at the steps, saves and loads of an engine."""

    @property
    def follows_steps(self) -> bool:
        """Whether anything changes between steps."""

    @property
    def masks_weights(self) -> bool:
        """Whether updates are masked, and masks are stored in checkpoints."""

    def before_step(self) -> None:
        """Follow DeepSpeed to the point at which gradients are reduced and not yet clipped."""

    def before_update(self) -> None:
        """Prepare the update of the master weights: there was no overflow, and the gradient's norm is known."""

    def holds_update(self) -> bool:
        """Whether this step leaves weights and moments as they are."""

    def mask_update(self, parameter: nn.Parameter, update: Tensor) -> None:
        """Zero the inactive weights in this rank's slice of an update, flat."""

    def after_update(self, tensors: set[int]) -> None:
        """Follow the update of these master tensors (ids), before weights of the forward pass are written."""

    def after_step(self) -> None:
        """Follow the end of a step, taken or skipped."""

    def check_save(self) -> None:
        """Reject a save, on all ranks if one of them has to, before anything is written or removed."""

    def saving(self, checkpoint: Path) -> dict[str, Any]:
        """Write masks into a checkpoint's folder; the return value is stored in its client_state."""

    def loading(self, checkpoint: Path) -> Callable[[], None]:
        """Prepare for a load of this checkpoint; the returned function undoes that if the load fails."""

    def loaded(self, checkpoint: Path, state: dict[str, Any] | None) -> None:
        """Follow a load of weights and states; `state` is what `saving` returned, or None if there is none."""

    def reads_weights(self, checkpoint: Path) -> bool:
        """Return whether `load_weights` has to read the weights of a checkpoint, and DeepSpeed cannot."""

    def load_weights(self, checkpoint: Path) -> dict[str, Any]:
        """Load only the weights of a checkpoint; return the rest of its client_state."""


@dataclass(frozen=True)
class Hook:
    """One change to a live engine."""

    name: str
    changes: str
    """The part of the engine that the hook replaces or wraps."""
    because: str
    """How DeepSpeed behaves without the hook, or the behavior that the hook relies on."""
    seen_in: str
    """Versions of DeepSpeed in which this behavior was observed."""
    applies: Callable[[Any, HookTarget], bool]
    install: Callable[[Any, HookTarget], object]


def _carry_layout(engine: Any, _: HookTarget) -> None:
    saving.carry_state(engine, logical.LAYOUT, lambda: logical.layout_of(engine.module), loaded=lambda state: None)


def _always(engine: Any, mst: HookTarget) -> bool:
    return True


HOOKS = (
    Hook(
        "plain step",
        "optimizer.step and engine.clip_fp32_gradients",
        "stage 0 in fp32 records no gradient norm, and takes steps with gradients that are not finite",
        "0.19",
        step.steps_plainly,
        lambda engine, _: step.guard_plain_step(engine),
    ),
    Hook(
        "norm in float64",
        "optimizer.get_grad_norm_direct (stages 1 and 2), and the norm of a plain step",
        "float32 sums depend on how parameters are split over ranks, and compact parameters are split differently",
        "0.19",
        lambda engine, _: compact_marks.is_compact(engine.module),
        lambda engine, _: step.norm_in_float64(engine),
    ),
    Hook(
        "plain loss",
        "engine.backward",
        "stage 0 in fp16 divides gradients by the loss scale and has not multiplied the loss by it",
        "0.19",
        step.scales_plainly,
        lambda engine, _: step.scale_plain_loss(engine),
    ),
    Hook(
        "own ranks",
        "engine.buffered_allreduce_fallback",
        "without ZeRO, gradients are reduced over the ranks of the last mpu in the process, even another engine's",
        "0.19",
        lambda engine, _: engine.zero_optimization_stage() < 2,  # BF16_Optimizer reduces so at stage 1, too
        lambda engine, _: start.keep_mpu(engine),
    ),
    Hook(
        "powers of beta",
        "the optimizer's step hooks",
        "Adam's CPU kernels update powers of β by multiplication, but use pow after a load: the last bit may differ",
        "0.19",
        lambda engine, _: powers.multiplies_powers(engine),
        lambda engine, _: powers.compute_powers(engine),
    ),
    Hook(
        "padding",
        "optimizer.fp32_partitioned_groups_flat",
        "stage 3 leaves the padding of parts uninitialized, and Adafactor and Lamb take norms over it",
        "0.19.8",
        lambda engine, _: padding.has_padding(engine),
        lambda engine, _: padding.zero_padding(engine),
    ),
    Hook(
        "parts of sequences",
        "optimizer.__avg_scatter_grads",
        "stage 3 divides gradients by all ranks; the other stages divide by sequences and sum over their parts",
        "0.19.8",
        step.averages_parts,
        lambda engine, _: step.add_up_parts(engine),
    ),
    Hook(
        "scheduler",
        "engine.load_checkpoint, and load_state_dict of the learning-rate scheduler during a load",
        "a scheduler gets whatever a checkpoint has, even nothing, and fails without saying so",
        "0.19",
        _always,
        lambda engine, _: own_loop_state.explain_scheduler(engine),
    ),
    Hook(
        "handover",
        "engine.save_checkpoint and engine.load_checkpoint",
        "they only know files, and a run whose storage changes continues with another engine in the same process",
        "0.19",
        _always,
        lambda engine, _: handover.install(engine),
    ),
    Hook(
        "universal checkpoints",
        "engine.load_checkpoint",
        "stage 0 loads none; stage 3 gives all parameter groups the settings of the first; buffers are not loaded",
        "0.19",
        _always,
        lambda engine, _: saving.fit_universal_checkpoints(engine),
    ),
    Hook(
        "step",
        "engine._take_model_step",
        "it runs once per accumulation boundary, with reduced gradients, before clipping",
        "0.19",
        lambda _, mst: mst.follows_steps,
        lambda engine, mst: step.around_model_step(engine, mst.before_step, mst.after_step),
    ),
    Hook(
        "tied gradients",
        "engine._take_model_step",
        "sums over three or more replicas depend on the place in a bucket, which differs between stages of a pipeline",
        "0.19",
        lambda engine, mst: mst.masks_weights and tied_gradients.may_differ(engine),
        lambda engine, _: tied_gradients.equalize_tied_gradients(engine),
    ),
    Hook(
        "backward passes",
        "engine.buffered_allreduce_fallback, _backward_epilogue and _take_model_step; zero_grad of engine, optimizer "
        "and module; optimizer.independent_gradient_partition_epilogue and clear_backward_seen_flag",
        "a second backward pass replaces the gradient of the first, at stage 3 if no forward pass came in between, or "
        "reduces it again, at stage 0; engine.no_sync reduces gradients if communication overlaps",
        "0.19.8",
        lambda engine, mst: mst.follows_steps and backward_passes.changes_gradients(engine),
        lambda engine, _: backward_passes.reject_second_pass(engine),
    ),
    Hook(
        "unused layers",
        "optimizer.partition_grads, copy_grads_in_partition and zero_grad; engine._take_model_step",
        "stage 3, and offload, use the gradient of an earlier step for parameters that have none in this one",
        "0.19.8",
        lambda engine, mst: mst.follows_steps and unused_layers.keeps_gradients(engine),
        lambda engine, _: unused_layers.zero_unused_gradients(engine),
    ),
    Hook(
        "before update",
        "the optimizer's step hooks",
        "they run after the gradient norm is known and before states are read, but not after an overflow",
        "0.19",
        lambda _, mst: mst.follows_steps,
        lambda engine, mst: step.before_master_update(engine, mst.before_update),
    ),
    Hook(
        "held update",
        "the optimizer's step hooks",
        "an optimizer that finds no gradient changes nothing, not even its count of updates",
        "0.19",
        lambda _, mst: mst.masks_weights,
        lambda engine, mst: step.hold_updates(engine, mst.holds_update),
    ),
    Hook(
        "muon's dtype",
        "original_muon.ns_compute_dtype, for the whole process",
        "it depends on whether the accelerator reports fp16 support, which differs between CPUs, so weights would too",
        "0.19.8",
        lambda engine, _: supported.uses_muon(engine),
        lambda engine, _: muon.fix_dtype(),
    ),
    Hook(
        "muon",
        "the optimizer's step hooks; parameters and ZeRO-3 are marked as not using Muon",
        "it orthogonalizes before masks are applied, updates inactive weights, and clips the update, not the gradient",
        "0.19.8",
        lambda engine, mst: muon.takes_over(engine, mst.masks_weights),
        muon.Muon,
    ),
    Hook(
        "update",
        "the optimizer's step hook",
        "it runs after master weights are updated and before they are copied and gathered, but not after an overflow",
        "0.19",
        lambda _, mst: mst.masks_weights,
        lambda engine, mst: step.after_master_update(engine, mst.after_update),
    ),
    Hook(
        "earlier saves",
        "engine.save_checkpoint",
        "it leaves files of others in the folder of a tag that is saved again, such as masks of a sparse run",
        "0.19",
        lambda _, mst: not mst.masks_weights,
        lambda engine, _: saving.replace_earlier_saves(engine),
    ),
    Hook(
        "checkpoints",
        "engine.save_checkpoint and engine.load_checkpoint",
        "client_state is saved and returned",
        "0.19",
        lambda _, mst: mst.masks_weights,
        saving.carry_along,
    ),
    Hook(
        "weights alone",
        "engine.load_checkpoint with load_module_only",
        "at stage 3 it loads nothing; elsewhere it loads weights that have to fit masks, or functions of them",
        "0.19",
        _always,
        saving.load_weights_alone,
    ),
    Hook(
        "consolidated weights",
        "engine._zero3_consolidated_16bit_state_dict",
        "it gathers what parameters store, and compact ones store their active weights alone",
        "0.19",
        lambda engine, _: engine.zero_optimization_stage() == 3 and compact_marks.is_compact(engine.module),
        lambda engine, _: saving.consolidate_matrices(engine),
    ),
    Hook(
        "layout",
        "engine.save_checkpoint and engine.load_checkpoint",
        "its files do not say which part of which parameter of the whole model a slice or stage holds",
        "0.19",
        lambda engine, _: groups.is_cut_up(engine) or isinstance(engine.module, PipelineModule),
        _carry_layout,
    ),
    Hook(
        "same optimizer",
        "engine.save_checkpoint and engine.load_checkpoint",
        "it assigns optimizer states by position, whatever they belong to",
        "0.19.8",
        _always,
        lambda engine, _: same_optimizer.check_states_belong(engine),
    ),
    Hook(
        "loads in steps",
        "engine.load_checkpoint, _backward_epilogue and _take_model_step, zero_grad of engine, optimizer and module",
        "it keeps the gradient and the number of micro-batches of a step that is under way",
        "0.19.8",
        lambda _, mst: mst.follows_steps,
        lambda engine, _: backward_passes.reject_loads_in_steps(engine),
    ),
    Hook(
        "loading",
        "engine.load_checkpoint",
        "another step may be another attention pattern",
        "0.19",
        lambda _, mst: mst.follows_steps and not mst.masks_weights,
        lambda engine, mst: saving.after_loading(engine, lambda path: mst.loaded(path, None)),
    ),
    Hook(
        "own entries",
        "engine.save_checkpoint and engine.load_checkpoint",
        "a client_state overwrites the values of DeepSpeed that have the same names, which a load returns too; a rank "
        "that cannot pickle it fails while the others wait",
        "0.19.8",
        _always,
        lambda engine, _: own_loop_state.keep_own_entries(engine),
    ),
)


def install(engine: Any, mst: HookTarget) -> list[str]:
    """Install the hooks that apply, in their order; return their names."""
    chosen = [hook for hook in HOOKS if hook.applies(engine, mst)]
    for hook in chosen:
        hook.install(engine, mst)
    return [hook.name for hook in chosen]

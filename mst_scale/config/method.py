"""Defines the block `mst`, with the blocks of the three parts of the method in it, and derives the schedules.

Importing this file does not import torch, so that commands such as `mst plan` start quickly.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.config import AttentionConfig
from mst_scale.hybrid_sparse_attention.pattern import AttentionSchedule, Pattern, strides_per_phase
from mst_scale.methods import METHODS, Growth, NoOptions, WeightFunction
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.sparsity_variation import Schedule, SparsityConfig
from mst_scale.validation import MAX_SEED, NO_EFFECT, Field, StrictBool, StrictInt, block


@block("mst.targets")
class TargetsConfig:
    """Which parameters may become sparse, as globs on their names."""

    include: list[str] = Field(
        default_factory=lambda: ["*"],
        description="Globs on parameter names. Norms, biases, embeddings and adapters (LoRA) never match.",
    )
    exclude: list[str] = Field(
        default_factory=list, description="Globs on parameter names; takes precedence over `include`."
    )
    # the paper's 4x needs the head
    lm_head: StrictBool = Field(default=True, description="Include the LM head, even if it is tied to the embedding.")

    def choose(self, names: Collection[str]) -> list[str]:
        """Return the names of matrices that match an `include` glob and no `exclude` glob, in the given order.

        Raises:
            UserError: if there are none, or a glob does not match anything.
        """
        if not names:
            raise UserError(
                "the model has no matrix that can become sparse (norms, biases and embeddings never do): use method "
                "dense, or leave the mst block out"
            )
        for glob in self.include + self.exclude:
            if not any(fnmatchcase(name, glob) for name in names):
                near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)[0]
                raise UserError(
                    f"mst.targets: {glob!r} matches no parameter that can be sparse; the nearest is {near!r}"
                )
        chosen = [
            name
            for name in names
            if any(fnmatchcase(name, glob) for glob in self.include)
            and not any(fnmatchcase(name, glob) for glob in self.exclude)
        ]
        if not chosen:
            raise UserError("mst.targets: every parameter that could be sparse is excluded; use method dense instead")
        return chosen


@block("mst.compute")
class ComputeConfig:
    """How linear layers are computed while they are sparse."""

    backend: Literal["auto", "dense", "cpu", "block"] = Field(
        default="auto",
        description="`dense` multiplies by zeros and saves no time, `cpu` skips single weights, `block` (CUDA) skips "
        "blocks, and `auto` uses what was measured to be faster on this machine ([benchmarks.md](benchmarks.md)).",
    )
    compact: Literal["auto", "off"] = Field(
        default="off",
        description="`auto` stores only the active weights in long phases of constant sparsity: optimizer states, "
        "gradients and traffic shrink with the density ([compact.md](compact.md)). If that is not possible, one log "
        "line says why. `off` keeps inactive weights as zeros.",
    )


@block("mst")
class MSTConfig:
    """Mixed Sparsity Training. `method` selects a preset; the other keys override it."""

    method: str | None = Field(
        default=None,
        description="`mst`, `dense`, `tiny`, `dense-short`, or another method of [methods.md](methods.md). Required in "
        "an `mst` block; a config without the block trains `dense`.",
    )
    like: str | None = Field(
        default=None,
        description="`dense-short`: the config or run folder whose FLOPs determine the number of dense steps "
        "(`--match-flops`).",
    )
    masks: str | None = Field(
        default=None,
        description='`fixed`: the masks to keep, either `"zeros"` (the zeros of the weights, the default) or a file '
        "written by `mst masks` or a notebook.",
    )
    grow_from: str | None = Field(
        default=None,
        description="`expand`, `ligo`, `stack`: folder of the smaller run (or of one of its checkpoints) whose weights "
        "this run is grown from (`--from`).",
    )
    options: Any = Field(default_factory=NoOptions, description="Keys of the method itself ([methods.md](methods.md)).")
    seed: StrictInt | None = Field(
        default=None, ge=0, le=MAX_SEED, description="Seed of random growth; `null`: `training.seed`."
    )
    sparsity: SparsityConfig = Field(default_factory=SparsityConfig, description="Sparsity Variation.")
    topology: TopologyConfig = Field(default_factory=TopologyConfig, description="Mixed-Growing.")
    attention: AttentionConfig = Field(default_factory=AttentionConfig, description="Hybrid Sparse Attention.")
    targets: TargetsConfig = Field(default_factory=TargetsConfig, description="Parameters that may become sparse.")
    compute: ComputeConfig = Field(default_factory=ComputeConfig, description="Kernels of sparse layers.")
    allow_untested: list[str] = Field(
        default_factory=list,
        description='DeepSpeed keys (such as `"zero_optimization.new_key"`) to accept with a warning although '
        "[compatibility.md](compatibility.md) calls them untested or does not list them.",
        json_schema_extra=NO_EFFECT,
    )

    def __post_init__(self) -> None:
        if self.method == "fixed" and self.masks is None:
            raise UserError("mst.masks is null: leave it out to keep the zeros of the weights, or name a file of masks")
        if self.method != "fixed" and self.masks is not None:
            raise UserError(
                f"mst.masks is only for method fixed: leave it out with method {self.method}, or choose method fixed"
            )
        if self.method == "fixed" and self.topology.granularity != "element":
            raise UserError(
                "method fixed keeps masks as they are, weight by weight: leave mst.topology.granularity out"
            )
        if self.method == "fixed" and (self.topology.chosen.swaps or self.sparsity.variation not in ("sparse", "sd")):
            raise UserError(
                "method fixed keeps masks as they are: leave mst.topology.policy out, and mst.sparsity.variation too "
                '(or choose "sd", which makes the weights dense after a number of steps)'
            )
        if self.topology.granularity == "channel" and not self._draws_channels:
            raise UserError(
                'mst.topology.granularity = "channel" draws the active channels once and exchanges none: it needs '
                "mst.topology with policy static, random_ratio 1.0 and grown_moments active_mean or zero, and "
                "mst.sparsity.distribution = uniform"
            )
        restores = self.sparsity.variation not in ("dense", "sparse", "gmp")
        if self.topology.granularity == "channel" and not self.topology.revive_dead_units and restores:
            raise UserError(
                "mst.topology.revive_dead_units: false would leave new channels without weights: leave it out with "
                'mst.topology.granularity = "channel"'
            )
        if self.like is not None and self.method != "dense-short":
            raise UserError(f"mst.like is for method dense-short, not for {self.method}: leave it out")
        if self.grow_from is not None and self.growth is None:
            raise UserError(f"mst.grow_from is for methods expand, ligo and stack, not for {self.method}: leave it out")
        if self.sparsity.is_limited and (stated := self.sparsity.changed_durations(self._preset.get("sparsity", {}))):
            raise UserError(
                f"mst.sparsity.sparse_tokens and mst.sparsity.{stated[0]} both determine the length of the sparse "
                "phase: leave one of them out"
            )
        function, variation = self.function, self.sparsity.variation
        if function is not None and self.stays_dense and self.topology.granularity != "element":
            raise UserError(
                f"method {self.method} computes weights and has no masks to make of blocks or channels: leave "
                "mst.topology.granularity out"
            )
        if function is not None and variation not in function.variations:
            raise UserError(
                f"mst.sparsity.variation = {variation} does not work with method {self.method}: choose one of "
                f"{', '.join(function.variations)}"
            )
        given = None if function is None else function.sparsity
        if given is not None and not math.isclose(given, self.sparsity.max, rel_tol=1e-5):
            raise UserError(
                f"mst.sparsity.max = {self.sparsity.max:g}: the mst.options of method {self.method} determine the "
                f"sparsity; set it to {given:g}"
            )

    @property
    def _preset(self) -> Mapping[str, Any]:
        return {} if self.method is None else METHODS[self.method].preset

    @property
    def _draws_channels(self) -> bool:
        topology, uniform = self.topology, self.sparsity.distribution == "uniform"
        return (
            uniform and self.function is None and topology.policy == "static" and not topology.grows_by_dense_gradients
        )

    @cached_property
    def function(self) -> WeightFunction | None:
        """The function from stored parameters to the weights that layers use; None if they are the same."""
        of = None if self.method is None else METHODS[self.method]
        if of is None or of.function is None:
            return None
        made: WeightFunction = of.function(self.options)
        return made

    @cached_property
    def growth(self) -> Growth | None:
        """The growth from a smaller model; None if the model does not start from one."""
        of = None if self.method is None else METHODS[self.method]
        if of is None or of.growth is None:
            return None
        made: Growth = of.growth(self.options)
        return made

    @property
    def stays_dense(self) -> bool:
        """Whether no weight is ever masked."""
        self.require_method()
        hidden = self.function is not None and not self.function.elementwise  # the stored parameters are dense
        return self.sparsity.variation == "dense" or self.sparsity.max == 0 or hidden

    def require_method(self) -> None:
        """Raise UserError if the block has no method, because the run would be dense whatever the other keys are."""
        if self.method is None:
            raise UserError(
                'the mst block has no method, so nothing would be sparse: add "method": "mst" (or --method mst), or '
                '"dense" if that is intended'
            )

    def schedule(self, total_steps: int, steps_per_token: float | None = None) -> Schedule:
        """Return the schedule of phase, sparsity and update fraction for a run of `total_steps`.

        Args:
            total_steps: The length of the run.
            steps_per_token: The steps in which the run reads one token per parameter, for `sparsity.sparse_tokens`.
        """
        self.require_method()
        return self.sparsity.schedule(total_steps, self.topology, steps_per_token)

    def attention_schedule(self, total_steps: int, steps_per_token: float | None = None) -> AttentionSchedule:
        """Return the attention pattern of every step of a run; the arguments are those of `schedule`."""
        attention, schedule = self.attention, self.schedule(total_steps, steps_per_token)
        if attention.pattern == "dense":
            return AttentionSchedule()
        if attention.dense_from == "restore_end":
            dense_from: int | None = schedule.sparse_until
        elif attention.dense_from == "ultra_end":
            restored_from = schedule.first_step("restore")  # may be 0
            dense_from = schedule.sparse_until if restored_from is None else restored_from
        elif isinstance(attention.dense_from, float):
            dense_from = round(attention.dense_from * total_steps)
        else:
            dense_from = attention.dense_from
        if dense_from is not None and dense_from >= total_steps:
            dense_from = None
        of_phase = vars(attention.phase_strides)
        pieces = [
            (phase.start, Pattern(attention.pattern, of_phase[phase.name] or attention.stride))
            for phase in schedule.phases
            if dense_from is None or phase.start < dense_from
        ]
        return strides_per_phase(pieces if dense_from is None else [*pieces, (dense_from, Pattern("dense"))])

    @property
    def depends_on_length(self) -> bool:
        """Whether the schedule changes with the length of the run."""
        self.require_method()
        shares = self.attention.pattern != "dense" and isinstance(self.attention.dense_from, float)
        return shares or self.sparsity.depends_on_length(self.topology)

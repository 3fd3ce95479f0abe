"""The block `mst`: Mixed Sparsity Training as a user states it, and the schedules that follow from it.

Each part of the method owns its own block; here they are one. Values and arithmetic only, without torch and without a
model, so that a plan or a table starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mst_scale.config.targets import TargetsConfig
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.config import AttentionConfig
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.hybrid_sparse_attention.schedule import AttentionSchedule, strides_per_phase
from mst_scale.methods import METHODS, Growth, NoOptions, WeightFunction
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.sparse_linear.config import ComputeConfig
from mst_scale.sparsity_variation import Schedule, SparsityConfig


@dataclass(frozen=True)
class MSTConfig:
    """Mixed Sparsity Training. `method` chooses a preset; the other blocks override it."""

    method: str | None = None  # a config without an mst block is dense; a block must name one
    like: str | None = None  # dense-short: the config (or run folder) whose FLOPs it spends on dense steps
    masks: str | None = None  # fixed: "zeros" (those of the weights), or a file of masks (mst masks)
    grow_from: str | None = None  # ligo, stack: the folder of the smaller run whose weights it begins with, grown
    options: Any = field(default_factory=NoOptions)  # of the method, where it has some: see methods/baselines/
    seed: int | None = None  # of the random growth; None: training.seed
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    # keys of DeepSpeed's, let in at the user's risk
    allow_unclassified: list[str] = field(default_factory=list, metadata={"changes_result": False})

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise UserError(f"mst.seed must be at least 0, not {self.seed}")
        if self.method == "dense-short" and self.like is None:
            raise UserError(
                "method dense-short trains as many dense steps as another run's FLOPs buy: name that run's config or "
                "folder with --like C, or as mst.like"
            )
        if (self.method == "fixed") != (self.masks is not None):
            raise UserError(
                'mst.masks names the masks that method fixed keeps, "zeros" or a file: leave it out with '
                f"{self.method}, or choose method fixed"
            )
        if self.method == "fixed" and self.topology.granularity != "element":
            raise UserError(
                "method fixed keeps masks as they are, weight by weight: leave mst.topology.granularity out"
            )
        if self.topology.granularity == "channel" and not self._draws_channels:
            raise UserError(
                'mst.topology.granularity = "channel" draws which channels live and exchanges none: it goes with '
                "policy static, random_ratio 1.0, grown_moments living or zero (mst.topology) and with "
                "mst.sparsity.distribution = uniform"
            )
        if self.like is not None and self.method != "dense-short":
            raise UserError(f"mst.like goes with method dense-short, not with {self.method}: leave it out")

        if self.grow_from is not None and self.growth is None:
            raise UserError(f"mst.grow_from goes with methods ligo and stack, not with {self.method}: leave it out")

        function, variation = self.function, self.sparsity.variation
        if function is not None and variation not in function.variations:
            raise UserError(
                f"mst.sparsity.variation = {variation} does not go with method {self.method}: choose one of "
                f"{', '.join(function.variations)}"
            )
        if function is not None and function.sparsity not in (None, self.sparsity.max):
            raise UserError(
                f"mst.sparsity.max = {self.sparsity.max:g}: what method {self.method} keeps is decided by mst.options; "
                f"it has to say {function.sparsity:g}"
            )

    @property
    def _draws_channels(self) -> bool:
        topology, uniform = self.topology, self.sparsity.distribution == "uniform"
        return (
            uniform and self.function is None and topology.policy == "static" and not topology.grows_by_dense_gradients
        )

    @cached_property
    def function(self) -> WeightFunction | None:
        """What layers multiply with, of what their parameters store; None where that is the weight itself."""
        of = None if self.method is None else METHODS[self.method]
        if of is None or of.function is None:
            return None
        made: WeightFunction = of.function(self.options)
        return made

    @cached_property
    def growth(self) -> Growth | None:
        """How the model grows out of a smaller run's; None where it begins otherwise."""
        of = None if self.method is None else METHODS[self.method]
        if of is None or of.growth is None:
            return None
        made: Growth = of.growth(self.options)
        return made

    @property
    def stays_dense(self) -> bool:
        """Whether no weight is ever masked."""
        self.require_method()
        hidden = self.function is not None and not self.function.elementwise  # what is stored is dense
        return self.sparsity.variation == "dense" or self.sparsity.max == 0 or hidden

    def require_method(self) -> None:
        """Refuse a block that names no method: the run would be dense whatever its other keys say."""
        if self.method is None:
            raise UserError(
                'the mst block names no method, so nothing would be sparse: add "method": "mst" (or --method mst), or '
                '"dense" if that is meant'
            )

    def schedule(self, total_steps: int) -> Schedule:
        """Phase, sparsity and update fraction of every step of a run."""
        self.require_method()
        return self.sparsity.schedule(total_steps, self.topology)

    def attention_schedule(self, total_steps: int) -> AttentionSchedule:
        """The pattern of every step: the config's, until attention turns dense. A run that ends before it would, ends
        with the pattern that it was trained with."""
        attention, schedule = self.attention, self.schedule(total_steps)
        if attention.pattern == "dense":
            return AttentionSchedule()
        if attention.dense_from == "restore_end":
            dense_from: int | None = schedule.sparse_until
        elif attention.dense_from == "ultra_end":
            restored_from = schedule.first_step("restore")  # 0 in a run that begins with it
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
        """Whether the schedule changes with the run's length; it does not where every duration is stated in steps."""
        self.require_method()
        shares = self.attention.pattern != "dense" and isinstance(self.attention.dense_from, float)
        return shares or self.sparsity.depends_on_length(self.topology)

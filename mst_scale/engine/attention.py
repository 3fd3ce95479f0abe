"""Makes the attention layers of a model use the pattern of the schedule."""

from __future__ import annotations

from logging import INFO, WARNING
from typing import Any

from mst_scale.comm import logger
from mst_scale.engine.component import Component
from mst_scale.hybrid_sparse_attention import AttentionSchedule, Pattern, attach, set_pattern


class AttentionPattern(Component):
    """The attention pattern of each step, set before its forward pass."""

    def __init__(self, engine: Any, schedule: AttentionSchedule, backend: str, own_loop: bool):
        self.engine, self.schedule, self.backend, self.own_loop = engine, schedule, backend, own_loop
        self.layers = 0
        """Attention layers that follow the pattern …"""
        self.dense_reason: str | None = None
        """… and why others do not."""

    @property
    def pattern(self) -> Pattern:
        """The attention pattern of the next step."""
        return self.schedule.pattern_at(int(self.engine.global_steps))

    @property
    def changes(self) -> bool:
        """Whether the pattern changes during the run."""
        return len(self.schedule.pieces) > 1

    @property
    def level(self) -> int:
        """Level of the first log line: a warning if attention could use the pattern but does not."""
        able = any(hasattr(module, "set_attn_implementation") for module in self.engine.module.modules())
        return WARNING if self.dense_reason and able else INFO

    def begin(self) -> None:
        self._follow()
        if self.pattern.kind != "dense":
            self.dense_reason = attach(self.engine.module, self.pattern, self.backend)
            self._follow()
        if self.own_loop:  # `pretrain` has said so before
            self._warn_of_ineffective_stride()

    def _warn_of_ineffective_stride(self) -> None:
        config = getattr(self.engine.module, "config", None)  # of a transformers model, or of one of ours
        context = getattr(config, "max_position_embeddings", getattr(config, "seq_length", None))
        if isinstance(context, int) and (warning := self.schedule.describe_ineffective_stride(context)):
            logger.warning("%s", warning)

    def describe(self) -> str:
        if self.pattern.kind == "dense":
            return ""
        if not self.layers:
            return f"attention stays dense: {self.dense_reason}"
        turns = [start for start, pattern in self.schedule.pieces if pattern.kind == "dense"]
        until = f" until step {turns[0]}" if turns else ""
        partly = f" (not all of it: {self.dense_reason})" if self.dense_reason else ""
        layers = f"{self.layers} layer{'s' * (self.layers != 1)}"
        return f"attention of {layers} follows {self.pattern}{until}{partly}"

    def after_step(self, updated: bool) -> None:
        self._follow()

    def masks_restored(self) -> None:
        self._follow()

    def weights_replaced(self) -> None:
        self._follow()

    def _follow(self) -> None:
        """Let torch compute attention that keeps every pair."""
        backend = "auto" if self.pattern.kind == "dense" else self.backend
        self.layers = set_pattern(self.engine.module, self.pattern, backend)

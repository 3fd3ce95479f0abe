"""`engine.mst`: where a run is on its schedule, and the attention pattern that its model follows.

`Controller` is whole by itself: that of a run whose weights stay dense. `sparse.SparseController` adds the masks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.checkpoints import model_config, warm_start
from mst_scale.checkpoints.multiplied import STATE
from mst_scale.config import Experiment
from mst_scale.dead_units.kinds import Tally
from mst_scale.distributed import logger
from mst_scale.engine.config_record import ConfigRecord
from mst_scale.engine.types import MST
from mst_scale.engine.weight_functions import WeightFunctions, functions_of
from mst_scale.engine.words import phases_in_words
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, attach, set_pattern
from mst_scale.mixed_growing.evolve import Change
from mst_scale.mixed_growing.masks import MaskSet
from mst_scale.sparse_linear import Product
from mst_scale.sparsity_variation import Point


class Controller:
    """Beside one DeepSpeed engine: what holds at its next step."""

    masks_weights = False

    def __init__(self, engine: Any, experiment: Experiment):
        self.engine, self.experiment = engine, experiment
        self.method = experiment.mst.method
        self.schedule, self.attention = experiment.schedule, experiment.attention_schedule
        self.masks = MaskSet([])
        self.changes: list[Change] = []  # what the last topology step did …
        self.changed_at = 0  # … and the step it ended
        self.span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # a stopwatch of whoever measures us
        self.attention_backend = experiment.mst.attention.backend
        self.attended = 0  # layers that follow the pattern …
        self.dense_attention: str | None = None  # … and why others do not
        self.after_steps: list[Callable[[MST], None]] = []
        self.functions = functions_of(engine, experiment)
        self.record: ConfigRecord | None = None

    def begin(self) -> None:
        """Nothing has been refused: let attention follow, and say in one line what has been chosen; a warning where
        attention could follow and does not."""
        if self.functions is not None:
            self.functions.install(self._products())
            self.functions.begin(self.step)
            self.functions.follow(self.step)
            self._carry(self.functions)
        self._follow_pattern()
        if self.pattern.kind != "dense":
            self.dense_attention = attach(self.engine.module, self.pattern, self.attention_backend)
            self._follow_pattern()
        able = any(hasattr(module, "set_attn_implementation") for module in self.engine.module.modules())
        said = [self.sparsity_in_words(), self.attention_in_words()]
        level = WARNING if self.dense_attention and able else INFO
        logger.log(level, "%s: %s", self.method, "; ".join(part for part in said if part))
        context = getattr(getattr(self.engine.module, "config", None), "max_position_embeddings", None)  # transformers'
        if isinstance(context, int) and (told := self.attention.describe_ineffective_stride(context)):
            logger.warning("%s", told)

    def _products(self) -> dict[str, Product]:
        """What calls the functions of weights."""
        return {} if self.functions is None else self.functions.own_products()

    def _carry(self, functions: WeightFunctions) -> None:
        """In checkpoints."""

        def saved() -> dict[str, Any]:
            return functions.saved(self.step)

        def loaded(state: dict[str, Any] | None) -> None:
            functions.loaded(state, self.step)

        zero_shards.carry_state(self.engine, STATE, saved, loaded)

    # --- what others read ---

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return int(self.engine.global_steps)

    @property
    def point(self) -> Point:
        """Phase, target sparsity and update fraction of the next step."""
        return self.schedule.at(self.step)

    @property
    def pattern(self) -> Pattern:
        """The attention pattern of the next step."""
        return self.attention.pattern_at(self.step)

    @property
    def sparsity(self) -> float:
        """Share of the target parameters' weights that are not active."""
        return self.masks.sparsity if self.functions is None else self.functions.sparsity(self.step)

    def densities(self) -> dict[str, float]:
        """Share of active weights by parameter name."""
        return {} if self.functions is None else self.functions.densities(self.step)

    def gradient_densities(self) -> dict[str, float] | None:
        """The same of the products that give gradients of weights; None: as the others'."""
        return None if self.functions is None else self.functions.gradient_densities(self.step)

    def dead_units(self) -> Tally:
        """(dead, all) units by kind, over all ranks together; {} where nothing is sparse or no units are known."""
        return {}

    @property
    def woken(self) -> Tally:
        """(woken, all) units by kind, if the last step has woken any."""
        return {}

    def check_drift(self) -> None:
        """Nothing can drift without masks."""

    def sparsity_in_words(self) -> str:
        if self.functions is None:
            return "no weight is masked"
        return f"{self.functions.in_words()}; {phases_in_words(self.schedule)}"

    # --- who wants to know ---

    def on_step(self, call: Callable[[MST], None]) -> None:
        """Call `call(engine.mst)` at the end of every optimizer step, on every rank, taken or skipped."""
        if not self.follows_steps and not self.after_steps:  # the engine is DeepSpeed's own until somebody asks
            zero_shards.around_model_step(self.engine, self.before_step, self.after_step)
        self.after_steps.append(call)

    def on_topology_step(self, call: Callable[[MST], None]) -> None:
        """The same where the step has pruned and grown: `changes` say what."""
        self.on_step(lambda mst: call(mst) if mst.changed_at == mst.step else None)

    # --- what the engine tells it (zero_shards.hooks.Follower) ---

    @property
    def follows_steps(self) -> bool:
        return len(self.attention.pieces) > 1 or self.functions is not None

    def before_step(self) -> None:
        if self.functions is not None:
            self.functions.check_pulls()
            self.functions.see_gradients()

    def before_update(self) -> None:
        if self.functions is not None:
            self.functions.seed_moments()

    def holds_update(self) -> bool:
        return False

    def mask_update(self, parameter: torch.nn.Parameter, update: torch.Tensor) -> None: ...

    def after_update(self, tensors: Collection[int]) -> None: ...

    def after_step(self) -> None:
        if self.functions is not None:
            self.functions.end_if_due(self.step)
            self.functions.follow(self.step)
        self._follow_pattern()
        for call in self.after_steps:
            call(self)

    def saving(self, checkpoint: Path) -> dict[str, Any]:
        if self.engine.global_rank == 0:
            attended = self.pattern if self.attended else Pattern("dense")
            module = self.engine.module
            model_config.save(checkpoint, module, method=self.method, step=self.step, pattern=attended)
        return {}

    def loaded(self, checkpoint: Path, state: dict[str, Any] | None) -> None:
        self._follow_pattern()

    def load_weights(self, checkpoint: Path) -> dict[str, Any]:
        """`engine.load_checkpoint(…, load_module_only=True)`: weights without states or step, at every ZeRO stage."""
        if self.step and not self.masks.dense:
            raise UserError(
                "load_module_only would put weights where this run's masks have none: load them before the first step, "
                "or change weights in mid-run with mst_scale.load_weights(engine, state_dict)"
            )
        state = warm_start.take_weights(self.engine, checkpoint)
        self.begin_with_these_weights()
        return {key: value for key, value in state.items() if key != "module"}

    def masks_replaced(self) -> None:
        """Masks, and the step, have come from elsewhere."""
        self._follow_pattern()

    # --- beginning from a checkpoint's weights ---

    def take_masks(self, checkpoint: Path) -> None:
        """The masks of a checkpoint whose weights have just been taken; `masks_replaced` follows, at its step."""

    def begin_with_these_weights(self) -> None:
        """Weights came without masks: take those that the schedule asks for at this step."""
        self.weights_taken()
        self._follow_pattern()

    def weights_taken(self) -> None:
        """Weights are in place: where layers multiply with functions, store what stands for these weights."""
        if self.functions is not None:
            self.functions.begin(self.step)
            self.functions.follow(self.step)

    def weights_written(self) -> None:
        """Somebody has changed weights between two steps, master copy and all."""

    # --- attention ---

    def _follow_pattern(self) -> None:
        """Let attention follow the pattern of the next step; torch computes what holds every pair."""
        backend = "auto" if self.pattern.kind == "dense" else self.attention_backend
        self.attended = set_pattern(self.engine.module, self.pattern, backend)

    def attention_in_words(self) -> str:
        if self.pattern.kind == "dense":
            return ""
        if not self.attended:
            return f"attention stays dense: {self.dense_attention}"
        turns = [start for start, pattern in self.attention.pieces if pattern.kind == "dense"]
        until = f" until step {turns[0]}" if turns else ""
        partly = f" (not all of it: {self.dense_attention})" if self.dense_attention else ""
        return f"attention of {self.attended} layers follows {self.pattern}{until}{partly}"

"""Composes `engine.mst`: Mixed Sparsity Training as an ordered list of components that follow DeepSpeed's steps.

Each component does one thing (see `component.Component`).

    Masking           keeps inactive weights at 0: masks gradients and, where the optimizer needs it, updates
    WeightChecks      stops the run if the optimizer has moved an inactive weight
    Topology          prunes and grows at topology steps
    SparseCompute     makes layers compute with their masks
    DriftChecks       stops the run if the ranks' masks differ
    WeightFunctions   makes layers multiply by a function of the stored tensor, for methods that define one
    AttentionPattern  sets the attention pattern of the schedule
    Callbacks         calls the functions given to `on_step` and `on_topology_step`
    ChangedWeights    detects weights that were changed outside of optimizer steps
    ConfigRecord      stores the config in checkpoints, and compares it on resume

One optimizer step; additions to DeepSpeed's own step are marked by *:

    gradients are reduced
  * WeightChecks, Topology decide what this step does; ChangedWeights rejects weights changed meanwhile
  * Topology keeps this rank's gradient on a topology step; Masking masks it, so that its norm is the sparse model's
    norm, clipping; an overflow ends the step here, and the topology step stays due
    the optimizer updates master weights (or leaves them, with topology.replaces_update on a topology step)
  * Muon: Masking masks the orthogonalized update, which is not 0 at inactive weights
  * WeightChecks counts inactive weights that were moved; Topology prunes and grows, and initializes grown weights
    low-precision copy and gather
  * SparseCompute takes the new masks; DriftChecks compares them; AttentionPattern sets the pattern of the next step
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from logging import INFO
from pathlib import Path
from typing import Any, TypeVar

import torch

from mst_scale import zero_shards
from mst_scale._deprecated import renamed_attribute
from mst_scale.checkpoints import mask_files, model_config, warm_start
from mst_scale.checkpoints.background import BackgroundSaves
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.checkpoints.multiplied import STATE, functions_of, reject_functions
from mst_scale.comm import SharedMistake, logger
from mst_scale.comm.exchange import Exchange, Stages
from mst_scale.config import Experiment
from mst_scale.dead_units.live import Channels, LiveUnits
from mst_scale.engine.attention import AttentionPattern
from mst_scale.engine.changed_weights import ChangedWeights
from mst_scale.engine.compact_topology import CompactMasking, CompactTopology
from mst_scale.engine.component import Component
from mst_scale.engine.compute import CompactCompute, CompactLayers, SparseCompute
from mst_scale.engine.config_record import ConfigRecord
from mst_scale.engine.initial_masks import GivenMasks
from mst_scale.engine.masking import Masking
from mst_scale.engine.targets import choose_targets
from mst_scale.engine.topology import Criteria, Granularity, Topology
from mst_scale.engine.types import MST
from mst_scale.engine.weight_checks import DriftChecks, WeightChecks
from mst_scale.engine.weight_functions import WeightFunctions
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.mixed_growing.blocks import granularity_of
from mst_scale.mixed_growing.evolve import Change
from mst_scale.mixed_growing.masks import LayerMask, MaskSet
from mst_scale.sparse_linear import SparseLayers
from mst_scale.sparsity_variation import Point
from mst_scale.zero_shards import compact_files
from mst_scale.zero_shards.hooks import HookTarget

C = TypeVar("C", bound=Component)


class Callbacks(Component):
    """Functions to call after every step."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def after_step(self, updated: bool) -> None:
        for call in self.calls:
            call()


class SparseTraining(MST, HookTarget):
    """The components of one engine, in their order."""

    def __init__(self, engine: Any, experiment: Experiment, own_loop: bool):
        """Check that the engine supports the config, and choose the first masks, on all ranks together."""
        self.engine, self.experiment = engine, experiment
        self.method, self.schedule = experiment.mst.method, experiment.schedule
        self.span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # a stopwatch of whoever measures this
        self.callbacks = Callbacks()
        self.record = ConfigRecord(engine, experiment, own_loop)
        self.functions = None if experiment.mst.function is None else WeightFunctions(engine, experiment)
        backend = experiment.mst.attention.backend
        self.attention = AttentionPattern(engine, experiment.attention_schedule, backend, own_loop)
        masked: list[Component] = [] if experiment.mst.stays_dense else self._make_masks()
        if not masked:
            self.state = MaskState.none(experiment.schedule)
        if self.functions is not None:
            self.functions.use(self.compute.layers.products if masked else None)
        changed = [ChangedWeights(engine, self.state, self.store)] if masked else []
        functions = [] if self.functions is None else [self.functions]
        self.components: list[Component] = [
            *masked, *functions, self.attention, self.callbacks, *changed, self.record,
        ]  # fmt: skip
        self.measured = next((c for c in self.components if c.measures), None)
        self.saves: BackgroundSaves | None = None  # of a loop with training.async_save
        self._stepping = False  # DeepSpeed's engine takes a step
        self._updated = False  # at the step under way: an overflow leaves it so

    def _make_masks(self) -> list[Component]:
        """Create the components of a run with masks."""
        engine, mst = self.engine, self.experiment.mst
        topology, stated = mst.topology, mst.topology.granularity
        if "momentum" in topology.chosen.reads and not zero_shards.has_moments(engine):
            raise UserError(
                f"mst.topology.policy = {topology.policy} grows by Adam's first moment, and this optimizer has "
                "none: choose AdamW, or another policy"
            )
        targets = choose_targets(engine.module, mst.targets, frozen=mst.masks is not None)
        trained = {name: p for name, p in targets.items() if p.requires_grad}
        zero_shards.stages_of(engine.module).agree(lambda: zero_shards.check_optimized(engine, trained))
        self.store = zero_shards.shards_of(engine, targets)
        groups = zero_shards.groups_of(engine)
        named, of_checks = zero_shards.NamedCollectives("mst"), zero_shards.NamedCollectives("mst_drift")
        local = Exchange(groups.zero, engine.device, named)  # ranks over which ZeRO partitions a layer's slice
        everyone, stages = Exchange(groups.everyone, engine.device, of_checks), Stages(groups.stages)
        seed = self.experiment.training.seed if mst.seed is None else mst.seed
        self.units = LiveUnits(engine, seed)
        elements = everyone.agree(lambda: self._granularity(list(targets), seed))
        self.state = MaskState(
            masks=MaskSet(LayerMask(shard, self.store.device_of(i)) for i, shard in enumerate(self.store.slices)),
            exchange=zero_shards.exchanges_of(self.store.parameters, groups, engine.device, named),
            everyone=everyone,
            stages=stages,
            writes=groups.writes,
            schedule=self.schedule,
            seed=seed,
            granularity=stated if isinstance(stated, str) else asdict(stated),
            given=mst.masks is not None,
            numels=stages.joined({s.name: s.numel for s in self.store.slices}),
        )
        shapes = stages.joined({s.name: elements.grid_shape(s.shape) for s in self.store.slices})
        compact = isinstance(self.store, zero_shards.CompactStore)
        constant = max(self.experiment.sparsities) if mst.masks is None else None
        make = functools.partial(CompactTopology, sparsity=constant) if compact else Topology
        self.topology = make(
            engine, topology, self.state, self.store,
            elements=elements, shapes=shapes, distribution=mst.sparsity.distribution,
            criteria=Criteria() if self.functions is None else self.functions, units=self.units,
        )  # fmt: skip
        self.masking = (CompactMasking if compact else Masking)(
            engine, self.state, self.store, self.topology, initial=mst.sparsity.initial, given=self._read_given()
        )
        same_layers = Exchange(groups.same_layers, engine.device, of_checks)
        self.drift = DriftChecks(engine, self.state, same_layers, topology.check_every)
        backend = mst.compute.backend
        if isinstance(self.topology, CompactTopology):  # nothing inactive is in memory, so nothing can be moved
            make_compact = functools.partial(CompactLayers, self.topology, backend)
            layers = CompactCompute(engine, self.state, self.topology, make_compact, local)
            return [self.masking, self.topology, layers, self.drift]
        make_layers = functools.partial(
            SparseLayers, engine.module, targets, {s.name: s.cut.local_shape for s in self.store.slices}, backend,
            elements.side, forwards=zero_shards.FORWARDS, always=self.functions is not None,
            channels=isinstance(elements, Channels),
        )  # fmt: skip
        self.compute = SparseCompute(engine, self.state, self.topology, make_layers, local)
        checks = WeightChecks(engine, self.store, self.topology, self.drift)
        return [self.masking, checks, self.topology, self.compute, self.drift]

    def _granularity(self, names: list[str], seed: int) -> Granularity:
        stated = self.experiment.mst.topology.granularity
        if stated != "channel":
            return granularity_of(stated)
        return Channels(self.units.units, names, seed, lambda step: self.schedule.at(step).sparsity, lambda: self.step)

    def _read_given(self) -> GivenMasks | None:
        """Read the masks that `mst.masks` names; on one host, for example, the file may be missing."""
        if (stated := self.experiment.mst.masks) is None:
            return None
        mine = {name: None for name, _ in zero_shards.named_parameters(self.engine.module)}
        names = list(self.state.stages.joined(mine))

        def read() -> GivenMasks:
            given = GivenMasks(stated)
            given.check_names(names, self.state.numels)
            return given

        return self.state.everyone.agree(read)

    def begin(self) -> None:
        """Start all components after every check has passed, and log in one line what was chosen."""
        for component in self.components:
            if component.state_key is not None:
                zero_shards.carry_state(
                    self.engine, component.state_key, component.state_dict, component.load_state_dict
                )
            component.begin()
        if self.functions is None:
            zero_shards.carry_state(self.engine, STATE, None, reject_functions)
        chosen = ["no weight is masked" if self.measured is None else self.measured.describe()]
        said = [part for part in (*chosen, self.attention.describe()) if part]
        logger.log(max(INFO, self.attention.level), "%s: %s", self.method, "; ".join(said))

    # --- MST: what a training loop reads ---

    @property
    def step(self) -> int:
        return int(self.engine.global_steps)

    @property
    def point(self) -> Point:
        point = self.schedule.at(self.step)
        return replace(point, sparsity=self.sparsity) if self.state.given else point

    @property
    def pattern(self) -> Pattern:
        return self.attention.pattern

    @property
    def attended(self) -> int:
        """Number of attention layers that use the pattern."""
        return self.attention.layers

    @property
    def sparsity(self) -> float:
        return 0.0 if self.measured is None else self.measured.sparsity()

    def densities(self) -> dict[str, float]:
        return {} if self.measured is None else self.measured.densities()

    def gradient_densities(self) -> dict[str, float] | None:
        return None if self.measured is None else self.measured.gradient_densities()

    def dead_units(self) -> Mapping[str, tuple[int, int]]:
        return self.state.stages.added(self.units.count()) if self.masks_weights else {}

    @property
    def revived(self) -> Mapping[str, tuple[int, int]]:
        return self.topology.revived if self.masks_weights and self.changed_at == self.step else {}

    woken = renamed_attribute("woken", "revived")

    @property
    def changes(self) -> Sequence[Change]:
        return self.state.changes

    @property
    def changed_at(self) -> int:
        return self.state.changed_at

    @property
    def masks(self) -> MaskSet:
        """The masks of this rank's slices."""
        return self.state.masks

    def weights(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(state) if self.functions is None else self.functions.multiplied(state)

    def check_drift(self) -> None:
        if self.masks_weights:
            self.drift.check()

    def on_step(self, call: Callable[[MST], None]) -> None:
        if not self.follows_steps and not self.callbacks.calls:  # until the first call, the engine stays DeepSpeed's
            zero_shards.around_model_step(self.engine, self.before_step, self.after_step)
        self.callbacks.calls.append(lambda: call(self))

    def on_topology_step(self, call: Callable[[MST], None]) -> None:
        self.on_step(lambda mst: call(mst) if mst.changed_at == mst.step else None)

    # --- HookTarget: what the hooks call ---

    @property
    def masks_weights(self) -> bool:
        return not self.experiment.mst.stays_dense

    @property
    def follows_steps(self) -> bool:
        return self.masks_weights or self.attention.changes or self.functions is not None

    def before_step(self) -> None:
        if not zero_shards.has_gradients(self.engine):
            raise SharedMistake(
                "engine.step() was called without gradients: call engine.backward(loss) before each step, and "
                "do not call zero_grad() in between"
            )
        self._stepping, self._updated = True, False
        for component in reversed(self.components):  # ChangedWeights rejects first, Topology decides before Masking
            component.before_step()
        with self._span():
            for component in self.components:
                component.after_backward()

    def before_update(self) -> None:
        for component in self.components:
            component.before_update()

    def holds_update(self) -> bool:
        return any(component.holds_update() for component in self.components)

    def mask_update(self, parameter: torch.nn.Parameter, update: torch.Tensor) -> None:
        for component in self.components:
            component.mask_update(parameter, update)

    def after_update(self, tensors: Collection[int]) -> None:
        if not self._stepping:
            raise SharedMistake(
                f"{zero_shards.optimizer_name(self.engine)}.step() was called directly, so no mask was applied: call "
                "engine.step() instead"
            )
        self._updated = True
        with self._span():
            for component in self.components:
                component.after_update(tensors)

    def after_step(self) -> None:
        self._stepping = False
        with self._span():
            for component in self.components:
                component.after_step(self._updated)

    def _span(self) -> AbstractContextManager[Any]:
        moving = self.masks_weights and self.topology.under_way is not None
        return self.span("topology" if moving else "masking")

    # --- checkpoints ---

    def finish_save(self) -> None:
        saved = None if self.saves is None else self.saves.finish()
        if saved is not None and saved.error is not None:
            raise OSError(f"the checkpoint of step {saved.step} was not saved: {saved.error}")

    def check_save(self) -> None:
        """Reject a save, on all ranks if one of them has to."""

        def check() -> None:
            for component in self.components:
                component.before_save()

        self.state.everyone.agree(check)

    def saving(self, checkpoint: Path) -> dict[str, Any]:
        """Write masks and the model's config into a checkpoint's folder; return the masks' entry of client_state."""
        if self.engine.global_rank == 0:
            attended = self.pattern if self.attended else Pattern("dense")
            module = self.engine.module
            model_config.save(checkpoint, module, method=self.method, step=self.step, pattern=attended)
        if not self.masks_weights:
            return {}
        if zero_shards.is_compact(self.engine.module):
            self.state.everyone.agree(lambda: self._save_index(checkpoint))
        return mask_files.save(checkpoint, self.state, self.step, self.dead_units())

    def _save_index(self, checkpoint: Path) -> None:
        """Write which weights compact layers store; the first replica of each stage of a pipeline does."""
        engine = self.engine
        if zero_shards.groups_of(engine).first_replica:
            stage, stages = zero_shards.stage_number(engine), zero_shards.stage_count(engine)
            compact_files.save(checkpoint, zero_shards.indexes_of(engine.module), stage, stages)

    def loading(self, checkpoint: Path) -> Callable[[], None]:
        """Give compact layers the index of a checkpoint before its weights are loaded; return how to undo it."""
        topology = self.topology if self.masks_weights else None
        if not isinstance(topology, CompactTopology):
            return lambda: None
        return self.state.everyone.agree(lambda: topology.take_index(checkpoint))

    def loaded(self, checkpoint: Path, state: dict[str, Any] | None) -> None:
        if self.masks_weights:
            self._restore(checkpoint, state)
        self.masks_replaced()

    def reads_weights(self, checkpoint: Path) -> bool:
        """Return whether masks or functions decide what becomes of loaded weights, or DeepSpeed would load none."""
        changed = self.masks_weights or self.functions is not None or functions_of(checkpoint) is not None
        return changed or self.engine.zero_optimization_stage() == 3

    def load_weights(self, checkpoint: Path) -> dict[str, Any]:
        """`engine.load_checkpoint(…, load_module_only=True)`: weights without states or step, at every ZeRO stage."""
        if self.step and self.masks_weights and not self.masks.dense:
            raise UserError(
                "load_module_only would write weights that this run's masks keep at 0: load them before the first "
                "step, or change weights during the run with mst_scale.load_weights(engine, state_dict)"
            )
        state = warm_start.take_weights(self.engine, checkpoint)
        self.begin_with_these_weights()
        return {key: value for key, value in state.items() if key != "module"}

    def take_masks(self, checkpoint: Path) -> None:
        """Load the masks of a checkpoint whose weights were just loaded; call `masks_replaced` next, at its step."""
        if self.masks_weights:
            self._restore(checkpoint, mask_files.read(mask_files.file_of(checkpoint, 0))[0])

    def _restore(self, checkpoint: Path, state: dict[str, Any] | None) -> None:
        mask_files.restore(checkpoint, self.state, state)
        self.state.everyone.agree(lambda: self.masking.check_given(checkpoint))

    def masks_replaced(self) -> None:
        """Rebuild derived state after the masks and the step were replaced."""
        for component in self.components:
            component.masks_restored()

    def begin_with_these_weights(self) -> None:
        """Choose the masks that the schedule requires at this step, after weights were loaded without masks."""
        if self.masks_weights:
            self.masking.begin_anew()
            self.masks_replaced()
        self.weights_taken()

    def weights_taken(self) -> None:
        """Follow loaded weights: if layers multiply by functions, store the tensors that yield these weights."""
        for component in self.components:
            component.weights_replaced()

    def weights_written(self) -> None:
        """Follow a change of the weights and their master copy between two steps."""
        for component in self.components:
            component.weights_written()

"""How does a DeepSpeed engine come to train sparsely?

`initialize` takes the arguments of `deepspeed.initialize` and returns its results; `engine.mst` is the `Controller`.
The order of one optimizer step, with what the controller adds marked by *:

    reduced gradients are at hand
  * on a topology step keep this rank's dense gradient
  * mask this rank's gradient, so that its norm is the masked gradient's
    norm, clipping; an overflow ends the step here, and the topology step stays due
    the optimizer updates master weights (an inactive weight has g = m = v = w = 0 and stays exactly 0)
  * or, with topology.replaces_update, leaves them as they are on a topology step
  * every so often count what the optimizer has moved though it is inactive: more than nothing is refused
  * on a topology step: prune, grow, zero what was pruned, start what has grown, wake what no gradient reaches
    low-precision copy and gather
  * layers that compute with their masks take the new ones
  * drift check every so often; the attention pattern of the next step
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import deepspeed
import torch
from packaging.version import Version

from mst_scale import zero_shards
from mst_scale.checkpoints import mask_files, warm_start
from mst_scale.config import Experiment, load, states
from mst_scale.config.support import refuse_unsupported
from mst_scale.dead_units.kinds import Tally
from mst_scale.dead_units.live import LiveUnits
from mst_scale.distributed import SharedMistake, logger, speak
from mst_scale.engine.targets import choose_targets
from mst_scale.hybrid_sparse_attention import Pattern, attach, set_pattern
from mst_scale.mixed_growing.blocks import Blocks
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.mixed_growing.evolve import Change, Layer, evolve, sparsify
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.masks import LayerMask, MaskSet
from mst_scale.mixed_growing.policies import policy
from mst_scale.sparse_linear import SparseLayers
from mst_scale.sparsity_variation import Point, Schedule

SUPPORTED_DEEPSPEED = ("0.19", "0.20")  # from, and below: it moves its internals between minors
OLDEST_TORCH = "2.8"
FIRST_CHECKS = 3  # updates of a start whose inactive weights are counted


def check_versions(deepspeed_version: str = deepspeed.__version__, torch_version: str = torch.__version__) -> None:
    first, last = SUPPORTED_DEEPSPEED
    if not Version(first) <= Version(deepspeed_version) < Version(last):
        raise ImportError(
            f"mst_scale needs DeepSpeed {first}.x, this is {deepspeed_version}: pip install 'deepspeed=={first}.*'"
        )
    if Version(torch_version) < Version(OLDEST_TORCH):
        raise ImportError(f"mst_scale needs torch >= {OLDEST_TORCH}, this is {torch_version}")


check_versions()


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    *more: Any,
    config: Experiment | dict[str, Any] | str | Path | None = None,
    config_params: dict[str, Any] | str | None = None,
    **others: Any,
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize`, its arguments in its order, for a config that may hold our blocks.

    The config may also be `config_params` or `args.deepspeed_config`, as there. Returns (engine, optimizer, loader,
    lr_scheduler).
    """
    of_args = getattr(args, "deepspeed_config", None)
    configs = [given for given in (config, config_params, of_args) if given is not None]
    if model is None or len(configs) != 1:
        what = "a model" if model is None else f"one config, not {len(configs) or 'none'}"
        raise ValueError(f"mst_scale.initialize needs {what}: initialize(model=…, config=…), or args.deepspeed_config")
    if of_args is not None:  # DeepSpeed would read the file itself, our blocks and presets unseen
        args = copy.copy(args)
        args.deepspeed_config = None
    experiment = configs[0] if isinstance(configs[0], Experiment) else load(configs[0])
    _require_length(configs[0], experiment)
    notes = refuse_unsupported(experiment.deepspeed, experiment.mst)
    if not experiment.mst.stays_dense:
        zero_shards.refuse_arguments(model, *more, **others)
    speak()
    for note in notes:
        logger.warning("%s", note)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args,
        model,
        optimizer,
        model.parameters() if model_parameters is None else model_parameters,
        *more,
        config=experiment.deepspeed,
        **others,
    )
    zero_shards.guard_plain_step(engine)
    zero_shards.scale_plain_loss(engine)
    zero_shards.fit_universal_checkpoints(engine)
    engine.mst = Controller(engine, experiment)
    return engine, optimizer, loader, scheduler


def _require_length(config: Experiment | dict[str, Any] | str | Path, experiment: Experiment) -> None:
    """Phases are shares of a run: a loop of the user's has to say how long it will be."""
    shares = experiment.mst.depends_on_length
    if shares and not states(config, "training", "steps"):
        raise ValueError(
            "how many optimizer steps will the run take? The phases of sparsity are shares of it: add "
            '"training": {"steps": N} to the config'
        )


class Controller:
    """Mixed Sparsity Training beside one DeepSpeed engine."""

    def __init__(self, engine: Any, experiment: Experiment):
        mst, training = experiment.mst, experiment.training
        self.engine = engine
        self.topology = mst.topology
        self.seed = training.seed if mst.seed is None else mst.seed
        self.schedule: Schedule = mst.schedule(training.steps)
        self.attention = mst.attention_schedule(training.steps)
        self.policy = policy(
            mst.topology.policy,
            random_share=mst.topology.random_ratio,
            mest_share=mst.topology.mest_lambda if mst.topology.policy == "mest" else None,
        )
        self.distribution = mst.sparsity.distribution
        granularity = mst.topology.granularity
        self.granularity: dict[str, int] | str = granularity if isinstance(granularity, str) else asdict(granularity)
        self.blocks = None if isinstance(granularity, str) else Blocks(granularity.block, granularity.min_blocks)
        self.settled = 0  # the last step whose topology work is done
        self.changes: list[Change] = []  # what the last topology step did
        self.changed_at = 0
        self.masks = MaskSet([])
        self.span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # a stopwatch of whoever measures us
        self.idle = mst.stays_dense
        self.attention_backend = mst.attention.backend
        self.attended = 0  # layers that follow the pattern
        if not self.idle:
            self._attach(engine, experiment)
        elif len(self.attention.pieces) > 1:  # the pattern changes all the same
            zero_shards.around_model_step(engine, lambda: None, self._set_pattern)
            zero_shards.after_loading(engine, self._set_pattern)
        self._set_pattern()
        reason = None
        if self.pattern.kind != "dense":
            reason = attach(engine.module, self.pattern, self.attention_backend)
            self._set_pattern()
        self._describe(experiment, reason)

    def _describe(self, experiment: Experiment, dense_attention: str | None) -> None:
        """The one line that says what has been chosen; a warning where attention could follow and does not."""
        able = any(hasattr(module, "set_attn_implementation") for module in self.engine.module.modules())
        said = [self._sparsity_in_words(experiment), self._attention_in_words(dense_attention)]
        logger.log(
            WARNING if dense_attention and able else INFO,
            "%s: %s",
            experiment.mst.method,
            "; ".join(part for part in said if part),
        )

    def _sparsity_in_words(self, experiment: Experiment) -> str:
        if self.idle:
            return "no weight is masked"
        phases = ", ".join(f"{piece.phase} from step {piece.start}" for piece in self.schedule.pieces)
        in_blocks = "" if self.blocks is None else f" in blocks of {self.blocks.side} × {self.blocks.side}"
        trained = sum(math.prod(zero_shards.shape_of(p)) for p in self.engine.module.parameters())
        weights, bits = sum(m.numel for m in self.masks), 1 + self.counts_coverage
        return (
            f"{len(self.masks)} matrices with {weights:,} of {trained:,} parameters become up to "
            f"{100 * self.schedule.max_sparsity:.3g} % sparse{in_blocks} by policy {self.policy.name}; {phases}, of "
            f"{self.schedule.total_steps}; masks take {sum(m.length for m in self.masks) * bits // 8:,} bytes a rank"
        )

    def _attention_in_words(self, dense_attention: str | None) -> str:
        if self.pattern.kind == "dense":
            return ""
        if not self.attended:
            return f"attention stays dense: {dense_attention}"
        turns = [start for start, pattern in self.attention.pieces if pattern.kind == "dense"]
        until = f" until step {turns[0]}" if turns else ""
        partly = f" (not all of it: {dense_attention})" if dense_attention else ""
        return f"attention of {self.attended} layers follows {self.pattern}{until}{partly}"

    def _set_pattern(self) -> None:
        """Let attention follow the pattern of the next step; torch computes what holds every pair."""
        backend = "auto" if self.pattern.kind == "dense" else self.attention_backend
        self.attended = set_pattern(self.engine.module, self.pattern, backend)

    def _attach(self, engine: Any, experiment: Experiment) -> None:
        if "momentum" in self.policy.reads and not zero_shards.has_moments(engine):
            raise ValueError(
                f"mst.topology.policy = {self.topology.policy} grows by Adam's first moment, and this optimizer has "
                "none: choose AdamW, or another policy"
            )
        targets = choose_targets(engine.module, experiment.mst.targets)
        zero_shards.refuse_unoptimized(engine, targets)
        self.shards = zero_shards.shards_of(engine, targets)
        device = self.shards.weight(0).device
        self.exchange = Exchange(self.shards.group, engine.device, zero_shards.NamedCollectives("mst"))
        group, named = zero_shards.data_parallel_group(engine), zero_shards.NamedCollectives("mst_drift")
        self.everyone = Exchange(group, engine.device, named)
        self.units = LiveUnits(engine, self.seed)
        self.masks = MaskSet(LayerMask(s.name, s.shape, s.start, s.length, device) for s in self.shards.slices)
        # of the matrices whose elements targets count: weights, or blocks
        self.shapes = [s.shape if self.blocks is None else self.blocks.grid_shape(s.shape) for s in self.shards.slices]
        # a run that starts dense has had every weight active: the share is 1, and no bit need be kept to know it
        self.counts_coverage = self.topology.track_coverage and self.schedule.at(0).sparsity > 0
        if self.counts_coverage:
            for mask in self.masks:
                mask.track_ever()
        self.kept: dict[int, torch.Tensor] = {}  # dense gradients of the topology step under way, in true units
        self.moved: dict[int, int] = {}  # inactive weights that are not 0, on this rank, by parameter
        self.unchecked = FIRST_CHECKS  # updates to be looked at yet
        self.due = self.updated = self.looks = False
        self.initial = experiment.mst.sparsity.initial
        if self.schedule.at(0).sparsity:
            self._make_sparse(self.schedule.at(0).sparsity, self.initial)
        self.digests = self.masks.digests(self.exchange)
        shapes = {s.name: s.shape for s in self.shards.slices}
        side = 1 if self.blocks is None else self.blocks.side
        error = None
        try:
            self.layers = SparseLayers(engine.module, targets, shapes, experiment.mst.compute.backend, side)
        except ValueError as met:  # of this rank's device, say
            error = met
        self.everyone.raise_first(error)
        self._compute_with_masks()
        zero_shards.around_model_step(engine, self._measured(self._before_step), self._measured(self._after_step))
        if self.topology.replaces_update:
            zero_shards.hold_updates(engine, lambda: self.due)
        zero_shards.after_master_update(engine, self._measured(self._after_update))
        mask_files.ride_along(engine, self)
        if self.blocks is not None:
            self._say_where_blocks_are_too_few(self.blocks)

    def _say_where_blocks_are_too_few(self, blocks: Blocks) -> None:
        """Layers that `min_blocks` keeps denser than the sparsity asked for."""
        counts = active_counts(self.shapes, self.schedule.max_sparsity, self.distribution)
        least = [blocks.at_least(mask.shape) for mask in self.masks]
        short = [i for i in range(len(counts)) if least[i] > counts[i]]
        if short:
            logger.warning(
                "min_blocks = %d keeps %d of %d parameters denser than %.0f %% sparsity asks for: %s has %d × %d "
                "blocks and keeps %d or more of them instead of %d; smaller blocks or fewer min_blocks would reach it",
                blocks.least,
                len(short),
                len(counts),
                100 * self.schedule.max_sparsity,
                self.masks.names[short[0]],
                *self.shapes[short[0]],
                least[short[0]],
                counts[short[0]],
            )

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
        return self.attention.pattern_at(self.step)

    @property
    def sparsity(self) -> float:
        """Share of the target parameters' weights that are not active."""
        return self.masks.sparsity

    def densities(self) -> dict[str, float]:
        """Share of active weights by parameter name."""
        return {mask.name: mask.active / mask.numel for mask in self.masks}

    def dead_units(self) -> Tally:
        """(dead, all) units by kind, over all ranks together; {} where nothing is sparse or no units are known."""
        return {} if self.idle else self.units.count()

    @property
    def woken(self) -> Tally:
        """(woken, all) units by kind, if the last step has woken any."""
        return {} if self.idle or self.units.woken_at != self.step else self.units.woken

    # --- one step ---

    def _measured(self, part: Callable[..., None]) -> Callable[..., None]:
        def measured(*args: Any) -> None:
            with self.span("topology" if self.due and part != self._before_step else "masking"):
                part(*args)

        return measured

    def _before_step(self) -> None:
        step = self.step + 1
        self.updated = False
        self.due = self._is_due(step)
        every = self.topology.check_every
        # which updates are looked at: the first ones, the first after a topology step (it leaves what it pruned at 0,
        # maybe with a momentum somewhere), and those with a drift check
        self.looks = not self.masks.dense and (self.unchecked > 0 or bool(every and step % every == 0))
        if not self.due and self.masks.dense:
            return
        scale = zero_shards.loss_scale(self.engine)
        masks_gradient = "momentum" not in self.policy.reads  # snfs averages dense gradients in Adam's own moment
        for i, mask in enumerate(self.masks):
            gradient = self.shards.gradient(i)
            if gradient is None:  # the loss does not depend on this parameter
                gradient = torch.zeros(mask.length, device=mask.device)
            if self.due:
                self.kept[i] = gradient.detach().to(torch.float32, copy=True).div_(scale)
                if not self.kept[i].isfinite().all():
                    continue  # not masked, so that DeepSpeed's own check sees it and all ranks skip this step
            if masks_gradient and not mask.dense:
                mask.retain_(gradient)
                self.shards.put_gradient(i, gradient)
        if self.due and self.topology.wake_dead_units:
            targets = active_counts(self.shapes, self.schedule.at(step).sparsity, self.distribution)
            full = {m.name for m, s, n in zip(self.masks, self.shapes, targets, strict=True) if n == math.prod(s)}
            self.units.plan_waking(step, full, {mask.name for mask in self.masks if not mask.dense})

    def _after_update(self, tensors: set[int]) -> None:
        self.updated = True
        rezero = "momentum" in self.policy.reads or self.topology.rezero
        if not self.due and (self.masks.dense or not (rezero or self.looks)):
            return
        here = [i for i in range(len(self.masks)) if id(self.shards.owner(i)) in tensors]
        for i, mask in enumerate(self.masks):
            if i not in here:
                continue
            if rezero:  # moments are dense, or the optimizer moves weights without a gradient
                mask.retain_(self.shards.weight(i))
            elif self.looks:
                self.moved[i] = mask.count_inactive(self.shards.weight(i))
            if self.topology.rezero and "momentum" not in self.policy.reads:
                mask.retain_(*self.shards.states(i).values())
        if self.due:
            self.changes = [] if self.changed_at != self.step + 1 else self.changes
            self.changed_at = self.step + 1
            self.changes += self._evolve(here)

    def _refuse_moved(self) -> None:
        """Stop on all ranks if the optimizer has moved inactive weights. One small all-reduce for all layers."""
        local = torch.tensor([self.moved.get(i, 0) for i in range(len(self.masks))], dtype=torch.int64)
        self.moved.clear()
        self.unchecked = max(0, self.unchecked - 1)
        moved = self.everyone.max(self.exchange.sum(local)).tolist()
        if any(moved):
            self.check_drift()  # a mask that has lost a bit would look like a weight that has moved
            worst = max(range(len(moved)), key=moved.__getitem__)
            raise SharedMistake(
                f"{zero_shards.optimizer_name(self.engine)} moves weights that have no gradient: {sum(moved)} masked "
                f"weights are not 0 after step {self.step}, {moved[worst]} of them in {self.masks.names[worst]}; "
                "choose one that leaves them (AdamW with eps > 0, SGD, Adagrad), keep your own code off them, or set "
                "mst.topology.rezero to true, which zeroes them and their optimizer states after every update"
            )

    def _after_step(self) -> None:
        self.kept.clear()
        if self.updated and self.looks:
            self._refuse_moved()
        # the counts stay, the bits (two a weight) go
        self.changes = [replace(change, pruned_bits=None, grown_bits=None) for change in self.changes]
        if self.topology.track_coverage and not self.counts_coverage:
            self.changes = [replace(change, ever_active=change.numel) for change in self.changes]
        if self.masks.dense and self.step >= self.schedule.sparse_until:
            for mask in self.masks:
                mask.ever = None
        if self.updated or not self.due:  # an overflow leaves the topology step due at the next boundary
            self.settled = self.step
        self.units.finish(self.updated)
        if self.due and self.updated:
            self.unchecked = max(self.unchecked, 1)
            self.digests = self.masks.digests(self.exchange)
            self._compute_with_masks()
        self._ask_for_dense_gradients()
        every = self.topology.check_every
        if every and self.step % every == 0 and not self.masks.dense:
            self.check_drift()
        self._set_pattern()

    def _is_due(self, step: int) -> bool:
        """Whether this step changes the topology, or makes up for one that was skipped."""
        return any(self.schedule.is_topology_step(s) for s in range(self.settled + 1, step + 1))

    def _compute_with_masks(self) -> None:
        """Give the layers that multiply with their masks the ones of now; the same on every rank.

        A layer's bits are brought together, one layer at a time, in an all-reduce of 1/8 byte a weight. Ranks that
        differ in threads or compiler may choose differently: what is dense on one is dense on all of them.
        """
        chosen = [self.layers.choose(mask.name, 1 - mask.active / mask.numel) for mask in self.masks]
        if self.layers.products:
            dense = self.exchange.max(torch.tensor([backend == "dense" for backend in chosen], dtype=torch.int64))
            chosen = ["dense" if one else own for one, own in zip(dense.tolist(), chosen, strict=True)]
        for mask, backend in zip(self.masks, chosen, strict=True):
            self.layers.set_mask(mask.name, None if backend == "dense" else mask.whole(self.exchange), backend)
        self._ask_for_dense_gradients()

    def _ask_for_dense_gradients(self) -> None:
        """Growth reads dense gradients of every micro-batch of a topology step; snfs averages those of all steps."""
        self.layers.dense_gradients("momentum" in self.policy.reads or self._is_due(self.step + 1))

    def masks_loaded(self) -> None:
        """A checkpoint brought other masks, and another step."""
        if not self.idle:
            self.unchecked = FIRST_CHECKS
            self._forget_inactive()
            self._compute_with_masks()
        self._set_pattern()

    def load_weights(self, checkpoint: Path) -> dict[str, Any]:
        """`engine.load_checkpoint(…, load_module_only=True)`: weights without states or step, at every ZeRO stage."""
        if self.step and not self.masks.dense:
            raise ValueError(
                "load_module_only would put weights where this run's masks have none: load them before the first step"
            )
        state = warm_start.take_weights(self.engine, checkpoint)
        self.begin_with_these_weights()
        return {key: value for key, value in state.items() if key != "module"}

    def begin_with_these_weights(self) -> None:
        """Weights came without masks: take those that the schedule asks for at this step. Those of a start follow
        mst.sparsity.initial, later ones keep the largest weights, which training has sorted."""
        if not self.idle:
            for mask in self.masks:
                mask.forget()
            self.settled = self.step
            if self.point.sparsity:
                self._make_sparse(self.point.sparsity, "magnitude" if self.step else self.initial)
            self.digests = self.masks.digests(self.exchange)
        self.masks_loaded()

    def _forget_inactive(self) -> None:
        """Moments that were not loaded (load_optimizer_states=False) are of the masks before: they would move weights
        that are inactive now."""
        if "momentum" not in self.policy.reads:
            for i, mask in enumerate(self.masks):
                mask.retain_(*self.shards.states(i).values())

    def _evolve(self, here: list[int]) -> list[Change]:
        """Prune and grow these parameters to the target of the step that is being taken."""
        step = self.step + 1
        point = self.schedule.at(step)
        targets = active_counts(self.shapes, point.sparsity, self.distribution)
        masks = list(self.masks)
        states = {i: self.shards.states(i) for i in here}
        layers = [
            Layer(masks[i], targets[i], self.shards.weight(i), self.kept[i], states[i].get("exp_avg")) for i in here
        ]
        take_step = evolve if self.blocks is None else self.blocks.evolve
        changes = take_step(
            layers,
            policy=self.policy,
            update_fraction=point.update_fraction,
            seed=self.seed,
            step=step,
            exchange=self.exchange,
            regrow=self.topology.regrow,
        )
        for i, change in zip(here, changes, strict=True):
            masks[i].retain_(self.shards.weight(i))
            if "momentum" not in self.policy.reads:
                masks[i].retain_(*states[i].values())
                if self.topology.grown_moments == "seeded" and "exp_avg_sq" in states[i]:
                    self._seed_second_moment(i, states[i]["exp_avg_sq"], change)
            self.units.wake(masks[i].name)
        return changes

    def _seed_second_moment(self, i: int, v: torch.Tensor, change: Change) -> None:
        """Give each grown weight the second moment it would have had, had its growth gradient been the usual one.

        Adam divides by √v̂, v̂ = v / (1 - β₂ᵗ), and t counts all its updates: a weight that grows with v = 0 would take
        first updates up to √(1 - β₁)²/(1 - β₂) times too large. v = (1 - β₂ᵗ)·max(g², mean g² of the layer) makes
        them start at (1 - β₁) of a usual update and rise as the first moment fills. What wakes starts like what grows.
        """
        if change.gradient_mean_square is None:
            return
        grown = change.grown_indices()
        if (woken := self.units.starting(change.name)).numel():
            grown = torch.cat([grown, woken]).unique()
        if not grown.numel():
            return
        factor = zero_shards.clip_factor(self.engine)
        beta2 = zero_shards.group_of(self.shards, i)["betas"][1]
        warm = 1.0 - beta2 ** zero_shards.updates_of(self.shards, i)
        size = self.kept[i][grown].square_().clamp_(min=change.gradient_mean_square)
        v[grown] = size.mul_(factor * factor * warm).to(v.dtype)

    def _make_sparse(self, sparsity: float, how: str) -> None:
        """A topology for weights that have none, in master weights and in what the forward reads."""
        counts = active_counts(self.shapes, sparsity, self.distribution)
        layers = [Layer(m, counts[i], self.shards.weight(i)) for i, m in enumerate(self.masks)]
        make_sparse = sparsify if self.blocks is None else self.blocks.sparsify
        make_sparse(layers, how=how, seed=self.seed, exchange=self.exchange)
        for i, mask in enumerate(self.masks):
            mask.retain_(self.shards.weight(i))
            zero_shards.zero_inactive(self.shards, i, mask.flags())

    def check_drift(self) -> None:
        """Stop on all ranks if a mask is no longer what the last topology step left. One small all-reduce."""
        self.masks.check_drift(self.digests, self.exchange, self.everyone)

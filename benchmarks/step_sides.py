"""Builds two DeepSpeed engines of one config, one with its method and one dense.

Both take one micro-batch of random tokens per step. Method "mst" (or another) is taken to the middle of a phase of its
schedule by a real topology step, and stays there for any number of steps. Where `pretrain` would change the storage of
weights on the way, so does this, by the same calls.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mst_scale.config import Experiment
from mst_scale.config.compact import Stretch, stretches
from mst_scale.errors import UserError
from mst_scale.plan.memory import CONTEXT, FRAGMENTS, Memory
from mst_scale.plan.memory import memory as modelled_memory
from mst_scale.plan.setting import setting_of

from . import memory

MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet", "comms_logger", "scheduler")


@dataclass
class Side:
    """One engine, its batch, and how much memory it holds."""

    engine: Any
    batch: tuple[torch.Tensor, torch.Tensor]
    held: float | None = None  # bytes

    def step(self) -> None:
        """Take one step."""
        self.engine.backward(self.engine(*self.batch))
        self.engine.step()

    def step_in_parts(self, watch: Any) -> None:
        """Take one step with its parts timed."""
        with watch.span("forward"):
            loss = self.engine(*self.batch)
        with watch.span("backward"):
            self.engine.backward(loss)
        with watch.span("optimizer"):
            self.engine.step()


def engine_of(experiment: Experiment) -> Any:
    """Return the engine of an experiment, with weights drawn from a fixed seed."""
    import mst_scale
    from mst_scale import zero_shards
    from mst_scale.models import build

    torch.manual_seed(0)
    with zero_shards.partitioned_construction(experiment.deepspeed):
        model = build(experiment.model)
    return mst_scale.initialize(model=model, config=experiment)[0]


class Pair:
    """Both sides on this rank."""

    def __init__(self, ranks: Any, options: argparse.Namespace):
        from mst_scale.config import load

        self.ranks = ranks
        ours = load(options.config, options.set, options.method)
        theirs = load(options.config, [o for o in options.set if not o.startswith("mst.")], "dense")
        self.experiment, baseline = (self._one_micro_batch(e, options.micro_batch_size) for e in (ours, theirs))
        if options.layers is not None:
            layers = options.layers
            if layers == "fit":
                layers = layers_that_fit(self.experiment, baseline, ranks.world_size, capacity_here())
            self.experiment, baseline = (
                replace(e, model=replace(e.model, n_layer=layers)) for e in (self.experiment, baseline)
            )
        self.micro = self.experiment.deepspeed["train_micro_batch_size_per_gpu"]
        self.memory = "cuda" if torch.cuda.is_available() else "cpu"
        self.stretches = stretches(self.experiment)
        """The steps that `pretrain` would train compact, if it would change the storage of weights."""
        self.stretch: Stretch | None = None
        self.dense, self.mst = self._built(baseline), self._built(self._of(None))
        self.device = self.dense.engine.device

    def _one_micro_batch(self, experiment: Any, asked: int | None) -> Any:
        from mst_scale.config.check import check
        from mst_scale.config.deepspeed import batch_shape

        check(experiment)
        micro = asked or batch_shape(experiment.deepspeed, self.ranks.world_size).micro
        deepspeed = {k: v for k, v in experiment.deepspeed.items() if k not in MONITORS}
        deepspeed.update(
            train_micro_batch_size_per_gpu=micro,
            gradient_accumulation_steps=1,
            train_batch_size=micro * self.ranks.world_size,
            steps_per_print=2**31,
        )
        return replace(experiment, deepspeed=deepspeed)

    def _of(self, stretch: Stretch | None) -> Experiment:
        from mst_scale.pretrain.storage import of_stretch

        return of_stretch(self.experiment, stretch) if self.stretches else self.experiment

    def _built(self, experiment: Experiment, left: Any = None) -> Side:
        """Build an engine, which continues from the handover `left` if there is one, and take its first step."""

        def first_step() -> Side:
            engine = engine_of(experiment)
            if left is not None:
                left.give(engine)
            tokens, targets = self._random_tokens()
            side = Side(engine, (tokens.to(engine.device), targets.to(engine.device)))
            side.step()  # states exist from here on
            return side

        side, held = memory.held_by(first_step, self.memory)
        side.held = held
        return side

    def _random_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        model = self.experiment.model
        generator = torch.Generator().manual_seed(self.ranks.rank)
        tokens, targets = torch.randint(model.vocab_size, (2, self.micro, model.seq_length), generator=generator)
        if model.predicted < model.seq_length:  # BERT: as many positions as it predicts
            targets[:, model.predicted :] = -1
        return tokens, targets

    def enter(self, phase: Any) -> int:
        """Take MST to the middle of this phase, in the storage of that step; return the step to stay at."""
        step = self._middle(phase)
        stretch = next((one for one in self.stretches if one.first <= step < one.last), None)
        if stretch != self.stretch:
            if stretch is not None:
                self._move_masks(stretch.first)
            self._change_storage(stretch)
        self._move_masks(step)
        return step

    def _middle(self, phase: Any) -> int:
        """Return a step in the middle of this phase that is followed by an ordinary one, if there is any."""
        schedule = self.mst.engine.mst.schedule
        middle = (phase.start + phase.stop) // 2
        step = max(phase.start, middle - middle % schedule.interval)
        inside, due = range(step, phase.stop), schedule.is_topology_step
        quiet = [s for s in inside[: 4 * schedule.interval] if not due(s + 1)]
        return next((s for s in quiet if not due(s + 2)), quiet[0] if quiet else step)

    def _move_masks(self, step: int) -> None:
        """Bring the masks to the sparsity of a step, by a real topology step."""
        mst = self.mst.engine.mst
        if not mst.masks_weights or not step:
            return
        self.mst.engine.global_steps = step - 1
        mst.masks_replaced()  # what a checkpoint of that step would do
        self.mst.step()
        assert abs(mst.sparsity - mst.schedule.at(step).sparsity) < 0.01 or mst.topology.elements.side > 1

    def _change_storage(self, stretch: Stretch | None) -> None:
        """Continue with another engine: a compact one for the steps of a stretch, otherwise a dense one."""
        from mst_scale import zero_shards
        from mst_scale.pretrain.storage import hand_over

        one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == self.ranks.world_size
        seen_by_all = None if one_machine else Path.cwd()  # a folder for masks, which the next engine reads
        folder = self.ranks.on_first(lambda: Path(tempfile.mkdtemp(prefix="mst_bench_step_", dir=seen_by_all)))
        left = hand_over(self.mst.engine, folder, self.ranks, {}, {})
        module = zero_shards.release(self.mst.engine)
        del self.mst
        if not zero_shards.is_freed(module):
            raise RuntimeError("the previous engine was not freed, so memory would be measured wrongly")
        self.mst, self.stretch = self._built(self._of(stretch), left), stretch
        self.ranks.on_first(lambda: shutil.rmtree(folder))

    def pin(self, step: int) -> None:
        """The next step of MST is an ordinary one of this phase, however many are taken."""
        self.mst.engine.global_steps = step
        self.mst.engine.mst.state.settled = step


# --- how many layers fit on one GPU, while one side steps and the other keeps its weights, states and gradients ---


def layers_that_fit(ours: Experiment, baseline: Experiment, ranks: int, capacity: float) -> int:
    """At most as many as the config has; a ValueError where not even one fits."""
    for layers in range(ours.model.n_layer, 0, -1):
        sides = [_held(experiment, layers, ranks) for experiment in (ours, baseline)]
        peak = max(a.peak + b.held + b.gradients for a, b in (sides, sides[::-1]))
        if peak * (1 + FRAGMENTS) + CONTEXT <= capacity:
            return layers
    raise UserError(f"--layers fit: not one layer fits in {capacity / 1e9:.0f} GB: take a smaller --micro-batch-size")


def _held(experiment: Experiment, layers: int, ranks: int) -> Memory:
    shorter = replace(experiment, model=replace(experiment.model, n_layer=layers))
    return modelled_memory(shorter, setting_of(shorter, ranks))


def capacity_here() -> float:
    """Bytes of the GPU; a ValueError without one."""
    if not torch.cuda.is_available():
        raise UserError("--layers fit needs a CUDA device, whose memory they are to fit into: give a number")
    properties: Any = torch.cuda.get_device_properties(0)
    return float(properties.total_memory)

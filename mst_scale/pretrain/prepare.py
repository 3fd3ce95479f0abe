"""Prepares and validates everything that a run needs before its first step.

The order is visible in `prepare`: checkpoint, batch, validation, token files, initial weights, engine, run.json.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mst_scale import zero_shards
from mst_scale.checkpoints import finding, manifests, store
from mst_scale.comm import Mesh, Ranks, logger
from mst_scale.config import DataConfig, Experiment, to_dict
from mst_scale.config.compact import stretches as stretches_of
from mst_scale.config.deepspeed import BatchShape, batch_shape, without_open_batch
from mst_scale.config.parallel import sizes_of
from mst_scale.data.corpus import fingerprint, identity
from mst_scale.data.prepare import prepare as prepare_corpus
from mst_scale.data.recipe import Recipe
from mst_scale.data.sampler import Sampler, open_sampler
from mst_scale.errors import UserError
from mst_scale.files import write_atomically, write_if_possible
from mst_scale.flops.formulas import optimizer_flops
from mst_scale.flops.ledger import Ledger
from mst_scale.hugging_face import start_from
from mst_scale.models.initial_weights import not_drawn
from mst_scale.plan.expected_gain import describe_start
from mst_scale.pretrain import elastic, extending, growth, resume, storage, validation
from mst_scale.pretrain.building import build_engine, open_monitors, with_defaults
from mst_scale.run_logging import run_file
from mst_scale.run_logging.run_file import PAUSED, RunFile


@dataclass(frozen=True)
class Progress:
    """The state of a run in a checkpoint, in addition to weights, optimizer states and FLOPs."""

    step: int = 0
    losses: tuple[float, ...] = ()
    """The latest losses, with which spikes are detected."""
    in_spike: bool = False
    """Whether the last of them belongs to a spike."""
    skipped: tuple[int, ...] = ()
    """Batches skipped by rollbacks."""
    layers: dict[str, Any] = field(default_factory=dict)
    """Changes by topology steps since the last row of the metrics."""


@dataclass(frozen=True)
class Prepared:
    """A run that is ready for its next step."""

    experiment: Experiment
    out: Path
    ranks: Ranks
    batch: int
    """Sequences per update."""
    micro: int
    """Sequences per micro-batch."""
    accumulation: int
    """Micro-batches per rank and update."""
    train: Sampler
    val: Sampler
    tasks: Any
    """Evaluates training.eval_tasks; None if there are none."""
    engine: Any
    mesh: Mesh | None
    """Set if several ranks share a model."""
    ledger: Ledger
    progress: Progress
    rollbacks: int
    """Rollbacks by earlier starts of this run."""
    run_file: RunFile | None
    """On the first rank."""
    stretches: list[storage.Stretch]
    """The steps that are trained with compact storage, if that changes in the run …"""
    stretch: storage.Stretch | None
    """… and those of this engine; None if it is dense."""
    continues: bool = False
    """Whether it continues from the previous engine of this process."""
    branches: bool = False
    """Whether it continues from a checkpoint of another run."""

    @property
    def source_is_elsewhere(self) -> bool:
        """Whether none of the run's checkpoints is of its current step, with its storage and its learning rates."""
        return self.continues or self.branches


def prepare(
    experiment: Experiment,
    out: Path,
    ranks: Ranks,
    resume_from: str = "auto",
    branch_from: str | None = None,
    *,
    stop_at: int | None = None,
    handover: zero_shards.Handover | None = None,
    begins: Callable[..., None] = lambda part, about="": None,
) -> Prepared:
    """Prepare data, model, engine and checkpoint, on all ranks together.

    Args:
        experiment: what to train.
        out: the folder of the run.
        ranks: all ranks.
        resume_from: the option --resume.
        branch_from: the option --branch-decay-from.
        stop_at: the option --stop-at.
        handover: what the previous engine of this process has left; then no checkpoint is read.
        begins: called with the name of each part before it is prepared, for the progress line.

    Raises:
        UserError: if the experiment cannot run here, or cannot continue the run in `out`.
        SystemExit: if the run has passed `stop_at`; nothing is loaded, since these ranks may be too few for it.
    """
    sizes = ranks.agree(lambda: sizes_of(experiment.deepspeed))
    replicas = ranks.agree(lambda: sizes.data(ranks.world_size))
    if handover is None:
        source = _choose_source(experiment, out, ranks, resume_from, branch_from)
    else:
        source = handover.folder
    fitted, shape = _fit_batch(experiment, source, replicas, ranks)
    if stop_at is not None and handover is None:
        _end_if_passed(stop_at, fitted, out, ranks, source=source, shape=shape)
    if expected := describe_start(fitted, shape.sequences):
        logger.info("%s", expected)
    mesh = ranks.agree(lambda: Mesh(sizes)) if sizes.model > 1 else None
    ranks.agree(lambda: validation.validate(fitted, ranks.world_size, mesh))
    ledger = Ledger(fitted.model, shape.sequences, optimizer_flops(fitted.model, fitted.deepspeed))
    stretches = ranks.agree(lambda: stretches_of(fitted))
    if source is None:
        stretch = storage.stretch_after(stretches, 0, 0)
    else:
        stretch = ranks.on_first(lambda: storage.stretch_of(stretches, source))
    begins("corpus", f" {fitted.data.dir or fitted.data.source or ''}")
    folder = ranks.on_first(lambda: _prepare_corpus(fitted.data, begun=source is not None), long=True)
    train, val = ranks.agree(lambda: _open_splits(fitted, folder, check_ids=ranks.first))
    tasks = None
    if fitted.training.eval_tasks is not None:
        begins("evaluation tasks")
        tasks = _load_tasks(fitted, out, shape.micro, ranks)
    weights, grown = None, None
    if source is None and fitted.mst.growth is not None:
        begins("growth", f" from {fitted.mst.grow_from}")
        grown = growth.grow_weights(fitted, train, shape.sequences, shape.micro, ranks)
        ledger.begin(grown.cost.total)
        weights = grown.weights
    elif source is None:
        weights = _read_initial_weights(fitted, ranks)
    begins("model and engine", f" ({fitted.model.weights:,} weights)")
    saved = None if source is None else ranks.on_first(lambda: (manifests.head(source) or {}).get("optimizer"))
    of_engine = ranks.agree(lambda: validation.choose_adam(fitted, source is None, saved))
    of_engine = with_defaults(storage.for_engine(of_engine, stretches, stretch), out)
    monitors = ranks.agree(lambda: open_monitors(of_engine.deepspeed))
    with contextlib.nullcontext() if handover is None else not_drawn():
        engine = ranks.agree(lambda: build_engine(of_engine, monitors, weights, mesh, source))
    loadable: Loadable | None = None
    if source is not None:
        loadable = handover or resume.find_loadable(
            source, ranks, fitted.deepspeed, zero_shards.is_compact(engine.module)
        )
        ranks.agree(lambda: validation.validate_same_adam(saved, zero_shards.adam_of(engine), source))
    text, engine.mst.record.corpus = ranks.on_first(lambda: (identity(folder), fingerprint(folder)))
    progress, rollbacks = Progress(), 0
    if loadable is not None:
        begins("weights and states", f" of {source}")
        progress, rollbacks = _load_progress(engine, ledger, out, ranks, loadable)
    read = source if handover is None else None
    file = record_start(fitted, out, ranks, step=progress.step, source=read, batch=shape, text=text)
    if file is not None and grown is not None:
        file.happened("grown", **grown.to_dict())
    if file is not None and engine.mst.record.changes:
        file.happened("resumed with changes", changes=engine.mst.record.changes)
    return Prepared(
        experiment=fitted, out=out, ranks=ranks, batch=shape.sequences, micro=shape.micro,
        accumulation=shape.accumulation, train=train, val=val, tasks=tasks, engine=engine, mesh=mesh, ledger=ledger,
        progress=progress, rollbacks=rollbacks, run_file=file, stretches=stretches, stretch=stretch,
        continues=handover is not None, branches=source is not None and source.parent != out / "checkpoints",
    )  # fmt: skip


# --- the checkpoint ---


def _choose_source(
    experiment: Experiment, out: Path, ranks: Ranks, resume_from: str, branch_from: str | None
) -> Path | None:
    """Return the checkpoint that the run continues from, its own or that of a trunk; None for a run from step 0."""
    own = resume.choose_checkpoint(out, resume_from, ranks)
    ranks.on_first(lambda: resume.validate_same_model(out, experiment))
    own = extending.find_extension_start(own, out, experiment, resume_from, ranks)
    last = experiment.training.steps
    if own is not None and finding.step_of(own) > last:
        ranks.fail(
            UserError(
                f"{out} is at step {finding.step_of(own):,} already, and training.steps is {last:,}: give at least as "
                "many steps, or --resume TAG with an earlier checkpoint"
            )
        )
    return own or extending.find_branch_source(branch_from, experiment, ranks)


def _fit_batch(
    experiment: Experiment, source: Path | None, replicas: int, ranks: Ranks
) -> tuple[Experiment, BatchShape]:
    """Return the experiment with its global batch, which is that of the checkpoint `source`, and how it is divided."""
    if source is not None:
        experiment = ranks.agree(lambda: resume.with_batch_of(experiment, source, replicas))
    shape = ranks.agree(lambda: batch_shape(experiment.deepspeed, replicas))
    stated = replace(experiment, deepspeed=without_open_batch(experiment.deepspeed))
    return stated.with_batch(shape.sequences), shape


def _end_if_passed(
    stop_at: int, experiment: Experiment, out: Path, ranks: Ranks, *, source: Path | None, shape: BatchShape
) -> None:
    """End this start if its checkpoint is of the step at which the run is to stop, or of a later one."""
    reached = finding.step_of(source) if source is not None and source.parent == out / "checkpoints" else -1
    if not stop_at <= reached < experiment.training.steps:
        return
    file = record_start(experiment, out, ranks, step=reached, source=source, batch=shape, text=None)
    if file is not None:
        file.ended(PAUSED, reached)
    logger.info("the run is already at step %d, so --stop-at %d trains nothing", reached, stop_at)
    elastic.notify_waiting_ranks()
    ranks.leave()
    raise SystemExit(0)


Loadable = tuple[Path, bool] | zero_shards.Handover
"""What `resume.find_loadable` returns, or what the previous engine of this process has left."""


def load_checkpoint(engine: Any, ledger: Ledger, out: Path, ranks: Ranks, loadable: Loadable) -> Progress:
    """Load weights, optimizer states, masks and FLOPs."""
    if isinstance(loadable, zero_shards.Handover):
        state, how = ranks.agree(lambda: loadable.give(engine)), ", from memory"
    else:
        path, universal = loadable
        state = ranks.agree(lambda: zero_shards.load_checkpoint(engine, path, universal))
        how = ", reshaped" if universal else ""
    ranks.agree(lambda: ledger.load(state))
    step = int(state["step"])
    logger.info("continuing %s from step %d%s", out, step, how)
    losses, skipped = tuple(state.get("losses", ())), tuple(state.get("skipped", ()))
    in_spike = bool(state.get("in_spike", False))
    return Progress(step, losses, in_spike, skipped, dict(state.get("layers", {})))


def _load_progress(engine: Any, ledger: Ledger, out: Path, ranks: Ranks, loadable: Loadable) -> tuple[Progress, int]:
    """Load the checkpoint of a start; return the run's progress and how often it was rolled back."""
    rollbacks = ranks.on_first(lambda: run_file.rollbacks(out / "run.json"))
    progress = load_checkpoint(engine, ledger, out, ranks, loadable)
    skipped = {*progress.skipped, *(batch for batches in rollbacks for batch in batches)}
    return replace(progress, skipped=tuple(sorted(skipped))), len(rollbacks)


def record_start(
    experiment: Experiment, out: Path, ranks: Ranks, *, step: int, source: Path | None,
    batch: BatchShape, text: str | None,
) -> RunFile | None:  # fmt: skip
    """Write the resolved config and this start (run.json) into `out`, and set checkpoints of later steps aside.

    Returns:
        The run file, on the first rank.
    """
    hosts = ranks.all(socket.gethostname())

    def write() -> RunFile:
        out.mkdir(parents=True, exist_ok=True)
        store.sweep(out / "checkpoints")
        store.set_aside(out / "checkpoints", step)
        config = to_dict(experiment)
        # a start that trains nothing, because the run is finished, leaves its config as it is
        before = run_file.read(out / "run.json").get("config") if (out / "config.json").exists() else None
        if step < experiment.training.steps or before is None:
            # with the old length on disk, each later start would extend the run once more
            longer = before is not None and before.get("training", {}).get("steps") != experiment.training.steps
            write = write_atomically if longer else write_if_possible
            write(out / "config.json", json.dumps(config, indent=2) + "\n")
        else:
            config = before
        seed = experiment.training.seed
        start = run_file.about(
            from_step=step,
            checkpoint=None if source is None else str(source),
            ranks=ranks.world_size,
            replicas=sizes_of(experiment.deepspeed).data(ranks.world_size),
            hosts=hosts,
            batch=batch._asdict(),
            corpus=text,
            seeds={"training": seed, "mst": seed if experiment.mst.seed is None else experiment.mst.seed},
        )
        return RunFile(out / "run.json", config, start)

    return ranks.agree(lambda: write() if ranks.first else None)


# --- data ---


def _prepare_corpus(data: DataConfig, begun: bool) -> str:
    """Return the folder of the token files; if the config has a source, they are prepared at first use.

    A run that has begun continues with its corpus although the files of the source have changed since.

    Raises:
        UserError: if the config has neither a folder nor a source.
    """
    if data.source is not None:
        folder = data.dir or f"corpora/{data.source}"
        recipe = Recipe(data.source, data.tokenizer, data.text_key, data.val_fraction, data.max_bytes, data.seed)
        prepare_corpus(recipe, folder, keep=begun)  # only one rank must call it
        return folder
    if data.dir is None:
        raise UserError("no data: give --data DIR, or set data.dir or data.source in the config")
    return data.dir


def _open_splits(experiment: Experiment, folder: str, check_ids: bool) -> tuple[Sampler, Sampler]:
    """Return the samplers of the training and of the validation split."""
    seeds = {"train": experiment.training.seed, "val": experiment.eval_seed}
    train, val = (
        open_sampler(folder, split, experiment.model, seed, check_ids=check_ids) for split, seed in seeds.items()
    )
    return train, val


def _load_tasks(experiment: Experiment, out: Path, micro: int, ranks: Ranks) -> Any:
    from mst_scale.evaluation.evaluate import TasksDuringTraining  # takes seconds to import

    tasks = ranks.agree(lambda: TasksDuringTraining(experiment, out, micro, ranks))
    tasks.read()
    return tasks


# --- initial weights: on the first rank by name, an empty dict on the others ---


def _read_initial_weights(experiment: Experiment, ranks: Ranks) -> dict[str, Tensor] | None:
    """Read the weights of training.init; None if the run starts from random ones."""
    init = experiment.training.init
    if init is None:
        return None
    logger.info("starting from the weights of %s", init)
    weights: dict[str, Tensor] = ranks.agree(
        lambda: start_from.read(start_from.folder_of(init), experiment.model) if ranks.first else {}
    )
    return weights

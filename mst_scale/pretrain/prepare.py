"""Makes all that a run needs before its first step, and refuses there whatever can be refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.checkpoints import store
from mst_scale.comm import Mesh, Ranks, logger
from mst_scale.config import DataConfig, Experiment, to_dict
from mst_scale.config.check import batch_shape
from mst_scale.config.parallel import sizes_of, without_sizes
from mst_scale.costs.flops import optimizer_flops
from mst_scale.costs.ledger import Ledger
from mst_scale.data.corpus import fingerprint, identity
from mst_scale.data.prepare import ensure
from mst_scale.data.sampler import Sampler, open_sampler
from mst_scale.engine.api import initialize
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import UserError
from mst_scale.hugging_face import start_from
from mst_scale.models import build
from mst_scale.pretrain import branch, growing, lengthen, refusals, resume
from mst_scale.pretrain.adam import refuse_another, with_adam
from mst_scale.pretrain.learning_rate import MASKED
from mst_scale.runs import run_file
from mst_scale.runs.metrics import OptionalWrites
from mst_scale.runs.run_file import RunFile
from mst_scale.tensor_parallel import TensorGroup


@dataclass(frozen=True)
class Place:
    """Where a run stands: what a checkpoint says of it beside weights and states."""

    step: int = 0
    losses: tuple[float, ...] = ()
    """The last ones, which spikes are measured against."""
    skipped: tuple[int, ...] = ()
    """Batches that rollbacks have left out."""
    layers: dict[str, Any] = field(default_factory=dict)
    """What topology steps have come to since the last row of the metrics."""


@dataclass(frozen=True)
class Prepared:
    """A run before its next step."""

    experiment: Experiment
    out: Path
    ranks: Ranks
    batch: int
    """Sequences of an update …"""
    micro: int
    """… of a micro-batch …"""
    accumulation: int
    """… and how many of these a rank takes for one update."""
    train: Sampler
    val: Sampler
    tasks: Any
    engine: Any
    mesh: Mesh | None
    """Where several ranks share a model."""
    ledger: Ledger
    place: Place
    rollbacks: int
    """Earlier ones of this run."""
    run_file: RunFile | None
    """On the first rank."""


def prepare(
    experiment: Experiment,
    out: Path,
    ranks: Ranks,
    how: str = "auto",
    branch_from: str | None = None,
    *,
    begins: Callable[..., None] = lambda part, about="": None,
) -> Prepared:
    """Data, model, engine, checkpoint; `how` and `branch_from` are the options --resume and --branch-decay-from.

    `begins` is told what is done next.
    """
    sizes = ranks.agree(lambda: sizes_of(experiment.deepspeed))
    replicas = ranks.agree(lambda: sizes.data(ranks.world_size))
    own = resume.choose(out, how, ranks)
    ranks.on_first(lambda: resume.refuse_another_model(out, experiment))
    source = lengthen.beginning(own, out, experiment, how, ranks) or branch.source(branch_from, experiment, ranks)
    fitted = experiment
    if source is not None:
        fitted = ranks.agree(lambda: resume.with_batch_of(experiment, source, replicas))
    batch, micro, accumulation = ranks.agree(lambda: batch_shape(fitted.deepspeed, replicas))
    mesh = ranks.agree(lambda: Mesh(sizes)) if sizes.model > 1 else None
    ranks.agree(lambda: refusals.refuse(fitted, ranks.world_size, mesh))
    ledger = Ledger(fitted.model, batch, optimizer_flops(fitted.model, fitted.deepspeed))
    loadable = None if source is None else resume.loadable(source, ranks, fitted.deepspeed)
    begins("corpus", f" {fitted.data.dir or fitted.data.source or ''}")
    folder = ranks.on_first(lambda: corpus(fitted.data), long=True)

    def opened(split: str, seed: int) -> Sampler:
        return open_sampler(folder, split, fitted.model, seed, check_ids=ranks.first)

    train, val = ranks.agree(lambda: (opened("train", fitted.training.seed), opened("val", fitted.eval_seed)))
    if fitted.training.eval_tasks is not None:
        begins("evaluation tasks")
    evaluated = tasks(fitted, out, micro, ranks)
    start, growth = None, None
    if source is None and fitted.mst.growth is not None:
        begins("growth", f" from {fitted.mst.grow_from}")
        growth = growing.grown(fitted, train, batch, micro, ranks)
        ledger.begin(growth.before.total)
        start = growth.weights
    elif source is None:
        start = initial_weights(fitted, ranks)
    begins("model and engine", f" ({fitted.model.weights:,} weights)")
    saved = None if source is None else ranks.on_first(lambda: (store.head(source) or {}).get("optimizer"))
    chosen = ranks.agree(lambda: with_adam(fitted, source is None, saved))
    engine = ranks.agree(lambda: built_engine(chosen, out, start, mesh))
    if source is not None:
        ranks.agree(lambda: refuse_another(saved, zero_shards.adam_of(engine), source))
    text, engine.mst.record.corpus = ranks.on_first(lambda: (identity(folder), fingerprint(folder)))
    place, left_out = Place(), []
    if loadable is not None:
        begins("checkpoint", f" {loadable[0]}")
        left_out = ranks.on_first(lambda: run_file.rollbacks(out / "run.json"))
        place = load(engine, ledger, out, ranks, loadable)
        place = replace(place, skipped=tuple(sorted({*place.skipped, *(batch for some in left_out for batch in some)})))
    shape = (batch, micro, accumulation)
    story = begin_story(fitted, out, ranks, step=place.step, source=source, shape=shape, text=text)
    if story is not None and growth is not None:
        story.happened("grown", **growth.told())
    if story is not None and engine.mst.record.changes:
        story.happened("resumed with changes", changes=engine.mst.record.changes)
    return Prepared(
        fitted, out, ranks, batch, micro, accumulation,
        train, val, evaluated, engine, mesh, ledger, place, len(left_out), story,
    )  # fmt: skip


def load(engine: Any, ledger: Ledger, out: Path, ranks: Ranks, loadable: tuple[Path, bool]) -> Place:
    """Weights, states and FLOPs of a checkpoint, as `resume.loadable` names it."""
    path, universal = loadable
    state = ranks.agree(lambda: zero_shards.load_checkpoint(engine, path, universal))
    ranks.agree(lambda: ledger.load(state))
    step = int(state["step"])
    logger.info("continuing %s from step %d%s", out, step, ", reshaped" if universal else "")
    losses, skipped = tuple(state.get("losses", ())), tuple(state.get("skipped", ()))
    return Place(step, losses, skipped, dict(state.get("layers", {})))


def begin_story(
    experiment: Experiment, out: Path, ranks: Ranks, *, step: int, source: Path | None,
    shape: tuple[int, int, int], text: str | None,
) -> RunFile | None:  # fmt: skip
    """OUT with the resolved config and this start in run.json; checkpoints of later steps are set aside."""
    hosts: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(hosts, socket.gethostname(), group=ranks.control)

    def describe() -> None:
        out.mkdir(parents=True, exist_ok=True)
        store.sweep(out / "checkpoints")
        store.set_aside(out / "checkpoints", step)
        config = to_dict(experiment)
        if step < experiment.training.steps or not (out / "config.json").exists():  # else nothing will be trained
            store.write_if_possible(out / "config.json", json.dumps(config, indent=2) + "\n")
        seed = experiment.training.seed
        start = run_file.about(
            from_step=step,
            checkpoint=None if source is None else str(source),
            ranks=ranks.world_size,
            replicas=sizes_of(experiment.deepspeed).data(ranks.world_size),
            hosts=hosts,
            batch=dict(zip(("sequences", "micro", "accumulation"), shape, strict=True)),
            corpus=text,
            seeds={"training": seed, "mst": seed if experiment.mst.seed is None else experiment.mst.seed},
        )
        made.append(RunFile(out / "run.json", config, start))

    made: list[RunFile] = []
    ranks.on_first(describe)
    return made[0] if made else None


def corpus(data: DataConfig) -> str:
    """The folder of the token files, prepared on first use where the config names a source."""
    if data.source is not None:
        folder = data.dir or f"corpora/{data.source}"
        ensure(
            folder,
            data.source,
            data.tokenizer,
            text_key=data.text_key,
            val_fraction=data.val_fraction,
            max_bytes=data.max_bytes,
            seed=data.seed,
        )
        return folder
    if data.dir is None:
        raise UserError("no data: give --data DIR, or data.dir or data.source in the config")
    return data.dir


def tasks(experiment: Experiment, out: Path, micro: int, ranks: Ranks) -> Any:
    """What evaluates the tasks of training.eval_tasks; None where there are none."""
    if experiment.training.eval_tasks is None:
        return None
    from mst_scale.evaluation.evaluate import TasksDuringTraining  # seconds to import

    found = ranks.agree(lambda: TasksDuringTraining(experiment, out, micro, ranks))
    found.read()
    return found


def initial_weights(experiment: Experiment, ranks: Ranks) -> Any:
    """The weights of training.init, on the first rank, empty on the others; None for a start from random ones."""
    init = experiment.training.init
    if init is None:
        return None
    logger.info("starting from the weights of %s", init)
    return ranks.agree(lambda: start_from.read(start_from.folder_of(init), experiment.model) if ranks.first else {})


def built_engine(experiment: Experiment, out: Path, start: Any, mesh: Mesh | None = None) -> Any:
    """DeepSpeed's engine around the experiment's model; `start` are its weights on the first rank, empty on the others,
    None for random ones."""
    experiment = replace(experiment, deepspeed=without_sizes(experiment.deepspeed))
    torch.manual_seed(experiment.training.seed)
    model = built_model(experiment, mesh)
    if start is not None:
        start_from.fill(model, start or None)
    if "activation_checkpointing" in experiment.deepspeed:
        deepspeed.checkpointing.configure(None, deepspeed_config=experiment.deepspeed)
    monitored = _with_monitors(experiment, out)
    built: Any = initialize(
        model=model,
        model_parameters=parameter_groups(model, experiment),
        config=monitored,
        # a pipeline brings its own, of the same ranks
        mpu=None if isinstance(model, deepspeed.PipelineModule) else mesh,
    )[0]
    _spare_the_run(built.monitor)
    return built


def built_model(experiment: Experiment, mesh: Mesh | None) -> torch.nn.Module:
    """The model with its first weights, or of it what is this rank's."""
    if mesh is not None and mesh.sizes.pipeline > 1:
        from mst_scale.models.pipelined_gpt import PipelinedGPT

        return PipelinedGPT(experiment.model, mesh)
    with zero_shards.partitioned_construction(experiment.deepspeed, mesh):
        return build(experiment.model, None if mesh is None else TensorGroup.of(mesh))


def _spare_the_run(monitor: Any) -> None:
    """What monitors cannot write, DeepSpeed's own numbers of each step too, costs those numbers alone."""
    inner, disk = monitor.write_events, OptionalWrites()
    monitor.write_events = lambda events: disk.attempt("TensorBoard's numbers", lambda: inner(events))


def _with_monitors(experiment: Experiment, out: Path) -> Experiment:
    """TensorBoard beside the metrics, unless the config says otherwise; DeepSpeed prints nothing of its own."""
    ours = {
        "tensorboard": {"enabled": True, "output_path": str(out / "tensorboard"), "job_name": ""},
        "steps_per_print": 2**31,
    }
    return replace(experiment, deepspeed={**ours, **experiment.deepspeed})


def parameter_groups(model: torch.nn.Module, experiment: Experiment) -> list[dict[str, Any]]:
    """Weight decay (the optimizer's own) on matrices, none on norms and biases; what can be masked is a group of its
    own where it is treated apart."""
    matrices = [p for p in model.parameters() if zero_shards.is_matrix(p)]
    vectors = [p for p in model.parameters() if not zero_shards.is_matrix(p)]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if experiment.treats_masked_apart:
        masked = {id(p) for p in choose_targets(model, experiment.mst.targets).values()}
        groups[0]["params"] = [p for p in matrices if id(p) not in masked]
        groups.append({"params": [p for p in matrices if id(p) in masked], MASKED: True})
    return groups

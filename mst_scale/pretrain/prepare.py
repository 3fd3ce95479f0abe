"""What does a run need before its first step: token files, the weights it starts from, an engine, tasks to evaluate?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch

from mst_scale import zero_shards
from mst_scale.config import DataConfig, Experiment
from mst_scale.data.prepare import ensure
from mst_scale.distributed import Ranks, logger
from mst_scale.engine.api import initialize
from mst_scale.hugging_face import start_from
from mst_scale.models import build
from mst_scale.pretrain import refusals
from mst_scale.runs.optional_writes import Dispensable


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
        raise ValueError("no data: give --data DIR, or data.dir or data.source in the config")
    return data.dir


def tasks(experiment: Experiment, out: Path, micro: int, ranks: Ranks) -> Any:
    """What evaluates the tasks of training.eval_tasks; None where there are none."""
    if experiment.training.eval_tasks is None:
        return None
    from mst_scale.evaluation.during_training import TasksDuringTraining  # seconds to import

    found = ranks.together(lambda: TasksDuringTraining(experiment, out, micro, ranks))
    found.read()
    return found


def initial_weights(experiment: Experiment, ranks: Ranks) -> Any:
    """The weights of training.init, on the first rank, empty on the others; None for a start from random ones."""
    init = experiment.training.init
    if init is None:
        return None
    return ranks.together(lambda: start_from.read(start_from.folder_of(init), experiment.model) if ranks.first else {})


def built_engine(experiment: Experiment, out: Path, start: Any) -> Any:
    """DeepSpeed's engine around the experiment's model; `start` as `initial_weights` returns it."""
    torch.manual_seed(experiment.training.seed)
    with zero_shards.partitioned_construction(experiment.deepspeed):
        model = build(experiment.model)
    if start is not None:
        start_from.fill(model, start or None)
        logger.info("starting from the weights of %s", experiment.training.init)
    if "activation_checkpointing" in experiment.deepspeed:
        deepspeed.checkpointing.configure(None, deepspeed_config=experiment.deepspeed)
    monitored = _with_monitors(experiment, out)
    with refusals.in_deepspeeds_words():
        built, *_ = initialize(model=model, model_parameters=decay_groups(model), config=monitored)
    _spare_the_run(built.monitor)
    return built


def _spare_the_run(monitor: Any) -> None:
    """What monitors cannot write, DeepSpeed's own numbers of each step too, costs those numbers alone."""
    inner, disk = monitor.write_events, Dispensable()
    monitor.write_events = lambda events: disk.attempt("TensorBoard's numbers", lambda: inner(events))


def _with_monitors(experiment: Experiment, out: Path) -> Experiment:
    """TensorBoard beside the metrics, unless the config says otherwise; DeepSpeed prints nothing of its own."""
    ours = {
        "tensorboard": {"enabled": True, "output_path": str(out / "tensorboard"), "job_name": ""},
        "steps_per_print": 2**31,
    }
    return replace(experiment, deepspeed={**ours, **experiment.deepspeed})


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay (the optimizer's own) on matrices, none on norms and biases."""
    matrices = [p for p in model.parameters() if zero_shards.is_matrix(p)]
    vectors = [p for p in model.parameters() if not zero_shards.is_matrix(p)]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

"""Trains a run; where the storage of weights changes, a new engine takes over."""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.comm import Ranks, logger
from mst_scale.config import Experiment
from mst_scale.config.parallel import sizes_of
from mst_scale.errors import CorruptedError, DivergedError
from mst_scale.flops.budgets import shortened
from mst_scale.flops.ledger import uncounted_flops
from mst_scale.heap import restart_peak_memory
from mst_scale.pretrain import elastic, from_memory, resume
from mst_scale.pretrain.extending import describe_extension
from mst_scale.pretrain.prepare import Prepared, prepare
from mst_scale.pretrain.training_loop import Left, Run, StopRequest, StorageChanges
from mst_scale.run_logging.operations import command_of
from mst_scale.run_logging.progress import Starting
from mst_scale.run_logging.record import compare_with_baseline
from mst_scale.run_logging.run_file import FINISHED


def train(args: argparse.Namespace, experiment: Experiment, out: Path, ranks: Ranks, starting: Starting) -> None:
    """Train an experiment to its last step, and print the summary table.

    Args:
        args: the options, of which --resume and --branch-decay-from are used here.
        experiment: what to train.
        out: the folder of the run.
        ranks: all ranks, which call this together.
        starting: the progress line of the start.

    Raises:
        SystemExit: if the run was asked to stop.
    """
    restored = from_memory.restore(out, args.resume, ranks)
    sizes = ranks.agree(lambda: sizes_of(experiment.deepspeed))
    replicas = resume.initial_replicas(out, ranks, sizes)
    fitted = ranks.agree(lambda: shortened(experiment, replicas))
    steps = fitted.training.steps
    if args.stop_at is not None and args.stop_at > steps:
        logger.warning("--stop-at %d is after the last step, %d: the run ends there", args.stop_at, steps)
    start = functools.partial(prepare, fitted, out, ranks, args.resume, args.branch_decay_from, stop_at=args.stop_at)
    prepared = start(begins=starting.begins)
    stop = StopRequest()  # a start that is asked to stop before has nothing to save, and ends at once
    left = _train_with_one_engine(args, prepared, starting, stop, restored=restored)
    while left is not None:
        del prepared  # with the engine that is to be freed
        if ranks.any(not zero_shards.is_freed(left.module)):
            logger.error(
                "the previous engine was not freed, so its memory stays allocated: something still refers to it"
            )
        restart_peak_memory()
        if fitted.training.compile:
            torch.compiler.reset()  # torch limits compilations per function, and the next engine's blocks are different
        starting = Starting()
        prepared = start(handover=left.handover, begins=starting.begins)
        left = _train_with_one_engine(args, prepared, starting, stop, left=left)
    elastic.notify_waiting_ranks()
    ranks.leave()


def _train_with_one_engine(
    args: argparse.Namespace, prepared: Prepared, starting: Starting, stop: StopRequest, *,
    restored: dict[str, Any] | None = None, left: Left | None = None,
) -> Left | None:  # fmt: skip
    """Train with one engine, until the run ends or its storage changes.

    Returns:
        What the engine leaves if another one has to continue; None if the run has ended.
    """
    run = Run(prepared, stop, stop_at=args.stop_at, health=args.health, command=command_of(args.on_event), left=left)
    if prepared.source_is_elsewhere:
        run.save_first(wait=prepared.branches)  # its trunk does not keep this step for long
    if restored is not None:
        run.record_event(from_memory.CONTINUED, **restored)
    begun, first = time.monotonic(), run.step
    try:
        if run.pauses and first < run.training.steps:
            run.pause()
        if first < run.training.steps:
            starting.begins("first step")
            run.advance()
            starting.done()
            run.record.leave_out_first_step(run.step, run.tokens)
        elif run.ranks.first:
            extension = describe_extension(run.out, run.experiment)
            run.record.print_message(
                f"{run.out} is finished ({first:,} steps); `mst report {run.out}` shows it{extension}"
            )
        run.to_the_end()
    except DivergedError as error:
        run.end_diverged(error)
    except CorruptedError as error:
        run.end_corrupted(error)
    except StorageChanges:
        handover = run.hand_over()
        verified, began = run.verification.verified, run.record.began
        return Left(zero_shards.release(run.engine), handover, run.saves.newest_copy, verified, began)
    finally:
        run.saves.close()
        run.record.finish_monitors()
    if run.run_file is not None:
        run.record_end(FINISHED)
        more = uncounted_flops(run.experiment, run.step * run.batch)
        starts = [start for start in run.run_file.starts if start.get("last_step") != start.get("from_step")]
        corpora = [start.get("corpus") for start in starts]
        compare = functools.partial(
            compare_with_baseline,
            run.training.baseline,
            more=more,
            corpora=corpora,
            eval_sequences=run.training.eval_sequences,
        )
        run.record.print_message(run.record.summary(run.step, time.monotonic() - begun, first, compare))
    return None

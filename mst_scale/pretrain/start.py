"""Pretrain a GPT or BERT with DeepSpeed.

    deepspeed --num_accelerators 2 --module mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo
    torchrun --nproc_per_node 2 -m mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo
    mpirun -n 2 python -m mst_scale.pretrain --deepspeed_config ds_configs/demo.json --out runs/demo
    deepspeed --module mst_scale.pretrain --deepspeed_config large.json --method stack --from runs/small
    torchrun --nnodes 1:4 --nproc_per_node 8 … -m mst_scale.pretrain --deepspeed_config gpt2_small --elastic
        (docs/survival.md has the whole command)

Options and config are read before torch and DeepSpeed are imported, so --help and usage errors appear at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from mst_scale import comm
from mst_scale.checkpoints import finding
from mst_scale.comm import Watch, logger
from mst_scale.comm.parser import Parser, validate_folder
from mst_scale.compiled import build_locks
from mst_scale.config import RATE_DURATIONS, Experiment, describe_unread, load, overridden_in_recipe, read
from mst_scale.config.check import check, check_growth
from mst_scale.config.presets import config_file
from mst_scale.errors import UserError
from mst_scale.pretrain import elastic, extending, resume
from mst_scale.run_logging.operations import command_of
from mst_scale.run_logging.out_lock import OutLock
from mst_scale.run_logging.progress import Starting


def main(argv: list[str] | None = None) -> None:
    """Run the training program with these arguments (default: those of the command line).

    Raises:
        SystemExit: if the run was asked to stop, or if the options are wrong or ask for help. Every other error ends
            the process with the exit code of its class (`mst_scale.errors`).
    """
    watch = Watch()
    try:
        _main(argv, watch)
    except SystemExit:
        _stop_listening(watch)
        raise
    except BaseException as error:
        watch.explain(error)
        comm.end(error)
    _stop_listening(watch)


def _stop_listening(watch: Watch) -> None:
    """Ignore further signals: one that arrives while Python shuts down would kill a process that has succeeded."""
    watch.close()
    for name in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)


def _main(argv: list[str] | None, watch: Watch) -> None:
    # DeepSpeed 0.19 uses collectives that torch 2.13 deprecates, which users cannot change
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    threading.excepthook = comm.thread_failed
    comm.end_with_launcher()
    comm.speak()  # reading the config logs messages before the process group exists
    args = parse_arguments(argv)
    experiment = read_experiment(args)
    comm.timeout()  # rejects an invalid value, with which DeepSpeed's import would fail
    starting = Starting()
    starting.begins("torch and DeepSpeed")
    train = _import_train()
    if args.elastic:
        elastic.take_part(experiment)
    ranks = comm.init()
    watch.start(ranks)
    if args.elastic:
        experiment = ranks.agree(lambda: elastic.fit_batch(experiment, ranks.world_size))
    # one rank per machine removes stale locks, before any rank compiles
    ranks.agree(lambda: build_locks.clear(build_locks.extensions_folder()) if ranks.local_rank == 0 else [])
    out = output_folder(args, experiment)
    lock = OutLock(out)
    try:
        ranks.on_first(lambda: lock.take(resume.is_restart(out)))
        lock.check_shared(ranks)
        train(args, experiment, out, ranks, starting)
    finally:
        lock.release()


def _import_train() -> Callable[..., None]:
    """Import torch, DeepSpeed and the training loop without garbage collections, which would take a fifth of the time.

    Later collections do not traverse what is imported here.
    """
    first = "torch" not in sys.modules
    if first:
        gc.disable()
    import torch._dynamo  # noqa: F401  (the first optimizer would import it)

    from mst_scale.pretrain.engines import train

    if first:
        gc.freeze()
        gc.enable()
    return train


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options of `mst_scale.pretrain` (default: those of the command line)."""
    parser = Parser(prog="mst_scale.pretrain", description=__doc__)
    add = parser.add_argument
    add(
        "--deepspeed_config", required=True, metavar="C",
        help="a file, or the name of a ready-made config (gpt2_small)",
    )  # fmt: skip
    add("--method", metavar="M", help="dense, mst, rigl, static, …: overrides mst.method")
    add(
        "--match-flops",
        metavar="C",
        help="for dense-short: config or folder of the run whose FLOPs to match (default: this config with mst)",
    )
    add("--data", metavar="DIR", help="a folder with train.bin and val.bin: overrides data.dir")
    add("--out", metavar="DIR", help="folder of the run's files (default: runs/<config>-<method>)")
    add("--steps", type=int, metavar="N", help="overrides training.steps; a wsd run can be extended")
    add("--init", metavar="M", help="start from these weights: gpt2, a transformers folder, or a run")
    add(
        "--from", dest="grow_from", metavar="RUN",
        help="for expand, ligo and stack: the smaller run whose weights are grown into the initial weights",
    )  # fmt: skip
    add(
        "--branch-decay-from", metavar="RUN[:TAG]",
        help="start at a checkpoint of another run whose learning rate has not decayed yet (lr_schedule wsd), and "
        "decay it from there to the last step (--steps)",
    )  # fmt: skip
    add("--eval-tasks", metavar="A,B", help="tasks to evaluate (mst eval) with the validation loss")
    add("--eval-every", type=int, metavar="N", help="overrides training.eval_every")
    add("--eval-data", metavar="DIR", help="the tasks' files (default: from the hub)")
    add("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    add("--health", type=Path, metavar="FILE", help="keep the state of the run in FILE: JSON, or Prometheus if .prom")
    add(
        "--on-event",
        metavar="CMD",
        help="start CMD for each event (start, end, spike, …), with its JSON as last argument",
    )
    add("--stop-at", type=int, metavar="N", help="save and stop after step N; the same run continues from there")
    add(
        "--elastic", action="store_true",
        help="the number of ranks may change (mst launch --elastic adds this; torchrun --nnodes MIN:MAX needs it)",
    )  # fmt: skip
    add("--resume", default="auto", metavar="auto|never|TAG", help="continue from a checkpoint of OUT")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    args = parser.parse_args(argv)
    for action in parser._actions:  # a variable of a script that is not set; "" would be the default or this folder
        if getattr(args, action.dest, None) == "" and action.dest != "eval_tasks":
            parser.error(f"argument {action.option_strings[0]} is empty: give it a value, or leave it out")
    return args


def read_experiment(args: argparse.Namespace) -> Experiment:
    """Return the experiment that the options ask for, validated.

    Raises:
        UserError: if the config or an option is wrong, or if options contradict each other.
    """
    overrides = _overrides(args)
    experiment = load_experiment(args)
    if changes := overridden_in_recipe(args.deepspeed_config, overrides, args.method):
        logger.info("%s", changes)
    if args.health is not None:
        validate_folder("--health", args.health.parent)
    command_of(args.on_event)
    out, branches = output_folder(args, experiment), args.branch_decay_from is not None
    check_growth(experiment, branches or bool(finding.list_tags(out / "checkpoints")))
    if experiment.training.init is not None:
        shape = resume.shape_of_init(experiment, experiment.training.init, out)
        # loaded again, because a stride may be a fraction of the context
        shaped = [*overrides, *(f"model.{key}={json.dumps(value)}" for key, value in shape.items())]
        experiment = load(args.deepspeed_config, shaped, args.method)
    check(experiment)
    if experiment.training.eval_tasks is not None:
        from mst_scale.evaluation import tasks  # most runs have none

        tasks.choose(experiment.training.eval_tasks)  # rejects unknown names before the corpus is prepared
    if unread := describe_unread(args.deepspeed_config, overrides, args.method):
        logger.warning("%s", unread)
    if args.elastic:
        elastic.check_elastic(experiment.deepspeed)
    if branches:
        experiment = extending.plan_branch(experiment, args.branch_decay_from, out)
    validate_folder("--out", out)
    schedule = experiment.attention_schedule  # raises if its phases do not fit
    if warning := schedule.describe_ineffective_stride(experiment.model.seq_length):
        logger.warning("%s", warning)
    if skipped := experiment.describe_skipped_ramp():
        logger.info("%s", skipped)
    return experiment


def load_experiment(args: argparse.Namespace) -> Experiment:
    """Return the experiment that the config and the options state, without a look at other files or at this machine.

    Raises:
        UserError: if the config or a value is wrong, or if options contradict the config.
    """
    experiment = load(args.deepspeed_config, _overrides(args), args.method)
    if args.branch_decay_from is not None and experiment.training.init is not None:
        raise UserError("--branch-decay-from already determines the initial weights: leave out --init")
    if args.steps is not None and experiment.mst.like is not None:
        raise UserError(
            f"the length of method dense-short is determined by the FLOPs of {experiment.mst.like}: leave out --steps"
        )
    if args.stop_at is not None and args.stop_at < 1:
        raise UserError(f"--stop-at {args.stop_at}: give the number of a step, from 1")
    return experiment


def _overrides(args: argparse.Namespace) -> list[str]:
    """Return the options that change keys of the config as values of --set."""
    overrides = list(args.set)
    if args.steps is not None:
        overrides = [*_scale_rate_durations(args), *overrides, f"training.steps={args.steps}"]
    if args.match_flops is not None:
        overrides.append(f"mst.like={json.dumps(args.match_flops)}")
    if args.grow_from is not None:
        overrides.append(f"mst.grow_from={json.dumps(args.grow_from)}")
    if args.data is not None:
        overrides += [f"data.dir={json.dumps(args.data)}", "data.source=null"]
    for key in ("init", "eval_tasks", "eval_every", "eval_data"):
        if getattr(args, key) is not None:
            overrides.append(f"training.{key}={json.dumps(getattr(args, key))}")
    return overrides


def _scale_rate_durations(args: argparse.Namespace) -> list[str]:
    """Return overrides for durations of the learning rate in the file that are longer than --steps.

    Durations in steps keep their fraction of the run.
    """
    training = read(args.deepspeed_config)[1].get("training", {})
    total = training.get("steps") if isinstance(training, dict) else None
    if not isinstance(total, int) or args.steps < 1:
        return []
    overrides: list[str] = []
    for name in RATE_DURATIONS:
        stated = training.get(name)
        is_set = any(override.startswith(f"training.{name}=") for override in args.set)
        if type(stated) is int and args.steps < stated <= total and not is_set:
            scaled = max(1, round(stated * args.steps / total))
            overrides.append(f"training.{name}={scaled}")
            logger.warning("training.%s is now %d steps instead of %d, to fit --steps", name, scaled, stated)
    return overrides


def output_folder(args: argparse.Namespace, experiment: Experiment) -> Path:
    """Return the folder of the run: --out, or runs/<config>-<method>."""
    return Path(args.out or f"runs/{config_file(args.deepspeed_config).stem}-{experiment.mst.method}")

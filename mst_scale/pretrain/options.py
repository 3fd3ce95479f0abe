"""Reads the options of `mst_scale.pretrain`: the experiment they ask for, and where its files go."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mst_scale.checkpoints import store
from mst_scale.comm import logger
from mst_scale.comm.parser import Parser, validate_folder
from mst_scale.config import RATE_DURATIONS, Experiment, growth, load, overridden_in_recipe, read
from mst_scale.config.check import check
from mst_scale.config.ready import config_file
from mst_scale.errors import UserError
from mst_scale.pretrain import branch, resume


def arguments(argv: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Parse the options; `--help` prints `description` and exits."""
    parser = Parser(
        prog="mst_scale.pretrain", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    experiment = "a file, or the name of a ready-made config (gpt2_small)"
    parser.add_argument("--deepspeed_config", required=True, metavar="C", help=experiment)
    parser.add_argument("--method", metavar="M", help="dense, mst, rigl, static, …: overrides mst.method")
    parser.add_argument(
        "--match-flops", metavar="C", help="for dense-short: the config or folder of the run whose FLOPs it may spend"
    )
    parser.add_argument("--data", metavar="DIR", help="a folder with train.bin and val.bin: overrides data.dir")
    parser.add_argument("--out", metavar="DIR", help="folder of the run's files (default: runs/<config>-<method>)")
    parser.add_argument("--steps", type=int, metavar="N", help="overrides training.steps; a wsd run can be lengthened")
    parser.add_argument(
        "--init", metavar="M", help="start from these weights: gpt2, a folder of transformers, or a run"
    )
    parser.add_argument(
        "--from", dest="grow_from", metavar="RUN",
        help="for ligo and stack: the smaller run whose weights are grown into the initial weights",
    )  # fmt: skip
    parser.add_argument(
        "--branch-decay-from", metavar="RUN[:TAG]",
        help="start at a checkpoint of another run whose learning rate has not decayed yet (lr_schedule wsd), and "
        "decay it from there to the last step (--steps)",
    )  # fmt: skip
    parser.add_argument("--eval-tasks", metavar="A,B", help="tasks to evaluate (mst eval) with the validation loss")
    parser.add_argument("--eval-every", type=int, metavar="N", help="overrides training.eval_every")
    parser.add_argument("--eval-data", metavar="DIR", help="the tasks' files (default: from the hub)")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    parser.add_argument("--resume", default="auto", metavar="auto|never|TAG", help="continue from a checkpoint of OUT")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return parser.parse_args(argv)


def experiment_of(args: argparse.Namespace) -> Experiment:
    """Load the experiment that the options ask for, and check it.

    Raises:
        UserError: The config or an option cannot be used.
    """
    overrides = list(args.set)
    if args.steps is not None:
        overrides = [*_fitted(args), *overrides, f"training.steps={args.steps}"]
    if args.match_flops is not None:
        overrides.append(f"mst.like={json.dumps(args.match_flops)}")
    if args.grow_from is not None:
        overrides.append(f"mst.grow_from={json.dumps(args.grow_from)}")
    if args.data is not None:
        overrides += [f"data.dir={json.dumps(args.data)}", "data.source=null"]
    for key in ("init", "eval_tasks", "eval_every", "eval_data"):
        if getattr(args, key) is not None:
            overrides.append(f"training.{key}={json.dumps(getattr(args, key))}")
    experiment = load(args.deepspeed_config, overrides, args.method)
    if changes := overridden_in_recipe(args.deepspeed_config, overrides, args.method):
        logger.info("%s", changes)
    if args.branch_decay_from is not None and experiment.training.init is not None:
        raise UserError("--branch-decay-from already sets where the run begins: leave out --init")
    begun = args.branch_decay_from is not None or bool(store.list_tags(out_of(args, experiment) / "checkpoints"))
    growth.check_growth(experiment, begun)
    if experiment.training.init is not None:
        experiment = resume.with_shape_of(experiment, experiment.training.init, out_of(args, experiment))
    if args.steps is not None and experiment.mst.like is not None:
        raise UserError(f"method dense-short is as long as the FLOPs of {experiment.mst.like} last: leave out --steps")
    check(experiment)
    if args.branch_decay_from is not None:
        experiment = branch.planned(experiment, args.branch_decay_from, out_of(args, experiment))
    validate_folder("--out", out_of(args, experiment))
    schedule = experiment.attention_schedule  # refuses phases that do not fit
    if told := schedule.describe_ineffective_stride(experiment.model.seq_length):
        logger.warning("%s", told)
    return experiment


def _fitted(args: argparse.Namespace) -> list[str]:
    """Return overrides for durations of the learning rate that are stated in steps and do not fit into --steps.

    Each keeps its share of the run.
    """
    training = read(args.deepspeed_config)[1].get("training", {})
    total = training.get("steps") if isinstance(training, dict) else None
    fitted: list[str] = []
    if not isinstance(total, int) or args.steps < 1:
        return fitted
    for name in RATE_DURATIONS:
        stated = training.get(name)
        said = any(words.startswith(f"training.{name}=") for words in args.set)
        if type(stated) is int and args.steps < stated <= total and not said:
            fitted.append(f"training.{name}={max(1, round(stated * args.steps / total))}")
            logger.warning("training.%s: %d of %d steps become %s", name, stated, total, fitted[-1].partition("=")[2])
    return fitted


def out_of(args: argparse.Namespace, experiment: Experiment) -> Path:
    """Return the folder of the run's files."""
    return Path(args.out or f"runs/{config_file(args.deepspeed_config).stem}-{experiment.mst.method}")

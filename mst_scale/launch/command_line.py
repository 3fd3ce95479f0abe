"""Reads the command line of a launcher, checks the config before anything starts, and writes commands for a shell.

Ranks that share a layer must stay on one node. Ranks fill one node after the other, and neighbors share a layer
(DeepSpeed's `tensor_parallel.autotp_size`), so whole groups on every node are enough.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mst_scale.checkpoints.finding import list_tags
from mst_scale.comm.messages import quiet
from mst_scale.comm.parser import validate_new_folder
from mst_scale.config import Experiment
from mst_scale.config.deepspeed import batch_shape, largest_micro
from mst_scale.config.parallel import KEYS, sizes_of
from mst_scale.config.presets import describe_missing, ready_configs
from mst_scale.errors import UserError
from mst_scale.flops.budgets import shortened
from mst_scale.pretrain.resume import validate_same_model
from mst_scale.pretrain.start import load_experiment, output_folder, parse_arguments, read_experiment

PORTS = ("--port", "--ssh-port")
COUNTS = ("--processes", "--nodes", "--ranks-per-node", "--cpus-per-rank")  # 0 of them train nothing
OF_PRETRAIN_TOO = ("--out", "--elastic")


def read_options(
    words: Sequence[str],
    help_text: str | None,
    *,
    numbers: Mapping[str, int | None] = {},
    texts: Mapping[str, str | None] = {},
    lists: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> tuple[Namespace, str, list[str]]:
    """Read the options in front of CONFIG; what follows it belongs to `mst_scale.pretrain`.

    argparse cannot do this: an option here may take a word that begins with a dash (`--sbatch --qos=long`).

    Args:
        words: The command line after the launcher's name.
        help_text: What `--help` prints.
        numbers: Options that take a number, with their defaults.
        texts: Options that take a word, with their defaults.
        lists: Options that take a word and may be repeated.
        flags: Options without a value.

    Returns:
        The values by name, CONFIG, and the arguments of pretrain.

    Raises:
        UserError: An option is unknown or comes after CONFIG, its value is missing or not a number, or there is no
            such config.
        SystemExit: Help was asked for.
    """
    values: dict[str, Any] = {**numbers, **texts, **{name: [] for name in lists}, **dict.fromkeys(flags, False)}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in ("--help", "-h"):
            print((help_text or "").strip())
            raise SystemExit(0)
        if name not in values:
            raise UserError(f"unknown option {name}: see --help")
        if name in flags:
            values[name] = True
            continue
        if not equals:
            value = rest.pop(0) if rest else ""
        if not value:
            raise UserError(f"{name} needs a value: see --help")
        if name in numbers:
            values[name] = _number(name, value)
        elif name in texts:
            values[name] = value
        else:
            values[name].append(value)
    if not rest or not rest[0]:
        raise UserError("no config was given: pass a file, or the name of a ready-made config such as demo; see --help")
    config, *arguments = rest
    _check_after_options(config, arguments, values.keys())
    return Namespace(**{name.lstrip("-").replace("-", "_"): value for name, value in values.items()}), config, arguments


def _number(name: str, value: str) -> int:
    """Return the value of an option that takes a number."""
    if name in COUNTS and re.fullmatch("-[0-9]+|0+", value):
        raise UserError(f"{name} must be at least 1, not {value}")
    if not re.fullmatch("[0-9]{1,9}", value):
        raise UserError(f"{name} must be a number of at most nine digits, not '{value[:50]}'")
    if name in PORTS and not 1 <= int(value) <= 65535:
        raise UserError(f"{name} must be a port from 1 to 65535, not {value}")
    return int(value)


def _check_after_options(config: str, arguments: Sequence[str], options: Collection[str]) -> None:
    """Reject a config that does not exist, and options of the launcher among the arguments of pretrain."""
    if not os.path.isfile(config) and config not in ready_configs():
        raise UserError(describe_missing(config))
    for word in arguments:
        name = word.partition("=")[0]
        if name in options and name not in OF_PRETRAIN_TOO:
            raise UserError(f"{name} is an option of the launcher: write it before CONFIG")


def read_hostfile(hostfile: Path) -> list[str]:
    """Return the lines of a hostfile, without their comments.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        text = hostfile.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"--hostfile {hostfile} cannot be read: {error.strerror}") from None
    return [line.partition("#")[0] for line in text.splitlines()]


def seconds_in(variable: str, usual: float) -> float:
    """Return the seconds that an environment variable states, or the usual ones.

    Raises:
        UserError: if it states anything else.
    """
    stated = os.environ.get(variable)
    if not stated:
        return usual
    try:
        seconds = float(stated)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UserError(f"{variable} = {stated!r} must be a number of seconds")
    return seconds


def quoted(words: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Return the command, after `env` with these variables, as it could be typed."""
    if variables:
        words = ["env", *(f"{name}={value}" for name, value in variables.items()), *words]
    return shlex.join(words)


def read_run(config: str, arguments: Sequence[str]) -> tuple[Experiment, Path]:
    """Return the experiment that the arguments of `mst_scale.pretrain` ask for, and its folder.

    Raises:
        UserError: The config or an argument is wrong.
        SystemExit: An argument is unknown, or asks for help.
    """
    with quiet():  # the ranks will log
        args = parse_arguments(["--deepspeed_config", config, *arguments])
        experiment = read_experiment(args)
    return experiment, output_folder(args, experiment)


class Request(NamedTuple):
    """The run that a command line asks for, as far as its config and its arguments say."""

    arguments: Namespace
    """Of `mst_scale.pretrain`."""
    experiment: Experiment
    out: Path
    """The folder of the run."""


def read_request(config: str, arguments: Sequence[str]) -> Request:
    """Check a config with the arguments of `mst_scale.pretrain`, as far as no other files matter.

    Other files may be on the machines that train only.

    Raises:
        UserError: The config or an argument is wrong.
        SystemExit: An argument is unknown, or asks for help.
    """
    with quiet():  # the ranks will log
        args = parse_arguments(["--deepspeed_config", config, *arguments])
        experiment = load_experiment(args)
    return Request(args, experiment, output_folder(args, experiment))


def check_run(request: Request, nodes: Iterable[tuple[str, int]], mapped_by: str | None = None) -> None:
    """Check that no tensor-parallel group is split over two nodes.

    Args:
        request: The run.
        nodes: Names of nodes with the number of processes of each; a node may come several times.
        mapped_by: An option of mpirun by which ranks take another order.

    Raises:
        UserError: A group would leave its node, or might.
    """
    tensor = sizes_of(request.experiment.deepspeed).tensor
    stated = f"{KEYS['tensor']} = {tensor}"
    if tensor > 1 and mapped_by is not None:
        raise UserError(f"{stated} needs neighboring ranks on one node: leave {mapped_by} out")
    processes: Counter[str] = Counter()
    for node, count in nodes:
        processes[node] += count
    for node, count in processes.items():
        if count % tensor:
            raise UserError(
                f"{stated}: the {count} processes of {node} cannot be divided into groups of {tensor}, which must not "
                f"span nodes: start a multiple of it on each node, or --set {KEYS['tensor']}={math.gcd(count, tensor)}"
            )


def check_batch(request: Request, processes: Sequence[int]) -> None:
    """Check that ranks divide into replicas of the model which share the global batch.

    The batch of a run that has a checkpoint is not checked: it may differ from the config's.

    Args:
        request: The run.
        processes: The numbers of ranks, in the order in which the run uses them.

    Raises:
        UserError: The ranks or the batch cannot be divided.
    """
    experiment = request.experiment
    first, *later = (sizes_of(experiment.deepspeed).data(count) for count in processes)
    if request.arguments.branch_decay_from is None and not list_tags(request.out / "checkpoints"):
        batch, micro, _ = batch_shape(experiment.deepspeed, first)
        for replicas in later:
            largest_micro(batch, micro, replicas)


def check_places(request: Request) -> None:
    """Check the folders of a run that trains on this machine, before anything starts.

    Raises:
        UserError: There is no corpus, the folder of the run cannot be made, or it holds a run of another method.
    """
    experiment, data = request.experiment, request.experiment.data
    if data.source is None and data.dir is not None and not Path(data.dir).is_dir():
        problem = "is not a folder" if Path(data.dir).exists() else "does not exist"
        raise UserError(f"data folder {data.dir} {problem}; `mst data SOURCE --out {data.dir}` makes a corpus")
    validate_new_folder("--out", request.out)
    if experiment.training.init is None:  # the shape of other weights is read by the ranks
        validate_same_model(request.out, experiment)


def describe_run(request: Request, processes: int) -> str:
    """Describe in one line what a launcher would start on this machine."""
    experiment = request.experiment
    data, device = experiment.data, "on the CPU" if os.environ.get("DS_ACCELERATOR") == "cpu" else "on GPUs"
    replicas = max(1, processes // sizes_of(experiment.deepspeed).model)
    steps = shortened(experiment, replicas).training.steps  # of dense-short, fewer than the config says
    several = "process" if processes == 1 else "processes"
    corpus = data.dir or f"corpora/{data.source}"
    return f"{processes} {several} {device}, {steps:,} steps, corpus {corpus}, output {request.out}"

"""Train every combination of methods and seeds, one after the other or as jobs, and print a table of the runs.

  mst launch sweep [options] CONFIG [arguments of mst_scale.pretrain]
  mst launch sweep --methods dense,tiny,static,rigl,mst gpt2_small
  mst launch sweep --with slurm --with-option --nodes --with-option 2 gpt2_small

  CONFIG            a file, or the name of a ready-made config
  --methods A,B,…   default: dense,tiny,static,rigl,mst (the paper's table)
  --seeds 1,2,…     default: 1,2,3,4 (the paper's four)
  --out DIR         the runs go to DIR/METHOD-SEED (default: runs/sweep)
  --with LAUNCHER   local (default), hostfile, mpi, or slurm, which submits a job for each run
  --with-option W   an additional argument for that launcher, repeatable
  --table           only print the table of the runs that exist
  --dry-run         show what would run

Finished runs are skipped, so the same command continues a sweep. A run that fails does not stop the others. On SIGTERM
or Ctrl-C the current run saves, and the sweep ends. In a clone you can also call launchers/sweep.sh.
"""

from __future__ import annotations

import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from mst_scale.errors import UserError
from mst_scale.launch.command_line import read_options, read_request
from mst_scale.launch.elastic import FLAG
from mst_scale.launch.supervisor import Supervisor, forward, print_message
from mst_scale.run_logging import run_file
from mst_scale.run_logging.metrics import last_rows
from mst_scale.run_logging.run_file import FINISHED

LAUNCHERS = ("local", "hostfile", "mpi", "slurm")


def main(words: list[str]) -> int:
    """Read the options and train; return 1 if a run failed."""
    options, config, arguments = read_options(
        words,
        __doc__,
        texts={
            "--methods": "dense,tiny,static,rigl,mst", "--seeds": "1,2,3,4", "--out": "runs/sweep", "--with": "local",
        },
        lists=["--with-option"],
        flags=["--table", "--dry-run"],
    )  # fmt: skip
    _check_rest(arguments)
    launcher = getattr(options, "with").removesuffix(".sh")
    if launcher not in LAUNCHERS:
        raise UserError(f"--with {launcher}: choose local, hostfile, mpi or slurm")
    if not all(options.methods.split(",")):
        raise UserError(f"--methods {options.methods}: separate the names with commas")
    if not re.fullmatch("[0-9]+(,[0-9]+)*", options.seeds):
        raise UserError(f"--seeds {options.seeds}: separate the numbers with commas")
    methods, seeds, out = options.methods.split(","), options.seeds.split(","), Path(options.out)
    if len({*methods}) < len(methods) or len({*map(int, seeds)}) < len(seeds):
        raise UserError(f"--methods {options.methods} --seeds {options.seeds}: give each only once")
    if options.table:
        _print_table(out, methods, seeds)
        return 0
    for method in methods:
        read_request(config, [*arguments, "--method", method])
    runs = {  # folder -> CONFIG and the arguments of mst_scale.pretrain
        (folder := out / f"{method}-{seed}"): [
            config, *arguments, "--method", method, "--set", f"training.seed={seed}", "--out", str(folder)
        ]
        for seed in seeds for method in methods
    }  # fmt: skip
    start = [sys.executable, "-m", "mst_scale.launch", launcher]
    if options.dry_run:
        commands = [[*start, "--dry-run", *options.with_option, *words] for words in runs.values()]
        codes = (subprocess.run(command, check=False).returncode for command in commands)
        return next(filter(None, codes), 0)
    failures = _train(runs, [*start, *options.with_option])
    _print_table(out, methods, seeds)
    if failures:
        print_message(f"{failures} runs failed: the same command tries them again")
    return int(failures > 0)


def _train(runs: dict[Path, list[str]], start: list[str]) -> int:
    """Train the runs that are not finished, until this process is asked to stop; return how many have failed.

    Args:
        runs: The words of each run, by its folder.
        start: The command that trains a run with these words.
    """
    supervisor = Supervisor(forward(signal.SIGTERM))  # the launcher below lets its run save
    failures = 0
    for folder, words in runs.items():
        if supervisor.asked_to_stop():
            break
        if _is_finished(folder, words):
            print(f"{folder} is finished", flush=True)
            continue
        print(folder, flush=True)
        if supervisor.run([*start, *words]) and not supervisor.asked_to_stop():
            failures += 1
    if supervisor.stopping:
        print("the sweep was asked to stop: the same command continues")
    return failures


def _check_rest(arguments: list[str]) -> None:
    """Reject what the sweep itself states for each run, and would overrule."""
    for word in arguments:
        name = word.partition("=")[0]
        if name in ("--out", "--method") or word.removeprefix("--set=").startswith("training.seed="):
            given = {"--out": "--out", "--method": "--methods"}.get(name, "--seeds")
            raise UserError(f"{word} after CONFIG has no effect in a sweep: give {given} before CONFIG")


def _is_finished(folder: Path, words: list[str]) -> bool:
    """Return whether the run in a folder was finished by the command that ends in these words."""

    def without_flag(command: list[str]) -> list[str]:  # which the launcher itself puts after CONFIG
        return [word for word in command if word != FLAG]

    wanted = without_flag(words)
    commands = [without_flag(start.get("command", [])) for start in _starts(folder) if start.get("how") == FINISHED]
    return any(command[-len(wanted) :] == wanted for command in commands)


def _starts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_file.read(folder / "run.json").get("starts", [])
    return found


def _print_table(out: Path, methods: list[str], seeds: list[str]) -> None:
    """Print the last validation loss and fraction of dense FLOPs of each method, as a mean over its finished seeds."""
    print(f"{'method':<14}{'runs':>5}{'validation loss':>18}{'± over seeds':>14}{'FLOPs':>8}")
    for method in methods:
        folders = [out / f"{method}-{seed}" for seed in seeds]
        begun = [folder for folder in folders if (folder / "run.json").is_file()]
        finished = [folder for folder in begun if any(start.get("how") == FINISHED for start in _starts(folder))]
        rows = [row for folder in finished if (row := last_rows(folder / "metrics.jsonl")[1])]
        loss = spread = share = "–"
        if rows:
            loss = f"{statistics.mean(row['val_loss'] for row in rows):.4f}"
            share = f"{statistics.mean(row['flops'] / row['flops_dense'] for row in rows):.2f}"
        if len(rows) > 1:
            spread = f"{statistics.stdev(row['val_loss'] for row in rows):.4f}"
        others = len(begun) - len(finished)
        note = f"   {others} not finished, left out" if others else ""
        print(f"{method:<14}{len(rows):>5}{loss:>18}{spread:>14}{share:>8}{note}")

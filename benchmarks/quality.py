"""Compares the validation loss of variants, at equal tokens and over several seeds.

    mst bench quality [--config FILE] [--seeds 1 2 3] [--variants FILE] [--markdown]

Every variant is a run of `mst_scale.pretrain` with different settings, and the others are compared with the first one.
With the same seed, all read the same tokens in the same order, and start from the same weights if their shapes are the
same. `--variants` is a JSON file {"name": ["--set", "mst.topology.policy=rigl", …], …}; the default compares single
weights with blocks, a dense model, and a dense model of about the same FLOPs.

    val loss    mean over seeds of the loss on fixed validation sequences after the last step, ± standard deviation
    difference  to the first variant, mean over seeds of same-seed differences ± standard error
    sparsity    highest sparsity of the target parameters in the log
    FLOPs       of the run, as a fraction of a dense run of that shape (the paper's accounting)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mst_scale.errors import UserError

from .machine import machine
from .page import LOSSES, Row, aside, command_line, grid, parse, show

CONFIG = "demo"
# A GPT of 0.4 M weights in its layers; every run has the same sparsity: min_blocks = 0, and blocks tile every matrix.
SHAPE = {
    "model.n_layer": 2, "model.n_head": 4, "model.n_embd": 128, "model.seq_length": 64, "model.init_std": 0.02,
    "optimizer.params.lr": 3e-3,
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 16, "zero_optimization.stage": 0,
    "training.steps": 400, "training.log_every": 50, "training.eval_every": 0, "training.eval_sequences": 512,
    "training.save_every": 0, "training.keep_checkpoints": 1, "training.histogram_every": 0,
    "tensorboard.enabled": False,
    "mst.sparsity.max": 0.9, "mst.topology.interval": 10, "mst.targets.lm_head": False, "mst.compute.backend": "dense",
    "mst.attention.pattern": "dense",
}  # fmt: skip


def blocks(side: int) -> list[str]:
    """Return the arguments for masks made of blocks."""
    return ["--set", f'mst.topology.granularity={{"block": {side}, "min_blocks": 0}}']


VARIANTS: dict[str, list[str]] = {
    "element": [],
    "block 4": blocks(4),
    "block 8": blocks(8),
    "block 16": blocks(16),
    "dense": ["--method", "dense"],
    "tiny": ["--method", "dense", "--set", "model.n_embd=64", "--set", "model.n_head=2"],
}


def one_run(words: Sequence[str], ranks: Any) -> Row:
    """A run of `mst_scale.pretrain` with these arguments, in this process; its folder is gone afterwards."""
    from mst_scale.flops.budgets import shortened
    from mst_scale.pretrain import training_loop
    from mst_scale.pretrain.prepare import prepare
    from mst_scale.pretrain.start import parse_arguments, read_experiment

    with tempfile.TemporaryDirectory(prefix="mst-quality-") as folder, contextlib.redirect_stdout(io.StringIO()):
        out = Path(folder) / "run"
        experiment = read_experiment(parse_arguments([*words, "--out", str(out)]))
        training_loop.Run(prepare(shortened(experiment, ranks.world_size), out, ranks)).to_the_end()
        return read(out / "metrics.jsonl")


def read(metrics: Path) -> Row:
    """Return the results of a run from its metrics."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = rows[-1]
    return {
        "val_loss": last["val_loss"],
        "sparsity": max(row["sparsity"] for row in rows),
        "flops": last["flops"] / last["flops_dense"],
        "flops_total": last["flops"],
        "tokens": last["tokens"],
    }


def compare(runs: Mapping[str, Sequence[Row]]) -> list[Row]:
    """A row per variant; `runs` has the same seeds in the same order for each."""
    reference = next(iter(runs.values()))
    rows = []
    for name, found in runs.items():
        losses = [run["val_loss"] for run in found]
        differences = [run["val_loss"] - other["val_loss"] for run, other in zip(found, reference, strict=True)]
        rows.append(
            {
                "variant": name,
                "val_loss": statistics.fmean(losses),
                "spread": _spread(losses),
                "difference": statistics.fmean(differences),
                "difference_error": _spread(differences) / len(differences) ** 0.5,
                "sparsity": statistics.fmean(run["sparsity"] for run in found),
                "flops": statistics.fmean(run["flops_total"] for run in found),
                "flops_of_dense": statistics.fmean(run["flops"] for run in found),
                "tokens": found[0]["tokens"],
                "losses": losses,
                **LOSSES,
            }
        )
    return rows


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def measure(options: argparse.Namespace, variants: Mapping[str, Sequence[str]]) -> list[Row]:
    """All variants with the first seed, then with the next: what is there early can be compared early."""

    from mst_scale import comm

    ranks = comm.init()
    made: dict[str, Row] = {}
    if options.runs is not None and options.runs.exists():
        made = dict(json.loads(line) for line in options.runs.read_text().splitlines())
    common = ["--deepspeed_config", options.config, *(word for pair in options.set for word in ("--set", pair))]
    runs: dict[str, list[Row]] = {name: [] for name in variants}
    for seed in options.seeds:
        for name, words in variants.items():
            arguments = [*common, *words, "--set", f"training.seed={seed}"]
            key = " ".join(arguments)
            if key not in made:
                made[key] = one_run(arguments, ranks)
                if options.runs is not None:
                    with options.runs.open("a") as file:
                        file.write(json.dumps([key, made[key]]) + "\n")
            runs[name].append(made[key])
            print(f"{name}, seed {seed}: validation loss {made[key]['val_loss']:.4f}", file=sys.stderr, flush=True)
    return compare(runs)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as tables of Markdown."""
    first = rows[0]["variant"]
    lines = []
    for r in rows:
        difference = "–" if r is rows[0] else f"{r['difference']:+.4f} ± {r['difference_error']:.4f}"
        loss, share = f"{r['val_loss']:.4f} ± {r['spread']:.4f}", f"{r['flops_of_dense']:.2f}"
        lines.append([r["variant"], loss, difference, f"{r['sparsity']:.1%}", f"{r['flops']:.3g}", share])
    return grid(["variant", "val loss", f"difference to {first}", "sparsity", "FLOPs", "of its dense run"], lines)


def settings_of(options: argparse.Namespace, variants: Mapping[str, Sequence[str]]) -> str:
    """List the settings of every variant, for the results page."""
    listed = "\n".join(f"{name}: {' '.join(words) or '(as above)'}" for name, words in variants.items())
    shared = "\n".join(options.set)
    return f"Settings on top of {options.config}:\n\n```\n{shared}\n\n{listed}\n```"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench quality", __doc__)
    parser.add_argument(
        "--config", default=CONFIG, metavar="C", help="the experiment that variants vary (default: %(default)s)"
    )
    parser.add_argument("--variants", metavar="FILE", help="JSON: name → arguments of mst_scale.pretrain")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these variants")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one run per variant and seed")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keep results here; recorded runs are not repeated")
    options = parse(parser, arguments)
    variants = json.loads(Path(options.variants).read_text()) if options.variants else VARIANTS
    if options.config == CONFIG:  # small and short enough for minutes on a CPU; --set comes after and takes precedence
        options.set = [f"{key}={json.dumps(value)}" for key, value in SHAPE.items()] + options.set
    if options.only:
        unknown = sorted(set(options.only) - set(variants))
        if unknown:
            raise UserError(f"--only {unknown[0]}: the variants are {', '.join(variants)}")
        variants = {name: variants[name] for name in options.only}
    with aside():
        rows = measure(options, variants)
    setting = {"dtype": "float32", "processes": 1, "seeds": len(options.seeds)}
    setting[f"tokens per run of {rows[0]['variant']}"] = f"{rows[0]['tokens']:,}"
    shown = table(rows) + (f"\n\n{settings_of(options, variants)}" if options.markdown else "")
    return show(options, rows, shown, machine(), setting)

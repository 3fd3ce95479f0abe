"""What does a choice cost in validation loss, at equal tokens and over several seeds?

    mst bench quality [--config FILE] [--seeds 1 2 3] [--variants FILE] [--markdown]

Every variant is a run of `mst_scale.pretrain` with some settings of its own; the first one is what the others are
compared with. All see the same tokens in the same order for the same seed, and start from the same weights where their
shapes are the same. `--variants` names a JSON file {"name": ["--set", "mst.topology.policy=rigl", …], …}; without it
the built-in comparison is made: single weights against blocks, against dense and against a dense model of about the
same FLOPs.

    val loss    mean over seeds of the loss on fixed validation sequences after the last step, ± standard deviation
    difference  to the first variant, mean over seeds of same-seed differences ± standard error
    sparsity    of the target parameters, the most that a logged row has
    FLOPs       of the run, as a share of a dense run of that shape (the paper's accounting)
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]

# A GPT of 0.4 M weights in its layers; every run has the same sparsity: min_blocks = 0, and blocks tile every matrix.
SHAPE = {
    "model.n_layer": 2, "model.n_head": 4, "model.n_embd": 128, "model.context": 64,
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 16, "zero_optimization.stage": 0,
    "training.steps": 500, "training.log_every": 50, "training.eval_every": 0, "training.eval_sequences": 512,
    "training.save_every": 0, "training.keep_checkpoints": 1, "training.look_every": 0, "tensorboard.enabled": False,
    "mst.sparsity.max": 0.9, "mst.topology.interval": 10, "mst.targets.lm_head": False, "mst.compute.backend": "dense",
    "mst.attention.pattern": "dense",
}  # fmt: skip


def blocks(side: int) -> list[str]:
    return ["--set", f'mst.topology.granularity={{"block": {side}, "min_blocks": 0}}']


VARIANTS: dict[str, list[str]] = {
    "element": [],
    "block 4": blocks(4),
    "block 8": blocks(8),
    "block 16": blocks(16),
    "dense": ["--method", "dense"],
    "tiny": ["--method", "dense", "--set", "model.n_embd=64", "--set", "model.n_head=2"],
}


def command(config: str, common: Sequence[str], variant: Sequence[str], seed: int, out: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "mst_scale.pretrain", "--deepspeed_config", config, "--out", str(out)),
        *(*common, *variant, "--set", f"training.seed={seed}"),
    ]  # fmt: skip


def one_run(config: str, common: Sequence[str], variant: Sequence[str], seed: int, wrapper: Sequence[str]) -> Row:
    """One process, one thread; the run's folder is gone afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="mst-quality-") as folder:
        out = Path(folder) / "run"
        told = command(config, common, variant, seed, out)
        done = subprocess.run([*wrapper, *told], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(told)}\nended with code {done.returncode}:\n{done.stderr[-2000:]}")
        return read(out / "metrics.jsonl")


def read(metrics: Path) -> Row:
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
            }
        )
    return rows


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def measure(options: argparse.Namespace, variants: Mapping[str, Sequence[str]]) -> list[Row]:
    common = [word for setting in options.set for word in ("--set", setting)]
    cases = [(name, seed) for seed in options.seeds for name in variants]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = {
            case: pool.submit(one_run, options.config, common, variants[case[0]], case[1], options.wrapper.split())
            for case in cases
        }
        for (name, seed), future in futures.items():
            print(
                f"{name}, seed {seed}: validation loss {future.result()['val_loss']:.4f}", file=sys.stderr, flush=True
            )
    return compare({name: [futures[name, seed].result() for seed in options.seeds] for name in variants})


def table(rows: Sequence[Row]) -> str:
    first = rows[0]["variant"]
    lines = [f"| variant | val loss | difference to {first} | sparsity | FLOPs | of its dense run |", "|" + "---|" * 6]
    for r in rows:
        difference = "–" if r is rows[0] else f"{r['difference']:+.4f} ± {r['difference_error']:.4f}"
        lines.append(
            f"| {r['variant']} | {r['val_loss']:.4f} ± {r['spread']:.4f} | {difference} | {r['sparsity']:.1%} | "
            f"{r['flops']:.3g} | {r['flops_of_dense']:.2f} |"
        )
    return "\n".join(lines)


def markdown(rows: Sequence[Row], options: argparse.Namespace, variants: Mapping[str, Sequence[str]]) -> str:
    import torch

    title, _, text = (__doc__ or "").partition("\n")
    body = text.strip().split("\n\n", 1)[1]
    told = "mst bench quality --seeds " + " ".join(map(str, options.seeds)) + " --markdown"
    told += f" --variants {options.variants}" if options.variants else ""
    told += f" --config {options.config}" if options.config != CONFIG else ""
    settings = "\n".join(options.set)
    listed = "\n".join(f"{name}: {' '.join(words) or '(as above)'}" for name, words in variants.items())
    return (
        f"# {title}\n\n`{told}`\n\ntorch {torch.__version__}, CPU float32, one process a run, {len(options.seeds)} "
        f"seeds, {rows[0]['tokens']:,} tokens a run\n\n{table(rows)}\n\n"
        f"Settings on top of {options.config}:\n\n```\n{settings}\n\n{listed}\n```\n\n```\n{body}\n```\n"
    )


CONFIG = "ds_configs/demo.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mst bench quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=CONFIG, metavar="FILE")
    parser.add_argument("--variants", metavar="FILE", help="JSON: name → arguments of mst_scale.pretrain")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the variants, these")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs side by side")
    parser.add_argument(
        "--wrapper", default="", metavar="COMMAND", help="put before each run, such as a queue's command"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="for machines")
    output.add_argument("--markdown", action="store_true", help="the file in benchmarks/results")
    options = parser.parse_args(arguments)
    variants = json.loads(Path(options.variants).read_text()) if options.variants else VARIANTS
    if options.config == CONFIG:  # small and short enough for minutes on a CPU; --set comes after and wins
        options.set = [f"{key}={json.dumps(value)}" for key, value in SHAPE.items()] + options.set
    if options.only:
        unknown = sorted(set(options.only) - set(variants))
        if unknown:
            raise ValueError(f"--only {unknown[0]}: the variants are {', '.join(variants)}")
        variants = {name: variants[name] for name in options.only}
    rows = measure(options, variants)
    if options.json:
        import torch

        print(json.dumps({"machine": {"torch": torch.__version__}, "rows": rows}))
    elif options.markdown:
        print(markdown(rows, options, variants))
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

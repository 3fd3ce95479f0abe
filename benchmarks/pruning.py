"""Compares weights trained with MST and dense ones after pruning.

    mst bench pruning [--data DIR] [--runs DIR] [--seeds N] [--steps N] [--json | --markdown]

The paper says so: "the learned parameters are more concentrated, making them better suited for subsequent pruning". The
model of the config demo (2 layers, width 64, bytes of Python's library) is trained dense and with MST (80 % sparse
at most, dense again at the end), with the same batches and as many steps; then both are pruned by magnitude, as `mst
export --prune` does it, without further training.

    loss        on the run's validation corpus; mean over seeds ± half the range
    lost        loss minus that of the same model unpruned
    kurtosis    of the layers' weights, the embedding left out: 3 for a normal distribution, more where few weights
                are large and many are small
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mst_scale.config import ready
from mst_scale.distributed.parser import Parser, at_least

from .machine import machine
from .page import LOSSES, Row, aside, grid, outputs, tell

METHODS = ("dense", "mst")
SPARSITIES = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)


def train(method: str, seed: int, steps: int, data: str, runs: Path) -> Path:
    """A run that is there already is used as it is."""
    out = runs / f"{method}-{seed}-{steps}"
    argv = ["--deepspeed_config", str(ready.configs()["demo"]), "--method", method, "--out", str(out)]
    argv += ["--steps", str(steps), "--data", data]
    for setting in (f"training.seed={seed}", "training.save_every=0", "training.eval_every=0"):
        argv += ["--set", setting]
    subprocess.run([sys.executable, "-m", "mst_scale.pretrain", *argv], check=True, stdout=subprocess.DEVNULL)
    return out


def pruned(run: Path) -> tuple[list[float], float]:
    """(loss at each sparsity, kurtosis of the weights that may be pruned)."""
    import torch

    from mst_scale.data.corpus import open_tokens
    from mst_scale.data.sampler import Sampler
    from mst_scale.hugging_face.export import open_source, validation_loss
    from mst_scale.mixed_growing.distribution import active_counts
    from mst_scale.pruning.magnitude import keep_largest

    source = open_source(run)
    shapes = {name: tuple(p.shape) for name, p in source.targets().items()}
    assert source.experiment.data.dir is not None
    experiment = source.experiment
    sampler = Sampler(
        open_tokens(source.experiment.data.dir, "val"), experiment.model.context, experiment.training.seed
    )
    losses = []
    for sparsity in SPARSITIES:
        model = source.model()
        parameters = dict(model.named_parameters())
        counts = active_counts(list(shapes.values()), sparsity, source.experiment.mst.sparsity.distribution)
        for name, count in zip(shapes, counts, strict=True):
            keep_largest(parameters[name].data, count)
        losses.append(validation_loss(model, sampler, experiment))
    matrices = [source.weights.read(name) for name in shapes if name != "wte.weight"]
    kurtoses = [float(((w - w.mean()) / w.std()).pow(4).mean()) for w in matrices]
    return losses, float(torch.tensor(kurtoses).mean())


def measure(data: str, runs: Path, seeds: int, steps: int) -> list[Row]:
    from mst_scale.data.prepare import ensure

    ensure(data, "stdlib", "byte")
    rows = []
    for method in METHODS:
        found = [pruned(train(method, seed, steps, data, runs)) for seed in range(1, seeds + 1)]
        row: Row = {"method": method, "steps": steps, "seeds": seeds, **LOSSES}
        row["kurtosis"] = round(statistics.fmean(kurtosis for _, kurtosis in found), 2)
        for i, sparsity in enumerate(SPARSITIES):
            losses = [values[i] for values, _ in found]
            lost = [values[i] - values[0] for values, _ in found]
            row[f"loss {sparsity}"] = round(statistics.fmean(losses), 4)
            row[f"range {sparsity}"] = round((max(losses) - min(losses)) / 2, 4)
            row[f"lost {sparsity}"] = round(statistics.fmean(lost), 4)
            row[f"lost range {sparsity}"] = round((max(lost) - min(lost)) / 2, 4)
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    heads = [f"{row['method']}: {what}" for row in rows for what in ("loss", "lost")]
    lines = []
    for s in SPARSITIES:
        cells = [f"{100 * s:.0f} %"]
        for row in rows:
            cells.append(f"{row[f'loss {s}']:.4f} ± {row[f'range {s}']:.4f}")
            cells.append(f"{row[f'lost {s}']:+.4f} ± {row[f'lost range {s}']:.4f}" if s else "–")
        lines.append(cells)
    kurtoses = ", ".join(f"{row['method']} {row['kurtosis']}" for row in rows)
    return f"{grid(['pruned', *heads], lines)}\n\nKurtosis of the layers' weights: {kurtoses}."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="mst bench pruning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="corpora/stdlib-byte", metavar="DIR", help="made if it is not there")
    parser.add_argument("--runs", default="runs/pruning", type=Path, metavar="DIR", help="where the runs are kept")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="runs a method (default: %(default)s)")
    parser.add_argument("--steps", type=at_least(1), default=1000, help="of each run (default: %(default)s)")
    outputs(parser)
    options = parser.parse_args(arguments)
    with aside():
        rows = measure(options.data, options.runs, options.seeds, options.steps)
    command = f"mst bench pruning --seeds {options.seeds} --steps {options.steps}"
    tell(options, rows, table(rows), about={**machine(), "dtype": "float32"}, doc=__doc__, command=command)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Compares weights trained with MST and dense ones after pruning, at equal loss before pruning.

    mst bench pruning [--data DIR] [--runs DIR] [--seeds N] [--steps N] [--json | --markdown]

This tests a claim of the paper: "the learned parameters are more concentrated, making them better suited for subsequent
pruning". The model of the config demo (2 layers, width 64, bytes of SymPy's sources) is trained with the recipe
mst-best (at most 80 % sparse, dense at the end), dense for the same number of steps, and dense until it reaches MST's
validation loss, because a model that has learned more loses more from pruning. The dense runs use the best learning
rate of the study demo, MST that of the study main. All are pruned as by `mst export --method … --prune`, without
further training; magnitude also prunes the head, which is the embedding, and the other methods do not.

    loss        on the run's validation corpus; mean over seeds ± half the range
    lost        loss minus that of the same model unpruned
    kurtosis    of the layers' weights without the embedding: 3 for a normal distribution, more if few weights are
                large and many are small
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mst_scale.comm.parser import at_least
from mst_scale.config.presets import ready_configs
from mst_scale.errors import UserError

from .machine import machine
from .page import LOSSES, Row, aside, command_line, grid, parse, show

WAYS = ("magnitude", "wanda", "sparsegpt")
SPARSITIES = (0.3, 0.5, 0.7, 0.8, 0.9)
SETTINGS = ("model.init_std=0.1", "training.save_every=0", "training.eval_every=0")
OWN = {  # by method
    "mst": ("optimizer.params.lr=1.6e-2", "training.decay=0.4"),
    "dense": ("optimizer.params.lr=4e-3", "training.decay=0.2"),
}
EQUAL = 0.01  # of the loss
TRIES = 12


@dataclass(frozen=True)
class Found:
    """One run: its length, its loss, its loss after each (way, sparsity), and the kurtosis of its weights."""

    steps: int
    loss: float
    pruned: dict[tuple[str, float], float]
    kurtosis: float


def train(method: str, seed: int, steps: int, data: str, runs: Path) -> Path:
    """A run that is there already is used as it is."""
    out = runs / f"{method}-{seed}-{steps}"
    argv = ["--deepspeed_config", str(ready_configs()["demo"]), "--method", method, "--out", str(out)]
    argv += ["--steps", str(steps), "--data", data]
    for setting in (f"training.seed={seed}", *SETTINGS, *OWN[method]):
        argv += ["--set", setting]
    subprocess.run([sys.executable, "-m", "mst_scale.pretrain", *argv], check=True, stdout=subprocess.DEVNULL)
    return out


def steps_to(loss: float, loss_after: Callable[[int], float], longest: int) -> int:
    """How many steps reach a loss that `longest` steps undercut; the nearest of a few tries, on the line through the
    last two that enclose it."""
    tried = {longest: loss_after(longest)}
    if tried[longest] > loss:
        raise UserError(f"{longest:,} steps end at {tried[longest]:.4f}, above {loss:.4f}: train more of them")
    short = longest
    while tried[short] <= loss:
        short //= 2
        tried[short] = loss_after(short)
    while len(tried) < TRIES and min(abs(value - loss) for value in tried.values()) > EQUAL:
        below = max(steps for steps, value in tried.items() if value > loss)
        above = min(steps for steps, value in tried.items() if value <= loss and steps > below)
        share = min(0.8, max(0.2, (tried[below] - loss) / (tried[below] - tried[above])))  # both ends come nearer
        steps = round(math.exp(math.log(below) + share * math.log(above / below)))
        if steps in tried:
            break
        tried[steps] = loss_after(steps)
    return min(tried, key=lambda steps: abs(tried[steps] - loss))


def final_loss(run: Path) -> float:
    """Return the last validation loss of a run."""
    from mst_scale.run_logging import metrics

    return float(list(metrics.read(run / "metrics.jsonl"))[-1]["val_loss"])


def look_at(run: Path) -> Found:
    """Prune a run's weights every way."""
    import torch

    from mst_scale.data.corpus import open_tokens
    from mst_scale.data.sampler import Sampler
    from mst_scale.hugging_face.export import validation_loss
    from mst_scale.hugging_face.sources import open_source
    from mst_scale.pruning.network import calibration_batches, open_calibration, prune_model
    from mst_scale.pruning.request import requested

    source = open_source(run)
    experiment, shapes = source.experiment, {name: tuple(p.shape) for name, p in source.targets().items()}
    assert experiment.data.dir is not None
    sampler = Sampler(open_tokens(experiment.data.dir, "val"), experiment.model.seq_length, experiment.eval_seed)
    losses = {}
    for way in WAYS:
        for sparsity in SPARSITIES:
            request = requested(way, sparsity)
            assert request is not None
            model, seen = source.model(), []
            if request.needs_calibration:
                calibration = open_calibration(experiment.data.dir, experiment.model, request.sequences)
                seen = calibration_batches(calibration, request.sequences)
            amounts = request.amounts(shapes, experiment.mst.sparsity.distribution)
            prune_model(model, request.method, amounts, seen)
            losses[way, sparsity] = validation_loss(model, sampler, experiment)
    matrices = [source.weights.read(name) for name in shapes if name != "wte.weight"]
    kurtoses = [float(((w - w.mean()) / w.std()).pow(4).mean().detach()) for w in matrices]
    before = validation_loss(source.model(), sampler, experiment)
    return Found(experiment.training.steps, before, losses, float(torch.tensor(kurtoses).mean()))


def measure(data: str, runs: Path, seeds: int, steps: int) -> list[Row]:
    """Train and prune all runs, and return a row per method."""
    from mst_scale.data.prepare import prepare
    from mst_scale.data.recipe import Recipe

    prepare(Recipe("package:sympy", "byte"), data)
    found: dict[str, list[Found]] = {"mst": [], "dense, equal loss": [], "dense, as long": []}
    for seed in range(1, seeds + 1):

        def dense(length: int, seed: int = seed) -> Path:
            return train("dense", seed, length, data, runs)

        mst = train("mst", seed, steps, data, runs)
        equal = steps_to(final_loss(mst), lambda length: final_loss(dense(length)), steps)
        for name, run in zip(found, (mst, dense(equal), dense(steps)), strict=True):
            found[name].append(look_at(run))
    return [row_of(name, some) for name, some in found.items()]


def row_of(name: str, found: list[Found]) -> Row:
    """Return the row of a method from its runs."""
    row: Row = {"method": name, "steps": [one.steps for one in found], "seeds": len(found), **LOSSES}
    row["kurtosis"] = round(statistics.fmean(one.kurtosis for one in found), 2)

    def add(what: str, values: list[float]) -> None:
        row[what] = round(statistics.fmean(values), 4)
        row[f"{what} range"] = round((max(values) - min(values)) / 2, 4)

    add("loss", [one.loss for one in found])
    for way in WAYS:
        for sparsity in SPARSITIES:
            add(f"lost {way} {sparsity}", [one.pruned[way, sparsity] - one.loss for one in found])
    return row


def table(rows: list[Row]) -> str:
    """Return the rows as tables of Markdown."""

    def cell(row: Row, what: str, sign: str = "") -> str:
        return f"{row[what]:{sign}.4f} ± {row[f'{what} range']:.4f}"

    lines = [["trained steps", "", *(", ".join(f"{steps:,}" for steps in row["steps"]) for row in rows)]]
    lines += [["loss unpruned", "", *(cell(row, "loss") for row in rows)]]
    for way in WAYS:
        lines += [
            [f"lost, {way}", f"{100 * s:.0f} %", *(cell(row, f"lost {way} {s}", "+") for row in rows)]
            for s in SPARSITIES
        ]
    lines += [["kurtosis", "", *(str(row["kurtosis"]) for row in rows)]]
    return grid(["", "pruned", *(row["method"] for row in rows)], lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench pruning", __doc__)
    parser.add_argument("--data", default="corpora/sympy-byte", metavar="DIR", help="corpus; created if missing")
    parser.add_argument("--runs", default="runs/pruning", type=Path, metavar="DIR", help="where the runs are kept")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="runs per method (default: %(default)s)")
    parser.add_argument("--steps", type=at_least(1), default=1000, help="of each run (default: %(default)s)")
    options = parse(parser, arguments)
    with aside():
        rows = measure(options.data, options.runs, options.seeds, options.steps)
    return show(options, rows, table(rows), {**machine(), "dtype": "float32"})

"""Measures whether grown weights disturb Adam, and whether seeding their second moment helps.

    mst bench grown_weights [--data DIR] [--json | --markdown]

A grown weight starts at 0 with m = v = 0, while Adam's bias correction has long ended: its first updates are
(1 - β₁)g/√((1 - β₂)g²) and more, several times the learning rate for β₂ = 0.999. `seeded` starts with v = max(g², mean
g² of the layer) of the growth gradient (mst.topology.grown_moments). The model is a GPT of 2 layers and width 64 on the
bytes of Python's library, 80 % sparse throughout, with a topology step every 40 steps that exchanges 30 % of the active
weights; all variants use the same batches.

    first updates   mean |Δw| of grown weights in the k-th step after they grew, in units of the learning rate
    bump            mean loss of the 5 steps after a topology step minus that of the 5 before, in the second half
    final loss      mean over the last 50 steps
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from mst_scale.comm.parser import at_least

from .machine import machine
from .page import LOSSES, Row, aside, command_line, grid, parse, show

INTERVAL, WARM, RATE = 40, 100, 3e-3


def train(sampler: Any, grown_moments: str, beta2: float, steps: int) -> Row:
    """Train one run and return its row."""
    import mst_scale
    from mst_scale.config import ModelConfig
    from mst_scale.models.gpt import GPT

    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=2, n_head=4, n_embd=64, seq_length=128, vocab_size=257, vocab_multiple=1))
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, beta2], "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "steps_per_print": 2**31,
        "training": {"steps": steps},
        "mst": {
            "method": "sparse",
            "sparsity": {"max": 0.8},
            "topology": {"interval": INTERVAL, "update_schedule": "constant", "grown_moments": grown_moments},
        },
    }
    engine: Any = mst_scale.initialize(model=model, config=config)[0]
    losses: list[float] = []
    sizes: dict[int, list[float]] = {k: [] for k in range(1, 6)}
    grown: dict[int, torch.Tensor] = {}
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM)
        controller = engine.mst
        before = {i: controller.store.weight(i)[where].clone() for i, where in grown.items()}
        flags = [mask.flags() for mask in controller.masks]
        loss = engine(*sampler.batch(step, range(16)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        age = step + 1 - controller.changed_at
        if before and age in sizes and step > steps // 2:
            moved = [(controller.store.weight(i)[where] - before[i]).abs() for i, where in grown.items()]
            sizes[age].append(float(torch.cat(moved).mean()) / RATE)
        if age == 0:
            new = [mask.flags() & ~old for mask, old in zip(controller.masks, flags, strict=True)]
            grown = {i: where.nonzero().view(-1) for i, where in enumerate(new)}
    at = [s for s in range(INTERVAL, steps - 5, INTERVAL) if s > steps // 2]
    bumps = [statistics.fmean(losses[s : s + 5]) - statistics.fmean(losses[s - 5 : s]) for s in at]
    return {
        "beta2": beta2,
        "grown_moments": grown_moments,
        "first_updates": [round(statistics.fmean(sizes[k]), 3) for k in sizes],
        "bump": round(statistics.fmean(bumps), 4),
        "bump_error": round(statistics.stdev(bumps) / len(bumps) ** 0.5, 4),
        "final_loss": round(statistics.fmean(losses[-50:]), 4),
        "steps": steps,
        **LOSSES,
    }


def run(data: str, steps: int) -> list[Row]:
    """Measure and return all rows."""
    from mst_scale import comm
    from mst_scale.data.corpus import open_tokens
    from mst_scale.data.prepare import prepare
    from mst_scale.data.recipe import Recipe
    from mst_scale.data.sampler import Sampler

    comm.init()
    prepare(Recipe("stdlib", "byte"), data)
    sampler = Sampler(open_tokens(data, "train"), 128, seed=1)
    return [train(sampler, how, beta2, steps) for beta2 in (0.95, 0.999) for how in ("zero", "seeded")]


def table(rows: list[Row]) -> str:
    """Return the rows as tables of Markdown."""
    lines = []
    for r in rows:
        updates = ", ".join(f"{u:.2f}" for u in r["first_updates"])
        bump = f"{r['bump']:+.4f} ± {r['bump_error']:.4f}"
        lines.append([r["beta2"], r["grown_moments"], updates, bump, f"{r['final_loss']:.4f}"])
    head = ["β₂", "v of grown weights", "first updates 1 … 5 (× learning rate)", "bump", "final loss"]
    return grid(head, lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench grown_weights", __doc__)
    parser.add_argument("--data", default="corpora/stdlib-byte", metavar="DIR", help="corpus; created if missing")
    parser.add_argument("--steps", type=at_least(200), default=1600, help="of each run (default: %(default)s)")
    options = parse(parser, arguments)
    with aside():
        rows = run(options.data, options.steps)
    return show(options, rows, table(rows), {**machine(), "dtype": "float32"})

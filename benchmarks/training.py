"""Measures what our training loop and the masks add to a bare DeepSpeed step.

    mst bench training [--ranks N] [--json | --markdown]

    loop      one step of `mst_scale.pretrain` (sampling, learning rate, votes, FLOP ledger, metrics every 10 steps)
              compared with a bare forward/backward/step on the same engine with prepared batches
    masking   an ordinary step at 96 % sparsity (masked dense compute) compared with the same DeepSpeed run without MST
    topology  a topology step's extra time, divided by the 100 steps of an interval; where layers skip masked weights it
              also computes the dense weight gradients that growth needs (`mst bench step` shows that)
    drift     one drift check of all masks, divided by the 1,000 steps between two checks

Steps of the two runs alternate, so that changes of the clock or of the machine's load affect both; `ours_ms` and
`baseline_ms` are medians, ranges the middle half. `overhead` is the relative increase of the baseline's step time: the
median over pairs of consecutive steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mst_scale.comm.parser import at_least

from .local_ranks import run_on
from .machine import machine
from .page import Row, aside, command_line, grid, parse, show, with_range
from .timing import in_rounds, middle_half, seconds_of, versus

ASKED = {"loop": 0.02, "masking": 0.02, "topology": 0.01, "drift": 0.001}
# GPT-2 small's widths and its whole head; 4 of 12 layers, so that two engines fit into a few GB
MASKED_MODEL: dict[str, Any] = {"n_layer": 4, "n_head": 12, "n_embd": 768, "seq_length": 1024, "vocab_size": 50257}
LOOP_MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "seq_length": 256, "vocab_size": 257}


def config(model: dict[str, Any], ranks: int, sequences: int, **blocks: Any) -> dict[str, Any]:
    """Return the DeepSpeed config of a side."""
    return {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": 1,
        "train_batch_size": sequences * ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "tensorboard": {"enabled": False},
        "model": model,
        **blocks,
    }


def build_engine(model: dict[str, Any], ranks: int, **blocks: Any) -> Any:
    """Return an engine that trains a model on one sequence per rank and step."""
    import mst_scale
    from mst_scale.config import ModelConfig
    from mst_scale.models.gpt import GPT

    torch.manual_seed(0)
    raw = config(model, ranks, 1, training={"steps": 10**6}, **blocks)
    return mst_scale.initialize(model=GPT(ModelConfig(**model)), config=raw)[0]


def take_step(engine: Any, tokens: torch.Tensor) -> None:
    """Take one optimizer step on a single micro-batch."""
    engine.backward(engine(tokens, tokens))
    engine.step()


def write_random_walk(folder: Path, tokens: int, vocabulary: int) -> Path:
    """Write a corpus of ids that a model can predict after a few steps, unless it is there; return the folder."""
    if not (folder / "val.bin").exists():
        folder.mkdir(parents=True, exist_ok=True)
        walk = (np.cumsum(np.random.default_rng(5).integers(0, 3, tokens)) % vocabulary).astype(np.uint16)
        walk.tofile(folder / "train.bin")
        walk[: tokens // 10].tofile(folder / "val.bin")
    return folder


def loop(ranks: Any, rounds: int) -> Row:
    """The demo's model (0.8 M weights, 8 × 256 tokens per rank): a step so short that every extra shows."""
    from mst_scale.config import load
    from mst_scale.pretrain.prepare import prepare
    from mst_scale.pretrain.training_loop import Run

    folder = Path(ranks.on_first(lambda: tempfile.mkdtemp(prefix="mst-bench-")))
    if ranks.first:
        for split in ("train", "val"):
            (np.arange(200_000) * 7919 % 257).astype(np.uint16).tofile(folder / f"{split}.bin")
    ranks.any(False)  # the files are there
    training = {"steps": 10**7, "log_every": 10, "eval_every": 0, "save_every": 0, "warmup": 10}
    raw = config(LOOP_MODEL, ranks.world_size, 8, training=training, data={"dir": str(folder)})
    run = Run(prepare(load(raw), folder / "run", ranks))
    run.record.line.out = open(os.devnull, "w")  # noqa: SIM115 (lives as long as the run)
    tokens, targets = run.micro_batches.read(run.micro_batches.train, 0, ranks.rank)

    def ours() -> None:
        for _ in range(10):  # as many as lie between two logged rows
            run.advance()

    def bare() -> None:
        for _ in range(10):
            loss = run.engine(tokens, targets)
            run.engine.backward(loss)
            run.engine.step()

    mine, theirs = in_rounds([ours, bare], rounds)
    return row("loop", "bare forward/backward/step, same engine", mine, theirs, steps=10)


def masked(ranks: Any, rounds: int) -> list[Row]:
    """Compare steps with and without masks, topology steps and drift checks."""
    # ultra-sparse from the first step on; attention dense on both sides, to see the masks alone
    mst = {
        "method": "sparse",
        "sparsity": {"max": 0.96},
        "topology": {"interval": 100, "check_every": 0, "update_schedule": "constant"},
        "attention": {"pattern": "dense"},
        "compute": {"backend": "dense"},
    }

    sparse, dense = (build_engine(MASKED_MODEL, ranks.world_size, **blocks) for blocks in ({"mst": mst}, {}))
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(50257, (1, 1024), generator=generator)

    def step(which: Any) -> Callable[[], None]:
        return partial(take_step, which, tokens)

    ordinary = in_rounds([step(sparse), step(dense)], rounds)
    rows = [row("masking", "the same DeepSpeed run without MST", ordinary[0], ordinary[1])]
    controller = sparse.mst
    is_due = type(controller.schedule).is_topology_step
    topology: list[float] = []
    plain: list[float] = []
    for _ in range(max(3, rounds // 3)):
        for due, kept in ((True, topology), (False, plain)):
            type(controller.schedule).is_topology_step = lambda self, s, due=due: due
            controller.compute._ask_for_dense_gradients()
            kept.append(seconds_of(step(sparse)))
    type(controller.schedule).is_topology_step = is_due
    extra = [a - b for a, b in zip(topology, plain, strict=True)]
    share = statistics.median(extra) / 100 / statistics.median(ordinary[1])
    found = row("topology", "an ordinary step of the same run", topology, plain)
    found.update(overhead=share, note="extra time of a topology step / 100 / step time without MST")
    checks, steps = in_rounds([controller.check_drift, step(sparse)], max(3, rounds // 3))
    check = row("drift", "an ordinary step of the same run", checks, steps)
    check.update(overhead=statistics.median(checks) / 1_000 / statistics.median(steps))
    return [*rows, found, check]


def row(what: str, baseline: str, ours: list[float], theirs: list[float], steps: int = 1) -> Row:
    """Return the row of a comparison."""
    pairs = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    mine, other = ([1e3 * seconds / steps for seconds in times] for times in (ours, theirs))
    return {
        "what": what,
        **versus(mine, baseline, other, digits=2),
        "speedup": round(statistics.median(other) / statistics.median(mine), 4),
        "overhead": statistics.median(pairs),
        "overhead_range": [round(q, 4) for q in middle_half(pairs)],
        "asked": ASKED[what],
        "pairs": len(pairs),
    }


def here(options: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """What one of the ranks finds."""
    world = int(os.environ["WORLD_SIZE"])
    threads = max(1, options.threads // world)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    with aside():
        from mst_scale import comm

        ranks = comm.init()
        rows = [loop(ranks, options.rounds * 3), *masked(ranks, options.rounds)]
        ranks.leave()
    return machine(threads), [{**found, "ranks": world} for found in rows]


def table(rows: list[Row]) -> str:
    """Return the rows as tables of Markdown."""
    head = ["what", "ranks", "ours ms (middle half)", "baseline", "baseline ms (middle half)", "we add", "asked"]
    lines = []
    for r in rows:
        ours, theirs = (with_range(r, who) for who in ("ours", "baseline"))
        low, high = r["overhead_range"]
        spread = f" ({low:+.2%} … {high:+.2%})" if r["what"] in ("loop", "masking") else ""
        adds = f"{r['overhead']:+.2%}{spread}" if r["what"] != "drift" else f"{r['overhead']:+.4%}"
        lines.append([r["what"], r["ranks"], ours, r["baseline"], theirs, adds, f"≤ {r['asked']:.1%}"])
    return grid(head, lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench training", __doc__)
    parser.add_argument("--ranks", type=at_least(1), default=1, help="processes (default: %(default)s)")
    parser.add_argument("--rounds", type=at_least(2), default=9, help="pairs of stretches (default: %(default)s)")
    parser.add_argument(
        "--threads", type=at_least(1), default=os.cpu_count() or 1, help="CPU threads, shared by the ranks"
    )
    options = parse(parser, arguments)
    about, rows = run_on(options.ranks, here, options)
    return show(options, rows, table(rows), about)

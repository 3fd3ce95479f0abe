"""Measures the time and the bytes sent of one topology step, compared with the usual implementations.

    mst bench topology [--ranks 1 2] [--shapes gpt2 gpt3-1.3b] [--rounds 5] [--json | --markdown]

One Mixed-Growing step in the middle of the ultra phase (96 % sparse, ζ = 0.3, R = 0.25: prune, grow by gradient, grow
at random, mean g² per layer) on all matrices of a GPT, tied head included, from live float32 weights and gradients.

    naive        as in public codebases: all-reduces the scores, sorts every matrix with `topk` to prune and again to
                 grow, permutes the candidates for the random part, replicates masks and weights
    kthvalue     one process: `kthvalue` of the candidates' scores and one comparison, per matrix; the random part by
                 rejection. Ties are broken arbitrarily; weights are not sharded

Runs alternate and medians are compared; masks are restored before each run, outside the timing. With 2 ranks each holds
half of every matrix (ours) or all of it (naive), the ranks divide the threads, and the slower rank's time counts;
ranges are minimum and maximum. Bytes sent are counted: a ring all-reduce sends 2(R-1)/R times its payload for any R;
`many` is the limit for many ranks. A load above the number of cores means that other programs ran at the same time. Not
measured: GPUs, the time of more ranks than these.

The 1.3B shapes measure the bytes and how the time grows with the weights. Their matrices have their real sizes, but all
weights share one buffer and all gradients another, so that they fit a small machine.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mst_scale.comm.exchange import Exchange
from mst_scale.comm.parser import at_least

from .local_ranks import run_on
from .machine import machine
from .page import Row, command_line, grid, parse, show, with_range
from .timing import Run, ends, in_rounds, longest, seconds_of, versus
from .topology_ways import SHAPES, State, kthvalue, naive, ours

NAIVE, KTHVALUE = "scores all-reduced, full topk per matrix", "kthvalue + compare per matrix"
MASKED_FILL = "masked_fill_ with a mask of one byte per weight"
TIMED_AGAINST_BASELINES = ("gpt2",)
STAGES = {
    "peak_keys": "largest score, NaN check",
    "_sampled_brackets": "sample",
    "_split": "one pass over the scores",
    "_refine": "refine the lists",
    "_split_places": "random order",
    "mean_squares": "mean g²",
}


def profile(state: State, exchange: Exchange) -> dict[str, float]:
    """Percent of one step's time by stage."""
    profiler = cProfile.Profile()
    profiler.runcall(ours, state, exchange)
    stats = pstats.Stats(profiler)
    whole = stats.total_tt  # type: ignore[attr-defined]
    found = {STAGES[name]: times[3] for (_, _, name), times in stats.stats.items() if name in STAGES}  # type: ignore[attr-defined]
    found["masks and counts"] = whole - sum(found.values())
    return {stage: round(100 * seconds / whole, 1) for stage, seconds in found.items()}


def alternate(
    runs: Sequence[Run], before: Callable[[], None], rounds: int, group: dist.ProcessGroup | None
) -> list[list[float]]:
    """Milliseconds of the slowest rank of a group, or of this process alone, every run in turn.

    `before` is not timed.
    """

    def clock(run: Run) -> float:
        before()
        if group is None:
            return 1e3 * seconds_of(run)
        dist.barrier(group)
        return 1e3 * longest(seconds_of(run), group)

    return in_rounds(runs, rounds, clock)


def measure(rank: int, ranks: int, name: str, rounds: int, threads: int) -> list[Row]:
    """The rows of one model on one number of ranks."""
    torch.set_num_threads(max(1, threads // ranks))
    group = dist.group.WORLD if ranks > 1 else None
    compare = name in TIMED_AGAINST_BASELINES
    state = State(SHAPES[name], rank, ranks, shared=not compare)
    exchange = Exchange(group)
    ours(state, exchange)
    payload, sent = exchange.traffic.payload, exchange.traffic.sent_per_rank
    state.restore()
    stages = profile(state, Exchange(group))
    state.restore()

    baselines: dict[str, Callable[[], object]] = {}
    if compare:
        baselines[NAIVE] = lambda: naive(state, group)
        if ranks == 1:
            baselines[KTHVALUE] = lambda: kthvalue(state)
            for result in (naive(state, group), kthvalue(state)):
                assert all(abs(int(m.sum()) - t) <= t // 100 for m, t in zip(result, state.targets, strict=True))
    case = {
        "what": "topology step",
        "shapes": name,
        "matrices": len(state.layers),
        "weights": sum(layer.mask.numel for layer in state.layers),
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
        "all_reduces": exchange.traffic.calls,
        "bytes_sent_per_rank": {str(r): sent(r) for r in (1, 2, 4, 8)} | {"many": 2 * payload},
        "percent_of_time": stages,
        "mask_bytes_per_rank": sum(bits.numel() for bits in state.bits),
    }
    rows = []
    for baseline, run in baselines.items() or [("", None)]:
        runs: list[Callable[[], object]] = [lambda: ours(state, Exchange(group))]
        few = min(rounds, 2)  # for bytes, mostly
        mine, *theirs = alternate(runs if run is None else [*runs, run], state.restore, rounds if run else few, group)
        if theirs:
            rows.append({**case, **versus(mine, baseline, theirs[0], ends)})
        else:
            why = "baselines not run at this size: they need all weights and gradients of one machine at once"
            alone = {"ours_ms": round(statistics.median(mine), 3), "ours_range": [round(end, 3) for end in ends(mine)]}
            rows.append({**case, **alone, "baseline": NAIVE, "baseline_ms": None, "speedup": None, "why": why})
    if compare and ranks == 1:
        rows.append({**case, **masking(state, rounds)})
    return rows


def masking(state: State, rounds: int) -> Row:
    """What every other step pays: the gradients of all matrices masked once."""

    def packed() -> None:
        for layer, gradient in zip(state.layers, state.gradients, strict=True):
            layer.mask.retain_(gradient)

    dead = [~mask for mask in state.masks]

    def unpacked() -> None:
        for mask, gradient in zip(dead, state.gradients, strict=True):
            gradient.masked_fill_(mask, 0.0)

    mine, theirs = alternate([packed, unpacked], lambda: None, 2 * rounds, None)
    return {"what": "masking the gradients once", **versus(mine, MASKED_FILL, theirs, ends)}


def here(name: str, rounds: int, threads: int) -> list[Row]:
    """What one of the ranks finds."""
    dist.init_process_group("gloo")
    rows = measure(dist.get_rank(), dist.get_world_size(), name, rounds, threads)
    dist.barrier()
    dist.destroy_process_group()
    return rows


def run(
    ranks: Sequence[int] = (1, 2), shapes: Sequence[str] = tuple(SHAPES), rounds: int = 5, threads: int = 2
) -> list[Row]:
    """All rows; each number of ranks in processes of its own."""
    rows: list[Row] = []
    for name in shapes:
        for count in ranks:
            if count == 1 or name in TIMED_AGAINST_BASELINES:
                rows += run_on(count, here, name, rounds, threads)
    return rows


# --- presentation ---


def table(rows: list[Row]) -> str:
    """Return the rows as tables of Markdown."""
    lines = []
    for row in rows:
        lines.append([
            row["shapes"], f"{row['weights'] / 1e6:.1f} M", f"{row['ranks']} × {row['threads_per_rank']}",
            f"{row['mask_bytes_per_rank'] / 1e6:.2f}", row["what"], with_range(row, "ours", ",.1f"), row["baseline"],
            "–" if row["baseline_ms"] is None else with_range(row, "baseline", ",.1f"),
            row["why"] if row["speedup"] is None else f"**{row['speedup']}**",
        ])  # fmt: skip
    head = ["shapes", "weights", "ranks × threads", "masks, MB per rank", "what"]
    parts = [grid([*head, "ours ms (range)", "baseline", "baseline ms (range)", "speed-up"], lines)]
    lines = []
    for row in {row["shapes"]: row for row in rows if row["what"] == "topology step"}.values():
        sent = row["bytes_sent_per_rank"]
        kilobytes = (f"{sent[r] / 1e3:.0f}" for r in ("2", "4", "8", "many"))
        share = 100 * sent["many"] / (4 * row["weights"])
        lines.append([row["shapes"], row["matrices"], row["all_reduces"], *kilobytes, f"{share:.3f} %"])
    sizes = ["kB sent per rank: 2 ranks", "4", "8", "many"]
    parts.append(grid(["shapes", "matrices", "all-reduces", *sizes, "of a gather of the scores"], lines))
    profiles = [row for row in rows if row["what"] == "topology step" and row["ranks"] == 1]
    for row in {row["shapes"]: row for row in profiles}.values():
        stages = ", ".join(f"{stage} {percent} %" for stage, percent in row["percent_of_time"].items())
        parts.append(f"Parts of the time on one rank, {row['shapes']}: {stages}.")
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench topology", __doc__)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2], help="processes (default: 1 2)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=sorted(SHAPES),
        default=list(SHAPES),
        help="matrices of which models (default: all)",
    )
    parser.add_argument("--rounds", type=at_least(2), default=5, help="pairs of steps (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=2, help="CPU threads, shared by the ranks")
    options = parse(parser, arguments)
    about = machine(options.threads)
    rows = run(options.ranks, options.shapes, options.rounds, options.threads)
    return show(options, rows, table(rows), about)

"""What does one topology step cost, in time and in bytes sent, against the ways it is usually done?

    mst bench topology [--ranks 1 2] [--shapes gpt2 gpt3-1.3b] [--rounds 5] [--json | --markdown]

One Mixed-Growing step in the middle of the ultra phase (96 % sparse, ζ = 0.3, R = 0.25: prune, grow by gradient, grow
at random, mean g² per layer) on all matrices of a GPT, tied head included, from live float32 weights and gradients.

    naive        as the public codebases do: scores all-reduced, a full sort of every matrix by `topk` for the prune and
                 again for the growth, a permutation of the candidates for the random part, masks and weights replicated
    kthvalue     one process: `kthvalue` of the candidates' scores and one comparison, per matrix; the random part by
                 rejection. It breaks ties as they fall and has no shards

Runs alternate and medians are compared; masks are put back before each run, outside the timing. With 2 ranks each holds
half of every matrix (ours) or all of it (naive), the threads are shared out, and the slower rank's time counts. Bytes
sent are counted: a ring all-reduce sends 2(R-1)/R times its payload, whatever R is; `many` is the limit.

The 1.3B shapes are there for the bytes and to see that the time grows with the weights: their matrices have their real
sizes, but share one buffer of scores each for weights and for gradients, so that they fit a small machine.
"""

from __future__ import annotations

import cProfile
import json
import math
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from benchmarks.machine import machine
from mst_scale.arguments import Parser
from mst_scale.mixed_growing.distribution import active_counts, plan
from mst_scale.mixed_growing.evolve import Layer, evolve
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import POLICIES

SPARSITY, ZETA, RANDOM_SHARE = 0.96, 0.3, POLICIES["mst"].random_share
CPU = torch.device("cpu")
NAIVE, KTHVALUE = "scores all-reduced, full topk per matrix", "kthvalue + compare per matrix"
MASKED_FILL = "masked_fill_ with a mask of one byte per weight"
Row = dict[str, Any]
Shape = tuple[int, int]


def gpt(layers: int, width: int) -> list[Shape]:
    """Weight matrices of a GPT-2: qkv, projection, up, down per block, and the tied head."""
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return block * layers + [(50304, width)]


SHAPES = {"gpt2": gpt(12, 768), "gpt3-1.3b": gpt(24, 2048)}
TIMED_AGAINST_RIVALS = ("gpt2",)


class State:
    """The matrices of one rank: whole ones for the rivals, slices of the same memory for us."""

    def __init__(self, shapes: list[Shape], rank: int, ranks: int, shared: bool):
        sizes = [math.prod(shape) for shape in shapes]
        self.targets = active_counts(shapes, SPARSITY)
        generator = torch.Generator().manual_seed(0)

        def buffers(scale: float) -> list[Tensor]:
            if shared:
                largest = torch.randn(max(sizes), generator=generator) * scale
                return [largest[:size] for size in sizes]
            return [torch.randn(size, generator=generator) * scale for size in sizes]

        def draw(size: int, target: int) -> Tensor:
            mask = torch.rand(size, generator=generator) < 1.2 * target / size
            alive = mask.nonzero().view(-1)
            mask[alive[torch.randperm(alive.numel(), generator=generator)[target:]]] = False
            return mask

        self.weights, self.gradients = buffers(0.02), buffers(1e-4)
        drawn: dict[Shape, Tensor] = {}
        self.masks: list[Tensor] = []
        self.layers: list[Layer] = []
        for i, (shape, size, target) in enumerate(zip(shapes, sizes, self.targets, strict=True)):
            if shared and shape in shapes[:i]:
                mask = drawn[shape]
            else:
                mask = drawn[shape] = draw(size, target)
            if not shared:
                self.weights[i].mul_(mask)
                self.masks.append(mask)
            begin, end = rank * size // ranks, (rank + 1) * size // ranks
            sharded = LayerMask(f"matrix{i}", shape, begin, end - begin, CPU)
            sharded.set_flags(mask[begin:end], target)
            self.layers.append(Layer(sharded, target, self.weights[i][begin:end], self.gradients[i][begin:end]))
        self.bits = [layer.mask.bits.clone() for layer in self.layers if layer.mask.bits is not None]

    def restore(self) -> None:
        """Back to the masks before the step."""
        for layer, bits in zip(self.layers, self.bits, strict=True):
            layer.mask.set_bits(bits.clone(), layer.target)


def ours(state: State, exchange: Exchange) -> None:
    evolve(
        state.layers, policy=POLICIES["mst"], update_fraction=ZETA, seed=0, step=50_000, exchange=exchange
    )  # fmt: skip


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


def naive(state: State, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Full sorts of replicated scores."""
    generator = torch.Generator().manual_seed(0)
    new = []
    for mask, weight, gradient, target in zip(state.masks, state.weights, state.gradients, state.targets, strict=True):
        counts = plan(mask.numel(), target, target, ZETA, RANDOM_SHARE, True)
        drop, grow = weight.abs(), gradient.abs()
        if group is not None:
            dist.all_reduce(drop, group=group)
            dist.all_reduce(grow, group=group)
        drop.masked_fill_(~mask, -1)
        alive = torch.zeros_like(mask)
        alive[torch.topk(drop, mask.numel()).indices[: target - counts.prune]] = True
        order = torch.topk(grow.masked_fill_(alive, -1), mask.numel()).indices
        alive[order[: counts.by_score]] = True
        free = (~alive).nonzero().view(-1)
        alive[free[torch.randperm(free.numel(), generator=generator)[: counts.by_random]]] = True
        new.append(alive)
    return new


def kthvalue(state: State, group: None = None) -> list[Tensor]:
    """The k-th score of every matrix and a comparison; one process."""
    generator = torch.Generator().manual_seed(0)
    new = []
    for mask, weight, gradient, target in zip(state.masks, state.weights, state.gradients, state.targets, strict=True):
        size = mask.numel()
        counts = plan(size, target, target, ZETA, RANDOM_SHARE, True)
        at = mask.nonzero().view(-1)
        drop = weight[at].abs_()
        alive = mask.clone()
        alive[at[drop <= drop.kthvalue(counts.prune).values]] = False
        grow = gradient.abs().masked_fill_(alive, -1)
        alive |= grow >= grow.kthvalue(size - counts.by_score + 1).values
        drawn = torch.randint(size, (2 * counts.by_random + 100,), generator=generator)
        drawn = drawn[~alive[drawn]].unique()
        alive[drawn[torch.randperm(drawn.numel(), generator=generator)[: counts.by_random]]] = True
        gradient.square().mean()
        new.append(alive)
    return new


def alternate(
    runs: Sequence[Callable[[], object]], before: Callable[[], None], rounds: int, ranks: int
) -> list[list[float]]:
    """Milliseconds of the slowest rank, every run in turn, after one round to warm up."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for run, into in zip(runs, times, strict=True):
            before()
            if ranks > 1:
                dist.barrier()
            start = time.perf_counter()
            run()
            elapsed = torch.tensor(1e3 * (time.perf_counter() - start))
            if ranks > 1:
                dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            if turn:
                into.append(elapsed.item())
    return times


def measure(rank: int, ranks: int, name: str, rounds: int, threads: int) -> list[Row]:
    """The rows of one model on one number of ranks."""
    torch.set_num_threads(max(1, threads // ranks))
    group = dist.group.WORLD if ranks > 1 else None
    compare = name in TIMED_AGAINST_RIVALS
    state = State(SHAPES[name], rank, ranks, shared=not compare)
    exchange = Exchange(group)
    ours(state, exchange)
    payload = exchange.traffic.payload
    state.restore()
    stages = profile(state, Exchange(group))
    state.restore()

    rivals: dict[str, Callable[[], object]] = {}
    if compare:
        rivals[NAIVE] = lambda: naive(state, group)
        if ranks == 1:
            rivals[KTHVALUE] = lambda: kthvalue(state)
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
        "bytes_sent_per_rank": {str(r): 2 * (r - 1) * payload // r for r in (1, 2, 4, 8)} | {"many": 2 * payload},
        "percent_of_time": stages,
        "mask_bytes_per_rank": sum(bits.numel() for bits in state.bits),
    }
    rows = []
    for rival, run in rivals.items() or [("", None)]:
        runs: list[Callable[[], object]] = [lambda: ours(state, Exchange(group))]
        few = min(rounds, 2)  # for bytes, mostly
        mine, *theirs = alternate(runs if run is None else [*runs, run], state.restore, rounds if run else few, ranks)
        if theirs:
            rows.append({**case, **_versus(mine, rival, theirs[0])})
        else:
            why = "rivals not run at this size: they need all weights and gradients of one machine at once"
            median = round(statistics.median(mine), 3)
            rows.append({**case, "ours_ms": median, "ours_range": _ends(mine), "rival": NAIVE, "rival_ms": None,
                         "speedup": None, "why": why})  # fmt: skip
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

    mine, theirs = alternate([packed, unpacked], lambda: None, 2 * rounds, 1)
    return {"what": "masking the gradients once", **_versus(mine, MASKED_FILL, theirs)}


def _versus(mine: list[float], rival: str, theirs: list[float]) -> Row:
    a, b = statistics.median(mine), statistics.median(theirs)
    return {
        "ours_ms": round(a, 3),
        "ours_range": _ends(mine),
        "rival": rival,
        "rival_ms": round(b, 3),
        "rival_range": _ends(theirs),
        "speedup": round(b / a, 2),
        "rounds": len(mine),
    }


def _ends(times: list[float]) -> list[float]:
    return [round(min(times), 3), round(max(times), 3)]


def _worker(rank: int, ranks: int, rendezvous: str, name: str, rounds: int, threads: int, into: Any) -> None:  # noqa: PLR0917
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    rows = measure(rank, ranks, name, rounds, threads)
    if rank == 0:
        into.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def run(
    ranks: Sequence[int] = (1, 2), shapes: Sequence[str] = tuple(SHAPES), rounds: int = 5, threads: int = 2
) -> list[Row]:
    """All rows; each number of ranks in processes of its own."""
    rows: list[Row] = []
    for name in shapes:
        for count in ranks:
            if count > 1 and name not in TIMED_AGAINST_RIVALS:
                continue
            context = multiprocessing.get_context("spawn")
            into = context.Queue()
            with tempfile.TemporaryDirectory() as folder:
                arguments = (count, str(Path(folder) / "rendezvous"), name, rounds, threads, into)
                processes = multiprocessing.spawn(_worker, arguments, nprocs=count, join=False)
                while processes is not None and not processes.join(timeout=1):
                    pass
            rows += into.get()
    return rows


# --- presentation -----------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    lines = [
        "| shapes | weights | ranks × threads | masks, MB a rank | what | ours ms (range) | rival | rival ms (range) | "
        "speed-up |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        theirs = "–" if row["rival_ms"] is None else f"{row['rival_ms']:,.1f} ({_span(row['rival_range'])})"
        cells = (
            row["shapes"],
            f"{row['weights'] / 1e6:.1f} M",
            f"{row['ranks']} × {row['threads_per_rank']}",
            f"{row['mask_bytes_per_rank'] / 1e6:.2f}",
            row["what"],
            f"{row['ours_ms']:,.1f} ({_span(row['ours_range'])})",
            row["rival"],
            theirs,
            row["why"] if row["speedup"] is None else f"**{row['speedup']}**",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| shapes | matrices | all-reduces | kB sent per rank: 2 ranks | 4 | 8 | many | of a gather of the scores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in {row["shapes"]: row for row in rows if row["what"] == "topology step"}.values():
        sent = row["bytes_sent_per_rank"]
        kilobytes = " | ".join(f"{sent[r] / 1e3:.0f}" for r in ("2", "4", "8", "many"))
        share = 100 * sent["many"] / (4 * row["weights"])
        lines.append(f"| {row['shapes']} | {row['matrices']} | {row['all_reduces']} | {kilobytes} | {share:.3f} % |")
    profiles = [row for row in rows if row["what"] == "topology step" and row["ranks"] == 1]
    for row in {row["shapes"]: row for row in profiles}.values():
        stages = ", ".join(f"{stage} {percent} %" for stage, percent in row["percent_of_time"].items())
        lines += ["", f"Where the time goes on one rank, {row['shapes']}: {stages}."]
    return "\n".join(lines)


def _span(ends: list[float]) -> str:
    return f"{ends[0]:,.1f} – {ends[1]:,.1f}"


def markdown(about: dict[str, Any], rows: list[Row], command: str) -> str:
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    return (
        "# One topology step\n\n"
        f"Made by `{command}`; what is measured, and how, stands in `benchmarks/topology.py`.\n"
        f"{100 * SPARSITY:.0f} % sparse, ζ = {ZETA}, R = {RANDOM_SHARE}, float32 on CPU. Medians of alternating runs, "
        f"smallest and largest in brackets; a load above the number of cores: other work ran beside.\n\n"
        f"{facts}\n\n{table(rows)}\n\n"
        "Not measured: GPUs, more than 2 ranks (bytes for more are computed from the payload, which does not depend on "
        "the number of ranks).\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="mst bench topology", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, shared out among the ranks")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="for machines")
    output.add_argument("--markdown", action="store_true", help="the file in benchmarks/results")
    options = parser.parse_args(arguments)
    about = machine(options.threads)
    rows = run(options.ranks, options.shapes, options.rounds, options.threads)
    if options.json:
        print(json.dumps({"machine": about, "rows": rows}))
    elif options.markdown:
        given = f"--ranks {' '.join(map(str, options.ranks))} --shapes {' '.join(options.shapes)}"
        given += f" --rounds {options.rounds} --threads {options.threads}"
        print(markdown(about, rows, f"mst bench topology {given} --markdown"))
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

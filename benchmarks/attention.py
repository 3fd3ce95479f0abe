"""Compares Hybrid Sparse Attention with dense flash attention: speed, memory, and the number of pairs.

    mst bench attention [--device cpu|cuda|all] [--json | --markdown] [--quick]

Forward + backward of `attention(q, k, v, Pattern("strided", 256))` is compared with causal flash SDPA on the same
tensors, and forward with compiled FlexAttention with the same mask (which has no backward on CPU). There are 12 heads
of 64, and on CPU the batch is 1. The runs alternate in one process and medians are compared, so that a change of the
clock or other load affects both. `ceiling` is the number of dense causal pairs divided by ours: the speedup if a pair
takes as long as in flash attention. Rows that cannot be measured have a reason.

Peak memory is that of one forward + backward, including inputs and gradients: the resident set of a new process on CPU,
allocated bytes on CUDA.
"""

from __future__ import annotations

import functools
import importlib
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mst_scale.comm.parser import at_least
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, attention
from mst_scale.hybrid_sparse_attention.dispatch import choose

from . import memory
from .machine import machine
from .page import Row, command_line, grid, parse, show, unmeasured, with_range
from .timing import Run, for_seconds, versus

Compute = Callable[..., torch.Tensor]
HEADS, HEAD_DIM, STRIDE = 12, 64, 256
REPEATS = 10
SDPA, FLEX = "SDPA flash, causal", "FlexAttention, compiled, same mask"
CUDNN, FLASH3 = "SDPA cuDNN, causal", "FlashAttention-3, causal"
WINDOW, NATTEN = "flash-attn, its window alone", "NATTEN, its window alone"  # fewer pairs: no keys beyond the window
# (dtype, length) → the least speed-up over flash SDPA that is asked for on 2 AVX-512 cores
ASKED = {
    ("float32", 1024): 1.5,
    ("float32", 2048): 2.5,
    ("float32", 4096): 4.0,
    ("bfloat16", 1024): 1.0,
    ("bfloat16", 4096): 2.0,
}
LENGTHS = (1024, 2048, 4096, 8192, 16384)
CPU_CASES = [("float32", n) for n in LENGTHS] + [("bfloat16", n) for n in (1024, 2048, 4096)]
CUDA_CASES = [("bfloat16", n) for n in (1024, 2048, 4096, 8192, 16384, 32768)]


def alternate(runs: Sequence[Run], seconds: float, device: str) -> list[list[float]]:
    """Milliseconds of each run. On a GPU several in a row, as in a model: launches hide behind the kernels before."""
    repeats = 1 if device == "cpu" else REPEATS
    rows = [functools.partial(_repeated, run, repeats) for run in runs]
    found = for_seconds(rows, seconds, least=3, most=60, device=torch.device(device))
    return [[ms / repeats for ms in times] for times in found]


def _repeated(run: Run, repeats: int) -> None:
    for _ in range(repeats):
        run()


def shape(length: int, device: str) -> tuple[int, int, int, int]:
    """On a GPU the batch fills 16k tokens, so that short sequences occupy it too."""
    return 1 if device == "cpu" else max(1, 16384 // length), HEADS, length, HEAD_DIM


def tensors(dtype: str, length: int, device: str) -> list[torch.Tensor]:
    """q, k, v, dout."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(
            shape(length, device), dtype=getattr(torch, dtype), device=device, generator=generator
        ).requires_grad_(i < 3)
        for i in range(4)
    ]


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal flash attention of torch."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error rather than another kernel
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The fastest dense attention of torch on Hopper."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal FlashAttention-3, if it is installed."""
    flash_attn_interface: Any = importlib.import_module("flash_attn_interface")
    out = flash_attn_interface.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Hybrid Sparse Attention."""
    return attention(q, k, v, Pattern("strided", STRIDE))


def flex(pattern: Pattern, length: int, device: str) -> Callable[..., torch.Tensor]:
    """FlexAttention compiled for this pattern; 128-blocks without a pair are skipped."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def mask(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j <= i) & ((i - j < pattern.stride) | ((i - j) % pattern.stride == 0))

    blocks = create_block_mask(mask, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def flash_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """flash-attn restricted to the window, if it is installed."""
    flash_attn: Any = importlib.import_module("flash_attn")
    sides = (x.transpose(1, 2) for x in (q, k, v))
    out: torch.Tensor = flash_attn.flash_attn_func(*sides, causal=True, window_size=(STRIDE - 1, 0))
    return out.transpose(1, 2)


def natten_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """NATTEN restricted to the window, if it is installed."""
    natten: Any = importlib.import_module("natten")
    sides = (x.transpose(1, 2) for x in (q, k, v))
    out: torch.Tensor = natten.na1d(*sides, kernel_size=STRIDE, is_causal=True)
    return out.transpose(1, 2)


def both_ways(compute: Callable[..., torch.Tensor], q: Any, k: Any, v: Any, dout: torch.Tensor) -> Run:
    """Return a run of the forward and backward passes."""
    return lambda: torch.autograd.grad(compute(q, k, v), (q, k, v), dout)


def one_way(compute: Callable[..., torch.Tensor], q: Any, k: Any, v: Any) -> Run:
    """Return a run of the forward pass."""

    def run() -> object:
        with torch.no_grad():
            return compute(q, k, v)

    return run


def run(device: str = "all", seconds: float = 20.0, quick: bool = False) -> list[Row]:
    """All rows. `seconds` is the time for one comparison; `quick` leaves out what takes longer than a few of them."""
    rows: list[Row] = []
    if device in ("cpu", "all"):
        for dtype, length in CPU_CASES:
            if not (quick and length > 4096):
                rows += compare(dtype, length, "cpu", seconds)
        lengths = [n for n in LENGTHS if not (quick and n > 4096)]
        for backend in ("auto", "blocked"):
            rows += scaling("float32", lengths, 2 * seconds, backend)
        for dtype, length in (("float32", 4096), ("bfloat16", 4096)):
            rows.append(peak_memory(dtype, length, "cpu"))
    if device in ("cuda", "all"):
        for dtype, length in CUDA_CASES:
            if torch.cuda.is_available():
                rows += compare(dtype, length, "cuda", seconds)
                rows.append(peak_memory(dtype, length, "cuda"))
            else:
                case = _case("forward + backward", dtype, length, "cuda")
                rows += [{**case, **unmeasured(baseline)} for baseline in (SDPA, FLEX, WINDOW, NATTEN)]
    return rows


def _case(what: str, dtype: str, length: int, device: str) -> Row:
    pattern = Pattern("strided", STRIDE)
    return {
        "what": what,
        "device": device,
        "dtype": dtype,
        "length": length,
        "pattern": f"strided {STRIDE}",
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "backend": choose(device, getattr(torch, dtype), HEAD_DIM, dense=False, small=False)[0],
        "ceiling": round(Pattern().pairs(length) / pattern.pairs(length), 2),
    }


def compare(dtype: str, length: int, device: str, seconds: float, which: Sequence[str] = ()) -> list[Row]:
    """Both ways against flash SDPA (on a GPU all others too, or `which`); on a CPU, forward against FlexAttention."""
    pattern = Pattern("strided", STRIDE)
    q, k, v, dout = tensors(dtype, length, device)

    mine, theirs = alternate([both_ways(f, q, k, v, dout) for f in (ours, flash)], seconds, device)
    case = _case("forward + backward", dtype, length, device)
    row = {**case, **versus(mine, SDPA, theirs)}
    if device == "cpu" and (dtype, length) in ASKED:
        row["asked"] = ASKED[dtype, length]
    rows = [row]
    if device == "cuda":
        others = {
            CUDNN: lambda: cudnn,
            FLASH3: lambda: flash3,
            FLEX: lambda: flex(pattern, length, device),
            WINDOW: lambda: flash_window,
            NATTEN: lambda: natten_window,
        }
        for baseline, build in others.items():
            if which and baseline not in which:
                continue
            rows.append({**case, **against(baseline, build, lambda f: both_ways(f, q, k, v, dout), seconds, device)})
    elif length <= 4096:
        case = _case("forward", dtype, length, device)
        sides = [x.detach() for x in (q, k, v)]
        found = against(FLEX, lambda: flex(pattern, length, device), lambda f: one_way(f, *sides), seconds, device)
        rows.append({**case, **found})
    return rows


def against(
    baseline: str, build: Callable[[], Compute], way: Callable[[Compute], Run], seconds: float, device: str
) -> Row:
    """Ours against a baseline that may not be installed, or not run here."""
    try:
        mine, theirs = alternate([way(ours), way(build())], seconds, device)
    except Exception as error:  # whatever stops the baseline is reported in its row, and must not stop ours
        reason = (str(error).splitlines() or ["no message"])[0]
        return unmeasured(baseline, f"not measured: {type(error).__name__}: {reason[:160]}")
    return versus(mine, baseline, theirs)


def scaling(dtype: str, lengths: Sequence[int], seconds: float, backend: str = "auto") -> list[Row]:
    """Time per pair from length to length, in turns. The baseline is the cost per pair at the first length, so that a
    `speedup` of 1 / 1.5 or more in every row and between any two is the flatness that is asked for."""
    pattern = Pattern("strided", STRIDE)

    def chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, pattern, backend=backend)

    times = alternate([both_ways(chosen, *tensors(dtype, n, "cpu")) for n in lengths], seconds, "cpu")
    per_pair = [statistics.median(t) / pattern.pairs(n) for n, t in zip(lengths, times, strict=True)]
    rows = []
    for length, cost, taken in zip(lengths, per_pair, times, strict=True):
        expected = [per_pair[0] * pattern.pairs(length)]
        row = {
            **_case("time per pair" if backend == "auto" else f"time per pair, {backend}", dtype, length, "cpu"),
            **versus(taken, f"cost per pair at {lengths[0]}", expected),
        }
        rows.append({**row, "ns_per_pair": round(1e6 * cost / HEADS, 3), "spread_asked": 1.5})
    return rows


def peak_memory(dtype: str, length: int, device: str) -> Row:
    """Peak memory of a forward + backward in MiB, each in a process of its own on CPU."""
    ours, theirs = (memory.apart(_peak, name, dtype, length, device, device=device) for name in ("ours", "flash"))
    return {
        **_case("peak memory", dtype, length, device),
        **unmeasured(SDPA, "memory, not time"),
        "ours_mib": round(ours, 1),
        "baseline_mib": round(theirs, 1),
        "memory_ratio": round(ours / theirs, 3),
        "memory_asked": 1.2,
    }


def _step(name: str, dtype: str, length: int, device: str) -> None:
    both_ways(ours if name == "ours" else flash, *tensors(dtype, length, device))()


def _peak(name: str, dtype: str, length: int, device: str) -> float:
    if device == "cpu":
        _step(name, dtype, 512, device)  # libraries, thread pools and the compiled kernel are there before
    count = memory.peak_of(lambda: _step(name, dtype, length, device), device)
    if count is None:
        raise UserError("the peak of this process's memory cannot be read here: it takes Linux")
    return count / 2**20


# --- presentation ---


def flatness(rows: list[Row]) -> dict[str, float]:
    """Largest over smallest time per pair, by what was measured."""
    costs: dict[str, list[float]] = {}
    for row in rows:
        if "ns_per_pair" in row:
            costs.setdefault(row["what"], []).append(row["ns_per_pair"])
    return {what: max(found) / min(found) for what, found in costs.items() if len(found) > 1}


def table(rows: list[Row]) -> str:
    """Return the rows as tables of Markdown."""
    head = [
        "device", "dtype", "n", "what", "ours ms (middle half)", "baseline", "baseline ms (middle half)", "speed-up",
        "asked", "pair ceiling", "ns per pair",
    ]  # fmt: skip
    lines = []
    for row in rows:
        if row["speedup"] is not None:
            ours, theirs = (with_range(row, who, ".1f") for who in ("ours", "baseline"))
            last = [f"**{row['speedup']:.2f}**", row.get("asked", ""), row["ceiling"], row.get("ns_per_pair", "")]
        elif "memory_ratio" in row:
            ours, theirs = f"{row['ours_mib']} MiB", f"{row['baseline_mib']} MiB"
            last = [f"ratio **{row['memory_ratio']:.2f}**", f"≤ {row['memory_asked']}", "", ""]
        else:
            ours, theirs, last = "–", "–", [row["why"], "", row["ceiling"], ""]
        about = [row[name] for name in ("device", "dtype", "length", "what")]
        lines.append([*about, ours, row["baseline"], theirs, *last])
    text = [grid(head, lines)]
    for what, flat in flatness(rows).items():
        words = f"{what.capitalize()}, over the float32 rows on CPU"
        text.append(f"{words}: largest / smallest = **{flat:.2f}** (goal: at most 1.5).")
    return "\n\n".join(text)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench attention", __doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "all"), default="all", help="where to measure (default: all)"
    )
    parser.add_argument("--seconds", type=at_least(0.01), default=20.0, help="time for one comparison")
    parser.add_argument("--quick", action="store_true", help="lengths up to 4096")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (default: torch's choice)")
    options = parse(parser, arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    about = machine()
    rows = run(options.device, options.seconds, options.quick)
    about["load after"] = [round(x, 2) for x in os.getloadavg()]
    return show(options, rows, table(rows), about)

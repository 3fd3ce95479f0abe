"""Compiles every Triton kernel with every tile size for A100 and H100, and shows the compiler's statistics.

    mst bench compiled [--kernels NAME …] [--targets A100|H100 …] [--json | --markdown]

No GPU is needed or used, so there are no times. The dtype is bfloat16; attention has heads of 64 and 128, causal in
every part of a pattern, and its window also in both directions; blocks are 16 to 128. A row is one tile size: the most
registers, stack and shared memory of all its variants, and the fewest programs that a multiprocessor runs concurrently.
ptxas spills to the stack; tile sizes that spill are not used. Copies are the widths of the asynchronous copies to
shared memory in bytes: 16 for data, 4 for lists of block positions and for values per row.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from .ahead import KIB, TARGETS, Built, Target, build
from .page import Row, command_line, grid, parse, show, unmeasured

DIMS, SIDES = (64, 128), (16, 32, 64, 128)
WINDOW, RESIDUES, BLOCK, LAST = range(4)


@dataclass(frozen=True)
class Case:
    """A kernel as one launch would compile it."""

    kernel: str
    target: Target
    size: int  # of a head, of a block's side, or of a value in bytes
    tile: tuple[tuple[str, int], ...]
    warps: int
    stages: int
    constants: tuple[tuple[str, Any], ...]
    dtype: str = "bf16"

    def build(self) -> Built:
        """Compile the case."""
        makes = {"head": _attention, "side": _block, "bytes": _zeroing}
        return makes[self.size_name](self)

    @property
    def size_name(self) -> str:
        """What `size` is the size of."""
        if self.kernel == "_zero_inactive":
            return "bytes"
        return "head" if self.kernel in ("_forward", "_backward_queries", "_backward_keys") else "side"

    @property
    def line(self) -> tuple[Any, ...]:
        """Cases of one line differ in what is no choice."""
        return self.kernel, self.size, self.target.name, self.tile, self.warps, self.stages


# --- attention ---


def attention_cases(target: Target, kernel: str, dim: int) -> Iterator[Case]:
    """Every tile in every kind of launch: the parts of both patterns, in their order, and the dense pattern."""
    from mst_scale.hybrid_sparse_attention.tiles import tiles_of

    first_of = {WINDOW: False, RESIDUES: True, BLOCK: False, LAST: True}  # dk and dv go the other way round
    launches = [(part, first != (kernel == "_backward_keys")) for part, first in first_of.items()]
    launches.append((WINDOW, kernel != "_backward_keys"))  # dense; for dk and dv the window's is the same
    for tile in tiles_of(kernel, target.capability, torch.bfloat16, dim):
        kinds = [(part, first, True) for part, first in dict.fromkeys(launches)]
        for part, first, causal in (*kinds, (WINDOW, *launches[0][1:], False)):
            constants = {"PART": part, "FIRST": first, "CAUSAL": causal, "GROUP": 1, "SKIP": tile.skip}
            sizes = (("QUERIES", tile.queries), ("KEYS", tile.keys))
            yield Case(kernel, target, dim, sizes, tile.warps, tile.stages, tuple(constants.items()))


def _attention(case: Case) -> Built:
    from mst_scale.hybrid_sparse_attention import triton_kernel
    from mst_scale.hybrid_sparse_attention.tiles import width

    kernel = getattr(triton_kernel, case.kernel)
    types = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), f"*{case.dtype}")
    types |= dict.fromkeys(("tops", "totals", "delta"), "*fp32") | {"scale": "fp32"}
    constants = {"D": case.size, "WIDE": width(case.size), **dict(case.tile), **dict(case.constants)}
    aligned = ["n", "stride", "positions", *(x for x in kernel.arg_names if x.endswith(("_batch", "_head", "_row")))]
    return build(kernel, types, constants, case.target, aligned=aligned, warps=case.warps, stages=case.stages)


# --- blocks ---


def block_cases(target: Target, kernel: str, side: int) -> Iterator[Case]:
    """Every tile: y and dX, dW at once and in parts."""
    from mst_scale.sparse_linear.block import gradient_tiles, product_tiles, sum_warps

    if kernel == "_product":
        sizes = product_tiles(target.capability, side)
        kinds: list[dict[str, Any]] = [{"BIAS": True, "weight_input": 1}, {"BIAS": False, "weight_output": 1}]
        names: tuple[str, ...] = ("WIDTH", "TOKENS")
    elif kernel == "_weight_gradient":
        sizes, names = gradient_tiles(target.capability, side), ("TOKENS",)
        kinds = [{"SPLIT": True, "WIDTH": max(64, side)}, {"SPLIT": False, "WIDTH": max(64, side)}]
    else:
        sizes, names, kinds = [(sum_warps(side), 3)], (), [{"WIDTH": max(64, side)}]
    for (*tile, warps, stages), kind in itertools.product(sizes, kinds):
        yield Case(kernel, target, side, tuple(zip(names, tile, strict=True)), warps, stages, tuple(kind.items()))


def _block(case: Case) -> Built:
    from mst_scale.sparse_linear import block

    types = dict.fromkeys(("x", "weight", "bias", "y", "dy", "dw"), f"*{case.dtype}") | {"parts": "*fp32"}
    types |= dict.fromkeys(("begin", "others", "group_row", "group_number"), "*i32")
    constants = {"SIDE": case.size, **dict(case.tile), **dict(case.constants)}
    aligned = ("tokens", "per_split", "outputs", "inputs", "weight_output", "weight_input")
    kernel = getattr(block, case.kernel)
    return build(kernel, types, constants, case.target, aligned=aligned, warps=case.warps, stages=case.stages)


# --- masks ---


def zeroing_cases(target: Target, kernel: str, size: int) -> Iterator[Case]:
    """One tile for every size of a value."""
    from mst_scale.mixed_growing.zero_inactive import SPAN, WARPS

    dtype = {2: "bf16", 4: "fp32"}[size]
    yield Case(kernel, target, size, (("SPAN", SPAN),), WARPS, 3, (), dtype)


def _zeroing(case: Case) -> Built:
    from mst_scale.mixed_growing import zero_inactive

    types = {"values": f"*{case.dtype}", "bits": "*u8"}
    return build(zero_inactive._zero_inactive, types, dict(case.tile), case.target, warps=case.warps)


# --- all of them ---

KERNELS = {
    **dict.fromkeys(("_forward", "_backward_queries", "_backward_keys"), (attention_cases, DIMS)),
    **dict.fromkeys(("_product", "_weight_gradient", "_add_parts"), (block_cases, SIDES)),
    "_zero_inactive": (zeroing_cases, (2, 4)),
}


def cases(kernels: Iterable[str] = tuple(KERNELS), targets: Iterable[Target] = TARGETS) -> Iterator[Case]:
    """Yield every case of these kernels and targets."""
    for target, kernel in itertools.product(targets, kernels):
        make, sizes = KERNELS[kernel]
        for size in sizes:
            yield from make(target, kernel, size)


def rows(chosen: Iterable[Case]) -> list[Row]:
    """Compile these cases and return one row per line."""
    lines: dict[tuple[Any, ...], list[tuple[Case, Built]]] = {}
    for case in chosen:
        lines.setdefault(case.line, []).append((case, case.build()))
    return [_row(built) for built in lines.values()]


def _row(variants: list[tuple[Case, Built]]) -> Row:
    case, builds = variants[0][0], [built for _, built in variants]
    fewest = min(builds, key=lambda built: built.programs)
    return {
        "kernel": case.kernel.removeprefix("_"),
        case.size_name: case.size,
        "gpu": case.target.name,
        "tile": dict(case.tile),
        "warps": case.warps,
        "stages": case.stages,
        "registers": max(built.registers for built in builds),
        "stack": max(built.stack for built in builds),
        "shared_kib": round(max(built.shared for built in builds) / KIB, 1),
        "programs": fewest.programs,
        "limited_by": min(fewest.limits, key=lambda name: fewest.limits[name]),
        "instruction": "/".join(sorted({built.instruction for built in builds})),
        "copies": sorted({size for built in builds for size in built.copies}),
        "atomics": max(built.atomics for built in builds),
        "variants": len(builds),
        **unmeasured(None, "compiled, not run"),
    }


def table(found: Sequence[Row]) -> str:
    """Return the rows as tables of Markdown."""
    head = ["kernel", "of", "GPU", "tile", "warps, stages", "registers", "stack", "shared KiB"]
    head += ["programs (warps)", "limited by", "instruction", "copies"]
    lines = []
    for r in found:
        of = next(f"{name} {r[name]}" for name in ("head", "side", "bytes") if name in r)
        tile = " × ".join(map(str, r["tile"].values())) or "–"
        room = f"{r['programs']} ({r['programs'] * r['warps']})"
        copies = ", ".join(map(str, r["copies"])) or "–"
        cells = [r["kernel"], of, r["gpu"], tile, f"{r['warps']}, {r['stages']}", r["registers"], r["stack"]]
        lines.append([*cells, r["shared_kib"], room, r["limited_by"], r["instruction"], copies])
    return grid(head, lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench compiled", __doc__)
    names = {target.name: target for target in TARGETS}
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="(default: all)")
    parser.add_argument("--targets", nargs="+", choices=names, default=list(names), help="(default: all)")
    options = parse(parser, arguments)
    found = rows(cases(options.kernels, [names[name] for name in options.targets]))
    about = {"triton": version("triton"), "torch": torch.__version__, "python": platform.python_version()}
    return show(options, found, table(found), about)

"""Measures a step of the ultra-sparse phase on one GPU, its masks made of blocks, against the same run dense.

    mst bench step --device cuda [--configs gpt2_small gpt2_xl gpt3_6.7b] [--rounds 7] [--json | --markdown]

`mst bench step` for 124M, 1.5B and 6.7B parameters, as many of their layers as fit beside each other with both engines
(by the memory model of `mst plan`), in the ultra phase, with Triton's block kernels: blocks of 16 up to a width of
1600, of 32 above. Goals: 2.3× at the widths of 1.5B, 3× at those of 6.7B. Without a CUDA device every row says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mst_scale.distributed.parser import Parser, at_least

from .machine import machine
from .page import NO_DEVICE, Row, grid, outputs, tell


@dataclass(frozen=True)
class Shape:
    """A config, the side of its blocks, sequences a step, and the speed-up that is asked for."""

    config: str
    parameters: str
    block: int
    micro: int
    goal: float | None


SHAPES = {
    shape.config: shape
    for shape in (
        Shape("gpt2_small", "124M", 16, 8, None),
        Shape("gpt2_xl", "1.5B", 16, 8, 2.3),
        Shape("gpt3_6.7b", "6.7B", 32, 4, 3.0),
    )
}


def words(shape: Shape, rounds: int) -> list[str]:
    """The arguments of `mst bench step`."""
    settings = ["mst.compute.backend=block", f"mst.topology.granularity.block={shape.block}"]
    return [
        *("--config", shape.config, "--phases", "ultra", "--layers", "fit"),
        *("--micro", str(shape.micro), "--rounds", str(rounds)),
        *(word for setting in settings for word in ("--set", setting)),
    ]


def run(configs: Sequence[str], rounds: int, measure: Callable[[list[str]], Row]) -> list[Row]:
    """`measure` takes the words of `mst bench step` and returns what it finds."""
    import torch

    rows = []
    for shape in (SHAPES[name] for name in configs):
        row: Row = {"parameters": shape.parameters, "config": shape.config, "block": shape.block, "goal": shape.goal}
        if torch.cuda.is_available():
            found = measure(words(shape, rounds))
            row |= {**found["rows"][0], "model": found["setting"]["model"]}
        else:
            row |= {"ours_ms": None, "rival": "the same DeepSpeed run, dense", "rival_ms": None, "speedup": None}
            row["why"] = NO_DEVICE
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    head = ["parameters", "measured on", "block", "MST ms", "dense ms", "speed-up", "goal", "FLOPs ÷"]
    lines = []
    for r in rows:
        goal = "" if r["goal"] is None else f"{r['goal']}×"
        if r["speedup"] is None:
            figures = [r["why"], r["block"], "", "", "", goal, ""]
        else:
            times = f"{r['ours_ms']:,}", f"{r['rival_ms']:,}", f"**{r['speedup']}×**"
            figures = [r["model"], r["block"], *times, goal, r["flop_reduction"]]
        lines.append([r["parameters"], *figures])
    return grid(head, lines)


def main(arguments: Sequence[str], measure: Callable[[list[str]], Row]) -> int:
    parser = Parser(
        prog="mst bench step --device cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configs",
        nargs="+",
        choices=list(SHAPES),
        default=list(SHAPES),
        metavar="C",
        help=f"of {', '.join(SHAPES)} (default: all)",
    )
    parser.add_argument("--rounds", type=at_least(2), default=7, help="pairs of steps (7)")
    outputs(parser)
    options = parser.parse_args(arguments)
    rows, about = run(options.configs, options.rounds, measure), machine()
    command = f"mst bench step --device cuda --rounds {options.rounds}"
    tell(options, rows, table(rows), about=about, doc=__doc__, command=command)
    return 0

"""`mst plan`: what will a run on N GPUs take, before it is started?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mst_scale.plan.answer import Plan
    from mst_scale.plan.memory import Memory

ABOUT = """\
Memory per GPU by part at every ZeRO stage, whether the config fits, and the configuration to run it with.

The memory model is compared with the tensors of real DeepSpeed runs in tests/plan/. Peaks are those of data sheets."""

EXAMPLES = """\
examples:
  mst plan --config ds_configs/gpt3_13b.json --gpus 64 --gpu a100-80gb
  mst plan --config ds_configs/gpt3_175b.json --gpus 512 --gpu h100-80gb --json
"""


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "plan",
        help="memory, time and configuration on any number of GPUs",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--config", required=True, metavar="FILE", help="the experiment (ds_configs/*.json)")
    verb.add_argument("--gpus", required=True, type=int, metavar="N", help="how many, all of them data parallel")
    verb.add_argument(
        "--gpu", default="a100-80gb", metavar="NAME", help="a100-40gb, a100-80gb (default), h100-80gb, h200"
    )
    verb.add_argument("--method", metavar="M", help="dense, mst, rigl, …: overrides mst.method")
    verb.add_argument("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mst_scale.config import load
    from mst_scale.config.check import check
    from mst_scale.plan.answer import plan

    experiment = load(args.config, args.set, args.method)
    check(experiment)
    answer = plan(experiment, args.gpus, args.gpu)
    print(json.dumps(answer.to_dict()) if args.json else text(answer))
    return 0


def text(answer: Plan) -> str:
    from mst_scale.plan.answer import overrides

    gb = 1e9
    setting, best = answer.setting, answer.recommended
    head = (
        f"It fits: {answer.memory.needed / gb:.1f} of {answer.gpu.memory / gb:.0f} GB a GPU. "
        f"{answer.parameters / 1e9:.2f} B parameters on {setting.ranks:,} × {answer.gpu.name}, ZeRO-{setting.stage}, "
        f"micro-batch {setting.micro} × {setting.accumulation}."
    )
    rows = [["GB a GPU", "weights", "grads", "optimizer", "masks", "activ.", "buffers", "peak", "host", "fits"]]
    for choice in answer.stages:
        s, m = choice.setting, choice.memory
        mark = "this config" if s == setting else ""
        fits = "yes" if m.fits(answer.gpu) else "no"
        rows.append([f"ZeRO-{s.stage}{_offload(s.offload)}", *_cells(m), fits + (f" ← {mark}" if mark else "")])
    lines = [head, "", *_aligned(rows), ""]
    if best.setting == setting:
        lines.append("recommended: this config")
    else:
        lines.append("recommended: " + " ".join(overrides(best.setting, setting)))
    return "\n".join(lines)


def _offload(what: str) -> str:
    return {"none": "", "optimizer": " + opt. on host", "optimizer + parameters": " + all on host"}[what]


def _cells(m: Memory) -> list[str]:
    buffers = max(m.backward_buffers, m.step_buffers)
    parts = (m.weights, m.gradients, m.optimizer, m.masks, m.activations.total, buffers, m.needed, m.host)
    return [f"{part / 1e9:.1f}" for part in parts]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]]
        )
        for row in rows
    ]

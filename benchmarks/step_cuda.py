"""Compares a whole training step on one GPU with channels or blocks of weights with the strongest dense step.

    mst bench step --device cuda [--shapes 1.5B 6.7B] [--variants channels-80 …] [--micro-batches 8] [--json]

Two DeepSpeed engines take steps in turn on the same micro-batch of random tokens: the dense one with `torch.compile`
for its blocks and cuDNN's attention, and ours in the ultra-sparse phase of its schedule. Ours is measured both compiled
(if that works) and eager, and the faster of the two is used. The models have only some of their layers, and a
vocabulary reduced in proportion, so that embedding, head and loss take the same fraction of the step as in the whole
model. `--micro-batches` is the number per optimizer step: with fewer, the optimizer and ZeRO's copies, which are dense
in both engines, take a larger fraction.

    channels-80    whole neurons and channels of heads at 80 %: dense products of a fifth of the size
    blocksB-S      blocks of B × B weights at S % sparsity (Triton kernels)

Times are medians over rounds of several synchronized steps. `kernels` lists the time of each GPU kernel.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mst_scale.comm.parser import at_least

from .machine import machine
from .page import Row, aside, command_line, grid, parse, show, unmeasured, with_range
from .timing import in_rounds, middle_half, seconds_of, versus

MICRO_BATCHES = 10  # per round
BASELINE = "dense DeepSpeed bf16, torch.compile, cuDNN attention"
LISTED = 14  # kernels of a profile


@dataclass(frozen=True)
class Shape:
    """A config, how many of its layers are measured, sequences per micro-batch, and the speedup that is the goal."""

    parameters: str
    config: str
    layers: int
    micro: int
    goal: float | None


SHAPES = {
    shape.parameters: shape
    for shape in (
        Shape("6.7B", "gpt3_6.7b", 4, 4, 3.0),
        Shape("1.5B", "gpt2_xl", 8, 15, 2.3),
        Shape("124M", "gpt2_small", 12, 16, None),
    )
}
BLOCKS: dict[str, Any] = {
    "method": "mst",
    "topology": {"interval": 100, "update_fraction": 0.3, "random_ratio": 0.25},
    "compute": {"backend": "block"},
}
VARIANTS = ("channels-80", "blocks64-96", "blocks32-96", "blocks128-96", "blocks64-80")


def mst_block(variant: str) -> dict[str, Any]:
    """The "mst" block (and the recipe, if any) of a variant's config."""
    if variant == "channels-80":
        return {"recipe": "mst-channels"}
    side, sparsity = variant.removeprefix("blocks").split("-")
    topology = {**BLOCKS["topology"], "granularity": {"block": int(side)}}
    return {"mst": {**BLOCKS, "sparsity": {"max": int(sparsity) / 100}, "topology": topology}}


def constant(side: str) -> dict[str, Any]:
    """The "mst" block of a run that is 96 % sparse from the first step to the last: masked or compact; {} for dense."""
    if side == "dense":
        return {}
    return {
        "mst": {
            "method": "sparse",
            "sparsity": {"max": 0.96},
            "topology": {"interval": 1000, "check_every": 0},
            "targets": {"lm_head": True},
            "attention": {"pattern": "dense"},
            "compute": {"backend": "dense", "compact": "auto" if side == "compact" else "off"},
        }
    }


def experiment_of(shape: Shape, ours: dict[str, Any], micro_batches: int, tiny: bool) -> Any:
    """The config of one side: as the shipped one, with fewer layers and a vocabulary reduced in proportion."""
    from mst_scale.config import load
    from mst_scale.config.load import read

    whole = load(shape.config).model
    raw = {key: value for key, value in read(shape.config)[1].items() if key not in ("mst", "recipe", "tensorboard")}
    raw |= {
        "train_batch_size": shape.micro * micro_batches,
        "train_micro_batch_size_per_gpu": shape.micro,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 2**31,
        **ours,
    }
    rows = 64 * max(1, round(whole.padded_vocab * shape.layers / whole.n_layer / 64))
    raw["model"] = {**raw["model"], "n_layer": shape.layers, "vocab_size": rows}
    # torch's fused Adam is at hand; DeepSpeed's would be compiled first.
    optimizer = raw["optimizer"]
    raw["optimizer"] = {**optimizer, "params": {**optimizer["params"], "torch_adam": True, "fused": True}}
    if tiny:
        raw["bf16"] = {"enabled": False}
        raw["model"] = {"n_layer": 1, "n_embd": 64, "n_head": 2, "seq_length": 32, "vocab_size": 64}
        raw |= {"train_batch_size": micro_batches, "train_micro_batch_size_per_gpu": 1}
    return load(raw)


class Stepper:
    """One engine and its batch."""

    def __init__(self, experiment: Any, cudnn: bool):
        import mst_scale
        from mst_scale.models import build

        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with device:
            model: Any = build(experiment.model)
        self.cudnn = cudnn
        self.engine: Any = mst_scale.initialize(model=model, config=experiment)[0]
        micro, shape = experiment.deepspeed["train_micro_batch_size_per_gpu"], experiment.model
        tokens = torch.randint(shape.vocab_size, (2, micro, shape.seq_length), device=self.engine.device)
        self.tokens, self.targets = tokens[0].contiguous(), tokens[1].contiguous()
        self.layers, self.context, self.micro = shape.n_layer, shape.seq_length, micro
        self.micro_batches = experiment.deepspeed["gradient_accumulation_steps"]

    def compile(self) -> None:
        """Compile the model's blocks with torch.compile."""
        for block in self.engine.module.blocks:
            block.compile(dynamic=False)

    def steps(self, count: int) -> None:
        """Take optimizer steps."""
        with self._attention():
            for _ in range(count * self.micro_batches):
                self.engine.backward(self.engine(self.tokens, self.targets))
                self.engine.step()

    def _attention(self) -> contextlib.AbstractContextManager[Any]:
        if not self.cudnn:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)

    def close(self) -> None:
        """Free the engine and its memory."""
        self.engine.destroy()
        self.engine = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def enter_sparse_phase(stepper: Stepper, experiment: Any) -> int:
    """Take the masks to the middle of the sparsest phase by a real topology step. Returns that phase's step."""
    from mst_scale.flops.ledger import forecast

    mst = stepper.engine.mst
    phase = max(forecast(experiment).phases, key=lambda phase: mst.schedule.at(phase.start).sparsity)
    step = (phase.start + phase.stop) // 2
    step -= step % mst.schedule.interval
    stepper.engine.global_steps = step - 1
    mst.masks_replaced()
    stepper.steps(1)
    return step


def stay_at(stepper: Stepper, step: int) -> None:
    """The next steps are ordinary ones of this phase."""
    stepper.engine.global_steps = step
    stepper.engine.mst.state.settled = step


def described(shape: Shape, variant: str) -> Row:
    """Return what a row was measured on."""
    return {"variant": variant, "parameters": shape.parameters, "goal": shape.goal, "baseline": BASELINE}


def measure(shape: Shape, variant: str, dense: Stepper, *, compiled: bool, rounds: int, tiny: bool = False) -> Row:
    """A variant in turns with the dense engine."""
    experiment = experiment_of(shape, mst_block(variant), dense.micro_batches, tiny)
    row: Row = {**described(shape, variant), "compiled": compiled}
    stepper = Stepper(experiment, cudnn=False)
    try:
        stay_at(stepper, enter_sparse_phase(stepper, experiment))
        if compiled:
            stepper.compile()
        row |= compare(stepper, dense, rounds)
        row |= {"sparsity": round(stepper.engine.mst.sparsity, 4), "kernels": profile(stepper)}
        row["peak_bytes"] = peak(stepper)
    finally:
        stepper.close()
    return row


def compare(ours: Stepper, dense: Stepper, rounds: int) -> Row:
    """Medians of a step of each, in turns; both have taken the steps that compile and tune them."""
    ours.steps(2)
    device, steps = ours.engine.device, max(1, MICRO_BATCHES // ours.micro_batches)
    runs = [functools.partial(side.steps, steps) for side in (ours, dense)]
    mine, theirs = in_rounds(runs, rounds, lambda run: 1e3 * seconds_of(run, device) / steps)
    tokens = ours.micro * ours.context
    return {
        "model": f"{ours.layers} layers, {ours.micro_batches} × {tokens:,} tokens per step",
        "micro_batches": ours.micro_batches,
        **versus(mine, BASELINE, theirs, digits=2),
        "speedup": round(statistics.median(theirs) / statistics.median(mine), 3),
    }


def peak(stepper: Stepper) -> int | None:
    """Return the peak memory of a step, in bytes."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    stepper.steps(1)
    return int(torch.cuda.max_memory_allocated())


def peak_beyond(stepper: Stepper) -> int | None:
    """Return how much more memory a step takes at its peak than is allocated before it, in bytes."""
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    found = peak(stepper)
    return None if found is None else found - before


def update_ms(stepper: Stepper) -> float:
    """Return the time of DeepSpeed's step: gradient norm, clipping, masking, update and casts."""
    with stepper._attention():
        for _ in range(stepper.micro_batches - 1):
            stepper.engine.backward(stepper.engine(stepper.tokens, stepper.targets))
            stepper.engine.step()
        stepper.engine.backward(stepper.engine(stepper.tokens, stepper.targets))
        return 1e3 * seconds_of(stepper.engine.step, stepper.engine.device)


def spread(times: Sequence[float]) -> list[float]:
    """Return the median and the ends of the middle half."""
    return [round(ms, 3) for ms in (statistics.median(times), *middle_half(times))]


def profile(stepper: Stepper) -> list[list[Any]]:
    """Milliseconds per step of the kernels that take longest, and how often each is launched per step."""
    if not torch.cuda.is_available():
        return []
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        stepper.steps(2)
        torch.cuda.synchronize()
    rows = [
        [one.key[:90], round(one.self_device_time_total / 2e3, 3), one.count / 2]
        for one in found.key_averages()
        if one.self_device_time_total > 0
    ]
    rows.sort(key=lambda row: -row[1])
    rest = sum(row[1] for row in rows[LISTED:])
    return [*rows[:LISTED], ["all others", round(rest, 3), sum(row[2] for row in rows[LISTED:])]]


def ready_stepper(shape: Shape, ours: dict[str, Any], micro_batches: int, tiny: bool = False) -> Stepper:
    """One side, after the steps that compile and tune it; the baseline if `ours` is empty."""
    stepper = Stepper(experiment_of(shape, ours, micro_batches, tiny), cudnn=not tiny)
    if not tiny:
        stepper.compile()
    stepper.steps(2)
    return stepper


def run(shapes: Sequence[str], variants: Sequence[str], micro_batches: int, rounds: int) -> list[Row]:
    """Measure and return all rows."""
    rows: list[Row] = []
    for shape in (SHAPES[name] for name in shapes):
        if not torch.cuda.is_available():
            rows += [{**described(shape, variant), **unmeasured(BASELINE)} for variant in variants]
            continue
        with aside():
            dense = ready_stepper(shape, {}, micro_batches)
            for variant in variants:
                for compiled in (False, True):
                    try:
                        rows.append(measure(shape, variant, dense, compiled=compiled, rounds=rounds))
                    except Exception as error:  # what compiling stumbles over is reported in its row
                        why = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
                        rows.append({**described(shape, variant), "compiled": compiled, **unmeasured(BASELINE, why)})
            dense.close()
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as tables of Markdown."""
    head = ["width of", "variant", "sparsity", "measured on", "ours", "ms (middle half)", "dense ms (middle half)"]
    head += ["speedup", "goal"]
    lines = []
    for r in rows:
        goal = f"{r['goal']}×" if r.get("goal") else ""
        way = {True: "compiled", False: "eager"}.get(r.get("compiled"), "")  # type: ignore[arg-type]
        if r["speedup"] is None:
            lines.append([r["parameters"], r["variant"], "", "", way, r["why"].replace("|", "/")[:160], "", "", goal])
            continue
        mine, theirs = (with_range(r, who) for who in ("ours", "baseline"))
        sparsity = f"{100 * r['sparsity']:.1f}%" if "sparsity" in r else ""
        faster = f"**{r['speedup']}×**"
        lines.append([r["parameters"], r["variant"], sparsity, r["model"], way, mine, theirs, faster, goal])
    return grid(head, lines)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench step --device cuda", __doc__)
    option = parser.add_argument
    option(
        "--shapes",
        nargs="+",
        choices=list(SHAPES),
        default=["6.7B", "1.5B"],
        metavar="S",
        help="model widths (default: 6.7B 1.5B)",
    )
    option(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        metavar="V",
        help="kinds of masks (default: all)",
    )
    option(
        "--micro-batches",
        type=at_least(1),
        default=8,
        metavar="N",
        help="micro-batches per optimizer step (default: 8)",
    )
    option("--rounds", type=at_least(2), default=6, metavar="N", help="rounds of several steps (default: 6)")
    options = parse(parser, arguments)
    rows, about = run(options.shapes, options.variants, options.micro_batches, options.rounds), machine()
    return show(options, rows, table(rows), about)

"""Recommends how ranks share a model, a ZeRO stage, offload, micro-batch, recomputation and masks on given GPUs.

The recommendation is the setting with the fastest run by `step_time`, of all that DeepSpeed and sparse training accept
and that fit, at the config's own global batch. If others come within 3 % of it, it is the config's own or the simplest
of them, because the estimates are not more precise than that. A dense run is compared in the setting that is
recommended for it, which may be another one.

Ranks of a tensor-parallel group stay inside a node, whose GPUs they divide; a proposed sequence is shared inside a node
too. DeepSpeed runs a pipeline at ZeRO stages 0 and 1, where sparse training accumulates gradients in the type they are
computed in, and divides no sequences there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

from mst_scale.config import Experiment, ModelConfig
from mst_scale.config.parallel import describe_conflict
from mst_scale.flops.ledger import stretches
from mst_scale.plan.gpus import Machine
from mst_scale.plan.memory import Memory, memory
from mst_scale.plan.roofline import in_channels
from mst_scale.plan.setting import Setting, compact_of
from mst_scale.plan.step_time import (
    Seconds,
    longest_stretches,
    may_be_blocks,
    mean_step_seconds,
    run_seconds,
    step_seconds,
    with_blocks,
)

LARGEST_MICRO = 64  # beyond it matrix products do not become faster
CLOSE = 0.03
SLOWER = 1.05  # a dense step, than the fastest: such a setting is not recommended, as sparse steps are less certain
MOST_GPUS = 1 << 16
FREE: Mapping[str, int] = {}
MEASURED_SIDES = (16, 32)  # blocks whose cost in loss has been measured (docs/studies.md)
NO_GAIN = 1.05  # speedups below it are within the error of the expected times
MUCH_BETTER = 1.05  # times the config's own speedup, from which on other masks are recommended instead


@dataclass(frozen=True)
class Choice:
    """A setting, its memory, the seconds of a dense step, and those of the average step of the run."""

    setting: Setting
    memory: Memory
    seconds: Seconds
    run_step: float

    @property
    def dense_step(self) -> float:
        """Seconds of a dense step."""
        return self.seconds.total


def choices(experiment: Experiment, settings: Iterable[Setting], machine: Machine) -> list[Choice]:
    """Estimate the memory and time of each setting."""
    longest = longest_stretches(experiment)
    return [
        Choice(
            setting=s,
            memory=memory(experiment, s),
            seconds=step_seconds(experiment, s, machine),
            run_step=mean_step_seconds(experiment, s, machine, longest),
        )
        for s in settings
    ]


# --- ways to share a model ---


def layout_problem(model: ModelConfig, s: Setting, per_node: int) -> str | None:
    """Return why a model cannot be shared this way, and how to fix it; None if it can."""
    t, q, p, node = s.tensor, s.sequence, s.pipeline, min(per_node, s.ranks)
    if s.ranks % (t * q * p):
        return f"{s.ranks} GPUs cannot be divided into groups of {s.sizes.describe()}: use a multiple of {t * q * p}"
    if node % t:
        return f"tensor {t} does not fit in a node: use a divisor of its {node} GPUs"
    if model.n_head % t or model.ffw % t:
        return f"tensor {t} must divide the {model.n_head} heads and the MLP's width of {model.ffw}"
    if model.n_head // t % q or model.seq_length % q:
        return f"sequence {q} must divide the {model.n_head // t} heads of a rank and the context of {model.seq_length}"
    if p > 1 and model.arch != "gpt":
        return f"a pipeline requires a GPT, and model.arch is {model.arch}: omit --pp"
    if s.sizes.model > 1 and model.dropout:
        return f"GPUs that share a model would drop different values, and model.dropout is {model.dropout}: set it to 0"
    if p > model.n_layer:
        return f"pipeline {p} has more stages than the model's {model.n_layer} layers: use at most that many"
    if p > 1 and q > 1:
        return "a pipeline cannot be combined with sequence parallelism: omit --sp or --pp"
    if p > 1 and s.stage > 1:
        return f"a pipeline runs at ZeRO stages 0 and 1, not {s.stage}: --set zero_optimization.stage=1"
    return None


def layouts(model: ModelConfig, s: Setting, per_node: int, fixed: Mapping[str, int]) -> Iterator[Setting]:
    """Yield every possible way to share the model that has the `fixed` sizes, with a micro-batch of 1."""
    node = min(per_node, s.ranks)
    for t in _sizes("tensor", node, fixed):
        for q in _sizes("sequence", max(1, node // t), fixed):
            for p in _sizes("pipeline", min(s.ranks, model.n_layer), fixed):
                wanted = replace(s.at_stage(1) if p > 1 else s, tensor=t, sequence=q, pipeline=p)
                if layout_problem(model, wanted, per_node) is None and s.batch % wanted.data == 0:
                    yield replace(wanted, micro=1, accumulation=s.batch // wanted.data)


def _sizes(axis: str, most: int, fixed: Mapping[str, int]) -> list[int]:
    return [fixed[axis]] if axis in fixed else [n for n in range(1, most + 1) if most % n == 0 or axis == "pipeline"]


# --- the recommended setting ---


def ways(s: Setting) -> Iterator[list[Setting]]:
    """Yield every way to run the same global batch with the model shared in the same way, by growing micro-batch."""
    each = s.batch // s.data
    micros = [m for m in range(1, min(each, LARGEST_MICRO) + 1) if each % m == 0]
    if s.pipeline > 1:  # at stage 0 DeepSpeed's own optimizer for bf16 steps, which bypasses the masks
        stages = [0, 1] if s.precision == "fp32" else [1]
    else:  # accumulation in another type needs stage 2 or 3 with sparse training
        stages = [2, 3] if s.separate_accumulation else [0, 1, 2, 3]
    for there in with_offload(s, stages):
        for recompute in (False, True):
            yield [replace(there, recompute=recompute, micro=m, accumulation=each // m) for m in micros]


def with_offload(s: Setting, stages: Sequence[int]) -> Iterator[Setting]:
    """Yield the setting at each stage, without and with every offload that the stage supports."""
    for stage in stages:
        for optimizer, weights in ((False, False), (True, False), (True, True)):
            if (optimizer and stage < 2) or (weights and stage < 3):
                continue
            yield replace(s.at_stage(stage), offload_optimizer=optimizer, offload_parameters=weights)


def fitting(
    experiment: Experiment, setting: Setting, machine: Machine, fixed: Mapping[str, int] = FREE
) -> list[Choice]:
    """Return the choices that fit, the one with the fastest run first.

    Settings with a slower dense step than the fastest are left out, except for the fastest of each layout.
    """
    possible = layouts(experiment.model, setting, machine.gpu.per_node, fixed)
    shared = [s for s in possible if describe_conflict(experiment, s.sizes) is None]
    if not fixed and setting.batch % setting.data == 0 and all(s.sizes != setting.sizes for s in shared):
        shared.append(setting)
    found = []
    for s in shared:
        for way in ways(s):
            for candidate in way:
                if not memory(experiment, candidate).fits(machine.gpu):
                    break  # larger micro-batches need more
                found.append((step_seconds(experiment, candidate, machine).total, candidate))
    found.sort(key=itemgetter(0))
    layouts_fastest = {s.sizes: s for _, s in reversed(found)}.values()
    wanted = [s for seconds, s in found if seconds <= SLOWER * found[0][0] or s in layouts_fastest]
    return sorted(choices(experiment, wanted, machine), key=attrgetter("run_step"))


def recommend(
    found: Sequence[Choice],
    setting: Setting,
    fixed: Mapping[str, int] = FREE,
    seconds: Callable[[Choice], float] = attrgetter("run_step"),
) -> Choice | None:
    """Choose from `fitting`, by the time of the run or other `seconds`; None if nothing fits."""
    wanted = [
        choice for choice in found if fixed.get("pipeline", 1) > 1 or _keeps_accumulation(choice.setting, setting)
    ]
    if not wanted:
        return None
    fastest = min(map(seconds, wanted))
    close = [choice for choice in wanted if seconds(choice) <= fastest * (1 + CLOSE)]
    return next((choice for choice in close if choice.setting == setting), min(close, key=_simplicity))


def _keeps_accumulation(s: Setting, setting: Setting) -> bool:
    """Return whether gradients are accumulated in the config's type: if not, a pipeline is not proposed."""
    return s.pipeline == 1 or s.accumulate == setting.accumulate or setting.pipeline > 1


def _simplicity(choice: Choice) -> tuple[int, ...]:
    """Order choices that are about equally fast: without offload, sharing and recomputation, low stage, small batch."""
    s = choice.setting
    return (s.offload_parameters, s.offload_optimizer, s.sizes.model, s.recompute, s.stage, s.micro)


def by_layout(found: list[Choice], recommended: Choice) -> list[Choice]:
    """Return the fastest choice of each layout, with the recommended one for its own layout; the fastest first."""
    rows = {recommended.setting.sizes: recommended}
    for choice in found:
        rows.setdefault(choice.setting.sizes, choice)
    return sorted(rows.values(), key=lambda row: row.run_step)


def fewest_gpus(experiment: Experiment, setting: Setting, machine: Machine) -> int | None:
    """Return the smallest power of two of GPUs, above the setting's, on which something fits with micro-batch 1."""
    ranks = 1 << setting.ranks.bit_length()
    while ranks <= MOST_GPUS:
        if ranks % setting.sizes.model == 0:
            wider = replace(setting, ranks=ranks, micro=1, accumulation=1)
            if any(memory(experiment, s).fits(machine.gpu) for way in ways(wider) for s in way):
                return ranks
        ranks *= 2
    return None


# --- the recommended masks ---


@dataclass(frozen=True)
class Best:
    """The setting and masks of a sparse run that save the most time."""

    side: int | None  # of its blocks; None: masks as the config makes them
    setting: Setting
    memory: Memory
    run_seconds: float  # of the whole run with this setting and these masks
    dense_seconds: float  # of a dense run, with the setting that is recommended for it

    @property
    def speedup(self) -> float:
        """How many times faster than the dense run."""
        return self.dense_seconds / self.run_seconds

    @property
    def gains(self) -> bool:
        """Whether the speedup is larger than the error of the estimates."""
        return self.speedup >= NO_GAIN

    @property
    def overrides(self) -> list[str]:
        """The `--set` arguments for its masks."""
        if self.side is None:
            return []
        return ["--set mst.compute.backend=block", f"--set mst.topology.granularity.block={self.side}"]


def best_masks(experiment: Experiment, recommended: Choice, dense: Choice, machine: Machine) -> Best:
    """Choose the fastest of the config's masks and of blocks; the config's own if the others are hardly faster.

    Args:
        experiment: The config.
        recommended: The setting for the config's masks.
        dense: The setting for a dense run; blocks, which are stored whole, may be faster in it.
        machine: The GPUs.
    """

    def of(s: Setting, side: int | None) -> Best:
        there = experiment if side is None else with_blocks(experiment, side)
        s = replace(s, compact=compact_of(there))
        seconds = run_seconds(there, s, machine, stretches(there))
        return Best(side, s, memory(there, s), seconds, dense.dense_step * experiment.training.steps)

    unchanged = of(recommended.setting, None)
    if not may_be_blocks(experiment) or in_channels(experiment):  # channels are chosen in place of blocks
        return unchanged
    settings = dict.fromkeys((recommended.setting, dense.setting))
    possible = [best for side in MEASURED_SIDES for s in settings if (best := of(s, side)).memory.fits(machine.gpu)]
    fastest = max(possible, key=lambda best: best.speedup, default=unchanged)
    return fastest if fastest.speedup > MUCH_BETTER * unchanged.speedup else unchanged


# --- notes ---


def not_proposed(recommended: Choice, rows: Sequence[Choice], setting: Setting) -> list[str]:
    """Return a sentence about the fastest layout if it is a pipeline that would change the accumulation type."""
    won, (fastest, *_) = recommended.setting, rows
    s = fastest.setting
    if s.sizes == won.sizes or won.pipeline > 1 or _keeps_accumulation(s, setting):
        return []
    faster = 100 * (1 - fastest.run_step / recommended.run_step)
    return [
        f"not proposed: {describe_layout(s)}, {faster:.1f} % faster; at its ZeRO stage masks need gradients "
        f"accumulated in {s.accumulate}, not in {setting.accumulate} (--pp {s.pipeline} plans it)"
    ]


def describe_layout(s: Setting) -> str:
    """Describe how ranks share the model and the batch, such as "tensor 8 × pipeline 2 × data 4"."""
    shared = [] if s.sizes.model == 1 else [s.sizes.describe()]
    return " × ".join([*shared, f"data {s.data}"])

"""Compares compact training on a GPU with masked dense weights there: the same bits, and what a step takes."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from mst_scale.checkpoints import finding
from mst_scale.comm.launch import LAUNCHER_VARIABLES

from ..page import aside
from ..timing import in_rounds, seconds_of
from .correctness import LOSS_BOUNDS, corpus, pretrain
from .part import Case, Row, Where

STEPS = 9  # with two topology steps
SPARSITY = 0.8


@dataclass(frozen=True)
class Course:
    """A short run, whose config is that of `config` with the keys of `blocks`."""

    policy: str
    stage: int
    dtype: str
    what: str = ""
    blocks: dict[str, Any] = field(default_factory=dict)
    pruned: bool = False
    """Whether the model is pruned before the run, which keeps its zeros."""

    @property
    def name(self) -> str:
        """The name of the case."""
        return ", ".join([self.policy, f"ZeRO {self.stage}", self.dtype, *([self.what] if self.what else [])])


OVERFLOWING = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0}
FP32_SUMS = {"grad_accum_dtype": "fp32"}
COURSES = (
    Course("rigl", 1, "float32"),
    Course("mst", 2, "float32"),
    Course("rigl", 3, "float32"),
    Course("set", 0, "float32"),
    Course("rigl", 2, "bfloat16"),
    Course("mst", 3, "bfloat16"),
    Course("set", 0, "float16", blocks=OVERFLOWING),
    Course("rigl", 1, "float16", blocks=OVERFLOWING),
    Course("mst", 2, "float16", blocks=OVERFLOWING),
    Course("rigl", 3, "float16", blocks=OVERFLOWING),
    Course("rigl", 2, "float32", "first masks by magnitude", {"mst": {"sparsity": {"initial": "magnitude"}}}),
    Course("fixed", 2, "bfloat16", "a pruned model", pruned=True),
    Course("mst", 2, "bfloat16", "two micro-batches", {"train_micro_batch_size_per_gpu": 2, "data_types": FP32_SUMS}),
    Course("rigl", 2, "bfloat16", "recomputed blocks", {"model": {"activation_checkpointing": True}}),
    Course("mst", 2, "float32", "optimizer on the CPU", OFFLOADED),
    Course("rigl", 3, "bfloat16", "optimizer on the CPU", OFFLOADED),
)


def compact(where: Where) -> Iterator[Case]:
    """Every ZeRO stage, policy and type; then two runs whose storage changes, and compiled blocks."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of deterministic products, before the first one
    for of in COURSES[:1] if where.tiny else COURSES:
        yield Case(f"{of.name}, {STEPS} steps", functools.partial(same_course, of))
    for stage in () if where.tiny else (2, 3):
        yield Case(f"storage changes in memory, ZeRO {stage}", functools.partial(storage_changes, where, stage))
    yield Case("compiled blocks, bfloat16", functools.partial(compiled_course, where))


def same_course(of: Course) -> Row:
    """Train with compact and with masked dense weights, and compare masks, weights and moments bit for bit."""
    torch.use_deterministic_algorithms(True)
    try:
        with aside():
            found = [course(of, kind) for kind in ("auto", "off")]
    finally:
        torch.use_deterministic_algorithms(False)
    (ours, losses), (dense, theirs) = found
    assert any("exp_avg" in name for name in ours)
    row = equal(ours, dense, "masks, weights and moments")
    row["fine"] = row["fine"] and losses == theirs
    skipped = sum(loss is None for loss in losses)
    return row if of.dtype != "float16" else row | {"said": f"{row['said']}; {skipped} steps overflowed"}


def equal(ours: dict[str, torch.Tensor], dense: dict[str, torch.Tensor], what: str) -> Row:
    """Return how many tensors of two runs have the same bits."""
    assert ours.keys() == dense.keys() and ours
    differ = [name for name, value in ours.items() if not torch.equal(value, dense[name])]
    said = f"{len(ours) - len(differ)} of {len(ours)} {what} are bit-equal"
    if differ:
        far = {name: float((ours[name].double() - dense[name].double()).abs().max()) for name in differ}
        worst = max(far, key=lambda name: far[name])
        said += f"; {worst} differs most, by {far[worst]:.1e}"
    return {"said": said, "fine": not differ}


def course(of: Course, kind: str, compiled: bool = False) -> tuple[dict[str, torch.Tensor], list[float | None]]:
    """Train.

    Args:
        of: the run.
        kind: `mst.compute.compact`.
        compiled: whether torch.compile compiles the blocks.

    Returns:
        All masks, weights and moments in the coordinates of their matrices, and the loss of each step; None where the
        step overflowed.
    """
    import mst_scale
    from mst_scale import zero_shards
    from mst_scale.config import ModelConfig
    from mst_scale.models import GPT
    from mst_scale.zero_shards import step as ds_step

    torch.manual_seed(0)
    model = GPT(ModelConfig(**MODEL, **of.blocks.get("model", {})))
    if of.pruned:
        for block in model.blocks:
            for weight in (p for p in block.parameters() if p.dim() == 2):
                weight.data[weight.abs() < weight.abs().flatten().quantile(SPARSITY)] = 0
    raw = config(of, kind)
    engine: Any = mst_scale.initialize(model=model, config=raw)[0]
    is_compact = bool(zero_shards.indexes_of(engine.module))
    assert is_compact == (kind == "auto")
    if not is_compact:
        ds_step.norm_in_float64(engine)  # as compact runs do
    for block in engine.module.blocks if compiled else ():
        block.compile(dynamic=False)
    micro, losses = raw["train_micro_batch_size_per_gpu"], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(MODEL["vocab_size"], (4, MODEL["seq_length"]), generator=generator).to(engine.device)
        skipped, sums = engine.skipped_steps, 0.0
        for part in tokens.split(micro):
            loss = engine(part, part)
            engine.backward(loss)
            engine.step()
            sums += loss.item()
        losses.append(sums if engine.skipped_steps == skipped else None)
    store, found = engine.mst.store, {}
    for i, (part, mask) in enumerate(zip(store.slices, engine.mst.masks, strict=True)):
        found[f"{part.name} mask"] = mask.flags().cpu()
        states = store.states(i)
        if is_compact and i in store.indexes:
            states = {key: store.expanded([(i, value)])[0] for key, value in states.items()}
        for key, value in {"weight": store.weight(i), **states}.items():
            found[f"{part.name} {key}"] = value.detach().cpu().clone()
    engine.destroy()
    return found, losses


MODEL: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 64, "seq_length": 32, "vocab_size": 96}


def config(of: Course, kind: str) -> dict[str, Any]:
    """Return a config of constant sparsity whose clip is always active."""
    blocks = of.blocks
    sparse = {
        "method": "set",
        "sparsity": {"variation": "sparse", "max": SPARSITY, **blocks.get("mst", {}).get("sparsity", {})},
        "topology": {
            "policy": of.policy, "interval": 4, "random_ratio": 0.25 if of.policy == "mst" else None,
            "update_schedule": "constant",
        },
    }  # fmt: skip
    zero = {"stage": of.stage, **blocks.get("zero_optimization", {})}
    return {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "bf16": {"enabled": of.dtype == "bfloat16"}, "zero_force_ds_cpu_optimizer": False,
        "tensorboard": {"enabled": False}, "training": {"steps": 1000},
        **{key: value for key, value in blocks.items() if key not in ("mst", "model")},
        "zero_optimization": zero,
        "mst": {
            **({"method": "fixed"} if of.pruned else sparse),
            "attention": {"pattern": "dense"},
            "compute": {"backend": "dense", "compact": kind},
        },
    }  # fmt: skip


def compiled_course(where: Where) -> Row:
    """Train compact with compiled blocks and with eager ones, and compare losses, which differ by rounding."""
    of = Course("set", 2, "float32" if where.tiny else "bfloat16")
    with aside():
        (_, eager), (_, compiled) = course(of, "auto"), course(of, "auto", compiled=True)
    apart = max(abs((a or 0.0) - (b or 0.0)) for a, b in zip(eager, compiled, strict=True))
    bound = LOSS_BOUNDS[of.dtype]
    return {"said": f"losses within {apart:.1e} of eager blocks ({bound:g} is allowed)", "fine": apart <= bound}


# --- a run whose storage changes ---

RUN_STEPS = 120


def storage_changes(where: Where, stage: int) -> Row:
    """Pretrain dense, compact and dense again in one process, and with masked weights; the last checkpoint is equal."""
    folder = where.work / f"storage-{stage}"
    found = []
    for kind in ("auto", "off"):
        environment = {key: v for key, v in where.environment().items() if key not in LAUNCHER_VARIABLES}
        pretrain(folder / kind, run_config(corpus(where.work), stage, kind), ["-c", DETERMINISTIC], environment)
        found.append(tensors_of(folder / kind / "out" / "checkpoints" / finding.tag_of(RUN_STEPS)))
    ours, dense = found
    starts = json.loads((folder / "auto" / "out" / "run.json").read_text())["starts"]
    printed = (folder / "auto" / "log").read_text()
    changed = [start["from_step"] for start in starts]
    row = equal(ours, dense, "tensors of the last checkpoint")
    row["fine"] = row["fine"] and len(changed) == 3 and "was not freed" not in printed
    return row | {"said": f"engines from steps {changed}; {row['said']}"}


DETERMINISTIC = """
import sys, torch
torch.use_deterministic_algorithms(True)
from mst_scale.pretrain.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run_config(data: Path, stage: int, kind: str) -> dict[str, Any]:
    """Return the config of a run of method mst with a long phase of constant sparsity."""
    return {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": True}, "data_types": FP32_SUMS, "zero_optimization": {"stage": stage},
        "tensorboard": {"enabled": False},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "seq_length": 64, "vocab_size": 64},
        "data": {"dir": str(data)},
        "training": {
            "steps": RUN_STEPS, "warmup": 5, "log_every": 10, "eval_every": 0, "save_every": 60, "seed": 1,
            "async_save": False, "histogram_every": 0,
        },
        "mst": {
            "method": "mst", "attention": {"pattern": "dense"},
            "sparsity": {"max": 0.8, "warmup": 10, "ultra": 70, "restore": 20}, "topology": {"interval": 5},
            "compute": {"backend": "dense", "compact": kind},
        },
    }  # fmt: skip


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor in a checkpoint's files: weights, optimizer states, random numbers."""
    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, name: str) -> None:
        if torch.is_tensor(value):
            found[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, f"{name}/{key}")
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                collect(inner, f"{name}/{number}")

    for path in sorted(checkpoint.rglob("*.pt")):
        collect(torch.load(path, weights_only=False, map_location="cpu"), path.name)
    return found


# --- what a step takes ---

# Shape of step_cuda, micro-batches per step
SIZES = (("124M", 1), ("1.5B", 1), ("1.5B", 8), ("6.7B", 1), ("6.7B", 8))
SIDES = ("dense", "masked", "compact")
ROUNDS, STEPS_OF_ROUND = 7, 3


def density(where: Where) -> Iterator[Case]:
    """Plain DeepSpeed, masked weights and compact weights at 96 %, in turns, at three widths."""
    for parameters, micro_batches in SIZES[:1] if where.tiny else SIZES:
        of = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)} per step"
        yield Case(f"width of {parameters}, {of}", functools.partial(_density, where, parameters, micro_batches))
    yield Case("topology step, width of 124M", functools.partial(_topology, where, "124M"))


def _density(where: Where, parameters: str, micro_batches: int) -> Row:
    from .. import memory, step_cuda

    torch._dynamo.reset()  # torch limits how often it compiles a function
    shape = step_cuda.SHAPES[parameters]
    steppers: dict[str, step_cuda.Stepper] = {}
    row: dict[str, Row] = {}
    with aside():
        for side in SIDES:
            build = functools.partial(
                step_cuda.ready_stepper, shape, step_cuda.constant(side), micro_batches, where.tiny
            )
            steppers[side], held = memory.held_by(build, where.device)
            row[side] = {"state_bytes": memory.state_bytes(steppers[side].engine), "held_bytes": held}
        device, first = steppers["dense"].engine.device, steppers["dense"]
        model = f"{first.layers} layers, {micro_batches} × {first.micro * first.context:,} tokens per step"
        rounds, count = (2, 1) if where.tiny else (ROUNDS, 1 if micro_batches > 1 else STEPS_OF_ROUND)
        runs = [functools.partial(steppers[side].steps, count) for side in SIDES]
        whole = in_rounds(runs, rounds, lambda run: 1e3 * seconds_of(run, device) / count)
        each = [functools.partial(step_cuda.update_ms, steppers[side]) for side in SIDES]
        updates = in_rounds(each, min(rounds, 4), lambda update: update())
        for side, times, of_updates in zip(SIDES, whole, updates, strict=True):
            row[side] |= {"step_ms": step_cuda.spread(times), "update_ms": step_cuda.spread(of_updates)}
            row[side]["peak_bytes"] = step_cuda.peak_beyond(steppers[side])
            row[side]["kernels"] = step_cuda.profile(steppers[side])
            steppers[side].close()
    dense, ours = row["dense"], row["compact"]
    said = "; ".join(
        f"{side} {row[side]['step_ms'][0]} ms, update {row[side]['update_ms'][0]} ms, "
        f"states {row[side]['state_bytes'] / 2**20:,.0f} MiB, held {(row[side]['held_bytes'] or 0) / 2**20:,.0f} MiB"
        for side in SIDES
    )
    faster = round(dense["step_ms"][0] / ours["step_ms"][0], 3)
    said = f"compact {faster}× plain DeepSpeed; {said}"
    return {"said": said, "speedup": faster, "sides": row, "parameters": parameters, "model": model}


def _topology(where: Where, parameters: str) -> Row:
    """A step that prunes and grows, and an ordinary one, with masked and with compact weights."""
    from .. import step_cuda

    row: dict[str, Row] = {}
    with aside():
        for side in SIDES[1:]:
            config = step_cuda.constant(side)
            config["mst"] |= {"method": "set", "topology": {**config["mst"]["topology"], "policy": "rigl"}}
            config["mst"]["sparsity"]["variation"] = "sparse"
            stepper = step_cuda.Stepper(
                step_cuda.experiment_of(step_cuda.SHAPES[parameters], config, 1, where.tiny), not where.tiny
            )
            mst, engine = stepper.engine.mst, stepper.engine
            found: dict[str, list[float]] = {"ordinary": [], "topology": []}
            interval = mst.schedule.interval
            stepper.steps(2)
            for turn in range(1, 3 if where.tiny else 7):
                for kind, step in (("ordinary", turn * interval + 1), ("topology", (turn + 1) * interval)):
                    engine.global_steps = step - 1
                    mst.masks_replaced()
                    found[kind].append(1e3 * seconds_of(functools.partial(stepper.steps, 1), engine.device))
            moved = mst.state.changed_at == engine.global_steps
            row[side] = {f"{kind}_ms": step_cuda.spread(times[1:]) for kind, times in found.items()} | {"moved": moved}
            stepper.close()
    said = "; ".join(
        f"{side} {of['topology_ms'][0]} ms, an ordinary step {of['ordinary_ms'][0]} ms" for side, of in row.items()
    )
    return {"said": said, "sides": row, "parameters": parameters, "fine": all(of["moved"] for of in row.values())}

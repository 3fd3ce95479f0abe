"""Compares compact training on a GPU with masked dense weights there: the same bits, and what a step takes."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from ..page import aside
from ..timing import in_rounds, seconds_of
from .part import Case, Row, Where

STEPS = 9  # with two topology steps
SPARSITY = 0.8


def compact(where: Where) -> Iterator[Case]:
    """Every ZeRO stage, growth by gradient and at random; then bf16."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of deterministic products, before the first one
    runs = [(stage, policy, "float32") for stage, policy in ((1, "rigl"), (2, "mst"), (3, "rigl"), (0, "set"))]
    runs += [(2, "rigl", "bfloat16"), (3, "mst", "bfloat16")]
    for stage, policy, dtype in runs[:1] if where.tiny else runs:
        name = f"{policy}, ZeRO {stage}, {dtype}, {STEPS} steps"
        yield Case(name, functools.partial(same_course, where, stage, policy, dtype))


def same_course(where: Where, stage: int, policy: str, dtype: str) -> Row:
    """Train with compact and with masked dense weights, and compare masks, weights and moments bit for bit."""
    torch.use_deterministic_algorithms(True)
    try:
        with aside():
            found = [course(config(stage, policy, dtype, kind)) for kind in ("auto", "off")]
    finally:
        torch.use_deterministic_algorithms(False)
    ours, dense = found
    assert ours.keys() == dense.keys() and any("exp_avg" in name for name in ours)
    differ = [name for name, value in ours.items() if not torch.equal(value, dense[name])]
    said = f"{len(ours) - len(differ)} of {len(ours)} masks, weights and moments are bit-equal"
    if differ:
        worst = max(differ, key=lambda name: float((ours[name].double() - dense[name].double()).abs().max()))
        far = float((ours[worst].double() - dense[worst].double()).abs().max())
        said += f"; {worst} differs most, by {far:.1e}"
    return {"said": said, "fine": not differ}


def course(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train; return all masks, weights and moments in the coordinates of their matrices."""
    import mst_scale
    from mst_scale import zero_shards
    from mst_scale.config import ModelConfig
    from mst_scale.models import GPT
    from mst_scale.zero_shards import step as ds_step

    torch.manual_seed(0)
    shape = ModelConfig(n_layer=2, n_head=2, n_embd=64, seq_length=32, vocab_size=96)
    engine: Any = mst_scale.initialize(model=GPT(shape), config=raw)[0]
    is_compact = bool(zero_shards.indexes_of(engine.module))
    assert is_compact == (raw["mst"]["compute"]["compact"] == "auto")
    if not is_compact:
        ds_step.norm_in_float64(engine)  # as compact runs do
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(shape.vocab_size, (4, shape.seq_length), generator=generator).to(engine.device)
        engine.backward(engine(tokens, tokens))
        engine.step()
    store, found = engine.mst.store, {}
    for i, (part, mask) in enumerate(zip(store.slices, engine.mst.masks, strict=True)):
        found[f"{part.name} mask"] = mask.flags().cpu()
        states = store.states(i)
        if is_compact and store.index[i] is not None:
            states = {key: store.expanded([(i, value)])[0] for key, value in states.items()}
        for key, value in {"weight": store.weight(i), **states}.items():
            found[f"{part.name} {key}"] = value.detach().cpu().clone()
    engine.destroy()
    return found


def config(stage: int, policy: str, dtype: str, kind: str) -> dict[str, Any]:
    """Return a config of constant sparsity whose clip is always active."""
    return {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "bf16": {"enabled": dtype == "bfloat16"}, "zero_optimization": {"stage": stage},
        "tensorboard": {"enabled": False}, "training": {"steps": 1000},
        "mst": {
            "method": "set", "attention": {"pattern": "dense"},
            "sparsity": {"variation": "sparse", "max": SPARSITY},
            "topology": {
                "policy": policy, "interval": 4, "random_ratio": 0.25 if policy == "mst" else None,
                "update_schedule": "constant",
            },
            "compute": {"backend": "dense", "compact": kind},
        },
    }  # fmt: skip


# --- what a step takes ---

# Shape of step_cuda, micro-batches per step
SIZES = (("1.5B", 1), ("6.7B", 1), ("124M", 1), ("6.7B", 8), ("1.5B", 8))
SIDES = ("dense", "masked", "compact")
ROUNDS, STEPS_OF_ROUND = 7, 3


def density(where: Where) -> Iterator[Case]:
    """Plain DeepSpeed, masked weights and compact weights at 96 %, in turns, at three widths."""
    for parameters, micro_batches in SIZES[:1] if where.tiny else SIZES:
        of = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)} per step"
        yield Case(f"width of {parameters}, {of}", functools.partial(_density, where, parameters, micro_batches))


def _density(where: Where, parameters: str, micro_batches: int) -> Row:
    from mst_scale.zero_shards import base_optimizer

    from .. import memory, step_cuda

    shape = step_cuda.SHAPES[parameters]
    steppers: dict[str, step_cuda.Stepper] = {}
    row: dict[str, Row] = {}
    with aside():
        for side in SIDES:
            memory.give_back()
            before = memory.held(where.device)
            stepper = step_cuda.Stepper(
                step_cuda.experiment_of(shape, step_cuda.constant(side), micro_batches, where.tiny), not where.tiny
            )
            if side == "dense" and not where.tiny:
                stepper.compile()
            stepper.steps(2)
            memory.give_back()
            after, steppers[side] = memory.held(where.device), stepper
            base = base_optimizer(stepper.engine)
            tensors = [p for group in base.param_groups for p in group["params"]]
            tensors += [t for state in base.state.values() for t in state.values() if torch.is_tensor(t)]
            row[side] = {
                "state_bytes": sum(t.numel() * t.element_size() for t in tensors),
                "held_bytes": None if before is None or after is None else after - before,
            }
        device, first = steppers["dense"].engine.device, steppers["dense"]
        model = f"{first.layers} layers, {micro_batches} × {first.micro * first.context:,} tokens per step"
        rounds, count = (2, 1) if where.tiny else (ROUNDS, 1 if micro_batches > 1 else STEPS_OF_ROUND)
        runs = [functools.partial(steppers[side].steps, count) for side in SIDES]
        whole = in_rounds(runs, rounds, lambda run: 1e3 * seconds_of(run, device) / count)
        updates: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(min(rounds, 4) + 1):
            for side in SIDES:
                ms = step_cuda.update_ms(steppers[side])
                if turn:
                    updates[side].append(ms)
        for side, times in zip(SIDES, whole, strict=True):
            row[side] |= {"step_ms": step_cuda.spread(times), "update_ms": step_cuda.spread(updates[side])}
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

"""Tests that a GPU computes the same as the definitions and the CPU: kernels, topology steps, training."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from mst_scale import tile_choice
from mst_scale.comm.exchange import Exchange
from mst_scale.doctor import full as checks
from mst_scale.doctor.findings import SKIP, WRONG, Finding
from mst_scale.doctor.full import type_name
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.hybrid_sparse_attention import dispatch as attention_dispatch
from mst_scale.hybrid_sparse_attention.definition import definition
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.blocks import Blocks, Elements
from mst_scale.mixed_growing.evolve import Layer
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import policy
from mst_scale.run_logging import metrics
from mst_scale.shard import Shard
from mst_scale.sparse_linear import dispatch as linear_dispatch

from ..training import write_random_walk
from .part import Case, Row, Where

Granularity = str | dict[str, int]

# --- kernels ---


MOST_TILES = 6  # of any kernel's list


def kernels(where: Where) -> Iterator[Case]:
    """Every tile in the type that is used most; then other types, parts and shapes with the first tile."""
    half = torch.float16 if where.tiny else torch.bfloat16
    length, stride, shape = (70, 16, (70, 100)) if where.tiny else (2048, 256, (3072, 768))
    heads, sides = ((32,), (16,)) if where.tiny else ((64, 128), (16, 32, 64, 128))
    for tile in range(1 if where.tiny else MOST_TILES):
        for head_dim in heads:
            name = f"attention, heads of {head_dim}, tile {tile}"
            how = Attention(half, length, head_dim, Pattern("strided", stride), 4, tile)
            yield Case(name, functools.partial(attention_case, where, how))
        for side in sides:
            name = f"blocks of {side}, tile {tile}"
            yield Case(name, functools.partial(block_case, where, half, shape, side, tile))
    if not where.tiny:  # a minute in the interpreter
        yield Case("doctor: attention", lambda: of_finding(checks.check_attention("triton", where.device)))
    yield Case("doctor: blocks", lambda: of_finding(checks.check_blocks(where.device)))
    yield Case("doctor: 2:4", lambda: of_finding(checks.check_two_of_four(where.device)))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield Case(f"masking, {type_name(dtype)}", functools.partial(masking_case, where, dtype))
    types = (half,) if where.tiny else (torch.bfloat16, torch.float16, torch.float32)
    length, stride, shape = (70, 16, (70, 100)) if where.tiny else (1000, 128, (1600, 6400))
    for dtype, head_dim, kind in product(types, heads if where.tiny else (*heads, 256), ("strided", "fixed")):
        name = f"attention {kind} {stride}, {length} tokens, heads of {head_dim} that share keys, {type_name(dtype)}"
        yield Case(
            name,
            functools.partial(attention_case, where, Attention(dtype, length, head_dim, Pattern(kind, stride), 2, 0)),
        )
    for dtype, side in product(types, sides):
        name = f"blocks of {side}, {shape[1]}→{shape[0]}, {type_name(dtype)}"
        yield Case(name, functools.partial(block_case, where, dtype, shape, side, 0))


@dataclass(frozen=True)
class Attention:
    """One case of the attention kernels."""

    dtype: torch.dtype
    length: int
    head_dim: int
    pattern: Pattern
    key_heads: int
    """For 4 heads."""
    tile: int


def of_finding(found: Finding) -> Row:
    """Return the row of a check of `mst doctor`."""
    return {"said": found.message} | ({} if found.verdict == SKIP else {"fine": found.verdict != WRONG})


def attention_case(where: Where, how: Attention) -> Row:
    """Compare an attention kernel with its definition."""
    os.environ[tile_choice.VARIABLE] = str(how.tile)
    generator, pattern, dtype = torch.Generator().manual_seed(0), how.pattern, how.dtype
    shapes = [(1, heads, how.length, how.head_dim) for heads in (4, how.key_heads, how.key_heads, 4)]
    q, k, v, dout = (torch.randn(s, generator=generator).to(where.device, dtype) for s in shapes)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_dispatch.attention(q, k, v, pattern, True, "triton")

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return definition(q, k, v, pattern=pattern, causal=True, scale=1 / math.sqrt(how.head_dim))

    result = checks.both_ways(ours, (q, k, v), dout)
    truth = checks.both_ways(exact, [x.double() for x in (q, k, v)], dout.double())
    bounds = checks.ATTENTION_BOUNDS[dtype]
    names = dict(zip(("out", "dq", "dk", "dv"), (bounds[0], *[bounds[1]] * 3), strict=True))
    return of_error(checks.compare(dtype, names, result, [x.cpu() for x in truth]))


def block_case(where: Where, dtype: torch.dtype, shape: tuple[int, int], side: int, tile: int) -> Row:
    """Compare a block kernel with its definition."""
    from ..linear_cuda import block_mask

    if (reason := linear_dispatch.unsupported_reason("block", where.device, dtype, shape, side)) is not None:
        return {"said": f"not here: {reason}"}
    os.environ[tile_choice.VARIABLE] = str(tile)
    active = block_mask(*shape, side, 0.9, "cpu")
    index = linear_dispatch.build_index("block", active.to(where.device), side)
    return of_error(checks.linear_error(index, active, dtype, checks.BLOCK_BOUNDS[dtype], where.device))


def masking_case(where: Where, dtype: torch.dtype) -> Row:
    """Zeros at the inactive weights, NaN and infinities included, and not a bit changed at the active ones."""
    generator = torch.Generator().manual_seed(3)
    differ = 0
    for length in (1, 7, 4096, 100_003):
        values = torch.randn(length, generator=generator).to(dtype)
        values[::5], values[1::7] = float("nan"), float("inf")
        bits = packed_bits.pack(torch.rand(length, generator=generator) < 0.1)
        there = values.clone().to(where.device)
        packed_bits.retain_(there, bits.to(where.device))
        packed_bits.retain_(values, bits)
        word = torch.int16 if values.element_size() == 2 else torch.int32
        differ += int((there.cpu().view(word) != values.view(word)).sum())
    return {"said": f"{differ} values differ from the CPU's", "fine": differ == 0}


def of_error(error: checks.Error) -> Row:
    """Return the row of a largest error and its bound."""
    said = f"{error.what} is off by {error.error:.1e}, {error.bound:.1e} is allowed"
    return {"said": said, "fine": error.fine, "what": error.what, "error": error.error, "bound": error.bound}


# --- masks ---


def masks(where: Where) -> Iterator[Case]:
    """Yield topology steps, computed on the GPU and on the CPU from equal inputs."""
    size = (64, 48) if where.tiny else (3072, 768)
    for name, dtype in product(("mst", "rigl", "set", "mest", "snfs"), (torch.float32, torch.bfloat16)):
        for side in (1,) if name != "mst" else (1, 16):
            what = f"{name}, {type_name(dtype)}" + (f", blocks of {side}" if side > 1 else "")
            yield Case(what, functools.partial(mask_case, where, name, dtype, size, side))


def mask_case(where: Where, name: str, dtype: torch.dtype, size: tuple[int, int], side: int) -> Row:
    """Three topology steps to 50, 90 and 80 %, from equal weights and gradients of many equal values."""
    here, there = (digests(torch.device(device), name, dtype, size, side) for device in ("cpu", where.device))
    same = here == there
    return {"said": f"masks of {len(here)} topology steps {'equal' if same else 'differ'}", "fine": same}


def digests(device: torch.device, name: str, dtype: torch.dtype, size: tuple[int, int], side: int) -> list[int]:
    """Return digests of the masks after some topology steps."""
    granularity = Elements() if side == 1 else Blocks(side, 2)
    mask = LayerMask(Shard.whole("w", size), device)
    numel = math.prod(granularity.grid_shape(size))
    found = []
    for step, density in enumerate((0.5, 0.1, 0.2)):
        generator = torch.Generator().manual_seed(step)
        drawn = (torch.randn(mask.numel, generator=generator).to(dtype).to(device) for _ in range(3))
        weight, gradient, momentum = drawn
        mask.retain_(weight)
        layer = Layer(mask, round(density * numel), weight, gradient, momentum)
        granularity.evolve([layer], policy=policy(name), update_fraction=0.3, seed=1, step=step, exchange=Exchange())
        found.append(mask.digest())
    return found


# --- training ---

STEPS = 12
# A loss on one device against the other's. Two ways to compute attention and layers on a CPU: 5e-7 and 6e-4 apart.
LOSS_BOUNDS = {"float32": 2e-5, "bfloat16": 1e-2}
DTYPES = tuple(LOSS_BOUNDS)


@dataclass(frozen=True)
class Training:
    """A short sparse run."""

    stage: int
    dtype: str
    granularity: Granularity
    to_dense: bool = False
    """From 98 % to dense: masks are removed while units that were dead are revived."""

    @property
    def name(self) -> str:
        """The name of the case."""
        kind = self.granularity
        of = kind if isinstance(kind, str) else f"blocks of {kind['block']}"
        end = ", to dense" if self.to_dense else ""
        return f"mst, ZeRO {self.stage}, {self.dtype}, {of}{end}, {STEPS} steps"


RUNS = (
    Training(1, "float32", "element"),
    Training(2, "float32", "element"),
    Training(3, "float32", "element"),
    Training(2, "bfloat16", "element"),
    Training(2, "float32", {"block": 16}),
    Training(2, "float32", "channel"),
)
# Which units are revived depends on the last bit of a gradient, so these are not compared with the CPU.
TO_DENSE = tuple(Training(stage, dtype, "element", to_dense=True) for stage in range(4) for dtype in DTYPES)


def training(where: Where) -> Iterator[Case]:
    """Every ZeRO stage, two types, blocks and channels: first on the GPU, then the same on the CPU."""
    runs, to_dense = (RUNS[:1], TO_DENSE[-1:]) if where.tiny else (RUNS, TO_DENSE)
    for run in (*runs, *to_dense):
        yield Case(f"{run.name}, on the GPU", functools.partial(on_device, where, run))
    for run in runs:
        yield Case(f"{run.name}, against the CPU", functools.partial(against_cpu, where, run))


def on_device(where: Where, run: Training) -> Row:
    """Train on this device and on the CPU, and compare the losses."""
    rows = trained(where, where.device, run)
    losses = [row["loss"] for row in rows]
    start = max(losses) if run.to_dense else losses[0]  # it rises when nearly all weights are masked
    fine = start - losses[-1] > 2 * LOSS_BOUNDS[run.dtype]
    fine &= not run.to_dense or rows[-1]["sparsity"] == 0
    said = f"the loss fell from {start:.3f} to {losses[-1]:.3f} at up to {max(row['sparsity'] for row in rows):.0%}"
    return {"said": said, "fine": fine, "losses": losses}


def against_cpu(where: Where, run: Training) -> Row:
    """The same run twice, from the same start on the same batches."""
    runs = [trained(where, device, run) for device in ("cpu", where.device)]
    losses = [[row["loss"] for row in rows] for rows in runs]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    sparsity = [[row["sparsity"] for row in rows] for rows in runs]
    bound = LOSS_BOUNDS[run.dtype]
    fine = apart <= bound and sparsity[0] == sparsity[1]
    said = f"losses within {apart:.1e} of the CPU's ({bound:g} is allowed)"
    return {"said": said, "fine": fine, "losses_cpu": losses[0], "losses": losses[1]}


def trained(where: Where, device: str, run: Training) -> list[dict[str, Any]]:
    """The metrics of a run in a process of its own; of one that has ended already, what it left."""
    folder = where.work / "training" / f"{device} {run.name}".replace(",", "").replace(" ", "-")
    metrics_file = folder / "out" / "metrics.jsonl"
    if not (rows := losses_of(metrics_file)):
        environment = {**os.environ, "DS_ACCELERATOR": device, "TRITON_INTERPRET": "0", tile_choice.VARIABLE: "0"}
        if device == "cpu":
            environment["OMP_NUM_THREADS"] = "2"  # a tiny model, at the same time as others
        pretrain(folder, training_config(corpus(where.work), device, run), ["-m", "mst_scale.pretrain"], environment)
        rows = losses_of(metrics_file)
    return rows


def pretrain(folder: Path, config: dict[str, Any], program: list[str], environment: dict[str, str]) -> None:
    """Run a program that takes the options of `mst_scale.pretrain`, in a new folder, to its end.

    Raises:
        RuntimeError: with the last lines that it has printed, if it fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = ["--deepspeed_config", str(folder / "config.json"), "--out", str(folder / "out")]
    with (folder / "log").open("w") as log:
        command = [sys.executable, *program, *words]
        ended = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
    if ended.returncode:
        lines = (folder / "log").read_text().strip().splitlines() or ["it printed nothing"]
        raise RuntimeError("; ".join(lines[-4:]))


def losses_of(metrics_file: Path) -> list[dict[str, Any]]:
    """The rows with a loss; none of a run that has not ended."""
    rows = [row for row in metrics.read(metrics_file) if row.get("loss") is not None] if metrics_file.exists() else []
    return rows if len(rows) == STEPS else []


def training_config(data: Path, device: str, run: Training) -> dict[str, Any]:
    """The CPU's run computes with torch alone, so that no kernel has to be compiled for it first."""
    stage, dtype, granularity = run.stage, run.dtype, run.granularity
    channels = granularity == "channel"
    topology: dict[str, Any] = {"interval": 4, "granularity": granularity}
    mst: dict[str, Any] = {
        "method": "mst",
        "sparsity": {"max": 0.8, **({"distribution": "uniform"} if channels else {})},
        "attention": {"stride": 16},
        "topology": topology,
    }
    if device == "cpu":
        mst["attention"]["backend"] = "blocked"
        mst["compute"] = {"backend": "auto" if channels else "dense"}
    elif isinstance(granularity, dict):
        mst["compute"] = {"backend": "block"}
    if run.to_dense:
        mst["sparsity"] |= {"max": 0.98, "warmup": 0.1, "ultra": 0.3, "restore": 0.5, "restore_moves": "continuous"}
        topology |= {"interval": 1}
    if channels:
        topology |= {"policy": "static", "random_ratio": 1.0, "grown_moments": "active_mean"}
        mst["targets"] = {"lm_head": False}
    return {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": stage}, "tensorboard": {"enabled": False},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "seq_length": 64, "vocab_size": 64},
        "data": {"dir": str(data)},
        "training": {
            "steps": STEPS, "warmup": 1, "log_every": 1, "eval_every": 0, "save_every": 0, "seed": 1,
            "histogram_every": 0,
        },
        "mst": mst,
    }  # fmt: skip


def corpus(work: Path) -> Path:
    """Tokens that a model can learn in a few steps."""
    return write_random_walk(work / "corpus", tokens=50_000, vocabulary=63)

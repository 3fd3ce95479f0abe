"""Trains a tiny GPT whole on one rank, and cut by tensor and pipeline parallelism on several, on the same batches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.errors import UserError
from tests.support import engines
from tests.support.pool import run

TINY = ModelConfig(n_layer=3, n_head=4, n_embd=16, seq_length=8, vocab_size=50, bias=True)
BATCH, MICRO = 8, 2
MESHES: dict[Any, Any] = {}  # of this process: engines never let go of their groups, and each group has threads


def tokens_and_targets(step: int, micro_batch: int, config: ModelConfig = TINY) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    sequence = torch.randint(0, config.vocab_size, (MICRO, config.seq_length + 1), generator=generator)
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,  # the first gradients are larger
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 2**31,
        **more,
    }


def built(sizes: dict[str, int], stage: int = 0, seed: int = 5, **changes: Any) -> tuple[Any, Any]:
    """(mesh, this rank's piece of the model)."""
    from mst_scale import zero_shards
    from mst_scale.comm import Mesh, ParallelDims
    from mst_scale.models import build
    from mst_scale.tensor_parallel import TensorGroup

    config, wanted = dataclasses.replace(TINY, **changes), ParallelDims(**sizes)
    if wanted not in MESHES:
        MESHES[wanted] = Mesh(wanted)
    mesh = MESHES[wanted]
    torch.manual_seed(seed)
    if mesh.sizes.pipeline > 1:
        from mst_scale.models.pipelined_gpt import PipelinedGPT

        return mesh, PipelinedGPT(config, mesh)
    with zero_shards.partitioned_construction(settings(stage), mesh):
        return mesh, build(config, TensorGroup.of(mesh))


@dataclass(frozen=True)
class Training:
    stage: int
    steps: int
    deepspeed: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


def trained(rank: int, world: int, sizes: dict[str, int], how: Training) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of the steps, the same on every rank."""
    import mst_scale
    from mst_scale import zero_shards

    mesh, model = built(sizes, how.stage, **how.model)
    given = {} if mesh.sizes.pipeline > 1 else {"mpu": mesh}
    engine: Any = mst_scale.initialize(model=model, config=settings(how.stage, **how.deepspeed), **given)[0]
    losses, norms = [], []
    for step in range(how.steps):
        mine = range(mesh.replica, BATCH // MICRO, mesh.data)
        losses.append(engines.step(engine, [tokens_and_targets(step, k) for k in mine]))
        norms.append(zero_shards.grad_norm(engine))
    engine.destroy()
    return losses, norms


def assert_equals_one_rank(world: int, sizes: dict[str, int], how: Training, rtol: float) -> None:
    """Losses and gradient norms on every rank are those of the whole model on one."""
    (reference,) = run(trained, 1, {}, how)
    for mine in run(trained, world, sizes, how):
        for got, expected in zip(mine, reference, strict=True):
            assert got == pytest.approx(expected, rel=rtol)


def _rejected(rank: int, world: int, sizes: dict[str, int], changes: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        built(sizes, **changes)
    return str(error.value)


def assert_rejected(sizes: dict[str, int], changes: dict[str, Any], words: str) -> None:
    """Each of two ranks rejects this model in one line."""
    for said in run(_rejected, 2, sizes, changes):
        assert words in said and "\n" not in said

"""Trains a small GPT on sequences that are cut over ranks: the same batches whatever the layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import mst_scale
from mst_scale.comm import Mesh, ParallelDims
from mst_scale.config.blocks import ModelConfig
from mst_scale.models.gpt import GPT
from tests.support.engines import whole_masks
from tests.support.toys import deepspeed_config

SHAPE: dict[str, Any] = {"n_layer": 1, "n_head": 4, "n_embd": 32, "seq_length": 32, "vocab_size": 64}
BATCH = 2  # sequences, of all ranks together


@contextlib.contextmanager
def mesh_of(sequence: int) -> Iterator[Mesh]:
    """DeepSpeed keeps an mpu for the engines that come after, too."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.init_distributed("gloo")
    try:
        yield Mesh(ParallelDims(sequence=sequence))
    finally:
        groups.mpu = None


def batch(step: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A walk over the vocabulary; the targets of more than the first quarter of each sequence do not count."""
    generator = torch.Generator().manual_seed(step)
    walk = torch.randint(3, (BATCH, length + 1), generator=generator).cumsum(1) % 64
    targets = walk[:, 1:].clone()
    targets[:, : length // 4 + 1] = -1
    return walk[:, :-1].contiguous(), targets


def mine(mesh: Mesh, *whole: torch.Tensor) -> list[torch.Tensor]:
    """This rank's part of the sequences that fall to it."""
    rows = slice(mesh.replica * BATCH // mesh.data, (mesh.replica + 1) * BATCH // mesh.data)
    length = whole[0].shape[1] // mesh.sizes.sequence
    return [t[rows, mesh.part * length : (mesh.part + 1) * length].contiguous() for t in whole]


def config(stage: int, mesh: Mesh, precision: str, steps: int, **more: Any) -> dict[str, Any]:
    raw = deepspeed_config(stage, mesh.data, precision)
    raw |= {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // mesh.data}
    raw |= {"training": {"steps": steps, "seed": 3}, "model": SHAPE}
    raw["mst"] = {
        "method": "mst",
        "sparsity": {"max": 0.8},
        "topology": {"interval": 3, "check_every": 5},
        "attention": {"stride": 4, "dense_from": 24},
        **more,
    }
    return raw


def model(**changes: Any) -> GPT:
    torch.manual_seed(5)
    return GPT(ModelConfig(**{**SHAPE, **changes}))


def train(  # noqa: PLR0917  (what the pool hands on)
    rank: int, world: int, sequence: int, stage: int, precision: str, steps: int, recompute: bool, more: dict[str, Any]
) -> tuple[list[float], list[dict[str, str]], list[float]]:
    """Losses, the masks' digests after each change, and the norm of each gradient."""
    with mesh_of(sequence) as mesh:
        engine, *_ = mst_scale.initialize(
            model=model(activation_checkpointing=recompute), mpu=mesh, config=config(stage, mesh, precision, 30, **more)
        )
        losses, digests, norms = [], [], []
        for step in range(steps):
            loss = engine(*mine(mesh, *batch(step, SHAPE["seq_length"])))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            norms.append(float(engine.get_global_grad_norm() or 0.0))
            if engine.mst.changed_at == step + 1:
                digests.append(whole_masks(engine))
        return losses, digests, norms

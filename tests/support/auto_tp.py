"""Trains a tiny Llama of transformers, which DeepSpeed's AutoTP cuts over ranks, on the same batches everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mst_scale import zero_shards
from tests.support import engines, layouts
from tests.support.engines import masters

BATCH, MICRO, LENGTH, VOCAB = 4, 2, 8, 48
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped
    "max_position_embeddings": 2 * LENGTH,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Cut:
    """Over how many ranks layers are cut, how many replicas there are, and the ZeRO stage."""

    tensor: int = 1
    data: int = 1
    stage: int = 0

    @property
    def world(self) -> int:
        return self.tensor * self.data

    def __str__(self) -> str:
        return f"tp{self.tensor}-dp{self.data}-zero{self.stage}"


@dataclass(frozen=True)
class Recipe(layouts.Recipe):
    """What every layout does alike."""

    of: int = 14
    precision: str = "fp32"


def config(cut: Cut, recipe: Recipe) -> dict[str, Any]:
    tensor: dict[str, Any] = {} if cut.tensor == 1 else {"tensor_parallel": {"autotp_size": cut.tensor}}
    low = {} if recipe.precision == "fp32" else {recipe.precision: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": BATCH // MICRO // cut.data,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,  # the first gradients are larger
        "zero_optimization": {"stage": cut.stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 2**31,
        **tensor,
        **low,
        **recipe.deepspeed,
        "training": {"steps": recipe.of, "seed": 3},
        "mst": layouts.sparse_block(recipe, 0.7),
    }


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))


def forget_groups() -> None:
    """DeepSpeed keeps an engine's groups and its mode for the process: another size wants others."""
    from deepspeed.module_inject import layers
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups

    for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"):
        setattr(groups, name, None)
    init_utils._TP_MODEL_INIT_ARGS = None
    layers.set_autotp_mode(training=False)


@contextlib.contextmanager
def started(cut: Cut, recipe: Recipe) -> Iterator[Any]:
    """This rank's engine."""
    import mst_scale

    forget_groups()
    engine: Any = None
    try:
        engine = mst_scale.initialize(model=llama(**recipe.model), config=config(cut, recipe))[0]
        yield engine
    finally:
        if engine is not None:
            engine.destroy()
        forget_groups()


def tokens(step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    return torch.randint(0, VOCAB, (MICRO, LENGTH), generator=generator)


def step(cut: Cut, engine: Any, number: int) -> float:
    """One optimizer step on the batch of this number; the mean loss, the same on every rank."""
    mine = [tokens(number, k) for k in range(dist.get_rank() // cut.tensor, BATCH // MICRO, cut.data)]
    return engines.step(engine, [{"input_ids": ids, "labels": ids} for ids in mine])


DEAD = {"mlp": [1, 13, 23], "value": [0, 5]}  # units of the first layer: in each slice some


def kill_units(engine: Any) -> None:
    """Zero all factors of some units of the first layer, in master weights and in what the forward reads."""
    lines = {
        "mlp.gate_proj": (0, DEAD["mlp"]),
        "mlp.up_proj": (0, DEAD["mlp"]),
        "mlp.down_proj": (1, DEAD["mlp"]),
        "self_attn.v_proj": (0, DEAD["value"]),
        "self_attn.o_proj": (1, [0, 4, 9, 13]),  # two query heads of 4 channels read each value head
    }
    shards = engine.mst.store
    for i, shard in enumerate(shards.slices):
        name = shard.name.removeprefix("model.layers.0.").removesuffix(".weight")
        if name not in lines:
            continue
        axis, chosen = lines[name]
        flat, columns = shard.logical(torch.arange(shard.length)), shard.shape[1]
        line = flat // columns if axis == 0 else flat % columns
        kept = ~torch.isin(line, torch.tensor(chosen))
        shards.weight(i).mul_(kept)
        shards.zero_read(i, kept)


def trained(rank: int, world: int, cut: Cut, recipe: Recipe, kills: bool = False) -> dict[str, Any]:
    """Losses, norms, and after every topology step the masks and what was reported of it."""
    keys = ("losses", "norms", "masks", "changes", "digests", "dead", "revived")
    found: dict[str, Any] = {key: [] for key in keys}
    with started(cut, recipe) as engine:
        if kills:
            kill_units(engine)
        if recipe.given_gradients:
            layouts.give_gradients(engine)
        for number in range(recipe.steps):
            found["losses"].append(step(cut, engine, number))
            found["norms"].append(zero_shards.grad_norm(engine))
            if engine.mst.changed_at == number + 1:
                layouts.note_masks(found, engine)
                found["dead"].append(engine.mst.dead_units())
                found["revived"].append(engine.mst.revived)
        found["sparsity"], found["densities"] = engine.mst.sparsity, engine.mst.densities()
        found["masters"] = masters(engine)
    return found

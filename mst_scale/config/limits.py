"""Refuses values that no experiment can have: huge numbers, deep nesting, characters that break a line.

The one place with the largest value of every integer key. The smallest stand with the blocks.
"""

from __future__ import annotations

from typing import Any

from mst_scale.distributed.errors import refuse_unprintable, shown
from mst_scale.errors import UserError

MILLION = 10**6
SEED = 2**63 - 1  # torch and numpy take a signed 64-bit number
STEPS = 10**7  # seventy times the paper's
TOKENS = 2**24  # of a sequence or a vocabulary; sixteen million
DEPTH = 32  # levels of nested objects and lists
WEIGHTS = 10**14  # of a model; the largest known have 10^12

# Several times what the largest known runs state. Durations are also limited by training.steps.
LARGEST: dict[str, int] = {
    "model.n_layer": 1024,
    "model.n_head": 2**16,
    "model.n_embd": 2**20,
    "model.d_ffw": 2**22,
    "model.context": TOKENS,
    "model.vocab_size": TOKENS,
    "model.vocab_multiple": 2**20,
    "data.max_bytes": 2**60,
    "data.seed": SEED,
    "training.steps": STEPS,
    "training.seed": SEED,
    "training.warmup": STEPS,
    "training.restart": STEPS,
    "training.decay": STEPS,
    "training.log_every": SEED,
    "training.eval_every": SEED,
    "training.eval_sequences": 10 * MILLION,
    "training.eval_seed": SEED,
    "training.rival.eval_sequences": 10 * MILLION,
    "training.save_every": SEED,
    "training.keep_checkpoints": MILLION,
    "training.look_every": SEED,
    "training.stop_after_nonfinite": STEPS,
    "training.spike.window": MILLION,
    "training.spike.skip": STEPS,
    "training.spike.max_rollbacks": STEPS,
    "mst.seed": SEED,
    "mst.sparsity.warmup": STEPS,
    "mst.sparsity.ultra": STEPS,
    "mst.sparsity.restore": STEPS,
    "mst.sparsity.stages": 1000,
    "mst.sparsity.turn": STEPS,
    "mst.sparsity.start": STEPS,
    "mst.topology.interval": STEPS,
    "mst.topology.granularity.block": 128,
    "mst.topology.granularity.min_blocks": MILLION,
    "mst.topology.check_every": SEED,
    "mst.attention.stride": TOKENS,
    "mst.attention.phase_strides.dense": TOKENS,
    "mst.attention.phase_strides.warmup": TOKENS,
    "mst.attention.phase_strides.ultra": TOKENS,
    "mst.attention.phase_strides.restore": TOKENS,
    "mst.attention.dense_from": STEPS,
    "train_batch_size": 100 * MILLION,
    "train_micro_batch_size_per_gpu": MILLION,
    "gradient_accumulation_steps": MILLION,
}


def refuse_large(key: str, value: int) -> None:
    most = MILLION if key.startswith("mst.options.") else LARGEST[key]
    if value > most:
        raise UserError(f"{key} must be at most {most:,}, not {shown(value)}")


def refuse_senseless(raw: dict[str, Any]) -> None:
    """Check a whole config, DeepSpeed's part too; in a loop, because a deeply nested file would end a recursion."""
    left: list[tuple[Any, str, int]] = [(raw, "", 0)]
    while left:
        value, path, depth = left.pop()
        if depth > DEPTH:
            raise UserError(f"{shown(path)}: nested more than {DEPTH} deep")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise UserError(f"{shown(key)}: keys must be strings")
                refuse_unprintable("the key", key)
            left += [(inner, f"{path}.{key}".lstrip("."), depth + 1) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [(inner, path, depth + 1) for inner in value]
        elif isinstance(value, str):
            refuse_unprintable(path, value)
        elif isinstance(value, int) and abs(value) > SEED:
            raise UserError(f"{path} must be a number below 2^63, not {shown(value)}")

"""Refuses values that no experiment can have: huge numbers, deep nesting, characters that break a line.

The one place with the largest value of every integer key (the smallest stand with the blocks), and with the usable
range of every other number that would train "successfully" without learning when it is far off. Learning rates have no
range: a high one is a legitimate way to diverge, which ends with exit code 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mst_scale.comm.exits import format_value
from mst_scale.comm.parser import validate_printable
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


@dataclass(frozen=True)
class Range:
    """The numbers that a key can usefully have: `least` to `most`, and 0 where it has a meaning of its own."""

    least: float
    most: float
    zero: str = ""
    """What 0 means; empty: 0 is usable only where it lies in the range."""

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most or (value == 0 and bool(self.zero))

    def __str__(self) -> str:
        zero = f"0 ({self.zero}) or " if self.zero else ""
        return f"{zero}a number from {self.least:g} to {self.most:g}"


AVERAGE = Range(0, 0.999999)  # the decay of a running average: closer to 1 it never forgets its first value, 0
PENALTY = Range(1e-12, 100, "none")  # several thousand times what is used
SHARE = Range(0, 1)
LARGEST_SCALE = 2**32  # of a loss in fp16, where gradients overflow above 65504

# Far outside of what anybody uses, so that only values which cannot be meant are refused.
USABLE: dict[str, Range] = {
    "gradient_clipping": Range(1e-6, 1e12, "no clipping"),
    "gradient_predivide_factor": Range(1e-6, 1e6),
    "optimizer.params.eps": Range(1e-30, 1, "none"),  # float32 has nothing between 0 and 1e-38
    "optimizer.params.weight_decay": PENALTY,
    "optimizer.params.betas": AVERAGE,
    "optimizer.params.momentum": AVERAGE,
    "optimizer.params.alpha": AVERAGE,
    "optimizer.params.rho": AVERAGE,
    "optimizer.params.dampening": SHARE,
    "optimizer.params.momentum_decay": SHARE,
    "optimizer.params.lambd": SHARE,
    "optimizer.params.lr_decay": SHARE,
    "optimizer.params.initial_accumulator_value": Range(0, 1e6),
    "fp16.loss_scale": Range(1e-3, LARGEST_SCALE, "dynamic"),
    "fp16.initial_scale_power": Range(0, 32),
    "fp16.min_loss_scale": Range(0, LARGEST_SCALE),
    "fp16.loss_scale_window": Range(1, MILLION),
    "fp16.hysteresis": Range(0, MILLION),
    "model.init_std": Range(1e-6, 1),
    "model.dropout": Range(0, 0.99),
    "training.sparse_decay": Range(1e-6, 1e4, "none while they are sparse"),
    "training.spike.deviations": Range(0, 1e6),
    "training.spike.rise": Range(0, 1e6),
    "mst.topology.mest_lambda": Range(1e-12, 1e12, "the gradient has no part in the score"),
    "mst.options.sharpness": Range(1e-6, 1e6),
    "mst.options.decay": PENALTY,
    "mst.options.penalty": PENALTY,
    "mst.options.noise": Range(1e-12, 100, "none"),
}


def refuse_unusable(key: str, value: Any) -> None:
    """Refuse a number, or one of a list, outside of its key's usable range; other types are not judged here."""
    for one in value if isinstance(value, list | tuple) else (value,):
        number = isinstance(one, int | float) and not isinstance(one, bool)
        if key in USABLE and number and one not in USABLE[key]:
            raise UserError(f"{key} must be {USABLE[key]}, not {format_value(one)}")


def refuse_unusable_of_deepspeed(deepspeed: Mapping[str, Any]) -> None:
    """The same for the keys of a DeepSpeed config."""
    for key in USABLE:
        value: Any = deepspeed
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        refuse_unusable(key, value)


def refuse_large(key: str, value: int) -> None:
    most = MILLION if key.startswith("mst.options.") else LARGEST[key]
    if value > most:
        raise UserError(f"{key} must be at most {most:,}, not {format_value(value)}")


def refuse_senseless(raw: dict[str, Any]) -> None:
    """Check a whole config, DeepSpeed's part too; in a loop, because a deeply nested file would end a recursion."""
    left: list[tuple[Any, str, int]] = [(raw, "", 0)]
    while left:
        value, path, depth = left.pop()
        if depth > DEPTH:
            raise UserError(f"{format_value(path)}: nested more than {DEPTH} deep")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise UserError(f"{format_value(key)}: keys must be strings")
                validate_printable("the key", key)
            left += [(inner, f"{path}.{key}".lstrip("."), depth + 1) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [(inner, path, depth + 1) for inner in value]
        elif isinstance(value, str):
            validate_printable(path, value)
        elif isinstance(value, int) and abs(value) > SEED:
            raise UserError(f"{path} must be a number below 2^63, not {format_value(value)}")

"""Counts the FLOPs that Muon adds to an optimizer step: Newton-Schulz on each of its matrices, sparse or not.

    standard    5 · (4 n² m + 2 n³)      n ≤ m, the sides of the matrix: X Xᵀ, its square, and their product with X
    gram        8 n² m + 28 n³           m > n: the iteration goes over n × n, with one restart; n = m is standard

They are those of the whole job: ranks take turns, and where each repeats them (stage 0) they count once. What is linear
in the weights (momentum, masks, the update itself) is not counted, as of no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mst_scale.config.blocks import ModelConfig
from mst_scale.config.check import global_batch
from mst_scale.costs.flops import matrices

NOT_MUONS = ("embed", "lm_head")  # DeepSpeed leaves matrices with such names to Adam
TOKEN_TYPES = 2  # of BERT


def newton_schulz_flops(shape: Sequence[int], method: str = "gram") -> float:
    """One matrix, or a stack of them; a convolution's filters are one."""
    if len(shape) == 4:
        shape = (shape[0], shape[1] * shape[2] * shape[3])
    (*stack, rows, columns), count = shape, 1
    for size in stack:
        count *= size
    n, m = sorted((rows, columns))
    if method == "gram" and m > n:
        return float(count * (8 * n**2 * m + 28 * n**3))
    return float(count * 5 * (4 * n**2 * m + 2 * n**3))


def shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices of our own models that DeepSpeed gives to Muon: all but those of certain names."""
    d = model.n_embd
    found = {"wte.weight": (model.padded_vocab, d), "wpe.weight": (model.seq_length, d)}
    if model.arch == "bert":
        found["wtt.weight"] = (TOKEN_TYPES, d)
    found |= {m.name: (m.outputs, m.inputs) for m in matrices(model)}
    return {name: shape for name, shape in found.items() if not any(word in name.lower() for word in NOT_MUONS)}


def optimizer_flops(model: ModelConfig, deepspeed: Mapping[str, Any]) -> float:
    """What the config's optimizer adds to each step: nothing but Muon's is counted."""
    block = dict(deepspeed.get("optimizer") or {})
    if str(block.get("type")).lower() != "muon":
        return 0.0
    method = dict(block.get("params") or {}).get("ns_method", "gram")
    return sum(newton_schulz_flops(shape, method) for shape in shapes(model).values())


def share_of_a_sequence(model: ModelConfig, deepspeed: dict[str, Any], ranks: int) -> float:
    """The same, spread over the batch."""
    whole = optimizer_flops(model, deepspeed)
    return whole / global_batch(deepspeed, ranks) if whole else 0.0

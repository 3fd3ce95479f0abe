"""Counts the FLOPs of training on one sequence.

This follows the paper's appendix on FLOP calculation. S_l is the sparsity of a matrix with I inputs and O outputs, L
the sequence length, and Q the fraction of dense attention that remains:

    matrix       (1 - S_l) · L · (2I - 1) · O          qkv, proj, ffw1, ffw2 of every layer, and the head
    scores       Q · 2 · pairs · N_embd                 q·k
    reduce       Q · 2 · pairs · N_embd                 attention · v (N_embd = heads · D_head; misprinted in the paper)
    backward     2 · forward                            so a step is 3 · forward

One third of a step are the products that compute the gradients of the weights, for which a method may have separate
densities.

The two accountings differ in `pairs`: "paper" counts dense attention as the full square L², "causal" as the L(L+1)/2
pairs that a causal kernel computes. In both, sparse attention counts its own pairs. BERT's attention is bidirectional,
so both count the square. Its head (transform and decoder) computes only the masked positions, of which a sequence has
`model.predicted`.

Not counted, as in the paper: norms, GELU, softmax, biases, embedding look-ups, the optimizer (except Muon's matrix
products), topology steps, and the recomputation of activation checkpointing.

Muon adds Newton-Schulz to an optimizer step, on each of its matrices, sparse or not:

    standard    5 · (4 n² m + 2 n³)      n ≤ m, the sides of the matrix: X Xᵀ, its square, and their product with X
    gram        8 n² m + 28 n³           m > n: the iteration runs on n × n, with one restart; n = m is standard

These are the FLOPs of the whole job: each matrix counts once, even if every rank computes it (stage 0). Work that is
linear in the number of weights (momentum, masks, the update itself) is not counted, for any optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mst_scale.config import ModelConfig, TargetsConfig
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS, Pattern

DENSE = Pattern("dense")
NOT_MUONS = ("embed", "lm_head")  # DeepSpeed optimizes matrices with such names with Adam
TOKEN_TYPES = 2  # of BERT
KEYS = {"paper": "flops", "causal": "flops_causal"}
"""The keys of the FLOPs spent in metrics and checkpoints, by accounting …"""
DENSE_KEYS = {"paper": "flops_dense", "causal": "flops_dense_causal"}
"""… and of the FLOPs that dense training would have spent."""


@dataclass(frozen=True)
class Flops:
    """FLOPs by component, summed over layers. Flops add up and scale: `a + b`, `3 * a`."""

    qkv: float = 0.0
    scores: float = 0.0
    reduce: float = 0.0
    proj: float = 0.0
    ffw1: float = 0.0
    ffw2: float = 0.0
    head: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """All FLOPs."""
        return self.attention + self.matrices + self.optimizer

    @property
    def attention(self) -> float:
        """The part that depends on the attention pattern."""
        return self.scores + self.reduce

    @property
    def matrices(self) -> float:
        """The part that depends on the sparsity of the weights."""
        return self.qkv + self.proj + self.ffw1 + self.ffw2 + self.head

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Flops:
        return Flops(*(factor * value for value in dataclasses.astuple(self)))

    __rmul__ = __mul__


class Matrix(NamedTuple):
    """A weight that multiplies every token, or a fraction of them."""

    name: str  # as in the model's `named_parameters()`
    component: str  # the field of Flops that it adds to
    inputs: int
    outputs: int
    share: float = 1.0  # the fraction of tokens that it multiplies


def matrices(model: ModelConfig) -> list[Matrix]:
    """Return every weight that a forward pass multiplies by. A tied head has the name of the embedding."""
    d, f = model.n_embd, model.ffw
    found = []
    for layer in range(model.n_layer):
        block = f"blocks.{layer}."
        found += [
            Matrix(block + "attention.qkv.weight", "qkv", d, 3 * d),
            Matrix(block + "attention.proj.weight", "proj", d, d),
            Matrix(block + "mlp.up.weight", "ffw1", d, f),
            Matrix(block + "mlp.down.weight", "ffw2", f, d),
        ]
    share = model.predicted / model.seq_length
    if model.arch == "bert":
        found.append(Matrix("transform.weight", "head", d, d, share))
    return [*found, Matrix(head_name(model), "head", d, model.padded_vocab, share)]


def head_name(model: ModelConfig) -> str:
    """Return the name of the head's weight."""
    return "wte.weight" if model.tied_head else "lm_head.weight"


def choose_matrices(model: ModelConfig, targets: TargetsConfig) -> list[Matrix]:
    """Return the matrices that `mst.targets` chooses, the same ones as `targets.choose_targets` finds in the model."""
    able = [m for m in matrices(model) if targets.lm_head or m.name != head_name(model)]
    chosen = set(targets.choose([m.name for m in able]))
    return [m for m in able if m.name in chosen]


def forward_flops(
    model: ModelConfig,
    density: float | Mapping[str, float] = 1.0,
    attention_share: float = 1.0,
    accounting: str = "paper",
) -> Flops:
    """Count a forward pass of one sequence.

    Args:
        model: the model.
        density: 1 - S: one number for every matrix and the head, or the fraction of active weights by parameter name,
            where parameters that are not named are dense.
        attention_share: Q in the same accounting: `Pattern.share(model.seq_length, accounting, model.causal)`.
        accounting: "paper" or "causal".
    """
    tokens = model.seq_length
    if accounting not in ACCOUNTINGS:
        raise UserError(f"accounting {accounting!r} is unknown: choose one of {', '.join(ACCOUNTINGS)}")
    weights = matrices(model)
    densities = density if isinstance(density, Mapping) else dict.fromkeys((w.name for w in weights), density)
    if unknown := densities.keys() - {w.name for w in weights}:
        raise UserError(f"this model has no matrix {sorted(unknown)[0]!r}: see flops.formulas.matrices(model)")
    for name, value in (*densities.items(), ("attention_share", attention_share)):
        if not 0.0 <= value <= 1.0:
            raise UserError(f"{name} = {value} is not a fraction in [0, 1]")

    count = dict.fromkeys(("qkv", "proj", "ffw1", "ffw2", "head"), 0.0)
    for w in weights:
        count[w.component] += densities.get(w.name, 1.0) * w.share * tokens * (2 * w.inputs - 1) * w.outputs
    half = accounting == "causal" and model.causal
    pairs = tokens * (tokens + 1) // 2 if half else tokens * tokens
    half_of_attention = attention_share * model.n_layer * 2 * pairs * model.n_embd
    return Flops(scores=half_of_attention, reduce=half_of_attention, **count)


def step_flops(
    model: ModelConfig,
    density: float | Mapping[str, float] = 1.0,
    pattern: Pattern = DENSE,
    accounting: str = "paper",
    *,
    gradient_density: Mapping[str, float] | None = None,
) -> Flops:
    """Count the forward and backward passes of one sequence (3 · forward), which a batch multiplies.

    `density` and `accounting` are those of `forward_flops`; `gradient_density` is the density of the products that
    compute the gradients of the weights, by default `density`.
    """
    share = pattern.share(model.seq_length, accounting, model.causal)
    forward = forward_flops(model, density, share, accounting)
    if gradient_density is None:
        return 3 * forward
    return 2 * forward + forward_flops(model, gradient_density, share, accounting)


def dense_step_flops(model: ModelConfig, accounting: str = "paper") -> Flops:
    """Count the same step of a dense model, to which all reductions are relative."""
    return step_flops(model, accounting=accounting)


# --- Muon ---


def newton_schulz_flops(shape: Sequence[int], method: str = "gram") -> float:
    """Count the Newton-Schulz iteration for a matrix or a stack of them; filters of a convolution are one matrix."""
    if len(shape) == 4:
        shape = (shape[0], shape[1] * shape[2] * shape[3])
    count = math.prod(shape[:-2])
    n, m = sorted(shape[-2:])
    if method == "gram" and m > n:
        return float(count * (8 * n**2 * m + 28 * n**3))
    return float(count * 5 * (4 * n**2 * m + 2 * n**3))


def muon_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the matrices of our models that DeepSpeed optimizes with Muon: all except those in NOT_MUONS."""
    d = model.n_embd
    found = {"wte.weight": (model.padded_vocab, d), "wpe.weight": (model.seq_length, d)}
    if model.arch == "bert":
        found["wtt.weight"] = (TOKEN_TYPES, d)
    found |= {m.name: (m.outputs, m.inputs) for m in matrices(model)}
    return {name: shape for name, shape in found.items() if not any(word in name.lower() for word in NOT_MUONS)}


def optimizer_flops(model: ModelConfig, deepspeed: Mapping[str, Any]) -> float:
    """Count the FLOPs that the config's optimizer adds to each step: 0 unless it is Muon."""
    block = dict(deepspeed.get("optimizer") or {})
    if str(block.get("type")).lower() != "muon":
        return 0.0
    method = dict(block.get("params") or {}).get("ns_method", "gram")
    return sum(newton_schulz_flops(shape, method) for shape in muon_shapes(model).values())

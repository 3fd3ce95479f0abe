"""Counts the FLOPs of training on one sequence.

The paper's appendix on FLOP calculation, with S_l the sparsity of a matrix of I inputs and O outputs, L the sequence
length, Q the share of dense attention that is left:

    matrix       (1 - S_l) · L · (2I - 1) · O          qkv, proj, ffw1, ffw2 of every layer, and the head
    scores       Q · 2 · pairs · N_embd                 q·k
    reduce       Q · 2 · pairs · N_embd                 attention · v (N_embd = heads · D_head: the paper's misprint)
    backward     2 · forward                            so a step is 3 · forward

A third of the step is the products that give the weights' gradients. Where a method counts these otherwise, they have
densities of their own.

Two accountings differ in `pairs`: "paper" counts dense attention as the full square L², "causal" as the L(L+1)/2
pairs that a causal kernel needs. Sparse attention costs its own pairs in both. BERT sees both sides and needs the
square: there the two agree. Its head (transform and decoder) computes the masked positions only, `model.predicted`
of them in a sequence of the model's context.

Not counted, as in the paper: norms, GELU, softmax, biases, embedding look-ups, the optimizer (but for Muon's matrix
products: `muon`), topology steps, and what activation checkpointing computes twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS, Pattern

DENSE = Pattern("dense")
KEYS = {"paper": "flops", "causal": "flops_causal"}
"""Under which metrics and checkpoints hold what was spent, by accounting …"""
DENSE_KEYS = {"paper": "flops_dense", "causal": "flops_dense_causal"}
"""… and what dense training would have."""


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
        return self.attention + self.matrices + self.optimizer

    @property
    def attention(self) -> float:
        """What the pattern of attention changes."""
        return self.scores + self.reduce

    @property
    def matrices(self) -> float:
        """What the sparsity of the weights changes."""
        return self.qkv + self.proj + self.ffw1 + self.ffw2 + self.head

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Flops:
        return Flops(*(factor * value for value in dataclasses.astuple(self)))

    __rmul__ = __mul__


class Matrix(NamedTuple):
    """One weight that is multiplied with every token, or with a share of them."""

    name: str  # as in the model's `named_parameters()`
    component: str  # the field of Flops that it adds to
    inputs: int
    outputs: int
    share: float = 1.0  # of the tokens it is multiplied with


def matrices(model: ModelConfig) -> list[Matrix]:
    """Every matrix product of a forward pass that has a weight. A tied head has its embedding's name."""
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
    return "wte.weight" if model.tied_head else "lm_head.weight"


def forward_flops(
    model: ModelConfig,
    density: float | Mapping[str, float] = 1.0,
    attention_share: float = 1.0,
    accounting: str = "paper",
    length: int | None = None,
) -> Flops:
    """One forward pass of one sequence of `length` tokens (None: the model's context).

    `density` is 1 - S: one number for every matrix and the head, or {parameter name: share of active weights}, where
    what is not named is dense. `attention_share` is Q in the same accounting:
    `Pattern.share(length, accounting, model.causal)`.
    """
    tokens = model.seq_length if length is None else length
    if accounting not in ACCOUNTINGS:
        raise UserError(f"accounting {accounting!r} is unknown: choose one of {', '.join(ACCOUNTINGS)}")
    weights = matrices(model)
    densities = density if isinstance(density, Mapping) else dict.fromkeys((w.name for w in weights), density)
    if unknown := densities.keys() - {w.name for w in weights}:
        raise UserError(f"no matrix of this model is called {sorted(unknown)[0]!r}: see flops.matrices(model)")
    for name, value in (*densities.items(), ("attention_share", attention_share)):
        if not 0.0 <= value <= 1.0:
            raise UserError(f"{name}: {value} is not a share in [0, 1]")

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
    length: int | None = None,
    *,
    gradient_density: Mapping[str, float] | None = None,
) -> Flops:
    """Forward and backward of one sequence: 3 · forward. A step on a batch costs `batch * step_flops(…)`.

    `gradient_density`: that of the products that give the weights' gradients; None: as the others'.
    """
    tokens = model.seq_length if length is None else length
    share = pattern.share(tokens, accounting, model.causal)
    forward = forward_flops(model, density, share, accounting, tokens)
    if gradient_density is None:
        return 3 * forward
    return 2 * forward + forward_flops(model, gradient_density, share, accounting, tokens)


def dense_step_flops(model: ModelConfig, accounting: str = "paper", length: int | None = None) -> Flops:
    """What the same step costs dense: the denominator of every reduction that is shown."""
    return step_flops(model, accounting=accounting, length=length)

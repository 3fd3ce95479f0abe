"""Implements the pruning methods: magnitude, Wanda and SparseGPT.

    magnitude   |W_ij|                  compared within the whole matrix (Han et al. 2015, arXiv 1506.02626); layers
                                        share one budget, as in training
    Wanda       |W_ij| · ‖X_j‖₂         X_j: input j of all calibration tokens; compared within each output i, of whose
                                        row ⌊S · inputs⌋ weights become zero (Sun et al. 2023, arXiv 2306.11695)

These remove the weights with the lowest scores and change no others. N:M sparsity keeps at most N weights in each group
of M consecutive inputs of an output: row i, columns M·k … M·k + M - 1; scores are then compared within the groups.
Sparse tensor cores compute with 2:4 (Mishra et al. 2021, arXiv 2104.08378).

SparseGPT (Frantar and Alistarh 2023, arXiv 2301.00774) prunes a matrix column by column and updates later columns to
compensate. Each row w of the matrix should keep its outputs wX for the calibration tokens X. The Hessian H of this
error is the same for every row, and its Cholesky factor contains what each step needs after the columns before it have
been processed:

    H   = 2XXᵀ + λI,  λ = 0.01 · mean of the diagonal of 2XXᵀ
    H⁻¹ = UᵀU,        U upper triangular;  row c of U is that of [H_c:,c:]⁻¹, divided by the root of its first number

Columns are processed in blocks of 128. In each, the fraction S of its weights with the smallest w_c² / U_cc² is
removed, all rows compared together; with N:M, the smallest of each M columns, when the first of them is reached. Then,
column by column:

    e = w_c / U_cc where w_c is removed, else 0;      w_c: ← w_c: - e · U_c,c:

immediately within the block, and for all later columns at the end of the block. Everything is computed in float64.

Beyond the paper: weights that are already zero are removed first, and stay zero. Next are those whose inputs are zero
for the whole calibration (for example of dead neurons): their score is 0, while λ alone would give them a positive one.
If all inputs are zero, H is I.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.errors import UserError
from mst_scale.mixed_growing.evolve import Layer, sparsify
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.shard import Shard

BLOCK = 128
DAMPING = 0.01


@dataclass(frozen=True)
class NM:
    """An N:M pattern: at most `keep` of every `of` weights are not zero."""

    keep: int
    of: int

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}"

    @property
    def share(self) -> Fraction:
        """The fraction of weights that become zero."""
        return 1 - Fraction(self.keep, self.of)

    @classmethod
    def parse(cls, text: str) -> NM:
        """Read `N:M` as a user writes it.

        Raises:
            UserError: if it is not of that form, with 1 ≤ N < M.
        """
        found = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text)
        if found is None:
            raise UserError(f"--pattern {text!r}: write N:M, as in 2:4, where N of M weights stay")
        keep, of = (int(number) for number in found.groups())
        if not 1 <= keep < of:
            raise UserError(f"--pattern {text}: N of M weights stay, with 1 ≤ N < M, as in 2:4")
        return cls(keep, of)


@dataclass(frozen=True)
class Amount:
    """How much of a matrix becomes zero: a fraction of it, or with `pattern`, a fraction of each group."""

    share: Fraction
    pattern: NM | None = None

    @classmethod
    def of(cls, pattern: NM) -> Amount:
        """Return the amount for a pattern."""
        return cls(pattern.share, pattern)

    def among(self, count: int) -> int:
        """Return ⌊share · count⌋, exactly."""
        return self.share.numerator * count // self.share.denominator


@dataclass(frozen=True)
class PruningMethod:
    """A method to select the weights that become zero.

    Attributes:
        title: Its name and publication, for a model card.
        prune: Sets weights of a matrix (outputs, inputs) to zero in place, and may change others; zeros stay zero. The
            second argument is the sum of `of_inputs` over all calibration tokens.
        of_inputs: The statistic of a layer's inputs (tokens, inputs) to sum; None if the method only uses weights.
        spread: Whether layers share one budget (mst.sparsity.distribution); otherwise each loses the same fraction.
        within: If not `spread`, the part of a matrix in which weights are compared.
    """

    title: str
    prune: Callable[[Tensor, Tensor | None, Amount], None]
    of_inputs: Callable[[Tensor], Tensor] | None = None
    spread: bool = False
    within: str = ""


def lowest(scores: Tensor, zeros: Tensor, count: int) -> Tensor:
    """Select the weights of each group that become zero.

    Weights that training left at exactly 0 (`zeros`) are selected first and count as pruned: a group that has enough of
    them loses no others, and zeros stay zero. Of equal scores the lower index is kept, as everywhere in the code.

    Args:
        scores: (groups, size), at least 0.
        zeros: (groups, size), bool.
        count: The number of weights per group that become zero, unless it already has more zeros.

    Returns:
        Flags of the weights that become zero; (groups, size), bool.
    """
    best_first = scores.masked_fill(zeros, -1).argsort(dim=-1, descending=True, stable=True)
    last = best_first[:, scores.shape[-1] - count :]
    return torch.zeros_like(zeros).scatter_(-1, last, True) | zeros


# --- magnitude and Wanda ---


@torch.no_grad()
def _magnitude(weight: Tensor, inputs: Tensor | None, amount: Amount) -> None:
    if amount.pattern is None:
        keep_largest(weight, weight.numel() - amount.among(weight.numel()))
        return
    groups = weight.view(-1, amount.pattern.of)
    groups.masked_fill_(lowest(groups.abs(), groups == 0, amount.among(amount.pattern.of)), 0)


def keep_largest(matrix: Tensor, count: int) -> None:
    """Zero all but the `count` largest magnitudes; ties go to the lower flat index."""
    mask = LayerMask(Shard.whole("weight", matrix.shape), matrix.device)
    flat = matrix.detach().view(-1)
    sparsify([Layer(mask, count, flat)], how="magnitude", seed=0, exchange=Exchange())
    mask.retain_(flat)


@torch.no_grad()
def _wanda(weight: Tensor, inputs: Tensor | None, amount: Amount) -> None:
    assert inputs is not None
    size = weight.shape[1] if amount.pattern is None else amount.pattern.of
    scores = weight.abs().double() * inputs.double().sqrt()
    removed = lowest(scores.view(-1, size), weight.view(-1, size) == 0, amount.among(size))
    weight.masked_fill_(removed.view_as(weight), 0)


def _squares(x: Tensor) -> Tensor:
    return x.double().square().sum(0)  # ‖X_j‖² of each input j, summed over tokens


# --- SparseGPT ---


def products(x: Tensor) -> Tensor:
    """Return XXᵀ of inputs (tokens, inputs), summed over tokens; (inputs, inputs)."""
    return x.t() @ x


def factor(gram: Tensor) -> Tensor:
    """Return U of the inverse of H, given XXᵀ; float64."""
    h = 2 * gram.double()
    h.diagonal().add_(DAMPING * h.diagonal().mean())
    if not h.any():
        h.diagonal().fill_(1)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True)


@torch.no_grad()
def sparsegpt(weight: Tensor, inputs: Tensor | None, amount: Amount, block: int = BLOCK) -> None:
    """Prune a matrix in place by SparseGPT; `inputs` is XXᵀ of its calibration inputs."""
    assert inputs is not None
    size = 1 if amount.pattern is None else amount.pattern.of
    block = max(block // size, 1) * size
    upper, values, zeros = factor(inputs), weight.double(), weight == 0
    unused = inputs.diagonal() == 0
    ease = upper.diagonal().masked_fill(unused & ~unused.all(), torch.inf)
    for start in range(0, weight.shape[1], block):
        inside, later = slice(start, start + block), slice(start + block, None)
        u = upper[inside, inside]
        values[:, inside], errors = _block(values[:, inside], zeros[:, inside], u, ease[inside], amount)
        values[:, later] -= errors @ upper[inside, later]
    weight.copy_(values)


def _block(values: Tensor, zeros: Tensor, u: Tensor, ease: Tensor, amount: Amount) -> tuple[Tensor, Tensor]:
    """Return the new weights of a block of columns, and the errors for which later columns compensate.

    The score of a weight is (w / ease)²; `ease` describes how well other columns compensate for a column: U_cc, or
    infinity.
    """
    values, errors, pattern = values.clone(), torch.zeros_like(values), amount.pattern
    removed = zeros.clone()
    if pattern is None:
        scores = (values / ease).square()
        removed = lowest(scores.view(1, -1), zeros.reshape(1, -1), amount.among(values.numel())).view_as(values)
    for c in range(values.shape[1]):
        if pattern is not None and c % pattern.of == 0:
            group = slice(c, c + pattern.of)
            scores = (values[:, group] / ease[group]).square()
            removed[:, group] = lowest(scores, zeros[:, group], amount.among(pattern.of))
        errors[:, c] = (values[:, c] / u[c, c]).masked_fill(~removed[:, c], 0)
        values[:, c:] -= errors[:, c, None] * u[c, c:]
        values[:, c].masked_fill_(removed[:, c], 0)  # it is 0 except for rounding
    return values, errors


METHODS = {
    "magnitude": PruningMethod("magnitude", _magnitude, spread=True),
    "wanda": PruningMethod("Wanda (Sun et al. 2023, arXiv 2306.11695)", _wanda, _squares, within="each row"),
    "sparsegpt": PruningMethod(
        "SparseGPT (Frantar and Alistarh 2023, arXiv 2301.00774)", sparsegpt, products, within=f"each {BLOCK} inputs"
    ),
}

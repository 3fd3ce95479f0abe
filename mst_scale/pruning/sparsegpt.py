"""Implements SparseGPT, which prunes a matrix column by column and updates later columns to compensate.

See Frantar and Alistarh 2023, arXiv 2301.00774. Each row w of the matrix should keep its outputs wX for the calibration
tokens X. The Hessian H of this error is the same for every row, and its Cholesky factor contains what each step needs
after the columns before it have been processed:

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

import torch
from torch import Tensor

from mst_scale.pruning.method import Amount, PruningMethod, lowest

BLOCK = 128
DAMPING = 0.01


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
def prune(weight: Tensor, inputs: Tensor | None, amount: Amount, block: int = BLOCK) -> None:
    """Prune a matrix in place; `inputs` is XXᵀ of its calibration inputs."""
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


SPARSEGPT = PruningMethod(
    title="SparseGPT (Frantar and Alistarh 2023, arXiv 2301.00774)",
    prune=prune,
    of_inputs=products,
    within=f"each {BLOCK} inputs",
)

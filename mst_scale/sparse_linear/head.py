"""Computes the loss of a sparse output matrix without keeping its logits, by the compiled kernel.

The forward pass computes the gradients too, if they are wanted: they need the same logits, which exist for one tile of
tokens at a time. The backward pass only scales them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mst_scale.errors import UserError
from mst_scale.sparse_linear import derivatives
from mst_scale.sparse_linear.definition import wide
from mst_scale.sparse_linear.kernel import CompiledProducts
from mst_scale.transforms import check_first_derivative, leave_graph

# Bytes of scratch of all threads of a head together: each has the logits of a tile and its own gradient.
SCRATCH = 1 << 30
TILE = 64  # tokens, at most


def cross_entropy(
    x: Tensor, values: Tensor, targets: Tensor, products: CompiledProducts, count: Tensor | None = None
) -> Tensor:
    """Return the mean of -log softmax(x Sᵀ)[target] over targets other than -1, in float32.

    Args:
        x: (…, inputs).
        values: the active weights of the head, in float32 (float64 if x is).
        targets: as many as x has tokens.
        products: the structure of the mask.
        count: the sum is divided by this number instead of by the number of targets that count.

    Raises:
        UserError: if targets do not fit, or for a second derivative.
    """
    leave_graph("the loss of a sparse head", derivatives.TO_DENSE)
    how = products, torch.is_grad_enabled(), count
    loss: Tensor = derivatives.outside_graphs(_CrossEntropy, x, values, targets, how)
    return loss


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """Check that targets are tokens, or -1 for tokens that do not count.

    Only targets on the CPU are checked, because reading those of another device would make the CPU wait for it.

    Raises:
        UserError: if one is not.
    """
    if targets.device.type != "cpu" or not targets.numel():
        return
    least, largest = (int(value) for value in targets.aminmax())
    if least < -1:
        raise UserError(f"a target is {least}: use -1 for tokens that do not count")
    if largest >= vocabulary:
        raise UserError(f"a target is {largest}: with this vocabulary, targets must be below {vocabulary}")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, targets: Tensor, how: tuple[CompiledProducts, bool, Tensor | None]
    ) -> Tensor:
        products, with_gradients, count = how
        outputs, inputs = products.shape
        flat = x.reshape(-1, inputs).contiguous()
        targets = targets.reshape(-1).to(torch.int64).contiguous()
        if len(targets) != len(flat):
            raise UserError(f"{len(flat)} tokens need {len(flat)} targets, not {len(targets)}")
        check_targets(targets, outputs)
        counted = targets >= 0
        total = counted.sum() if count is None else count
        dtype = wide(x.dtype)
        wants_gradients = with_gradients and any(ctx.needs_input_grad)  # torch.no_grad does not change the latter
        losses = torch.empty(len(flat), dtype=dtype)
        dx = torch.empty(flat.shape, dtype=dtype) if wants_gradients else None
        gradient = torch.zeros(products.entries, dtype=dtype) if wants_gradients else None
        given = {"x": flat, "values": values.contiguous(), "targets": targets, "weights": counted.to(dtype) / total}
        each = (products.entries + TILE * outputs) * losses.element_size()
        results = {"losses": losses, "dx": dx, "gradient": gradient}
        products.run("sl_head", len(flat), x.dtype, {**given, **results}, most_threads=max(1, SCRATCH // each))
        if wants_gradients:
            ctx.save_for_backward(dx, gradient)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return losses.double().sum().div(total).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("the loss of a sparse head", derivatives.TO_DENSE)
        dx, gradient = ctx.saved_tensors
        return (dx * grads[0]).to(ctx.dtype).view(ctx.shape), gradient * grads[0], None, None

"""Refuses the derivatives that a hand-written gradient does not have, in one line that says what to do instead.

`refuse_transforms` is for the forward pass: torch.func and forward-mode AD would take a kernel's result for a constant.
`refuse_second_derivatives` is for the backward pass: a gradient that was computed without autograd has no graph.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from mst_scale.errors import UserError


def refuse_transforms(what: str, fix: str, *tensors: torch.Tensor | None, vmap: bool = False) -> None:
    """Raise UserError under a torch.func transform, or if a tensor has a forward-mode tangent.

    `what` is computed by code of ours; `fix` is what the user should do instead. `vmap` allows torch.func.vmap alone.
    """
    if transformed(vmap) or has_tangent(*tensors):
        raise UserError(f"{what} cannot follow torch.func transforms or forward-mode AD; {fix}")


def refuse_second_derivatives(what: str, fix: str) -> None:
    """Raise UserError in a backward pass that was called with create_graph=True."""
    if torch.is_grad_enabled():
        raise UserError(f"{what} has no second derivatives, which create_graph=True asks for; {fix}")


def leave_graph(what: str, fix: str) -> None:
    """End a graph of torch.compile here, instead of letting it trace what it cannot; fullgraph=True is told why."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"{what} cannot be traced by torch.compile; leave out fullgraph=True, or {fix}")


def transformed(vmap: bool = False) -> bool:
    """Whether a torch.func transform is active: any, or with `vmap` any other than torch.func.vmap."""
    if not torch._C._are_functorch_transforms_active():
        return False
    kinds = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    return not vmap or any(kind != torch._C._functorch.TransformType.Vmap for kind in kinds)


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether forward-mode AD follows one of these."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None)

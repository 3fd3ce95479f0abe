"""Rejects derivatives that hand-written gradients do not have, in one line that says what to do instead.

`check_not_transformed` is for the forward pass: torch.func and forward-mode AD would treat a kernel's result as a
constant. `check_first_derivative` is for the backward pass: a gradient computed without autograd has no graph.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from mst_scale.errors import UserError


def check_not_transformed(what: str, fix: str, *tensors: torch.Tensor | None, vmap: bool = False) -> None:
    """Raise UserError under a torch.func transform, or if a tensor has a forward-mode tangent.

    `what` names the computation; `fix` says what the user should do instead. `vmap` allows torch.func.vmap only.
    """
    if transformed(vmap) or has_tangent(*tensors):
        raise UserError(f"{what} cannot follow torch.func transforms or forward-mode AD; {fix}")


def check_first_derivative(what: str, fix: str) -> None:
    """Raise UserError in a backward pass that was called with create_graph=True."""
    if torch.is_grad_enabled():
        raise UserError(f"{what} has no second derivatives, which create_graph=True requires; {fix}")


def leave_graph(what: str, fix: str) -> None:
    """Break a graph of torch.compile here, where it cannot trace; with fullgraph=True the error says why."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"{what} cannot be traced by torch.compile; leave out fullgraph=True, or {fix}")


def transformed(vmap: bool = False) -> bool:
    """Return whether a torch.func transform is active; with `vmap`, one other than torch.func.vmap."""
    if not torch._C._are_functorch_transforms_active():
        return False
    kinds = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    return not vmap or any(kind != torch._C._functorch.TransformType.Vmap for kind in kinds)


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Return whether forward-mode AD tracks one of these tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None)

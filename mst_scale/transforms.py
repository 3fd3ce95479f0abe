"""Rejects derivatives that hand-written gradients do not support, with one line that says what to do instead.

`check_not_transformed` is called in the forward pass: torch.func and forward-mode AD would treat a kernel's result as a
constant. `check_first_derivative` is called in the backward pass: a gradient computed without autograd has no graph.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.autograd import forward_ad

from mst_scale.errors import UserError


def check_not_transformed(what: str, fix: str, *tensors: torch.Tensor | None, vmap: bool = False) -> None:
    """Check that no torch.func transform is active and that no tensor has a forward-mode tangent.

    Args:
        what: the computation, for the message.
        fix: what the user should do instead.
        tensors: the inputs.
        vmap: whether torch.func.vmap is supported.

    Raises:
        UserError: if one is.
    """
    if transformed(vmap) or has_tangent(*tensors):
        raise UserError(f"{what} cannot follow torch.func transforms or forward-mode AD; {fix}")


def check_first_derivative(what: str, fix: str) -> None:
    """Raise UserError in a backward pass with create_graph=True."""
    if torch.is_grad_enabled():
        raise UserError(f"{what} has no second derivatives, which create_graph=True requires; {fix}")


def leave_graph(what: str, fix: str) -> None:
    """Break the graph of torch.compile; with fullgraph=True, torch reports this message as an error."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"{what} cannot be traced by torch.compile; leave out fullgraph=True, or {fix}")


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which functions compiled by torch.compile run eagerly.

    It is for passes that would cause graph breaks: torch.compile would keep using the broken graphs in later passes.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes 1.4 s
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def transformed(vmap: bool = False) -> bool:
    """Return whether a torch.func transform is active, not counting torch.func.vmap if `vmap` is set."""
    if not torch._C._are_functorch_transforms_active():
        return False
    kinds = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    return not vmap or any(kind != torch._C._functorch.TransformType.Vmap for kind in kinds)


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Return whether forward-mode AD tracks one of these tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None)

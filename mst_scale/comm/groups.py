"""Creates every process group of this package, by name, so that logs and watchdogs of torch can tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mst_scale.comm.launch import timeout

_made: dict[str, list[Any]] = {}


def new_group(name: str, ranks: Sequence[int] | None = None, backend: str | None = None) -> Any:
    """Create a process group, on all ranks in the same order, with the timeout that DEEPSPEED_TIMEOUT states.

    Args:
        name: What the ranks of the group share, such as "tensor" or "control".
        ranks: Its ranks; all ranks by default.
        backend: Its backend; that of the default group by default.
    """
    import torch.distributed as dist

    members = None if ranks is None else list(ranks)
    group = dist.new_group(members, timeout=timeout(), backend=backend, group_desc=f"mst_scale {name}")
    if members is None or dist.get_rank() in members:
        _made.setdefault(name, []).append(group)
    return group


def groups() -> dict[str, list[Any]]:
    """Return the process groups that this rank belongs to, by name."""
    return {name: list(made) for name, made in _made.items()}

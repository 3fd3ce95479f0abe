"""Creates every process group of this package by name, and gives all groups of a process one timeout.

Names distinguish the groups in the logs and watchdogs of torch. torch, DeepSpeed and Accelerate create groups of
their own, mostly without a timeout: these then have torch's default (30 minutes, 10 for NCCL).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mst_scale.comm.launch import timeout


def new_group(name: str, ranks: Sequence[int] | None = None, backend: str | None = None) -> Any:
    """Create a process group, on all ranks in the same order, with the timeout of DEEPSPEED_TIMEOUT.

    Args:
        name: What the ranks of the group share, such as "tensor" or "control".
        ranks: Its ranks; all ranks by default.
        backend: Its backend; that of the default group by default.
    """
    import torch.distributed as dist

    members = None if ranks is None else list(ranks)
    return dist.new_group(members, timeout=timeout(), backend=backend, group_desc=f"mst_scale {name}")


def bound_later_groups(limit: timedelta) -> None:
    """Set the timeout of groups that are created later without one, such as DeepSpeed's.

    torch has no function for this; it reads two variables.
    """
    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = limit
    distributed_c10d.default_pg_nccl_timeout = limit


def bound_existing_groups(limit: timedelta) -> None:
    """Set the timeout of the default group, and of every other group that was created without one.

    Groups with a timeout of their own keep it: some are meant to wait for longer, such as for rank 0 to prepare data.
    """
    import torch.distributed as dist
    from torch.distributed import constants, distributed_c10d

    of_torch = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)
    for group in list(distributed_c10d._world.pg_map):
        if group is dist.group.WORLD or timeout_of(group) in of_torch:
            distributed_c10d._set_pg_timeout(limit, group)


def timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a process group; None if its backend does not state one."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    return None

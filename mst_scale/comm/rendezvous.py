"""Makes `deepspeed.init_distributed`, whoever calls it, use a free port and fail with a one-line error.

DeepSpeed always takes port 29500 unless a launcher or a user states another one, so a second run on the same machine
would end with a traceback, or its ranks would join the first run's store.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from mst_scale.comm.exits import one_line
from mst_scale.comm.launch import complete_environment, under_mpi


class Unreachable(OSError):
    """The ranks cannot meet at the address and port that they were given."""


def unreachable(error: BaseException) -> Unreachable:
    """Return the error of a failed rendezvous, which says where it was and what to do."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return Unreachable(
        f"cannot meet the other ranks at {address} ({one_line(error)}); "
        "if the port is taken, choose another (--master_port)"
    )


def install(deepspeed: ModuleType) -> None:
    """Wrap `init_distributed` of the package `deepspeed`, which `deepspeed.initialize` calls too."""
    plain = deepspeed.comm.init_distributed

    @functools.wraps(plain)
    def init_distributed(*given: Any, **named: Any) -> Any:
        import torch.distributed as dist

        if dist.is_initialized() or given[5:6] not in ((), (None,)) or named.get("init_method") is not None:
            return plain(*given, **named)
        if not under_mpi():
            complete_environment()
        try:
            return plain(*given, **named)
        except dist.DistNetworkError as error:
            _print_in_one_line()
            raise unreachable(error) from None

    modules: Any = (deepspeed, deepspeed.comm)
    for module in modules:
        module.init_distributed = init_distributed


def _print_in_one_line() -> None:
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        if isinstance(error, Unreachable) and not hasattr(sys, "ps1"):
            print(f"mst_scale: {error}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook

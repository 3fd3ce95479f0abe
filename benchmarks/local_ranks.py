"""Runs a benchmark on several processes of this machine; returns the result of rank 0, or raises a rank's error."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from mst_scale.errors import UserError


def run_on(ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work(*arguments)` returns on rank 0. It finds its place in the environment, as under a launcher."""
    from mst_scale.comm import free_port

    context = mp.get_context("spawn")
    results, errors, finished = context.SimpleQueue(), context.SimpleQueue(), context.Barrier(ranks)
    try:
        mp.spawn(_rank, (free_port(), work, arguments, results, errors, finished), nprocs=ranks)
    except mp.ProcessExitedException:
        if errors.empty():
            raise
        code, said = errors.get()  # by the rank that found it
        raise (UserError if code == 2 else OSError)(said) from None
    return results.get()


def _rank(  # noqa: PLR0917
    rank: int, port: int, work: Callable[..., Any], arguments: Any, results: Any, errors: Any, finished: Any
) -> None:
    ranks = finished.parties
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )

    from mst_scale import comm

    try:
        found = work(*arguments)
    except comm.FailedElsewhere:
        return  # another rank says why
    except Exception as error:
        if not comm.is_plain(error):
            raise
        errors.put((comm.exit_code(error), str(error)))
        raise SystemExit(comm.exit_code(error)) from None
    if rank == 0:
        results.put(found)
    finished.wait()  # another rank may still be in the last collective
    comm.leave(0)

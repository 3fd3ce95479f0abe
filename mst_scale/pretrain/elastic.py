"""Decides how many of the available ranks can train a run, and what its ranks do where their number may change.

The global batch, the order of its sequences and the schedules do not depend on the number of ranks (`data/sampler.py`,
`pretrain/learning_rate.py`), so a run may continue on any number whose data-parallel replicas divide the batch evenly.

torchrun's agents (`torchrun --nnodes MIN:MAX`) choose a number that need not be one of those. The ranks that are too
many then wait, without a part in the run, until the others have finished or the agents start all of them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

from mst_scale.comm import logger
from mst_scale.comm.launch import launched_rank, timeout
from mst_scale.config import Experiment
from mst_scale.config.deepspeed import batch_shape, largest_micro, without_open_batch
from mst_scale.config.parallel import sizes_of
from mst_scale.errors import UserError

AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun
STORE = "MST_STORE"  # the variable with the address and the port where all ranks meet, and the ranks that wait
FINISHED = "mst_scale/finished"  # the key in that store which lets the ranks that wait end
SECONDS_TO_NOTICE = 10.0  # in which an agent notices that nodes have come: by default it looks every 0.1 s
RESHAPED = ("adam", "adamw")  # optimizers of which `checkpoints/reshape.py` knows the states
LOOK_EVERY = 10.0  # seconds


def batch_of(deepspeed: Mapping[str, Any]) -> int:
    """Return the global batch of a run whose number of ranks may change.

    Raises:
        UserError: if the config does not state it, so that it would depend on the number of ranks.
    """
    total = deepspeed.get("train_batch_size")
    if total in (None, "auto"):
        raise UserError(
            "--elastic needs a global batch that does not depend on the number of ranks: set train_batch_size"
        )
    return batch_shape({"train_batch_size": total}, 1).sequences


def check_elastic(deepspeed: Mapping[str, Any]) -> None:
    """Check that a run can continue on a different number of ranks.

    Raises:
        UserError: if its batch would change, or its optimizer's states cannot be divided again.
    """
    batch_of(deepspeed)
    optimizer = str((deepspeed.get("optimizer") or {}).get("type"))
    if optimizer.lower() not in RESHAPED:
        raise UserError(
            f"--elastic: optimizer.type = {optimizer}, and only the states of Adam and AdamW are divided among another "
            "number of ranks: use one of them, or leave --elastic out"
        )


def can_train(world: int, deepspeed: Mapping[str, Any]) -> bool:
    """Return whether this many ranks divide into whole replicas that share the global batch evenly."""
    model = sizes_of(deepspeed).model
    return world > 0 and world % model == 0 and batch_of(deepspeed) % (world // model) == 0


def fit_batch(experiment: Experiment, world: int) -> Experiment:
    """Return the experiment with the largest micro-batch, at most its own, with which these ranks share the batch."""
    total = batch_of(experiment.deepspeed)
    replicas = sizes_of(experiment.deepspeed).data(world)
    deepspeed = without_open_batch(experiment.deepspeed)
    try:
        batch_shape(deepspeed, replicas)
    except UserError:
        deepspeed.pop("gradient_accumulation_steps", None)
        micro = deepspeed.get("train_micro_batch_size_per_gpu") or total
        deepspeed["train_micro_batch_size_per_gpu"] = largest_micro(total, micro, replicas)
        logger.info(
            "a global batch of %d sequences on %d replicas: micro-batches of %d",
            total, replicas, deepspeed["train_micro_batch_size_per_gpu"],
        )  # fmt: skip
    return dataclasses.replace(experiment, deepspeed=deepspeed)


def take_part(experiment: Experiment) -> None:
    """Under torchrun, leave out the ranks that cannot share the batch; does not return on those before they may end.

    Raises:
        UserError: if no number of these ranks can train the run.
    """
    if AGENT not in os.environ:
        return
    world = int(os.environ["WORLD_SIZE"])
    usable = next((n for n in range(world, 0, -1) if can_train(n, experiment.deepspeed)), None)
    if usable is None:
        raise UserError(
            f"{world} ranks cannot hold one replica of the model ({sizes_of(experiment.deepspeed).describe()}): "
            f"start a multiple of {sizes_of(experiment.deepspeed).model}"
        )
    waiting = range(usable, world)
    os.environ.setdefault(STORE, " ".join([os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], *map(str, waiting)]))
    if not waiting:
        return
    if launched_rank() == 0:
        logger.warning(
            "%d of %d ranks train, because more cannot share a global batch of %d sequences; the others wait",
            usable, world, batch_of(experiment.deepspeed),
        )  # fmt: skip
    if launched_rank() in waiting:
        _wait_for_end()
    os.environ["WORLD_SIZE"] = str(usable)


def _wait_for_end() -> NoReturn:
    """Wait until the run has finished; the agent ends this process earlier where ranks start again."""
    import torch.distributed as dist

    try:
        store = _meeting_place()
        while True:
            began = time.monotonic()
            try:
                store.wait([FINISHED], timedelta(seconds=LOOK_EVERY))
                break
            except dist.DistStoreError:  # not yet
                if time.monotonic() - began < LOOK_EVERY / 2:
                    raise
        store.set(f"{FINISHED}/{launched_rank()}", "seen")
    except (dist.DistError, RuntimeError):  # rank 0 has ended without finishing the run
        raise SystemExit(1) from None
    raise SystemExit(0)


def notify_waiting_ranks() -> None:
    """Let the ranks that wait under torchrun end. Call it on every rank, when the run has finished."""
    import torch.distributed as dist

    waiting = os.environ.get(STORE, "").split()[2:]
    if waiting and launched_rank() == 0:
        with contextlib.suppress(dist.DistError, RuntimeError):
            store = _meeting_place()
            store.set(FINISHED, "yes")
            store.wait([f"{FINISHED}/{rank}" for rank in waiting], timedelta(seconds=LOOK_EVERY))


def _meeting_place() -> Any:
    """Return the store of all ranks."""
    import torch.distributed as dist

    host, port, *_ = os.environ[STORE].split()
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout())


def end_after_save(asked: Callable[[], bool]) -> NoReturn:
    """End a rank whose run was asked to stop and has saved.

    Under torchrun's agents, exit code 0 would mean that the run has finished. It is right for a rank whose own agent
    has asked it to stop. The others have stopped because a node comes or leaves. If one comes, their agents are about
    to ask them too; if one has left, they are not asked, and exit code 1 lets their agents start them again.

    Args:
        asked: Returns whether this process itself has received SIGTERM or SIGUSR1.
    """
    deadline = time.monotonic() + SECONDS_TO_NOTICE
    while STORE in os.environ and not asked():
        if time.monotonic() >= deadline:
            raise SystemExit(1)
        time.sleep(0.05)
    raise SystemExit(0)

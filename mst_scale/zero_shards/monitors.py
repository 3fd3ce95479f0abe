"""Opens DeepSpeed's monitors (TensorBoard, Weights & Biases, CSV, Comet) before its engine, and lets each fail alone.

The engine opens them on rank 0 between two collectives, where an error would leave the other ranks waiting. Its one
call of all monitors skips those after the first that cannot write. TensorBoard's writer has a thread that ends with an
error of the disk and raises it forever, so another writer takes its place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import deepspeed.runtime.engine
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster

from mst_scale.comm import one_line
from mst_scale.errors import UserError

# What DeepSpeed calls them, by the key of the config.
WRITERS = {
    "tensorboard": "tb_monitor", "wandb": "wandb_monitor", "csv_monitor": "csv_monitor", "comet": "comet_monitor",
}  # fmt: skip
Attempt = Callable[[str, Callable[[], object]], None]


def open_monitors(config: Mapping[str, Any]) -> Any:
    """Open the enabled monitors on rank 0; those of other ranks write nothing.

    Args:
        config: DeepSpeed's.

    Raises:
        UserError: if Weights & Biases or Comet do not start, for example without a login.
        OSError: if one cannot write.
    """
    deepspeed.comm.init_distributed(verbose=False, auto_mpi_discovery=False)  # as the engine would do later
    try:
        return MonitorMaster(get_monitor_config(dict(config)))
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("wandb", "comet_ml"):
            raise
        names = [name for name in ("wandb", "comet") if (config.get(name) or {}).get("enabled")]
        which = " or ".join(names)
        raise UserError(f"{which} cannot start: {one_line(error)} (or set its enabled to false)") from error


@contextlib.contextmanager
def engine_takes(monitors: Any) -> Iterator[None]:
    """Let an engine that is made meanwhile take these monitors instead of opening others."""
    module: Any = deepspeed.runtime.engine
    before = module.MonitorMaster
    module.MonitorMaster = lambda _: monitors
    try:
        yield
    finally:
        module.MonitorMaster = before


def write_separately(monitors: Any, attempt: Attempt) -> None:
    """Write to each monitor through `attempt(name, write)`, which may catch an error of the disk."""
    for name, attribute in WRITERS.items():
        monitor = getattr(monitors, attribute)
        if monitor is not None:
            write = functools.partial(_write_tensorboard, monitor) if name == "tensorboard" else monitor.write_events
            monitor.write_events = functools.partial(_attempt, attempt, name, write)


def _attempt(attempt: Attempt, name: str, write: Callable[[Any], None], events: Any) -> None:
    attempt(f"the numbers of {name}", lambda: write(events))


def _write_tensorboard(monitor: Any, events: Any) -> None:
    if monitor.summary_writer is None:
        monitor.get_summary_writer()
    try:
        type(monitor).write_events(monitor, events)
    except OSError:
        monitor.summary_writer = None
        raise

"""DeepSpeed's monitors: opened before its engine, and independent of each other."""

from types import SimpleNamespace

import pytest
from deepspeed.monitor import monitor as deepspeed_monitor

from mst_scale import zero_shards
from mst_scale.errors import UserError
from mst_scale.run_logging.metrics import OptionalWrites
from tests.support import pool

ROWS = [("loss", 1.0, 1)]


class Writer:
    """TensorBoard's writer, whose thread ends with the first error."""

    def __init__(self, room):
        self.room, self.rows, self.broken = room, [], False

    def add_scalar(self, *row):
        self.broken = self.broken or not self.room["yes"]
        if self.broken:
            raise OSError("no space left")
        self.rows.append(row)

    def flush(self):
        pass


def full_for_a_while(rank, world, folder):
    room, made, others = {"yes": True}, [], []
    config = {"tensorboard": {"enabled": True, "output_path": str(folder)}, "csv_monitor": {"enabled": True}}
    monitors = zero_shards.open_monitors(config)

    def another():
        made.append(Writer(room))
        monitors.tb_monitor.summary_writer = made[-1]

    another()
    monitors.tb_monitor.get_summary_writer = another
    monitors.csv_monitor = SimpleNamespace(write_events=others.append)
    zero_shards.write_separately(monitors, OptionalWrites().attempt)
    for yes in (True, False, False, True, True):
        room["yes"] = yes
        monitors.write_events(ROWS)
    return [len(writer.rows) for writer in made], len(others)


def test_a_full_disk_costs_the_numbers_of_that_time(tmp_path):
    assert pool.run(full_for_a_while, 1, tmp_path) == [([1, 0, 2], 5)]


def without_a_login(rank, world):
    missing = type("UsageError", (Exception,), {"__module__": "wandb.errors"})

    def fails(config):
        raise missing("No API key configured")

    before, deepspeed_monitor.WandbMonitor = deepspeed_monitor.WandbMonitor, fails
    try:
        with pytest.raises(UserError, match=r"wandb cannot start: .*No API key.*enabled to false"):
            zero_shards.open_monitors({"wandb": {"enabled": True}})
    finally:
        deepspeed_monitor.WandbMonitor = before


def test_a_monitor_that_cannot_start_is_named():
    pool.run(without_a_login, 1)

"""A rank that is killed or fails alone is named, and the others end: no rank waits for ever."""

import os
import signal
import time

import pytest

from tests.support import forked, tiny_run

LONG = {"steps": 100_000, "save_every": 0, "eval_every": 0}


def running(folder, world, before=None):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = tiny_run.config(folder, training=LONG, optimizer=optimizer, train_batch_size=2 * world)
    argv = ["--deepspeed_config", str(config), "--out", str(folder / "out")]
    return forked.start(world, argv, folder / "logs", before)


def wait_for_rows(folder, processes, count=3):
    path, deadline = folder / "out" / "metrics.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < deadline and all(p.exitcode is None for p in processes), "it did not start"
        time.sleep(0.02)


def said(folder, rank):
    return (folder / "logs" / f"rank{rank}").read_text()


@pytest.mark.parametrize(("victim", "speaker"), [(1, 0), (0, 1)])
def test_a_killed_rank_is_named_and_the_others_end(tmp_path, victim, speaker):
    processes = running(tmp_path, 3)
    wait_for_rows(tmp_path, processes)
    os.kill(processes[victim].pid, signal.SIGKILL)
    start = time.monotonic()
    codes = forked.end(processes, 60)
    assert time.monotonic() - start < 30
    assert [code for rank, code in enumerate(codes) if rank != victim] == [1, 1]
    lines = [line for line in said(tmp_path, speaker).splitlines() if "gone without a word" in line]
    who = f"rank 1 ({os.uname().nodename}, process {processes[1].pid})" if victim else "rank 0"
    assert len(lines) == 1 and lines[0].startswith(f"mst_scale: {who} is gone") and "same command continues" in lines[0]
    for rank in {0, 1, 2} - {victim}:
        assert "Traceback" not in said(tmp_path, rank)
    assert "mst_scale: rank" not in said(tmp_path, 2), "one rank speaks"


def fails_alone():
    from mst_scale.pretrain.training_loop import Run

    inner = Run._update

    def update(self):
        if self.step == 4 and self.ranks.rank == 1:
            raise KeyError("a defect on one rank")
        return inner(self)

    Run._update = update


def test_a_rank_that_fails_alone_ends_the_others(tmp_path):
    processes = running(tmp_path, 2, fails_alone)
    assert forked.end(processes, 60) == [1, 1]
    assert "KeyError: 'a defect on one rank'" in said(tmp_path, 1)
    assert "rank 1 (" in said(tmp_path, 0) and "has failed" in said(tmp_path, 0)
    assert "Traceback" not in said(tmp_path, 0)


def test_a_stopped_rank_is_waited_for(tmp_path):
    """A rank under SIGSTOP is alive: no rank ends, and the run goes on with SIGCONT."""
    processes = running(tmp_path, 2)
    wait_for_rows(tmp_path, processes)
    os.kill(processes[1].pid, signal.SIGSTOP)
    time.sleep(2)
    assert [process.exitcode for process in processes] == [None, None]
    os.kill(processes[1].pid, signal.SIGCONT)
    before = (tmp_path / "out" / "metrics.jsonl").read_text().count("\n")
    wait_for_rows(tmp_path, processes, before + 3)
    os.kill(processes[0].pid, signal.SIGTERM)
    assert forked.end(processes, 60) == [0, 0]

"""A rank that is killed, frozen or stuck, or fails alone, is named, and the others end: no rank waits for ever."""

import functools
import json
import os
import signal
import time

import pytest

from mst_scale.comm import timeout
from mst_scale.errors import UserError
from tests.support import forked, tiny_run

pytestmark = pytest.mark.full

LONG = {"steps": 100_000, "save_every": 0, "eval_every": 0}


SPARSE = {"method": "mst", "sparsity": {"max": 0.5, "variation": "sparse"}, "topology": {"interval": 5}}


def running(folder, world, before=None, *, save_every=0, mst=SPARSE, **environment):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    training = {**LONG, "save_every": save_every}
    config = tiny_run.config(folder, training=training, optimizer=optimizer, train_batch_size=2 * world, mst=mst)
    argv = ["--deepspeed_config", str(config), "--out", str(folder / "out")]
    return forked.start(world, argv, folder / "logs", before, **environment)


def wait_for_rows(folder, processes, count=3):
    path = folder / "out" / "metrics.jsonl"
    tiny_run.wait_for(lambda: path.exists() and path.read_text().count("\n") >= count, processes)


def said(folder, rank):
    return (folder / "logs" / f"rank{rank}").read_text()


@pytest.mark.parametrize(
    ("victim", "speaker", "mst"),
    [(1, 0, SPARSE), (0, 1, SPARSE), (1, 0, {"method": "dense"})],
    ids=lambda one: one["method"] if isinstance(one, dict) else str(one),
)
def test_a_killed_rank_is_named_and_the_others_end(tmp_path, victim, speaker, mst):
    processes = running(tmp_path, 3, mst=mst)
    wait_for_rows(tmp_path, processes)
    os.kill(processes[victim].pid, signal.SIGKILL)
    start = time.monotonic()
    codes = forked.end(processes, 60)
    assert time.monotonic() - start < 30
    assert [code for rank, code in enumerate(codes) if rank != victim] == [1, 1]
    lines = [line for line in said(tmp_path, speaker).splitlines() if "disconnected without a message" in line]
    who = f"rank 1 ({os.uname().nodename}, process {processes[1].pid})" if victim else "rank 0"
    assert len(lines) == 1 and lines[0].startswith(f"mst_scale: {who} disconnected") and "same command" in lines[0]
    for rank in {0, 1, 2} - {victim}:
        assert "Traceback" not in said(tmp_path, rank)
    assert "mst_scale: rank" not in said(tmp_path, 2), "one rank speaks"


def fails_alone():
    from mst_scale.pretrain.batches import MicroBatches

    inner = MicroBatches.update

    def update(self, step, number):
        if step == 4 and self.ranks.rank == 1:
            raise KeyError("a defect on one rank")
        return inner(self, step, number)

    MicroBatches.update = update


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


def at_a_moment(moment, what):
    """For `before`: call `what(run)` once, in the fifth step, or the save or topology step that ends it."""
    from mst_scale.checkpoints import store
    from mst_scale.mixed_growing import evolve
    from mst_scale.pretrain.batches import MicroBatches
    from mst_scale.pretrain.training_loop import Run

    owner, name = {"step": (MicroBatches, "update"), "save": (store, "_write"), "topology step": (evolve, "peaks_of")}[
        moment
    ]
    inner, advance, runs = getattr(owner, name), Run.advance, []

    def patched(*args, **named):
        if runs:
            what(runs.pop())
        return inner(*args, **named)

    def remember(run):
        if run.step == 4:
            runs.append(run)
        advance(run)

    setattr(owner, name, patched)
    Run.advance = remember


def freezes(moment, victim):
    """The allowed silence is short from the fifth step on; the start may take longer on a busy machine."""
    from mst_scale.comm import Watch
    from mst_scale.pretrain.training_loop import Run

    def freeze(run):
        if run.ranks.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)

    at_a_moment(moment, freeze)
    start, advance, watches = Watch.start, Run.advance, []

    def started(watch, ranks):
        start(watch, ranks)
        watches.append(watch)

    def hurried(run):
        if run.step == 4:
            watches[0].silence = 4.0
        advance(run)

    Watch.start, Run.advance = started, hurried


@pytest.mark.parametrize(("moment", "victim"), [("step", 1), ("save", 0), ("topology step", 1)])
def test_a_frozen_rank_is_named_and_the_others_end(tmp_path, moment, victim):
    processes = running(tmp_path, 3, functools.partial(freezes, moment, victim), save_every=5)
    others = [process for rank, process in enumerate(processes) if rank != victim]
    for process in others:
        process.join(120)
    assert [process.exitcode for process in others] == [1, 1], said(tmp_path, 1 - victim)
    who = f"rank 1 ({os.uname().nodename}, process {processes[1].pid})" if victim else "rank 0"
    lines = [line for line in said(tmp_path, 1 - victim).splitlines() if "no heartbeat" in line]
    assert len(lines) == 1 and lines[0].startswith(f"mst_scale: {who} ") and "same command" in lines[0]
    assert forked.end(processes, 5)[victim] == -signal.SIGKILL, "it was frozen, and the others have killed it"


def hangs():
    """Rank 1 makes no progress, but its other threads do."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def hang(run):
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
        if dist.get_rank() == 1:
            time.sleep(1000)

    at_a_moment("step", hang)


def test_a_rank_that_hangs_is_named_when_collectives_time_out(tmp_path):
    processes = running(tmp_path, 3, hangs)
    ends = forked.end(processes, 120)
    assert ends[1] in (1, -signal.SIGKILL), "the hung one, by its watch or by the others"
    assert ends[::2] == [1, 1]
    lines = [line for line in said(tmp_path, 0).splitlines() if "made no progress" in line]
    assert len(lines) == 1 and lines[0].startswith(f"mst_scale: rank 1 ({os.uname().nodename}"), said(tmp_path, 0)
    assert "rank 2" not in lines[0]


def short_stop():
    from mst_scale.comm import watchdog

    watchdog.STOPPING_SECONDS = 4.0


def test_a_run_that_is_asked_to_stop_does_not_wait_long_for_a_frozen_rank(tmp_path):
    processes = running(tmp_path, 3, short_stop)
    wait_for_rows(tmp_path, processes)
    os.kill(processes[1].pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(processes[2].pid, signal.SIGTERM)  # whose main thread is in a collective; rank 0 learns of it all the same
    for rank in (0, 2):
        processes[rank].join(60)
    assert forked.end(processes, 5) == [1, -signal.SIGKILL, 1]
    assert "rank 1 (" in said(tmp_path, 0) and "no heartbeat" in said(tmp_path, 0)


def writes_timeouts(path):
    from torch.distributed import distributed_c10d

    from mst_scale.pretrain.training_loop import Run

    def advance(run):
        if run.ranks.first:
            groups = [group._get_backend(group._device_types[0]) for group in distributed_c10d._world.pg_map]
            path.write_text(json.dumps([group.options._timeout.total_seconds() for group in groups]))
        raise SystemExit(0)

    Run.advance = advance


def test_every_process_group_has_the_stated_timeout(tmp_path):
    processes = running(tmp_path, 2, functools.partial(writes_timeouts, tmp_path / "found"), DEEPSPEED_TIMEOUT="7")
    assert forked.end(processes, 120) == [0, 0], said(tmp_path, 0)
    found = json.loads((tmp_path / "found").read_text())
    assert len(found) >= 3 and set(found) == {420.0}, "the world's, the control group, and ZeRO's"


@pytest.mark.parametrize("stated", ["ten", "0", "-3", "1.5", "", "9" * 30])
def test_an_invalid_timeout_is_rejected(monkeypatch, stated):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", stated)
    with pytest.raises(UserError, match="DEEPSPEED_TIMEOUT"):
        timeout()

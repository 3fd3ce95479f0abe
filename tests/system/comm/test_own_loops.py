"""Ranks of a loop of one's own, and of Trainer, are watched like those of pretrain, and all groups have one timeout."""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import pytest

from tests.support import forked

pytestmark = pytest.mark.full

LONG = 10**6


def start(folder, world, body, *arguments, **more):
    return forked.start_ranks(world, body, arguments, folder, **more)


def said(folder, rank):
    return (folder / f"rank{rank}").read_text()


def engine_of(stage=1, steps=LONG, method="mst"):
    import mst_scale
    from tests.support.toys import deepspeed_config, toy

    world = int(os.environ["WORLD_SIZE"])
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    mst = {"method": "mst", "sparsity": {"max": 0.5}, "targets": {"lm_head": False}}
    mst = {"method": method} if method == "dense" else mst
    config = deepspeed_config(stage, world, optimizer=optimizer, training={"steps": steps}, mst=mst)
    return mst_scale.initialize(model=toy(), config=config)[0]


def train(engine, steps, at_step=lambda step: None):
    from tests.support.toys import toy_batch

    rank = int(os.environ["RANK"])
    for step in range(steps):
        at_step(step)
        engine.backward(engine(*toy_batch(step, rank)))
        engine.step()


def hurry(seconds=4.0):
    from mst_scale.comm import watchdog

    watchdog.of_process().silence = seconds


def freeze(moment, victim, folder):
    """One rank is stopped in the fifth step, or in the save after it."""
    rank = int(os.environ["RANK"])
    engine = engine_of()

    def stop(*_):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)

    def at_step(step):
        if step == 4:
            hurry()
            if moment == "step":
                stop()

    if moment == "save":
        train(engine, 5, at_step)
        if rank == victim:
            engine.optimizer.state_dict = stop
        engine.save_checkpoint(folder)
    train(engine, LONG, at_step)


def assert_named(folder, processes, victim, how):
    others = [process for rank, process in enumerate(processes) if rank != victim]
    for process in others:
        process.join(120)
    assert [process.exitcode for process in others] == [1] * len(others), said(folder, 1 - victim)
    who = f"rank 1 ({os.uname().nodename}, process {processes[1].pid})" if victim else "rank 0"
    text = said(folder, 1 - victim)
    lines = [line for line in text.splitlines() if how in line]
    assert len(lines) == 1 and lines[0].startswith(f"mst_scale: {who} ") and "latest checkpoint" in lines[0], text


@pytest.mark.parametrize(("moment", "victim"), [("step", 1), ("save", 0), ("step", 0)])
def test_a_frozen_rank_is_named_and_the_others_end(tmp_path, moment, victim):
    processes = start(tmp_path / "logs", 3, freeze, moment, victim, str(tmp_path / "saved"))
    assert_named(tmp_path / "logs", processes, victim, "no heartbeat")
    assert forked.end(processes, 5)[victim] == -signal.SIGKILL, "it was frozen, and the others have killed it"


def killed(victim, method):
    def at_step(step):
        if step == 4 and int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    train(engine_of(method=method), LONG, at_step)


@pytest.mark.parametrize("method", ["mst", "dense"])
def test_a_killed_rank_is_named_and_the_others_end(tmp_path, method):
    processes = start(tmp_path, 3, killed, 1, method)
    assert_named(tmp_path, processes, 1, "disconnected without a message")


def fails_alone():
    def at_step(step):
        if step == 4 and os.environ["RANK"] == "1":
            raise KeyError("a defect on one rank")

    train(engine_of(), LONG, at_step)


def test_a_rank_that_fails_alone_ends_the_others(tmp_path):
    processes = start(tmp_path, 2, fails_alone)
    assert forked.end(processes, 60) == [1, 1]
    assert "KeyError: 'a defect on one rank'" in said(tmp_path, 1)
    assert "rank 1 (" in said(tmp_path, 0) and "has failed" in said(tmp_path, 0)
    assert "Traceback" not in said(tmp_path, 0)


def hangs():
    from torch.distributed import distributed_c10d

    def at_step(step):
        if step == 4:
            for group in list(distributed_c10d._world.pg_map):
                distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
            if os.environ["RANK"] == "1":
                time.sleep(1000)

    train(engine_of(), LONG, at_step)


def test_a_rank_that_hangs_is_named_when_collectives_time_out(tmp_path):
    processes = start(tmp_path, 3, hangs)
    ends = forked.end(processes, 120)
    assert ends[1] in (1, -signal.SIGKILL), "the hung one, by its watch or by the others"
    assert ends[::2] == [1, 1]
    lines = [line for line in said(tmp_path, 0).splitlines() if "made no progress" in line]
    assert len(lines) == 1 and lines[0].startswith(f"mst_scale: rank 1 ({os.uname().nodename}"), said(tmp_path, 0)


def timeouts(joined, of_world, stage, path):
    import deepspeed
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from mst_scale.comm.groups import timeout_of

    if joined:
        stated = {} if of_world is None else {"timeout": timedelta(seconds=of_world)}
        dist.init_process_group("gloo", **stated)
        dist.new_group(timeout=timedelta(seconds=86400), group_desc="of the user")
    if stage == 3:
        with deepspeed.zero.Init():  # its groups come before the engine
            pass
    engine_of(stage)
    dist.new_group(group_desc="later")
    dist.barrier()  # rank 0 serves the store
    if os.environ["RANK"] == "0":
        found = {}
        for group in distributed_c10d._world.pg_map:
            found.setdefault(timeout_of(group).total_seconds(), []).append(group.group_desc)
        with open(path, "w") as file:
            json.dump(found, file)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("joined", "of_world", "minutes", "seconds"),
    [(False, None, "7", 420.0), (True, None, "7", 420.0), (True, 5400, "7", 420.0), (True, 5400, None, 5400.0)],
)
def test_every_process_group_has_one_timeout(tmp_path, *, joined, of_world, minutes, seconds, stage):
    more = {} if minutes is None else {"DEEPSPEED_TIMEOUT": minutes}
    processes = start(tmp_path, 2, timeouts, joined, of_world, stage, str(tmp_path / "found"), **more)
    assert forked.end(processes, 120) == [0, 0], said(tmp_path, 0)
    found = {float(key): value for key, value in json.loads((tmp_path / "found").read_text()).items()}
    assert found.pop(86400.0, ["of the user"]) == ["of the user"]
    assert set(found) == {seconds} and len(found[seconds]) >= 3, found


def leaves(how):
    """Rank 1 ends, while rank 0 still works for longer than it takes to notice that."""
    import torch
    import torch.distributed as dist

    from mst_scale.comm import watchdog

    watchdog.BEAT_SECONDS = 0.5  # between two looks
    engine = engine_of(steps=30)
    steps = 30 if how in ("os._exit at the end", "return") else 10
    if how == "workers":  # a forked worker ends, and has got a signal for itself
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        os.waitpid(pid, 0)
        loader = torch.utils.data.DataLoader(range(8), num_workers=2)
        assert len(list(loader)) == 8
    train(engine, steps)
    if how == "workers":
        assert watchdog.of_process().silence > 60, "nobody has asked this run to stop"
    if how == "the group is destroyed":
        dist.destroy_process_group()
        time.sleep(1)
    if os.environ["RANK"] == "1":
        os._exit(0) if how in ("os._exit at the end", "the group is destroyed") else sys.exit(0)
    time.sleep(2)
    print("rank 0 has ended as it should", flush=True)


@pytest.mark.parametrize("how", ["os._exit at the end", "the group is destroyed", "return", "sys.exit", "workers"])
def test_ranks_may_end_at_different_times(tmp_path, how):
    processes = start(tmp_path, 2, leaves, how)
    assert forked.end(processes, 120) == [0, 0], said(tmp_path, 0)
    assert "rank 0 has ended as it should" in said(tmp_path, 0)
    assert "mst_scale: rank" not in said(tmp_path, 0)


def cannot_meet():
    import socket

    connect = socket.create_connection

    def refused(address, *more, **named):
        if os.environ["RANK"] == "2":
            raise ConnectionRefusedError(111, "a firewall")
        return connect(address, *more, **named)

    from mst_scale.comm import watchdog

    socket.create_connection, watchdog.MEET_SECONDS = refused, 3.0
    engine = engine_of()
    assert watchdog.of_process() is None
    train(engine, 5)


def test_ranks_that_cannot_meet_train_unwatched_and_say_so(tmp_path):
    processes = start(tmp_path, 3, cannot_meet)
    assert forked.end(processes, 120) == [0, 0, 0], said(tmp_path, 2)
    assert "not monitored (rank 2 cannot reach rank 0" in said(tmp_path, 2)


def trainer_freezes(folder):
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    from tests.ranks.integrations.test_trainer import trained
    from tests.support.integrated import opened

    class Freeze(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 4:
                hurry()
                if os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGSTOP)

    with opened():
        trained(folder, 2, "gpt2", callback=Freeze())


def test_a_frozen_rank_of_trainer_is_named(tmp_path):
    processes = start(tmp_path / "logs", 2, trainer_freezes, tmp_path / "out")
    assert_named(tmp_path / "logs", processes, 1, "no heartbeat")
    forked.end(processes, 0)

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import pool


def total(rank: int, world: int, add: int) -> int:
    value = torch.tensor(rank + add)
    dist.all_reduce(value)
    return int(value)


def fail_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()  # would wait for ever: rank 1 never comes


def sleep(rank: int, world: int) -> None:
    time.sleep(60)


def test_ranks_share_a_group_and_are_reused():
    assert pool.run(total, 2, 10) == [21, 21]
    processes = [p.pid for p in pool._pools[2].processes]
    assert pool.run(total, 2, 0) == [1, 1]
    assert processes == [p.pid for p in pool._pools[2].processes]


def leave_a_variable(rank: int, world: int) -> str | None:
    found = os.environ.get("ACCELERATE_USE_DEEPSPEED")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return found


def test_no_call_sees_the_environment_of_the_previous_one():
    assert [pool.run(leave_a_variable, 1) for _ in range(2)] == [[None], [None]]


def test_an_error_on_one_rank_ends_all_and_names_it():
    with pytest.raises(pool.RankError, match=r"rank 1 of 2(.|\n)*rank one has had enough"):
        pool.run(fail_on_rank_one, 2)
    assert pool.run(total, 2, 1) == [3, 3], "the next call starts fresh processes"


def test_a_call_has_a_hard_time_limit():
    with pytest.raises(pool.RankError, match=r"ranks \[0\] gave no answer"):
        pool.run(sleep, 1, seconds=0.5)

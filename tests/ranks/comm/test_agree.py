"""What ranks do together: an error of one of them is raised on all, without waiting forever for busy ranks."""

import time

import pytest
import torch.distributed as dist

from mst_scale.comm import FailedElsewhere, Ranks
from mst_scale.comm import ranks as ranks_module
from mst_scale.errors import UserError
from tests.support import pool


def fails_before_a_collective(rank, world):
    """The first rank fails, while the other waits for it in a collective."""
    group, control = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    ranks = Ranks(rank, rank, world, control)
    usual, ranks_module.SECONDS_TO_AGREE = ranks_module.SECONDS_TO_AGREE, 1.0

    def run():
        if rank == 0:
            raise UserError("a mistake")
        dist.barrier(group=group)

    begun = time.monotonic()
    with pytest.raises(UserError if rank == 0 else FailedElsewhere):
        try:
            ranks.agree(run)
        finally:
            took = time.monotonic() - begun
            ranks_module.SECONDS_TO_AGREE = usual  # this process runs other tests
            if rank == 0:
                dist.barrier(group=group)  # a program would end here
    return took


def test_a_rank_with_an_error_does_not_wait_for_one_in_a_collective():
    first, _ = pool.run(fails_before_a_collective, 2)
    assert 1 <= first < 20


def fails_on_the_second(rank, world):
    ranks = Ranks(rank, rank, world, dist.new_group(backend="gloo"))

    def run():
        if rank == 1:
            raise UserError("a mistake")

    with pytest.raises(UserError if rank == 1 else FailedElsewhere):
        ranks.agree(run)
    return ranks.agree(lambda: rank)


def test_an_error_is_raised_on_all_ranks():
    assert pool.run(fails_on_the_second, 2) == [0, 1]

"""Processes of a benchmark: the result of rank 0, a rank's error, and what happens at their exit."""

from __future__ import annotations

import atexit
import os

import pytest
import torch.multiprocessing as mp

from benchmarks.local_ranks import run_on
from mst_scale.errors import UserError


def place(_) -> tuple[str, str]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"]


def aborts_at_exit() -> str:
    """As threads of a process group may."""
    atexit.register(os.abort)
    return "measured"


def wrong_on_one_rank(kind: type[Exception]) -> None:
    if os.environ["RANK"] == "1":
        raise kind("give another size")


def test_the_result_is_that_of_rank_0():
    assert run_on(2, place, None) == ("0", "2")


def test_an_abort_at_exit_does_not_hide_the_result():
    assert run_on(1, aborts_at_exit) == "measured"


def test_a_plain_error_of_a_rank_is_raised_here():
    with pytest.raises(UserError, match="give another size"):
        run_on(2, wrong_on_one_rank, UserError)


def test_another_error_is_a_crash_of_its_rank():
    with pytest.raises(mp.ProcessRaisedException, match="ValueError"):
        run_on(2, wrong_on_one_rank, ValueError)

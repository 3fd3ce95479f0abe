"""Each rank's own device is the current one in every collective before the engine, which NCCL's groups require."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from mst_scale import comm
from tests.support.pool import run


@contextmanager
def accelerators() -> Iterator[tuple[list[int], list[int]]]:
    """A stand-in for the accelerators of a machine: the number of the current one, and what it was in collectives."""
    from deepspeed.accelerator import get_accelerator

    current, seen = [0], []

    def watched(collective: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            seen.append(current[-1])
            return collective(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "set_device", current.append)
        for name in ("broadcast", "broadcast_object_list", "all_gather_object"):
            patch.setattr(dist, name, watched(getattr(dist, name)))
        yield current, seen


def of_split_model(rank: int, world: int, sizes: dict[str, int]) -> list[int]:
    from mst_scale.comm import Mesh, ParallelDims
    from mst_scale.models import build
    from mst_scale.models.pipelined_gpt import PipelinedGPT
    from mst_scale.tensor_parallel import TensorGroup
    from tests.support.cut_models import TINY

    with accelerators() as (_, seen):
        mesh = Mesh(ParallelDims(**sizes))
        PipelinedGPT(TINY, mesh) if "pipeline" in sizes else build(TINY, TensorGroup.of(mesh))
    return seen


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}])
def test_a_model_that_is_split_agrees_on_its_seed(sizes: dict[str, int]):
    for rank, seen in enumerate(run(of_split_model, 2, sizes)):
        assert seen and set(seen) == {rank}


class Reached(Exception):
    pass


def before_the_engine(rank: int, world: int, number: int | None) -> tuple[list[int], list[int]]:
    """Up to DeepSpeed's engine, with `args.device_rank` if there is a number."""
    import mst_scale
    from mst_scale.engine import api
    from tests.support.compact_pairs import constant_config
    from tests.support.toys import toy

    def engine(*arguments: Any, **named: Any) -> None:
        raise Reached

    args = None if number is None else argparse.Namespace(device_rank=number)
    with accelerators() as (current, seen), pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_deepspeeds_own", engine)
        with pytest.raises(Reached):
            mst_scale.initialize(args, toy(), config=constant_config(1, world, "auto", initial="magnitude"))
    return current, seen


@pytest.mark.parametrize("number", [None, 5])
def test_first_weights_are_sent_for_compact_storage(number: int | None):
    for rank, (current, seen) in enumerate(run(before_the_engine, 2, number)):
        device = rank if number is None else number  # the one that DeepSpeed's engine takes
        assert current[-1] == device and seen and set(seen) == {device}


def under_mpirun(rank: int, world: int) -> list[int]:
    """DeepSpeed finds the number when it joins the ranks."""
    import deepspeed
    import torch

    from mst_scale.engine import compaction

    number = os.environ.pop("LOCAL_RANK")
    with accelerators() as (_, seen), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        patch.setattr(deepspeed, "init_distributed", lambda verbose: os.environ.update(LOCAL_RANK=number))
        compaction._take_first_ranks(torch.zeros(1), None)
    return seen


def test_the_number_may_be_known_late():
    assert run(under_mpirun, 2) == [[0], [1]]


def joined(rank: int, world: int, through_deepspeed: bool) -> int:
    with accelerators() as (current, _):
        comm.init(through_deepspeed)
    return current[-1]


def test_a_run_begins_with_it():
    assert run(joined, 2, True) == [0, 1]
    assert run(joined, 2, False) == [0, 0]  # the doctor's checks, some of which begin without DeepSpeed


def without_number(rank: int, world: int) -> list[int]:
    from mst_scale.comm.ranks import select_device

    with accelerators() as (current, _):
        del os.environ["LOCAL_RANK"]
        select_device()
        os.environ["LOCAL_RANK"] = "-1"  # of no launcher, for transformers
        select_device()
        select_device(-1)
    return current


def test_no_device_is_selected_without_a_number():
    assert run(without_number, 1) == [[0]]

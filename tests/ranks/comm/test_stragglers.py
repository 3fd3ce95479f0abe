"""A rank that is slow but works is named once, with the time that it takes, and a run of equal ranks names none."""

import json
import time

import pytest

from mst_scale.comm import stragglers
from mst_scale.pretrain.batches import MicroBatches
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, logged_attempt


def slowed(rank, world, argv, where):
    """Rank 1 takes 60 ms longer to fetch its batches, or to compute."""
    from mst_scale.models.gpt import GPT

    read, look_every, forward = MicroBatches.read, stragglers.LOOK_EVERY, GPT.forward

    def late(of):
        def call(*args, **named):
            if rank == 1:
                time.sleep(0.06)
            return of(*args, **named)

        return call

    stragglers.LOOK_EVERY = 5
    if where == "fetching":
        MicroBatches.read = late(read)
    elif where == "computing":
        GPT.forward = late(forward)
    try:
        return logged_attempt(rank, world, argv)
    finally:
        MicroBatches.read, stragglers.LOOK_EVERY, GPT.forward = read, look_every, forward


def lines(results):
    assert [code for code, _ in results] == [0, 0], results
    return [line for _, text in results for line in text.splitlines() if "is slow" in line]


@pytest.mark.full
def test_a_rank_that_is_slow_to_fetch_or_to_compute_is_named_once(tmp_path):
    for where in ("fetching", "computing"):
        argv = arguments(tmp_path, where, "--steps", "15", mst=MST)
        (line,) = lines(pool.run(slowed, 2, argv, where))
        assert line.startswith("rank 1 ("), "once, although three windows were slow"
        events = json.loads((tmp_path / where / "run.json").read_text())["events"]
        (event,) = [event for event in events if event["what"] == "straggler"]
        assert event["rank"] == 1 and event["seconds"] > event["others"] + 0.1 and event["step"] == 5
    assert tiny_run.rows(tmp_path / "fetching")[-1]["step"] == 15


def compared(rank, world, seconds, stages=(0, 0, 0)):
    """What `look` finds for these times of all ranks, in windows of one step each."""
    import torch

    from mst_scale.comm import Ranks

    every, stragglers.LOOK_EVERY = stragglers.LOOK_EVERY, 1
    try:
        ranks = Ranks(rank, rank, world, torch.distributed.new_group(backend="gloo"))
        watch, found = stragglers.Stragglers(ranks, torch.nn.Linear(1, 1), stages[rank]), []
        for times in seconds:
            watch.fetched(times[rank])
            watch.stepped()
            found.append(watch.look())
        return found
    finally:
        stragglers.LOOK_EVERY = every


def test_only_a_rank_that_the_others_wait_for_is_named():
    alike, slightly, short, slow = (0.3, 0.29, 0.31), (0.3, 0.3, 0.4), (0.001, 0.001, 0.02), (0.3, 0.31, 0.7)
    for found in pool.run(compared, 3, [alike, slightly, short, slow, slow]):
        assert found[:3] == [None] * 3 and found[4] is None, "the second report comes later"
        assert found[3].rank == 2 and found[3].seconds == 0.7 and 0.3 <= found[3].others <= 0.31


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    head, slow = (0.3, 0.31, 0.7), (0.3, 0.6, 0.7)
    for found in pool.run(compared, 3, [head, slow], (0, 0, 1)):
        assert found[0] is None and (found[1].rank, found[1].seconds, found[1].others) == (1, 0.6, 0.3)


def passed(rank, world, waits):
    """What is found if rank 1 is slow to fetch, and rank 0 waits for it in its forward pass."""
    import torch

    from mst_scale.comm import Ranks

    every, stragglers.LOOK_EVERY = stragglers.LOOK_EVERY, 1
    try:
        ranks = Ranks(rank, rank, world, torch.distributed.new_group(backend="gloo"))
        module = torch.nn.Linear(1, 1)
        watch = stragglers.Stragglers(ranks, module, passes=not waits)
        watch.fetched(0.2 * rank)
        module.forward = lambda x: time.sleep(0.3 - 0.2 * rank)  # rank 0 waits for what rank 1 fetches
        module(torch.zeros(1))
        watch.stepped()
        return watch.look()
    finally:
        stragglers.LOOK_EVERY = every


def test_where_passes_wait_for_other_ranks_only_fetching_counts():
    assert pool.run(passed, 2, False) == [None, None], "the sums are the same"
    for found in pool.run(passed, 2, True):
        assert found.rank == 1 and found.others == 0

"""Saves in the background: what a rank and its writer process do when the other is slow, fails or is killed."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from mst_scale import snapshot
from mst_scale.checkpoints import finding, manifests, memory_copies
from mst_scale.checkpoints.background import BackgroundSaves, KeptCopies
from mst_scale.comm import Ranks, logger
from tests.support import pool

pytestmark = pytest.mark.full


def everyone(rank, world) -> Ranks:
    import torch.distributed as dist

    return Ranks(rank, rank, world, dist.new_group(backend="gloo"))


def save(saves, folder, step, size=100_000):
    """A checkpoint of one file per rank, and what it costs."""
    rank, world = saves.ranks.rank, saves.ranks.world_size

    def take(taken, draft):
        taken.save({"w": torch.full((size,), float(step))}, draft / f"{rank}.pt")

    about = {"tag": finding.tag_of(step), "step": step, "ranks": world, "stage": 1}
    return saves.start(take, Path(folder) / finding.tag_of(step), step=step, about=about, keep=2)


def run(rank, world, folder, plan):
    """`plan(saves, folder)`, with what is logged; the process is ended afterwards."""
    import io
    import logging

    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    saves = BackgroundSaves(everyone(rank, world))
    try:
        return plan(saves, Path(folder)), text.getvalue()
    finally:
        saves.close()
        logger.removeHandler(handler)
        logger.setLevel(level)


def without_the_other(saves, folder):
    """The program of rank 1 ends without its part, and rank 0 does not wait for it forever."""
    saves.finish()
    saves.prepare()
    if not saves.ranks.first:
        os.kill(saves.process.pid, signal.SIGSTOP)
    save(saves, folder, 1)
    if saves.ranks.first:
        saves.limit = 1.0
        saves.wait_here()
    saves.ranks.any(False)


def test_the_end_of_a_program_does_not_wait_forever(tmp_path):
    (_, text), _ = pool.run(run, 2, str(tmp_path), without_the_other)
    assert "the checkpoint of step 1 was not saved: it was not written within" in text
    assert list(tmp_path.iterdir()) == []


def three(saves, folder):
    found = []
    for step in (1, 2, 3):
        found.append(saves.finish())
        save(saves, folder, step)
    return [*found, saves.finish(), saves.finish()]


def test_a_save_waits_for_the_one_before_and_older_ones_are_removed(tmp_path):
    (found, text), _ = pool.run(run, 2, str(tmp_path), three)
    assert found == [None, (1, None), (2, None), (3, None), None]
    assert "waiting until the checkpoint of step 1 is written" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step00000002", "step00000003"]
    assert (tmp_path / "latest").read_text() == "step00000003"
    newest = tmp_path / "step00000003"
    assert manifests.damage(newest) == []
    assert sorted(p.name for p in newest.iterdir()) == [
        "0.pt",
        "1.pt",
        "manifest.json",
    ]
    assert torch.equal(torch.load(newest / "1.pt")["w"], torch.full((100_000,), 3.0))


def stopped(saves, folder):
    """The writer stands still; the rank does not."""
    saves.finish()
    save(saves, folder, 1)
    saves.finish()
    os.kill(saves.process.pid, signal.SIGSTOP)
    seconds = save(saves, folder, 2)
    before = saves.finish(wait=False), finding.list_tags(folder)
    saves.ranks.any(False)  # nobody's writer continues before all ranks have looked
    os.kill(saves.process.pid, signal.SIGCONT)
    return seconds, before, saves.finish()


def test_a_slow_writer_does_not_delay_training(tmp_path):
    for (seconds, before, after), _ in pool.run(run, 2, str(tmp_path), stopped):
        assert seconds < 1 and before == (None, ["step00000001"]) and after == (2, None)
    assert finding.list_tags(tmp_path) == ["step00000002", "step00000001"]


def hung(saves, folder):
    """The disk does not answer the writer of rank 1."""
    save(saves, folder, 1)
    saves.finish()
    saves.limit = 1.0
    if saves.ranks.rank == 1:
        os.kill(saves.process.pid, signal.SIGSTOP)
    save(saves, folder, 2)
    found = saves.finish()
    save(saves, folder, 3)
    saves.limit = 60.0
    return found, saves.finish()


def test_a_disk_that_does_not_answer_costs_this_save_alone(tmp_path):
    results = pool.run(run, 2, str(tmp_path), hung)
    for (found, after), _ in results:
        assert found.step == 2 and "not written within" in found.error and after == (3, None)
    assert sum(text.count("the checkpoint of step 2 is given up") for _, text in results) == 1
    assert finding.list_tags(tmp_path) == ["step00000003", "step00000001"]


def killed(saves, folder):
    """The writer of rank 1 is killed in the middle of the second save."""
    save(saves, folder, 1)
    saves.finish()
    if saves.ranks.rank == 1:
        os.kill(saves.process.pid, signal.SIGSTOP)
    save(saves, folder, 2)
    if saves.ranks.rank == 1:
        saves.process.kill()
    found = saves.finish()
    tags = finding.list_tags(folder), sorted(p.name for p in folder.iterdir())
    saves.ranks.any(False)
    save(saves, folder, 3)
    return found, tags, saves.finish()


def test_a_killed_writer_is_reported_and_the_next_save_works(tmp_path):
    results = pool.run(run, 2, str(tmp_path), killed)
    for (found, tags, after), _ in results:
        assert found.step == 2 and "ended by SIGKILL" in found.error
        assert tags == (["step00000001"], ["latest", "step00000001"])
        assert after == (3, None)
    assert [text.count("was ended by SIGKILL") for _, text in results] == [0, 1]
    assert manifests.damage(tmp_path / "step00000003") == []


def full(saves, folder):
    """The kernel refuses files above 4 KiB to the writer of rank 1, and later no longer."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save(saves, folder, 1)
    saves.finish()
    if saves.ranks.rank == 1:
        hard = resource.prlimit(saves.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(saves.process.pid, resource.RLIMIT_FSIZE, (4096, hard))
    save(saves, folder, 2)
    found = saves.finish()
    left = sorted(p.name for p in folder.iterdir())
    saves.ranks.any(False)
    if saves.ranks.rank == 1:
        resource.prlimit(saves.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    save(saves, folder, 3)
    return found, left, saves.finish()


def test_a_full_disk_costs_this_save_alone(tmp_path):
    for (found, left, after), _ in pool.run(run, 2, str(tmp_path), full):
        assert found.step == 2 and found.error is not None
        assert left == ["latest", "step00000001"], "nothing half is left"
        assert after == (3, None)
    assert finding.list_tags(tmp_path) == ["step00000003", "step00000001"]


def without_memory(saves, folder):
    """The kernel has no memory for the copy of rank 1, once to begin with and once to grow."""
    from mst_scale.comm import FailedElsewhere

    raised = []

    def attempt(step, size):
        try:
            save(saves, folder, step, size)
        except (OSError, FailedElsewhere) as error:
            raised.append(type(error).__name__)
        return saves.pending

    def fails(*args, **named):
        raise OSError(12, "Cannot allocate memory")

    create, grow = os.memfd_create, snapshot.mmap.mmap
    if saves.ranks.rank == 1:
        os.memfd_create = fails
    pending = [attempt(1, 1000)]
    os.memfd_create = create
    save(saves, folder, 2, 1000)
    saves.finish()
    if saves.ranks.rank == 1:
        snapshot.mmap.mmap = fails
    pending.append(attempt(3, 1_000_000))
    snapshot.mmap.mmap = grow
    save(saves, folder, 4, 1_000_000)
    return raised, pending, saves.finish()


def test_a_copy_for_which_there_is_no_memory_fails_on_all_ranks_alike(tmp_path):
    results = [found for found, _ in pool.run(run, 2, str(tmp_path), without_memory)]
    assert [raised for raised, _, _ in results] == [["FailedElsewhere"] * 2, ["OSError"] * 2]
    assert all(pending == [False, False] and after == (4, None) for _, pending, after in results)
    assert finding.list_tags(tmp_path) == ["step00000004", "step00000002"]


def without_process(saves, folder):
    """On rank 1 no process can be started for the first save."""
    from mst_scale.checkpoints import background

    def fails(*args, **named):
        raise OSError(11, "Resource temporarily unavailable")

    start = background._start_writer
    if saves.ranks.rank == 1:
        background._start_writer = fails
    try:
        save(saves, folder, 1)
    finally:
        background._start_writer = start
    found = saves.finish()
    save(saves, folder, 2)
    return found, saves.finish()


def test_a_writer_that_cannot_be_started_costs_this_save_alone(tmp_path):
    for (found, after), _ in pool.run(run, 2, str(tmp_path), without_process):
        assert found.step == 1 and "cannot be started" in found.error and after == (2, None)
    assert finding.list_tags(tmp_path) == ["step00000002"]


def test_the_bytes_are_those_of_torch_save(tmp_path):
    weight = torch.randn(100, 100)
    state = {
        "view": weight[3:5], "again": weight, "transposed": torch.randn(3, 5).bfloat16().t(), "empty": torch.empty(0),
        "scalar": torch.tensor(3.0), "other": [1, None, "é", {"deep": torch.arange(7)}],
    }  # fmt: skip
    torch.save(state, tmp_path / "file.pt")
    taken, copy = snapshot.Snapshot(), tmp_path / "copy"
    copy.mkdir()
    for _ in range(2):  # the memory is used again
        taken.begin(Path("/somewhere"))
        taken.put(Path("/somewhere/mst/plain"), b"plain", 0o755)
        taken.save(state, "/somewhere/file.pt")
        assert snapshot.write(taken.files, taken.fd, copy) == ["mst/plain", "file.pt"]
    taken.close()
    assert (copy / "file.pt").read_bytes() == (tmp_path / "file.pt").read_bytes()
    assert (copy / "mst" / "plain").read_bytes() == b"plain" and (
        copy / "mst" / "plain"
    ).stat().st_mode & 0o777 == 0o755


def own_layout(saves, folder):
    """A checkpoint of DeepSpeed's own layout over one of the same tag, with a file of somebody else's."""
    for number in (1, 2):
        saves.finish()
        saves.start(
            lambda taken, draft, number=number: taken.put(draft / "mst" / f"{saves.ranks.rank}", b"%d" % number),
            folder / "tag", step=number, about=None,
        )  # fmt: skip
        saves.finish()
        if saves.ranks.rank == 0:
            (folder / "tag" / "own.json").write_text(json.dumps(number))
        saves.ranks.any(False)


def test_a_tag_that_exists_is_written_over_as_deepspeed_does(tmp_path):
    pool.run(run, 2, str(tmp_path), own_layout)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "tag"]
    assert (tmp_path / "tag" / "mst" / "1").read_bytes() == b"2" and (tmp_path / "tag" / "own.json").read_text() == "2"
    assert not (tmp_path / "tag" / "manifest.json").exists()


def kept(saves, folder):
    """Copies in memory: the writer of rank 1 stands still, and later it has no room for a while."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    host, first = folder / "run" / "host", saves.ranks.rank == 0
    saves.copies = KeptCopies(host, 0, "", None)
    found = []

    def keep(step):
        rank, about = saves.ranks.rank, {"tag": finding.tag_of(step), "step": step, "ranks": 2, "stage": 1}
        saves.keep(lambda taken, draft: taken.put(draft / f"{rank}.pt", bytes(100_000)), step=step, about=about)

    def over(wait=True):
        found.append((saves.finish(wait), saves.pending, saves.copies.newest))

    keep(1)
    over()
    if not first:
        os.kill(saves.process.pid, signal.SIGSTOP)
    keep(2)
    over(wait=False)
    saves.ranks.any(False)
    os.kill(saves.process.pid, signal.SIGCONT)
    over()
    process = saves.process.pid
    if not first:
        hard = resource.prlimit(process, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process, resource.RLIMIT_FSIZE, (4096, hard))
    for step in (3, 4):
        keep(step)
        over()
    steps = sorted(copy.step for copy, rank in memory_copies.list_parts(host) if rank == saves.ranks.rank)
    if not first:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (hard, hard))
    keep(5)
    over()
    return found, steps, saves.process.pid == process


def test_copies_in_memory_that_are_slow_or_have_no_room(tmp_path):
    results = pool.run(run, 2, str(tmp_path), kept)
    one, two, five = (finding.tag_of(step) for step in (1, 2, 5))
    for rank, ((found, steps, same_process), text) in enumerate(results):
        assert found == [
            (None, False, one), (None, True, one), (None, False, two), (None, False, two), (None, False, two),
            (None, False, five),
        ]  # fmt: skip
        assert same_process and steps == [[2, 4], [2]][rank], "the copy that all ranks have stays"
        assert "not saved" not in text

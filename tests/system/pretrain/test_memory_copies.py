"""Whole runs with `training.memory_every`: after the loss of ranks or a host they continue from memory, bit for bit."""

import functools
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mst_scale.checkpoints import finding, memory_copies
from mst_scale.run_logging.run_file import DIVERGED
from tests.support import forked, pool, tiny_run
from tests.support.toy_engine import OFFLOAD
from tests.support.whole_runs import COMPACT, MST, arguments, assert_same_run, attempt, logged_attempt
from tests.system.pretrain.test_verification import FLIPPED_AT, flipped

pytestmark = pytest.mark.full

COPIES = {"memory_every": 3, "save_every": 8}
CASES = {
    "dense, stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {"mst": MST, "zero_optimization": {"stage": 1}},
    "stage 3": {"mst": MST, "zero_optimization": {"stage": 3}},
    "compact storage, stage 2": {**COMPACT, "zero_optimization": {"stage": 2}},
}
SLOW = ("stage 1",)


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """Where this host keeps the parts of the run in `tmp_path`/out."""
    found = memory_copies.folder_of(tmp_path / "out")
    yield found
    shutil.rmtree(found.parent, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run of each case, without copies in memory."""

    @functools.cache
    def run(case: str) -> Path:
        made = tmp_path_factory.mktemp("undisturbed")
        plain = arguments(made, training={"save_every": 8}, **CASES[case])
        assert pool.run(attempt, 2, plain) == [(0, "")] * 2
        return made / "out"

    return run


def test_where_saves_block_there_are_no_copies(tmp_path, folder):
    training = {"memory_every": 1, "save_every": 8}
    argv = arguments(
        tmp_path, training=training, mst=MST, zero_optimization={"stage": 1, **OFFLOAD["zero_optimization"]}
    )
    (code, said), _ = pool.run(logged_attempt, 2, argv)
    assert code == 0 and said.count("training.memory_every has no effect") == 1 and not folder.parent.exists()


def record_of(out: Path) -> dict:
    return json.loads((out / "run.json").read_text())


def killed(tmp_path: Path, argv: list[str], step: int, ready, *, victims=(0, 1), before=None) -> None:
    """A run that waits after a step until `ready()`, of which these ranks are then killed; the others end."""
    held = tmp_path / "held"
    held.touch()
    hold = functools.partial(_both, before, step, str(held))
    processes = forked.start(2, argv, tmp_path / "logs", hold)
    tiny_run.wait_for(ready)
    for rank in victims:
        processes[rank].kill()
    held.unlink()
    codes = forked.end(processes, 60)
    assert None not in codes and 0 not in codes, codes


def _both(before, step: int, held: str) -> None:
    if before is not None:
        before()
    copies_wait()
    forked.hold(step, held)


def copies_wait() -> None:
    """No copy is skipped because the one before is not complete, however fast these steps are."""
    from mst_scale.pretrain.saving import Saves

    inner = Saves.copy

    def copy(saves: Saves, step: int, state) -> None:
        saves.finish()
        inner(saves, step, state)

    Saves.copy = copy  # type: ignore[method-assign]


def parts(folder: Path, step: int) -> list[int]:
    return sorted(rank for copy, rank in memory_copies.list_parts(folder) if copy.step == step)


def steps_of(folder: Path, start: int) -> set[int]:
    """The steps of which a start has left a part."""
    return {copy.step for copy, _ in memory_copies.list_parts(folder) if copy.start == start}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_a_run_continues_from_memory_after_all_ranks_are_killed(tmp_path, folder, undisturbed, case):
    argv, out = arguments(tmp_path, training=COPIES, **CASES[case]), tmp_path / "out"
    killed(tmp_path, argv, 6, lambda: parts(folder, 6) == [0, 1])
    assert finding.list_tags(out / "checkpoints") == []
    results = pool.run(logged_attempt, 2, argv)
    assert [code for code, _ in results] == [0, 0], results
    assert "the run continues from memory, at step 6" in results[0][1]
    assert record_of(out)["starts"][-1]["from_step"] == 6
    (event,) = [event for event in record_of(out)["events"] if event["what"] == "continued from memory"]
    assert event["step"] == 6 and event["parts"] == 2
    assert_same_run(out, undisturbed(case))
    assert not folder.parent.exists(), "a run that has ended leaves nothing in memory"


def test_after_the_loss_of_one_rank_another_number_of_ranks_continues(tmp_path, folder):
    argv, out = arguments(tmp_path, training=COPIES, **CASES["stage 1"]), tmp_path / "out"
    killed(tmp_path, argv, 10, lambda: parts(folder, 9) == [0, 1], victims=(1,))
    assert finding.list_tags(out / "checkpoints") == ["step00000008"], "older than the copy"
    ((code, text),) = pool.run(logged_attempt, 1, argv)
    assert code == 0 and "continues from memory, at step 9" in text
    assert "creating a copy that can be loaded" in text and "global batch stays 8" in text
    rows = tiny_run.rows(out)
    assert [row["step"] for row in rows] == list(range(1, 13)) and rows[-1]["tokens"] == 12 * 8 * tiny_run.CONTEXT


def test_a_run_killed_at_any_moment_of_a_copy_continues_from_one_that_is_complete(tmp_path, folder, undisturbed):
    """Copies after every step; the kill comes at a random moment, and again."""
    argv = arguments(tmp_path, training={"memory_every": 1, "save_every": 0}, **CASES["stage 1"])
    chance, out = random.Random(7), tmp_path / "out"
    for number in range(2):
        processes = forked.start(2, argv, tmp_path / "logs", copies_wait)
        tiny_run.wait_for(lambda number=number: len(steps_of(folder, number)) > 1)
        time.sleep(0.1 * chance.random())
        for process in processes:
            process.kill()
        forked.end(processes, 60)
        complete = [step for step in steps_of(folder, number) if parts(folder, step) == [0, 1]]
        assert complete, "a complete copy goes when the next one is complete, not before"
    results = pool.run(logged_attempt, 2, argv)
    assert [code for code, _ in results] == [0, 0], results
    assert f"continues from memory, at step {max(complete)}" in results[0][1]
    assert_same_run(out, undisturbed("stage 1"))


def damage(folder: Path, step: int, rank: int) -> None:
    """Flip a bit in the largest file of a part."""
    part = memory_copies.part_folder(folder, finding.tag_of(step), rank)
    file = max(part.rglob("*.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_parts_that_are_damaged_or_missing_are_not_used(tmp_path, folder, undisturbed):
    argv, out = arguments(tmp_path, training={"memory_every": 2, "save_every": 5}, **CASES["stage 1"]), tmp_path / "out"
    killed(tmp_path, argv, 8, lambda: parts(folder, 8) == [0, 1])
    assert parts(folder, 6) == [0, 1], "the copy before stays until the next one is written"
    damage(folder, 8, 1)
    log = tmp_path / "logs" / "rank0"
    killed(tmp_path, argv, 7, lambda: "continues from memory" in log.read_text())
    said = log.read_text()
    assert "the copy of step 8 in memory is not used" in said and "does not match its checksum" in said
    assert "continues from memory, at step 6" in said
    killed(tmp_path, argv, 8, lambda: parts(folder, 8) == [0, 1])
    shutil.rmtree(memory_copies.part_folder(folder, "step00000008", 0))
    results = pool.run(logged_attempt, 2, argv)
    assert [code for code, _ in results] == [0, 0], results
    assert "step 8 in memory is not used: no host has the part of rank 0" in results[0][1]
    assert record_of(out)["starts"][-1]["from_step"] == 6
    assert_same_run(out, undisturbed("stage 1"))


# --- several hosts ---


def on_own_host() -> None:
    """Each rank is a node of its own."""
    os.environ["SLURMD_NODENAME"] = f"node{os.environ['RANK']}"


def attempt_on_hosts(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    on_own_host()
    return logged_attempt(rank, world, argv)


def test_a_host_that_is_lost_is_replaced_by_the_copy_of_its_neighbor(tmp_path, folder, undisturbed):
    argv, out = arguments(tmp_path, training=COPIES, **CASES["stage 3"]), tmp_path / "out"
    nodes = [folder.parent / f"node{rank}.{folder.name}" for rank in range(2)]
    killed(tmp_path, argv, 6, lambda: all(parts(node, 6) == [0, 1] for node in nodes), before=on_own_host)
    shutil.rmtree(nodes[1])
    damage(nodes[0], 3, 0)
    results = pool.run(attempt_on_hosts, 2, argv)
    assert [code for code, _ in results] == [0, 0], results
    assert "continues from memory, at step 6" in results[0][1] and "and one of the previous host" in results[0][1]
    assert_same_run(out, undisturbed("stage 3"))
    assert not folder.parent.exists()


def test_a_damaged_part_is_read_from_the_other_host(tmp_path, folder, undisturbed):
    argv, out = arguments(tmp_path, training=COPIES, **CASES["stage 1"]), tmp_path / "out"
    nodes = [folder.parent / f"node{rank}.{folder.name}" for rank in range(2)]
    killed(tmp_path, argv, 6, lambda: all(parts(node, 6) == [0, 1] for node in nodes), before=on_own_host)
    damage(nodes[0], 6, 0)
    damage(nodes[1], 6, 1)
    results = pool.run(attempt_on_hosts, 2, argv)
    assert [code for code, _ in results] == [0, 0], results
    assert "continues from memory, at step 6" in results[0][1]
    assert_same_run(out, undisturbed("stage 1"))


def kill_writer(rank: int, world: int, argv: list[str], on_hosts: bool) -> tuple[int, str]:
    """The writer of rank 1 is killed while it should keep the copy of step 3."""
    from mst_scale.checkpoints.background import BackgroundSaves
    from mst_scale.checkpoints.memory_copies import MemoryJob

    inner = BackgroundSaves._send

    def send(saves, job) -> None:
        inner(saves, job)
        if rank == 1 and isinstance(job, MemoryJob) and job.head["step"] == 3:
            saves.process.kill()

    BackgroundSaves._send = send  # type: ignore[method-assign]
    try:
        return (attempt_on_hosts if on_hosts else logged_attempt)(rank, world, argv)
    finally:
        BackgroundSaves._send = inner  # type: ignore[method-assign]


@pytest.mark.parametrize("on_hosts", [False, True])
def test_a_killed_writer_costs_a_copy_and_nothing_else(tmp_path, folder, undisturbed, on_hosts):
    results = pool.run(kill_writer, 2, arguments(tmp_path, training=COPIES, **CASES["stage 1"]), on_hosts)
    assert [code for code, _ in results] == [0, 0], results
    assert "ended by SIGKILL" in results[1][1]
    assert not [event for event in record_of(tmp_path / "out")["events"] if event["what"] == "failed save"]
    assert_same_run(tmp_path / "out", undisturbed("stage 1"))


# --- what ends a run ---


def test_copies_that_the_last_start_has_not_made_are_not_used(tmp_path, folder, undisturbed):
    """Nor are those of a run that has diverged."""
    argv, out = arguments(tmp_path, training=COPIES, **CASES["stage 1"]), tmp_path / "out"
    log = tmp_path / "logs" / "rank0"
    for how, why in ((None, "it was made before the last start"), (DIVERGED[0], "the run diverged")):
        killed(tmp_path, argv, 6, lambda: parts(folder, 6) == [0, 1])
        record = record_of(out)
        record["starts"] += [record["starts"][-1]] if how is None else []
        record["starts"][-1] = {**record["starts"][-1], **({} if how is None else {"how": how})}
        (out / "run.json").write_text(json.dumps(record))
        message = f"the copy of step 6 in memory is not used: {why}"
        killed(tmp_path, argv, 1, lambda line=message: line in log.read_text() and parts(folder, 6) == [])


def flipped_with_copies(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    from mst_scale.pretrain.saving import Saves

    inner = Saves.copy
    copies_wait()
    try:
        return flipped(rank, world, argv, "exp_avg of")
    finally:
        Saves.copy = inner  # type: ignore[method-assign]


def test_after_silent_corruption_the_copy_of_a_verified_step_is_used(tmp_path, folder, undisturbed):
    training = {"memory_every": 4, "save_every": 100, "verify_every": 4}
    argv, out = arguments(tmp_path, training=training, **CASES["stage 1"]), tmp_path / "out"
    assert [code for code, _ in pool.run(flipped_with_copies, 2, argv)] == [4, 4]
    assert parts(folder, 4) == parts(folder, 8) == [0, 1] and FLIPPED_AT == 8
    results = pool.run(logged_attempt, 2, argv)
    assert [code for code, _ in results] == [0, 0], results
    assert "step 8 in memory is not used: silent corruption was found" in results[0][1]
    assert "continues from memory, at step 4" in results[0][1]
    assert_same_run(out, undisturbed("stage 1"))

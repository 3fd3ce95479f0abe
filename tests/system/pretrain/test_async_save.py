"""Whole runs whose checkpoints are written in the background: the same bytes, and nothing lost to kills and signals."""

import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from mst_scale.checkpoints import finding, manifests
from mst_scale.files import write_atomically
from tests.support import forked, pool, tiny_run, whole_runs
from tests.support.whole_runs import COMPACT, MST, assert_same_run, attempt, logged_attempt, without_times

pytestmark = pytest.mark.full

CASES = {
    "stage 0": ({"mst": MST, "zero_optimization": {"stage": 0}}, "dense"),
    "stage 1": ({"mst": MST, "zero_optimization": {"stage": 1}}, "dense"),
    "stage 2, without masks": ({"zero_optimization": {"stage": 2}}, "dense"),
    "stage 3": ({"mst": MST, "zero_optimization": {"stage": 3}}, "dense"),
    "compact storage, dense form": ({**COMPACT, "zero_optimization": {"stage": 2}}, "dense"),
    "compact storage, compact form": ({**COMPACT, "zero_optimization": {"stage": 3}}, "compact"),
}
SLOW = ("stage 1", "stage 2, without masks")


arguments = functools.partial(whole_runs.arguments, training={"async_save": True})


def digests(out: Path, tag: str) -> dict[str, str]:
    files = json.loads((out / "checkpoints" / tag / manifests.MANIFEST).read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items()}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_the_files_are_those_of_a_save_that_blocks(tmp_path, case):
    blocks, form = CASES[case]
    for name, key in (("async", "true"), ("blocking", "false")):
        sets = ["--set", f"training.async_save={key}", "--set", f"training.checkpoint_form={form}"]
        # fresh processes, since DeepSpeed numbers the parameters of stage 3 throughout a process
        processes = forked.start(2, arguments(tmp_path, name, *sets, **blocks), tmp_path / name / "logs")
        assert forked.end(processes, 100) == [0, 0]
    ours, theirs = tmp_path / "async", tmp_path / "blocking"
    assert digests(ours, "step00000008") == digests(theirs, "step00000008")
    heads = [manifests.head(out / "checkpoints" / "step00000008") for out in (ours, theirs)]
    assert {**heads[0], "files": None} == {**heads[1], "files": None}
    assert sorted(p.name for p in (ours / "checkpoints").iterdir()) == sorted(
        p.name for p in (theirs / "checkpoints").iterdir()
    )
    assert without_times(tiny_run.rows(ours)) == without_times(tiny_run.rows(theirs))


def hold_writer(step: int, written: str) -> None:
    """On rank 1 the process that writes the checkpoint of this step stands still; `written` gets its number."""
    from mst_scale.checkpoints.background import BackgroundSaves

    inner = BackgroundSaves._send

    def send(saves, job) -> None:
        inner(saves, job)
        if saves.ranks.rank == 1 and job.about["step"] == step:
            os.kill(saves.process.pid, signal.SIGSTOP)
            write_atomically(Path(written), str(saves.process.pid))

    BackgroundSaves._send = send  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pool.run(attempt, 2, arguments(folder, mst=MST)) == [(0, "")] * 2
    return folder / "out"


def test_a_run_killed_while_a_checkpoint_is_written_continues_from_the_one_before(tmp_path, undisturbed):
    argv, out, stopped = arguments(tmp_path, mst=MST), tmp_path / "out", tmp_path / "stopped"
    processes = forked.start(2, argv, tmp_path / "logs", functools.partial(hold_writer, 8, str(stopped)))
    folder = out / "checkpoints"
    tiny_run.wait_for(lambda: list(folder.glob("step00000008.*.partial/reports/00000.json")) and stopped.exists())
    writer = int(stopped.read_text())
    for process in processes:
        process.kill()
    forked.end(processes, 60)
    tiny_run.wait_for(lambda: not is_running(writer))
    assert finding.list_tags(folder) == ["step00000004"] and manifests.damage(folder / "step00000004") == []
    assert list(folder.glob("step00000008.*.partial")), "the half of the checkpoint that rank 0 has written"
    results = pool.run(logged_attempt, 2, argv)
    assert [code for code, _ in results] == [0, 0] and "from step 4" in results[0][1]
    assert_same_run(out, undisturbed)
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_asked_to_stop_waits_for_the_writer(tmp_path, undisturbed, signum):
    argv, out, stopped = arguments(tmp_path, mst=MST), tmp_path / "out", tmp_path / "stopped"
    held = tmp_path / "held"
    held.touch()
    processes = forked.start(2, argv, tmp_path / "logs", functools.partial(_both, str(stopped), str(held)))
    folder = out / "checkpoints"
    tiny_run.wait_for(stopped.exists)
    writer = int(stopped.read_text())
    os.kill(processes[1].pid, signum)
    os.kill(writer, signum)  # as Slurm, which signals all processes of a step
    held.unlink()
    time.sleep(1)
    assert all(process.is_alive() for process in processes) and finding.list_tags(folder) == []
    os.kill(writer, signal.SIGCONT)
    assert forked.end(processes, 60) == [0, 0]
    tags = finding.list_tags(folder)
    assert len(tags) == 2 and tags[1] == "step00000004" and all(manifests.damage(folder / tag) == [] for tag in tags)
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    assert_same_run(out, undisturbed)


def _both(stopped: str, held: str) -> None:
    hold_writer(4, stopped)
    forked.hold(6, held)


def kill_writers(rank: int, world: int, argv: list[str], steps: tuple[int, ...]) -> tuple[int, str]:
    """The writer of rank 1 is killed while it should write the checkpoints of these steps."""
    from mst_scale.checkpoints.background import BackgroundSaves

    inner = BackgroundSaves._send

    def send(saves, job) -> None:
        inner(saves, job)
        if rank == 1 and job.about["step"] in steps:
            saves.process.kill()

    BackgroundSaves._send = send  # type: ignore[method-assign]
    try:
        return logged_attempt(rank, world, argv)
    finally:
        BackgroundSaves._send = inner  # type: ignore[method-assign]


def test_a_killed_writer_costs_one_checkpoint_and_not_the_run(tmp_path, undisturbed):
    results = pool.run(kill_writers, 2, arguments(tmp_path, mst=MST), (4,))
    assert [code for code, _ in results] == [0, 0], results
    assert "step 4 was not saved" in results[0][1] and "ended by SIGKILL" in results[1][1]
    assert finding.list_tags(tmp_path / "out" / "checkpoints") == ["step00000012", "step00000008"]
    events = json.loads((tmp_path / "out" / "run.json").read_text())["events"]
    assert [event["step"] for event in events if event["what"] == "failed save"] == [4]
    assert_same_run(tmp_path / "out", undisturbed)


def test_saves_that_keep_failing_do_not_end_the_run(tmp_path):
    argv = arguments(tmp_path, "out", "--steps", "28")
    results = pool.run(kill_writers, 2, argv, (8, 12, 16, 20))
    assert [code for code, _ in results] == [0, 0], results
    assert "step 20 was not saved (failed saves in a row: 4)" in results[0][1]
    assert finding.list_tags(tmp_path / "out" / "checkpoints") == ["step00000028", "step00000024"]
    assert tiny_run.rows(tmp_path / "out")[-1]["step"] == 28


def without_memory(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """The kernel has no memory for the first copy of rank 1."""
    create, calls = os.memfd_create, []

    def fails(name: str) -> int:
        calls.append(name)
        if len(calls) == 1 and rank == 1:
            raise OSError(12, "Cannot allocate memory")
        return create(name)

    os.memfd_create = fails
    try:
        return logged_attempt(rank, world, argv)
    finally:
        os.memfd_create = create


def test_training_waits_for_a_checkpoint_of_which_there_is_no_copy(tmp_path, undisturbed):
    results = pool.run(without_memory, 2, arguments(tmp_path, mst=MST))
    assert [code for code, _ in results] == [0, 0], results
    assert "Cannot allocate memory" in results[1][1] and "training waits until it is written" in results[1][1]
    events = json.loads((tmp_path / "out" / "run.json").read_text())["events"]
    assert not [event for event in events if event["what"] == "failed save"]
    assert tiny_run.rows(tmp_path / "out")[4]["save_s"] > 0, "step 4 was saved"
    assert_same_run(tmp_path / "out", undisturbed)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False

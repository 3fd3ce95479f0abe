"""Storage that fails while a run trains: it goes on or stops cleanly, and a good checkpoint is never lost."""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mst_scale import comm
from mst_scale.checkpoints import finding, manifests, store
from mst_scale.compiled import build_locks
from mst_scale.errors import UserError
from mst_scale.run_logging import out_lock, run_file
from mst_scale.run_logging.out_lock import OutLock
from tests.ranks.checkpoints.test_store import Engine, alone
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, logged_attempt, without_times


def troubled(rank, world, argv, trouble, calls):
    """The saves of these numbers meet `trouble(rank, folder)` before DeepSpeed writes its files."""
    import resource
    import signal

    write, count = store._write, []

    def before_writing(engine, folder, tag, state):
        count.append(1)
        if len(count) in calls:
            trouble(rank, folder)
        try:
            write(engine, folder, tag, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store._write = before_writing
    try:
        return logged_attempt(rank, world, argv)
    finally:
        store._write = write


def full_disk(rank, folder):
    """The kernel refuses to write on rank 1."""
    import resource

    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def gone(rank, folder):
    if rank == 0:
        shutil.rmtree(folder)
    time.sleep(0.2)


def slow(rank, folder):
    time.sleep(0.5)


def tags(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir() if path.is_dir())


def test_a_failed_save_costs_nothing_but_itself(tmp_path):
    argv = arguments(tmp_path, mst=MST)
    results = pool.run(troubled, 2, argv, full_disk, (2,))
    assert [code for code, _ in results] == [0, 0], results
    text = "".join(text for _, text in results)
    assert "cannot save a checkpoint" in text and "step 8 was not saved" in text
    assert tags(tmp_path / "out") == ["step00000004", "step00000012"]
    events = json.loads((tmp_path / "out" / "run.json").read_text())["events"]
    assert [event["step"] for event in events if event["what"] == "failed save"] == [8]
    assert pool.run(logged_attempt, 2, arguments(tmp_path, "plain", mst=MST))[0][0] == 0
    assert without_times(tiny_run.rows(tmp_path / "out")) == without_times(tiny_run.rows(tmp_path / "plain"))


def full_between(rank, world, argv, first, last):
    """On rank 0 no file can grow beyond some bytes, so that a line is torn, from the end of step `first` to `last`."""
    import resource

    from mst_scale.pretrain import prepare, training_loop

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def advance(run):
        step = run.step
        inner(run)
        if rank == 0 and step < first <= run.step:
            limit((Path(run.out) / "metrics.jsonl").stat().st_size + 100)
        if rank == 0 and step < last <= run.step:
            limit(resource.RLIM_INFINITY)

    def record_start(*words, **named):
        if rank == 0 and first == 0:  # the process groups that meet at a file are there by now
            limit(100)
        return inner_begin(*words, **named)

    inner, training_loop.Run.advance = training_loop.Run.advance, advance
    inner_begin, prepare.record_start = prepare.record_start, record_start
    try:
        return logged_attempt(rank, world, argv)
    finally:
        training_loop.Run.advance, prepare.record_start = inner, inner_begin
        limit(resource.RLIM_INFINITY)


def test_a_full_disk_on_the_first_rank_costs_no_run_and_no_row(tmp_path):
    """Metrics, snapshots and run.json are refused too; the rows wait for the disk."""
    results = pool.run(full_between, 2, arguments(tmp_path, mst=MST), 3, 10)
    assert [code for code, _ in results] == [0, 0], results
    text = "".join(text for _, text in results)
    for what in ("metrics.jsonl", "snapshots of the weights"):
        assert text.count(f"cannot write {what} (") == 1, (what, text)
    assert f"cannot write {tmp_path / 'out' / 'run.json'} (" in text
    assert "metrics.jsonl can be written again" in text and tags(tmp_path / "out") == ["step00000012"]
    assert pool.run(logged_attempt, 2, arguments(tmp_path, "plain", mst=MST))[0][0] == 0
    assert without_times(tiny_run.rows(tmp_path / "out")) == without_times(tiny_run.rows(tmp_path / "plain"))


def test_a_finished_run_is_finished_also_where_nothing_can_be_written(tmp_path):
    argv = arguments(tmp_path, mst=MST)
    assert pool.run(logged_attempt, 2, argv)[0][0] == 0
    before = tiny_run.rows(tmp_path / "out")
    results = pool.run(full_between, 2, argv, 0, 99)
    assert [code for code, _ in results] == [0, 0], results
    assert tiny_run.rows(tmp_path / "out") == before and len(story(tmp_path)["starts"]) == 1


def story(folder: Path) -> dict:
    return json.loads((folder / "out" / "run.json").read_text())


def test_a_checkpoint_folder_that_vanishes_is_made_again(tmp_path):
    results = pool.run(troubled, 2, arguments(tmp_path, mst=MST), gone, (2,))
    assert [code for code, _ in results] == [0, 0], results
    assert tags(tmp_path / "out") == ["step00000008", "step00000012"]
    assert manifests.damage(tmp_path / "out" / "checkpoints" / "step00000008") == []


def test_saves_that_keep_failing_do_not_end_the_run(tmp_path):
    argv = arguments(tmp_path, "out", "--steps", "22", "--set", "training.keep_checkpoints=3")
    results = pool.run(troubled, 2, argv, full_disk, (2, 3, 4))
    assert [code for code, _ in results] == [0, 0], results
    assert "step 16 was not saved (failed saves in a row: 3)" in results[0][1]
    assert tags(tmp_path / "out") == ["step00000004", "step00000020", "step00000022"]


def test_a_run_whose_last_step_cannot_be_saved_ends_with_the_good_checkpoint_whole(tmp_path):
    results = pool.run(troubled, 2, arguments(tmp_path, "out", "--steps", "6"), full_disk, (2,))
    assert [code for code, _ in results] == [1, 1]
    assert tags(tmp_path / "out") == ["step00000004"]
    assert manifests.damage(tmp_path / "out" / "checkpoints" / "step00000004") == []


def test_the_time_of_a_save_is_logged(tmp_path):
    results = pool.run(troubled, 2, arguments(tmp_path, "out", "--steps", "6"), slow, (1,))
    assert "saved" in results[0][1]
    seconds = {row["step"]: row.get("save_s") for row in tiny_run.rows(tmp_path / "out")}
    assert seconds[5] > 0.5 and seconds[4] is None


def bad_disk(rank, world, folder):
    """What the disk gives back of the third checkpoint is not what was written."""
    ranks, seal, folder = alone(), store.seal_files, Path(folder)

    def spoil(draft, final, *others):
        seal(draft, final, *others)
        (final / "b.pt").write_text("c" * 1000)

    for step in (1, 2):
        store.save(Engine(), folder, ranks, step=step, batch=8, micro=2, keep=1, state={})
    store.seal_files = spoil
    try:
        store.save(Engine(), folder, ranks, step=3, batch=8, micro=2, keep=1, state={})
    except OSError as error:
        return str(error), finding.newest(folder, ranks)
    finally:
        store.seal_files = seal


def test_an_old_checkpoint_is_deleted_only_after_the_newer_one_was_verified(tmp_path):
    ((error, newest),) = pool.run(bad_disk, 1, str(tmp_path))
    assert "step00000003 is damaged: b.pt does not match its checksum" in error
    assert newest == "step00000002" and sorted(finding.list_tags(tmp_path)) == ["step00000002", "step00000003"]


# --- a build that was killed ---


@pytest.fixture
def clock(monkeypatch):
    """Time passes for the locks only while they are waited for."""
    passed = SimpleNamespace(seconds=0.0, then=lambda: None)
    begun = time.time()

    def sleep(seconds):
        passed.seconds += seconds
        passed.then()

    reported = SimpleNamespace(sleep=sleep, time=lambda: begun + passed.seconds, monotonic=lambda: passed.seconds)
    monkeypatch.setattr(build_locks, "time", reported)
    return passed


def lock_in(folder: Path, seconds_old: float) -> Path:
    lock = folder / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - seconds_old,) * 2)
    return lock


def test_the_lock_of_a_killed_build_is_removed_at_the_start_of_a_run(tmp_path):
    lock = lock_in(tmp_path / "extensions", 3600)
    results = pool.run(with_extensions, 2, arguments(tmp_path, "out", "--steps", "2"), str(tmp_path / "extensions"))
    assert [code for code, _ in results] == [0, 0] and not lock.exists()
    lines = [line for _, text in results for line in text.splitlines() if "killed build" in line]
    assert len(lines) == 1 and str(lock) in lines[0]


def with_extensions(rank, world, argv, folder):
    """Only the look at the locks uses this folder: operators are found, or built, where they always are."""
    inner, build_locks.extensions_folder = build_locks.extensions_folder, lambda: Path(folder)
    try:
        return logged_attempt(rank, world, argv)
    finally:
        build_locks.extensions_folder = inner


def test_a_lock_in_use_stays_and_a_young_one_is_waited_for(tmp_path, clock):
    import subprocess
    import sys

    lock = lock_in(tmp_path, 3600)
    compiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=lock.parent)
    try:
        assert build_locks.clear(tmp_path) == [] and lock.exists(), "somebody builds there"
    finally:
        compiler.kill()
        compiler.wait()
    os.utime(lock, (build_locks.time.time(),) * 2)
    assert build_locks.clear(tmp_path) == [lock] and 0 <= clock.seconds - build_locks.SETTLED <= 0.5


def test_a_quiet_lock_on_a_network_file_system_is_watched_until_it_is_old_or_gone(tmp_path, monkeypatch, caplog, clock):
    """Its builder may be on another machine; torch would wait for it for ever, so the start does not go on with it."""
    monkeypatch.setattr(build_locks, "_on_network", lambda path: True)
    caplog.set_level("INFO", "mst_scale")
    lock = lock_in(tmp_path, build_locks.SETTLED_ON_NETWORK - 100)
    assert build_locks.clear(tmp_path) == [lock] and 99 < clock.seconds < 110
    assert caplog.text.count("waiting for a build on another machine") == 1
    lock.touch()
    clock.then = lambda: lock.unlink(missing_ok=True)  # the other machine has built it
    assert build_locks.clear(tmp_path) == [] and not lock.exists()


# --- two runs in one folder ---


def test_a_second_run_in_the_same_folder_is_rejected_in_one_line(tmp_path):
    (tmp_path / "out").mkdir()
    held = OutLock(tmp_path / "out")
    held.take(restarted=False)
    results = pool.run(logged_attempt, 2, arguments(tmp_path))
    assert [code for code, _ in results] == [2, 2]
    (line,) = [line for _, text in results for line in text.splitlines()]
    assert f"another run writes into {tmp_path / 'out'} (process {os.getpid()} on " in line and "another --out" in line
    with pytest.raises(OSError, match="another run writes into"):  # which a launcher tries again
        OutLock(tmp_path / "out").take(restarted=True, patience=0.1)
    held.release()
    assert pool.run(logged_attempt, 2, arguments(tmp_path, "out", "--steps", "2"))[0][0] == 0


def on_its_own_machine(rank: int, world: int, folder: str, argv: list[str]) -> tuple[int, str]:
    """The ranks have different working folders, and so different folders of this relative name."""
    os.makedirs(f"{folder}/{rank}")
    os.chdir(f"{folder}/{rank}")
    visible, out_lock.VISIBLE = out_lock.VISIBLE, 0.5
    try:
        return logged_attempt(rank, world, argv)
    finally:
        out_lock.VISIBLE = visible
        os.chdir("/")


def test_a_folder_that_the_machines_do_not_share_is_noticed(tmp_path):
    results = pool.run(on_its_own_machine, 2, str(tmp_path), [*arguments(tmp_path), "--out", "here"])
    assert [code for code, _ in results] == [2, 2]
    (line,) = [line for _, text in results for line in text.splitlines() if "that the first rank writes into" in line]
    assert "here of " in line and "that all machines share" in line


def test_a_folder_that_cannot_be_created():
    with pytest.raises(UserError, match="choose another --out"):
        OutLock(Path("/proc/self/out")).take(restarted=False)


def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch, caplog):
    import errno
    import fcntl

    def none(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    caplog.set_level("INFO", "mst_scale")
    OutLock(tmp_path / "out").take(restarted=False)
    assert caplog.text.count("cannot be locked") == 1


@pytest.fixture
def two_machines(monkeypatch):
    """Each has locks that the other does not see, and heartbeats come quickly."""
    import fcntl

    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
    monkeypatch.setattr(out_lock, "BEAT", 0.1)
    monkeypatch.setattr(out_lock, "STILL", 0.5)
    monkeypatch.setattr(out_lock, "BRIEFLY", 0.1)

    def on(name, folder):
        monkeypatch.setattr(out_lock, "machine", lambda: name)
        return OutLock(folder)

    return on


def test_a_run_of_another_machine_is_noticed_without_a_shared_lock(tmp_path, two_machines):
    one, other = two_machines("one", tmp_path), two_machines("other", tmp_path)
    one.take(restarted=False)
    with pytest.raises(UserError, match=r"another run writes into .*process \d+ on one\)"):
        other.take(restarted=False)
    one.release()
    started = time.monotonic()
    other.take(restarted=False)
    assert time.monotonic() - started < 0.4, "a run that has ended is not waited for"
    other.release()


def test_the_folder_of_a_killed_run_of_another_machine_is_taken_over(tmp_path, two_machines):
    one, other = two_machines("one", tmp_path), two_machines("other", tmp_path)
    one.take(restarted=False)
    one.over.set()  # no heartbeat any more
    one.beats.join()
    other.take(restarted=False)
    assert other._holder() == f"process {os.getpid()} on other"
    other.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_frozen_run_that_was_taken_over_exits_when_it_resumes(tmp_path, two_machines, monkeypatch):
    """And likewise the earlier of two that start at the same moment."""
    ended = []
    monkeypatch.setattr(comm, "end", lambda error: ended.append(error) or sys.exit())
    one, other = two_machines("one", tmp_path), two_machines("other", tmp_path)
    monkeypatch.setattr(other, "_runs_elsewhere", lambda locked: False)
    one.take(restarted=False)
    other.take(restarted=False)
    one.beats.join(10)
    assert len(ended) == 1 and isinstance(ended[0], UserError) and "on other" in str(ended[0])
    assert other.beats.is_alive()
    one.release()
    assert "on other" in other._holder(), "it has left the other's name there"
    other.release()


# --- what a run tells about itself ---


def test_run_json_explains_the_run(tmp_path):
    steady = {"mst": {"method": "dense"}, "training": {"lr_schedule": "wsd", "decay": 0}}
    for steps in ("4", "8"):
        assert pool.run(logged_attempt, 2, arguments(tmp_path, "out", "--steps", steps, **steady))[0][0] == 0
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["restarts"] == 1 and [start["how"] for start in run["starts"]] == ["finished", "finished"]
    first, second = run["starts"]
    assert (first["from_step"], first["last_step"], second["from_step"], second["last_step"]) == (0, 4, 4, 8)
    assert second["checkpoint"].endswith("step00000004") and first["checkpoint"] is None
    assert first["hosts"] == [os.uname().nodename] * 2 and first["ranks"] == 2
    assert first["device"] == run_file.device() and any(c.isalpha() for c in first["device"])
    assert first["seeds"] == {"training": 1337, "mst": 1337} and first["batch"]["sequences"] == 8
    assert {"torch", "deepspeed", "python"} <= first["versions"].keys() and first["command"] and first["time"]
    assert run["config"] == json.loads((tmp_path / "out" / "config.json").read_text())


def test_the_state_of_the_source_tree(tmp_path):
    import subprocess

    assert run_file.git_state(tmp_path) is None
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "new.py").touch()
    subprocess.run(["git", "add", "new.py"], cwd=tmp_path, check=True)
    state = run_file.git_state(tmp_path)
    assert len(state["commit"]) == 40 and state["changed"] == ["new.py"]


def test_a_truncated_run_json_is_replaced(tmp_path):
    (tmp_path / "run.json").write_text('{"starts": [')
    run_file.RunFile(tmp_path / "run.json", {}, {"ranks": 2})
    assert json.loads((tmp_path / "run.json").read_text())["restarts"] == 0

"""A corpus comes out whole or not at all, the same however it was made, in bounded memory."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mst_scale.data import corpus, prepare
from mst_scale.data.corpus import SplitFile, UnfinishedCorpus, open_tokens, verify
from mst_scale.data.prepare import WINDOW, ordered_map
from mst_scale.data.recipe import Recipe
from mst_scale.errors import Damaged, UserError
from tests.support.texts import jsonl, make, rank_file, words

TEXTS = [words(1 + n % 17, seed=n) for n in range(300)]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}


@pytest.fixture
def big_text(tmp_path: Path) -> Path:
    """7 MB: 7 chunks."""
    path = tmp_path / "big.txt"
    path.write_text(words(20_000) * 70)
    assert path.stat().st_size > 7e6
    return path


# What is written ----------------------------------------------------------------------------------------------------


def test_every_document_is_followed_by_the_end_of_text(tmp_path: Path):
    meta = make(jsonl(tmp_path / "a.jsonl", ["one", "two", "é"]), tmp_path / "out")
    train, val = (np.fromfile(tmp_path / "out" / f"{name}.bin", np.uint16).tolist() for name in ("train", "val"))
    assert val == [*b"one", 256]
    assert train == [*b"two", 256, *"é".encode(), 256]
    assert meta["splits"]["train"] | {"sha256": ""} == {
        "file": "train.bin",
        "tokens": 7,
        "documents": 2,
        "max_id": 256,
        "sha256": "",
    }
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_text"], meta["dtype"]) == ("byte", 257, 256, "uint16")
    assert meta == json.loads((tmp_path / "out" / "meta.json").read_text()) == verify(tmp_path / "out")
    assert sorted(contents(tmp_path / "out")) == ["meta.json", "train.bin", "val.bin"]


def test_a_large_vocabulary_is_written_in_four_bytes(tmp_path: Path):
    ranks = rank_file(tmp_path / "large.tiktoken", [b"%08d" % n for n in range(70_000)])
    meta = make(jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out", str(ranks))
    assert (meta["dtype"], meta["end_of_text"]) == ("uint32", 70_256)
    assert np.fromfile(tmp_path / "out" / "train.bin", np.uint32).tolist() == [*b"two", 70_256]
    assert open_tokens(tmp_path / "out", vocab_size=70_257).tokens.dtype == np.uint32


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, big_text: Path, kind: str):
    source = big_text
    if kind == "jsonl":
        rng = random.Random(0)
        text = big_text.read_text()
        starts = [rng.randrange(len(text) - 4000) for _ in range(3000)]
        source = jsonl(tmp_path / "big.jsonl", [text[at : at + rng.randrange(4000)] for at in starts])
    ranks = str(rank_file(tmp_path / "small.tiktoken"))
    for workers in (1, 2, 3):
        make(source, tmp_path / f"out{workers}", ranks, workers=workers)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out3")


def test_a_corpus_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = Recipe("stdlib", "byte", max_bytes=300_000)
    first = prepare.prepare(recipe, tmp_path / "out")
    assert first["recipe"]["max_bytes"] == 300_000
    monkeypatch.setattr(prepare, "open_source", lambda recipe: pytest.fail("the source was opened"))
    assert prepare.prepare(recipe, tmp_path / "out") == first


# What is there already ----------------------------------------------------------------------------------------------


def test_a_finished_corpus_is_reused_without_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    first = make(source, tmp_path / "out")
    monkeypatch.setattr(prepare, "open_source", lambda recipe: pytest.fail("the source was opened"))
    assert make(source, tmp_path / "out") == first
    source.unlink()
    assert make(source, tmp_path / "out") == first


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"val_fraction": 0.5}, "val_fraction 0.01, not 0.5"),
        ({"seed": 1}, "seed 2357, not 1"),
        ({"max_bytes": 10_000}, "max_bytes None, not 10000"),
    ],
)
def test_other_arguments_in_the_same_folder_are_rejected(tmp_path: Path, change: dict, difference: str):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    make(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=f"{difference}.*--force"):
        make(source, tmp_path / "out", **change)
    assert contents(tmp_path / "out") == before


def test_force_replaces_what_is_there(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    make(source, tmp_path / "out")
    recipe = Recipe(str(source), "byte", val_fraction=0.5)
    forced = prepare.prepare(recipe, tmp_path / "out", workers=1, force=True)
    make(source, tmp_path / "fresh", val_fraction=0.5)
    assert forced["recipe"]["val_fraction"] == 0.5
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_changed_source_is_noticed(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    make(source, tmp_path / "out")
    jsonl(source, [*TEXTS, "more"])
    with pytest.raises(UserError, match=r"source.*--force"):
        make(source, tmp_path / "out")


def test_a_truncated_corpus_is_not_reused(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    make(source, tmp_path / "out")
    with open(tmp_path / "out" / "train.bin", "r+b") as handle:
        handle.truncate(100)
    with pytest.raises(Damaged, match=r"train\.bin.* 100 .*--force"):
        make(source, tmp_path / "out")


def test_foreign_bins_are_not_overwritten(tmp_path: Path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"\.bin"):
        make(jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path)
    assert np.fromfile(tmp_path / "train.bin", np.uint16).tolist() == list(range(100))


def test_too_few_documents_leave_nothing_behind(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", ["only one"])
    with pytest.raises(UserError, match=r"val_fraction.* train"):
        make(source, tmp_path / "out")
    jsonl(source, ["one", "two"])
    make(source, tmp_path / "out", val_fraction=0.4)  # other arguments: nothing worth keeping was in the way


def test_no_workers_are_rejected(tmp_path: Path):
    with pytest.raises(UserError, match="workers must be at least 1"):
        make(tmp_path, tmp_path / "out", workers=0)


# Killed -------------------------------------------------------------------------------------------------------------

SLOW = """
import sys, time
from mst_scale.data import prepare
from mst_scale.data.recipe import Recipe
from mst_scale.data.prepare import _Progress
prepare.JOURNAL_BYTES = 1 << 20
pauses = iter([0.1] * int(sys.argv[5]) + [600] if sys.argv[5:] else [0.1] * 999)
_Progress.advance = lambda *args: time.sleep(next(pauses))
prepare.prepare(Recipe(sys.argv[1], sys.argv[2]), sys.argv[3], workers=int(sys.argv[4]))
"""


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_is_rejected_and_then_finished(
    tmp_path: Path, big_text: Path, workers: int, monkeypatch: pytest.MonkeyPatch
):
    ranks, out = str(rank_file(tmp_path / "small.tiktoken")), tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", SLOW, str(big_text), ranks, str(out), str(workers), "4"])
    journal = out / ".partial" / "journal.json"
    deadline = time.monotonic() + 300
    while not journal.exists() or json.loads(journal.read_text())["chunks"] < 3:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.05)  # somewhere between two journals
    child.send_signal(signal.SIGKILL)
    child.wait()
    with pytest.raises(UserError, match=r"unfinished.*`mst data`"):
        open_tokens(out)
    with pytest.raises(UserError, match=r"val_fraction 0\.01, not 0\.5"):
        make(big_text, out, ranks, val_fraction=0.5)

    done = json.loads(journal.read_text())["chunks"]
    tokenized: list[int] = []
    tokenize = prepare.tokenize
    monkeypatch.setattr(prepare, "tokenize", lambda *args: tokenized.append(1) or tokenize(*args))
    make(big_text, out, ranks)
    n_resumed = len(tokenized)
    make(big_text, tmp_path / "undisturbed", ranks)
    assert contents(out) == contents(tmp_path / "undisturbed")
    assert n_resumed == len(tokenized) - n_resumed - done, "what the journal vouches for is not done again"


def test_a_damaged_partial_file_is_not_built_upon(tmp_path: Path, big_text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare, "JOURNAL_BYTES", 1 << 20)
    _interrupt_after(5, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        make(big_text, tmp_path / "out")
    monkeypatch.undo()
    with open(tmp_path / "out" / ".partial" / "train.bin", "r+b") as handle:
        handle.write(b"\xff")
    with pytest.raises(UserError, match=r"train\.bin .*\.partial"):
        make(big_text, tmp_path / "out")


def test_a_source_that_changed_meanwhile_is_read_again(tmp_path: Path, big_text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare, "JOURNAL_BYTES", 1 << 20)
    _interrupt_after(5, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        make(big_text, tmp_path / "out")
    monkeypatch.undo()
    big_text.write_text("changed\n" + big_text.read_text())
    make(big_text, tmp_path / "out")
    make(big_text, tmp_path / "undisturbed")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_a_rebuild_that_was_stopped_continues(tmp_path: Path, big_text: Path, monkeypatch: pytest.MonkeyPatch):
    make(big_text, tmp_path / "out", val_fraction=0.5)
    recipe = Recipe(str(big_text), "byte", val_fraction=0.1)
    monkeypatch.setattr(prepare, "JOURNAL_BYTES", 1 << 20)
    with monkeypatch.context() as patch:
        _interrupt_after(5, patch)
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare(recipe, tmp_path / "out", workers=1, force=True)
    said: list[str] = []
    monkeypatch.setattr(prepare, "_say", said.append)
    prepare.prepare(recipe, tmp_path / "out", workers=1, force=True)
    assert any("continuing after" in line for line in said)
    make(big_text, tmp_path / "undisturbed", val_fraction=0.1)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def _interrupt_after(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def advance(*args: object) -> None:
        seen.append(1)
        if len(seen) == chunks:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare._Progress, "advance", advance)


class Killed(BaseException):
    """Nothing in the package handles it: as if the process ended here."""


@pytest.mark.parametrize("rebuilding", [False, True])
@pytest.mark.parametrize("moment", range(8))
def test_killed_while_files_are_moved_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, rebuilding: bool
):
    """At each of the steps of publishing: what can be opened is whole, and a rerun makes it so."""
    source, out = jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    make(source, tmp_path / "expected", val_fraction=0.5)
    before = make(source, out) if rebuilding else None
    countdown = [moment]

    def counted(function):
        def call(*args, **kwargs):
            countdown[0] -= 1
            if countdown[0] < 0:
                raise Killed
            return function(*args, **kwargs)

        return call

    publish = UnfinishedCorpus.publish

    def counting_publish(self: UnfinishedCorpus) -> None:
        for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "rmdir"), (corpus, "_sync_folder")):
            monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
        publish(self)

    monkeypatch.setattr(UnfinishedCorpus, "publish", counting_publish)
    recipe = Recipe(str(source), "byte", val_fraction=0.5)
    with pytest.raises(Killed):
        prepare.prepare(recipe, out, workers=1, force=rebuilding)
    monkeypatch.undo()
    try:
        found = {split: open_tokens(out, split) for split in ("train", "val")}
    except ValueError as error:
        assert "unfinished" in str(error)
    else:
        assert verify(out) in [before, verify(tmp_path / "expected")]
        assert all(len(file.tokens) for file in found.values())
    if (out / "meta.json").exists() and before == json.loads((out / "meta.json").read_text()):
        prepare.prepare(recipe, out, workers=1, force=True)  # killed before anything was moved
    else:
        make(source, out, val_fraction=0.5)
    assert contents(out) == contents(tmp_path / "expected")


def test_a_complete_file_that_is_gone_is_missed(tmp_path: Path):
    """Neither nothing nor a file of the corpus that is rebuilt takes its place."""
    source, out = jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    make(source, out, val_fraction=0.5)
    (out / ".partial").mkdir()
    for name in ("meta.json", "val.bin", "train.bin"):
        (out / name).rename(out / ".partial" / name)
    recipe = json.loads((out / ".partial" / "meta.json").read_text())["recipe"]
    (out / ".partial" / "recipe.json").write_text(json.dumps(recipe))
    (out / ".partial" / "train.bin").rename(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"train\.bin.*--force"):
        make(source, out, val_fraction=0.5)
    (out / "train.bin").write_bytes(b"old corpus")
    with pytest.raises(Damaged, match=r"train\.bin.* 10 "):
        make(source, out, val_fraction=0.5)
    (tmp_path / "train.bin").rename(out / "train.bin")
    make(source, out, val_fraction=0.5)
    verify(out)


def test_two_at_once_wait_for_each_other(tmp_path: Path, big_text: Path):
    command = [sys.executable, "-c", SLOW, str(big_text), "byte", str(tmp_path / "out"), "1"]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [child.wait() for child in both] == [0, 0]
    verify(tmp_path / "out")


def test_a_file_system_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Lustre is often mounted so."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(prepare.fcntl, "flock", refuse)
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    prepare.prepare(Recipe(str(source), "byte"), tmp_path / "out", workers=1)
    assert "without locks" in capsys.readouterr().err
    verify(tmp_path / "out")


# The machine's limits -----------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_can_be_continued(tmp_path: Path, big_text: Path, monkeypatch: pytest.MonkeyPatch):
    class Full(SplitFile):
        def append(self, ids: bytes, documents: int, max_id: int) -> None:
            if self.n_bytes + len(ids) > 5 << 20:
                self.handle.write(ids[:1000])  # what still fits
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().append(ids, documents, max_id)

    monkeypatch.setattr(prepare, "JOURNAL_BYTES", 1 << 20)
    monkeypatch.setattr(prepare, "SplitFile", Full)
    with pytest.raises(OSError, match=r"out.*: No space left on device") as caught:
        make(big_text, tmp_path / "out")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="unfinished"):
        open_tokens(tmp_path / "out")
    monkeypatch.undo()
    make(big_text, tmp_path / "out")
    make(big_text, tmp_path / "undisturbed")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_a_real_limit_on_file_size_is_one_line(tmp_path: Path, big_text: Path):
    """RLIMIT_FSIZE stands in for a full disk: the system itself refuses the write."""
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
{SLOW}"""
    command = [sys.executable, "-c", script, str(big_text), "byte", str(tmp_path / "out"), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("OSError: ") and str(tmp_path / "out") in last and "File too large" in last
    assert not (tmp_path / "out" / "train.bin").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="/file/out: Not a directory"):
        make(jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "file" / "out")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_memory_is_bounded_for_a_file_beyond_the_bound(tmp_path: Path, kind: str):
    """210 MB in one text file, and in one row group; the main process may hold 192 MiB, a worker 96 MiB."""
    block = words(2000)
    source = tmp_path / f"big.{kind}"
    n_blocks = int(210e6 / len(block.encode()))
    if kind == "txt":
        source.write_text(block * n_blocks)
    else:
        texts = pa.array([block] * n_blocks)
        pq.write_table(pa.table({"text": texts}), source, use_dictionary=False, compression="none")
    script = """
import resource, sys
from mst_scale.data import prepare
from mst_scale.data.recipe import Recipe
prepare.prepare(Recipe(sys.argv[1], "byte"), sys.argv[2], workers=2)
# getrusage of this process would count what the one that started it held
status = dict(line.split(":") for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    main, worker = map(int, peak)
    assert source.stat().st_size > prepare.MAIN_BYTES
    shutil.rmtree(tmp_path)  # 0.6 GB, which pytest would keep
    assert main < prepare.MAIN_BYTES, f"main process: {main / 2**20:.0f} MiB"
    assert worker < prepare.WORKER_BYTES, f"worker: {worker / 2**20:.0f} MiB"


# On all cores -------------------------------------------------------------------------------------------------------


def slow_if_even(n: int) -> int:
    time.sleep(0.01 * (n % 2 == 0))
    return n * n


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_order(workers: int):
    assert list(ordered_map(slow_if_even, range(20), workers)) == [n * n for n in range(20)]
    assert list(ordered_map(slow_if_even, [], workers)) == []


def test_items_are_drawn_only_as_results_are_taken():
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for n in range(100):
            drawn += 1
            yield n

    results = ordered_map(slow_if_even, items(), 2)
    next(results)
    time.sleep(0.2)
    assert drawn <= 1 + 2 * WINDOW
    results.close()


def test_large_items_and_results_do_not_block_each_other():
    """Both are far beyond a pipe's buffer (64 kB)."""
    big = b"x" * 4_000_000
    assert [len(r) for r in ordered_map(bytes.upper, [big] * 6, 2)] == [4_000_000] * 6


def fails_on_three(n: int) -> int:
    if n == 3:
        raise ValueError("three")
    if n == 5:
        raise KeyError("five")
    return n


def test_an_error_in_a_worker_is_raised_here():
    with pytest.raises(ValueError, match="three"):
        list(ordered_map(fails_on_three, range(5), 2))
    with pytest.raises(KeyError, match="five"):
        list(ordered_map(fails_on_three, [5, 5], 2))


def dies(n: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return n


def test_a_worker_that_dies_is_an_error():
    with pytest.raises(OSError, match="killed"):
        list(ordered_map(dies, range(5), 2))


def test_workers_end_when_their_parent_is_killed():
    script = """
import os, time
from mst_scale.data.prepare import ordered_map
def work(n):
    return os.getpid()
for pid in ordered_map(work, range(10**9), 3):
    print(pid, flush=True)
    time.sleep(0.02)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers: set[int] = set()
    while len(workers) < 3:  # a worker that starts late takes no item at first
        workers.add(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while any(_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.02)


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False

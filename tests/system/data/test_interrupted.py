"""A corpus that was stopped, killed or had no room is rejected, and then finished as if nothing had happened."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mst_scale.data import corpus, prepare
from mst_scale.data.corpus import SplitFile, UnfinishedCorpus, open_tokens, verify
from mst_scale.data.recipe import Recipe
from mst_scale.errors import Damaged, UserError
from tests.support.texts import TEXTS, contents, jsonl, make, rank_file

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
@pytest.mark.parametrize("moment", range(9))
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


@pytest.mark.parametrize("force", [False, True])
def test_complete_files_of_a_source_that_has_changed_are_made_again(tmp_path: Path, monkeypatch, force: bool):
    """The call before ended between the last file and the move."""
    source, out = jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    recipe = Recipe(str(source), "byte", val_fraction=0.5)

    def killed(self: UnfinishedCorpus) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedCorpus, "publish", killed)
        with pytest.raises(Killed):
            prepare.prepare(recipe, out, workers=1)
    jsonl(source, [*TEXTS, "more text"])
    prepare.prepare(recipe, out, workers=1, force=force)
    make(source, tmp_path / "expected", val_fraction=0.5)
    assert contents(out) == contents(tmp_path / "expected")


def test_force_makes_a_complete_file_that_is_gone(tmp_path: Path, monkeypatch):
    source, out = jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    make(source, out, val_fraction=0.5)
    expected = contents(out)
    (out / ".partial").mkdir()
    for name in ("meta.json", "val.bin"):
        (out / name).rename(out / ".partial" / name)
    recipe = json.loads((out / ".partial" / "meta.json").read_text())["recipe"]
    (out / ".partial" / "recipe.json").write_text(json.dumps(recipe))
    (out / "train.bin").unlink()
    with pytest.raises(UserError, match=r"train\.bin.*--force"):
        make(source, out, val_fraction=0.5)
    prepare.prepare(Recipe(str(source), "byte", val_fraction=0.5), out, workers=1, force=True)
    assert contents(out) == expected


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


def test_the_one_that_waits_finishes_what_a_killed_one_has_begun(tmp_path: Path, big_text: Path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOW, str(big_text), "byte", str(out), "1"]
    with subprocess.Popen([*command, "4"], stderr=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + 300
        while not (out / ".partial" / "journal.json").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as second:
            assert second.stderr is not None
            while "waiting for it" not in (line := second.stderr.readline()):
                assert line
            first.kill()
            assert "continuing after" in second.stderr.read() and second.wait() == 0
    make(big_text, tmp_path / "undisturbed")
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_a_file_system_without_locks_is_said_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Lustre is often mounted so."""

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    prepare.prepare(Recipe(str(source), "byte"), tmp_path / "out", workers=1)
    assert "no locks" in caplog.text
    verify(tmp_path / "out")


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

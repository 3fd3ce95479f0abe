"""Which copies in memory a run may continue from."""

import errno
import json

import pytest

from mst_scale.checkpoints.memory_copies import Copy
from mst_scale.pretrain.from_memory import _by_copy, _Held, _is_new, _newest_on_disk, _unusable_reasons
from mst_scale.run_logging.run_file import CORRUPTED, DIVERGED, STORAGE, verified

OLD, NEW = Copy(4, 1, "T", "a", 2), Copy(6, 1, "T", "b", 2)


def reasons(tmp_path, copies, *starts, events=()):
    listed = [{"time": "T", **start} for start in starts]
    (tmp_path / "run.json").write_text(json.dumps({"starts": listed, "events": list(events)}))
    return _unusable_reasons(tmp_path, copies, verified(tmp_path / "run.json"))


def test_parts_of_one_copy_come_from_any_host():
    copies = _by_copy([("a", [(NEW, 0), (OLD, 0)]), ("a", []), ("b", [(NEW, 1), (NEW, 0)])])
    assert copies == {NEW: {0: ["a", "b"], 1: ["b"]}, OLD: {0: ["a"]}}


def test_why_a_copy_is_not_used(tmp_path):
    whole = {OLD: {0: ["a"], 1: ["a"]}, NEW: {0: ["a"]}}
    assert set(reasons(tmp_path, whole, {}, {})) == {NEW}
    whole[NEW][1] = ["b"]
    assert reasons(tmp_path, whole, {}, {}) == {}
    assert reasons(tmp_path, whole) == {}, "a run.json that was lost says nothing against a copy"
    assert set(reasons(tmp_path, whole, {}, {}, {})) == {OLD, NEW}, "made by a start before the last one"
    others = [{"time": "another run"}, {}]
    assert set(reasons(tmp_path, whole, *others)) == {OLD, NEW}, "another run was moved to this folder"
    change = {"how": STORAGE}
    assert reasons(tmp_path, whole, {}, change, change, {}) == {}, "changes of storage are no starts of their own"
    for how in DIVERGED:
        assert set(reasons(tmp_path, whole, {}, {"how": how})) == {OLD, NEW}
    corrupted = {"what": "corrupted", "verified": 5}
    assert set(reasons(tmp_path, whole, {}, {"how": CORRUPTED}, events=[corrupted])) == {NEW}
    assert reasons(tmp_path, whole, {}, {}, events=[corrupted]) == {}, "long ago"


class Alone:
    """One rank."""

    rank = 0

    def on_first(self, run, long=False):
        return run()

    agree = on_first

    def all(self, mine):
        return [mine]


def test_after_silent_corruption_later_checkpoints_do_not_count(tmp_path):
    for step in (3, 6):
        (tmp_path / f"step{step:08d}").mkdir()
    assert _newest_on_disk(tmp_path, [OLD, Copy(8, 1, "T", "c", 2)], None, Alone()) == 6
    assert _newest_on_disk(tmp_path, [OLD, Copy(8, 1, "T", "c", 2)], 4, Alone()) == 3
    assert _newest_on_disk(tmp_path, [OLD], 2, Alone()) == -1


def test_a_folder_without_a_run_takes_nothing_from_memory(tmp_path):
    assert _is_new(tmp_path / "removed") and _is_new(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not _is_new(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "checkpoints" / "step00000004").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step00000004" / "manifest.json").write_text("{}")
    assert not _is_new(tmp_path), "checkpoints of a run whose other files were lost"


class Held(_Held):
    """The parts of one rank, that can be put back or not."""

    def __init__(self, error):
        self._ranks, self._folder, self._hosts, self.copies = Alone(), None, ["a"], {OLD: {0: ["a"], 1: ["a"]}}
        self.error = error

    def _put_back(self, copy, rank, draft):
        raise self.error


def test_a_full_disk_ends_the_start_and_damaged_parts_do_not(tmp_path):
    with pytest.raises(OSError, match="stays in memory"):
        Held(OSError(errno.ENOSPC, "No space left on device")).make_checkpoint(OLD, tmp_path)
    assert list(tmp_path.iterdir()) == [], "no draft stays"
    held = Held(None)
    held._put_back = lambda copy, rank, draft: "manifest.json does not match its checksum"
    assert "does not match" in held.make_checkpoint(OLD, tmp_path)
    assert list(tmp_path.iterdir()) == []

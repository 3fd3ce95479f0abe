"""The life of a checkpoint folder; whole runs that are killed while they save are in test_pretrain.py."""

import errno
import json

import pytest

from mst_scale.checkpoints import finding, manifests, store
from mst_scale.comm import Ranks
from tests.support import pool


class Engine:
    """Writes two small files as DeepSpeed would, or fails in between."""

    def __init__(self, fails: bool = False):
        self.fails, self.checkpoint_engine, self._copy_recovery_script = fails, None, None

    def zero_optimization_stage(self):
        return 1

    def save_checkpoint(self, folder, tag, client_state, save_latest):
        from pathlib import Path

        assert not save_latest
        (Path(folder) / tag / "a.pt").write_text(str(client_state["step"]))
        if self.fails:
            raise RuntimeError("disk full")
        (Path(folder) / tag / "b.pt").write_text("b" * 1000)


def alone() -> Ranks:
    import torch.distributed as dist

    return Ranks(0, 0, 1, dist.new_group(backend="gloo"))


def steps(rank, world, folder, saved, fails=()):
    return steps_kept(rank, world, folder, (saved, fails, 2))


def steps_kept(rank, world, folder, plan):
    from pathlib import Path

    (saved, fails, keep), ranks, found = plan, alone(), []
    for step in saved:
        try:
            store.save(Engine(step in fails), Path(folder), ranks, step=step, batch=8, micro=2, keep=keep, state={})
        except OSError as error:
            found.append(str(error))
    return found


def test_the_newest_n_are_kept_and_latest_names_the_last(tmp_path):
    pool.run(steps, 1, str(tmp_path), (1, 2, 3, 4))
    assert finding.list_tags(tmp_path) == ["step00000004", "step00000003"]
    assert (tmp_path / "latest").read_text() == "step00000004"
    manifest = json.loads((tmp_path / "step00000004" / "manifest.json").read_text())
    assert manifest["files"]["b.pt"]["bytes"] == 1000 and manifest["step"] == 4
    assert manifests.damage(tmp_path / "step00000004") == []


def test_a_failed_save_leaves_the_older_ones_and_nothing_half(tmp_path):
    ((error,),) = pool.run(steps, 1, str(tmp_path), (1, 2, 3), (3,))
    assert "cannot save a checkpoint" in error and "disk full" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step00000001", "step00000002"]
    assert (tmp_path / "latest").read_text() == "step00000002"


def flip(folder, old, new):
    path = folder / "manifest.json"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("hurt", "fault"),
    [
        (lambda c: (c / "b.pt").unlink(), "b.pt is missing"),
        (lambda c: (c / "b.pt").write_text("b" * 999), "b.pt has 999 bytes of 1000"),
        (lambda c: (c / "b.pt").write_text("b" * 999 + "x"), "b.pt does not match its checksum"),
        (lambda c: (c / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda c: (c / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda c: (c / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (lambda c: flip(c, "step00000001", "step00000003"), "manifest.json does not match its own checksum"),
        (lambda c: flip(c, '"batch": 8', '"batch": 9'), "manifest.json does not match its own checksum"),
    ],
)
def test_damage_is_named(tmp_path, hurt, fault):
    pool.run(steps, 1, str(tmp_path), (1,))
    hurt(tmp_path / "step00000001")
    (found,) = manifests.damage(tmp_path / "step00000001")
    assert fault in found


def test_a_file_that_cannot_be_read_is_damage(tmp_path, monkeypatch):
    def broken(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    pool.run(steps, 1, str(tmp_path), (1,))
    monkeypatch.setattr(manifests, "file_digest", broken)
    assert "b.pt cannot be read (Input/output error)" in manifests.damage(tmp_path / "step00000001")


def test_a_manifest_from_before_it_had_a_digest_is_read(tmp_path):
    pool.run(steps, 1, str(tmp_path), (1,))
    path = tmp_path / "step00000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert len(manifest.pop(manifests.OWN_DIGEST)) == 64
    path.write_text(json.dumps(manifest))
    assert manifests.damage(path.parent) == [] and manifests.head(path.parent) == manifest


def test_the_same_step_can_be_saved_again(tmp_path):
    """A run set back to an older checkpoint comes by this step once more; the old one may be the damaged one."""
    pool.run(steps, 1, str(tmp_path), (1, 2))
    (tmp_path / "step00000002" / "b.pt").write_text("damaged")
    pool.run(steps, 1, str(tmp_path), (2,))
    assert manifests.damage(tmp_path / "step00000002") == []


def test_what_was_just_verified_is_never_the_one_to_go(tmp_path):
    """The newest is damaged and was passed over: the run is behind it, and its next save has a lower number."""
    pool.run(steps_kept, 1, str(tmp_path), ((1, 5), (), 2))
    (tmp_path / "step00000005" / "b.pt").write_text("damaged")
    pool.run(steps_kept, 1, str(tmp_path), ((3,), (), 1))
    assert finding.list_tags(tmp_path) == ["step00000005", "step00000003"]
    assert manifests.damage(tmp_path / "step00000003") == []


def test_a_run_that_is_set_back_does_not_return_to_its_old_course(tmp_path):
    pool.run(steps_kept, 1, str(tmp_path), ((1, 2, 3), (), 3))
    store.set_aside(tmp_path, 1)
    assert finding.list_tags(tmp_path) == ["step00000001"] and (tmp_path / "latest").read_text() == "step00000001"
    aside = [tmp_path / "step00000002.aside", tmp_path / "step00000003.aside"]
    assert all(manifests.damage(path) == [] for path in aside), "nothing is lost"
    pool.run(steps_kept, 1, str(tmp_path), ((2,), (), 3))
    assert [path.exists() for path in aside] == [False, True], "the run has come by the first of them"
    store.set_aside(tmp_path, 2)
    assert finding.list_tags(tmp_path) == ["step00000002", "step00000001"]


def test_leftovers_of_killed_saves_are_not_taken_for_checkpoints(tmp_path):
    pool.run(steps, 1, str(tmp_path), (1,))
    (tmp_path / "step00000009.partial").mkdir()
    (tmp_path / "someone_elses").mkdir()
    assert finding.list_tags(tmp_path) == ["step00000001"]
    store.sweep(tmp_path)
    assert not (tmp_path / "step00000009.partial").exists() and (tmp_path / "someone_elses").exists()


def test_a_link_that_goes_leaves_what_it_points_to(tmp_path):
    whole, link = tmp_path / "elsewhere", tmp_path / "run" / "step00000001"
    whole.mkdir()
    (whole / "file").write_text("kept")
    link.parent.mkdir()
    link.symlink_to(whole)
    store._remove(link)
    assert not list(link.parent.iterdir()) and (whole / "file").read_text() == "kept"


def test_what_a_file_system_keeps_of_an_older_checkpoint_does_not_stop_saves(tmp_path, monkeypatch, caplog):
    """NFS keeps files that are still open, so a folder is not removed as a whole."""
    monkeypatch.setattr(store.shutil, "rmtree", lambda *words, **named: None)
    for _ in range(2):
        (tmp_path / "step00000001").mkdir()
        store._remove(tmp_path / "step00000001")
    assert not (tmp_path / "step00000001").exists() and finding.list_tags(tmp_path) == []
    store._remove(tmp_path / "step00000002")
    assert "cannot remove the older checkpoint" in caplog.text


def test_other_folders_are_no_checkpoints(tmp_path):
    for name in ("step²", "step", "stepA", "step00000003"):
        (tmp_path / name).mkdir()
    assert finding.list_tags(tmp_path) == ["step00000003"]

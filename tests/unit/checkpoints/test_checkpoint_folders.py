"""A copy of a checkpoint for other layouts is used only as long as the checkpoint is the one that was copied."""

import json
import os

from mst_scale.checkpoint_folders import (
    MANIFEST,
    SOURCE,
    UNIVERSAL,
    has_copy,
    identity_of,
    is_universal,
    name_latest,
    remove_outdated,
)


def saved(folder, content="one"):
    (folder / "mst").mkdir(parents=True, exist_ok=True)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "mst/masks.json"):
        (folder / name).write_text(content)
    return folder


def copied(folder):
    (folder / UNIVERSAL).mkdir()
    (folder / UNIVERSAL / MANIFEST).write_text(json.dumps({SOURCE: identity_of(folder)}))


def test_a_tag_that_is_saved_again_has_no_copy(tmp_path):
    checkpoint = saved(tmp_path / "last")
    assert not has_copy(checkpoint)
    copied(checkpoint)
    assert has_copy(checkpoint)
    (checkpoint / "results.json").write_text("{}")  # what others put there does not matter
    assert has_copy(checkpoint)
    saved(checkpoint, "two")
    os.utime(checkpoint / "mp_rank_00_model_states.pt", ns=(5, 5))
    assert not has_copy(checkpoint)


def test_the_manifest_is_the_identity_of_a_sealed_checkpoint(tmp_path):
    checkpoint = saved(tmp_path / "step00000004")
    (checkpoint / MANIFEST).write_text('{"step": 4}')
    copied(checkpoint)
    os.utime(checkpoint / "mp_rank_00_model_states.pt", ns=(5, 5))  # it was copied to another disk
    assert has_copy(checkpoint)
    (checkpoint / MANIFEST).write_text('{"step": 5}')
    assert not has_copy(checkpoint)
    (checkpoint / UNIVERSAL / MANIFEST).write_text("{")
    assert not has_copy(checkpoint), "a damaged copy is made again"


def test_what_another_save_left_is_removed(tmp_path):
    checkpoint = saved(tmp_path / "last")
    copied(checkpoint)
    other = checkpoint / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    other.write_text("of a rank that is gone")
    (checkpoint / "notes.txt").write_text("mine")
    kept = {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"}
    remove_outdated(checkpoint, kept)
    assert {path.name for path in checkpoint.iterdir()} == {*kept, "mst", "notes.txt"}
    remove_outdated(tmp_path / "new")  # nothing was saved there


def test_files_of_ranks_are_newer_than_a_universal_layout_next_to_them(tmp_path):
    """DeepSpeed by itself leaves `zero` in the folder of a tag that it saves again."""
    (tmp_path / "t" / "zero").mkdir(parents=True)
    (tmp_path / "t" / "mp_rank_00_model_states.pt").touch()
    assert is_universal(tmp_path / "t")
    saved(tmp_path / "t")
    assert not is_universal(tmp_path / "t")


def test_no_earlier_checkpoint_stays_the_latest_universal_one(tmp_path):
    name_latest(tmp_path / "one", universal=True)
    assert (tmp_path / "latest").read_text() == (tmp_path / "latest_universal").read_text() == "one"
    name_latest(tmp_path / "two", universal=False)
    assert (tmp_path / "latest").read_text() == "two" and not (tmp_path / "latest_universal").exists()

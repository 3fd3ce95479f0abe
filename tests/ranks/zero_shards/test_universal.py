"""Checkpoints of DeepSpeed's own ds_to_universal are loaded with masks, or refused in one line on every rank."""

import shutil
from types import SimpleNamespace

import pytest
from deepspeed.checkpoint import ds_to_universal

import mst_scale
from tests.support import pool
from tests.support.engines import whole_masks
from tests.support.toy_engine import mst_config, train
from tests.support.toys import toy

SAVED, END = 6, 9
WHOLE_COMMAND = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}


def engine_of(stage: int, world: int, universal: bool):
    config = mst_config(stage, world, accumulation=4 // world, steps=24, checkpoint={"load_universal": universal})
    return mst_scale.initialize(model=toy(), config=config)[0]


def saves(rank: int, world: int, stage: int, folder: str) -> list:
    engine = engine_of(stage, world, False)
    train(engine, rank, world, SAVED, accumulation=4 // world)
    engine.save_checkpoint(folder, tag="saved")
    return whole_masks(engine)


def loads(rank: int, world: int, stage: int, folder: str, tag: str):
    engine = engine_of(stage, world, True)
    try:
        engine.load_checkpoint(folder, tag=tag)
    except ValueError as error:
        return str(error)
    found = whole_masks(engine)
    train(engine, rank, world, END - SAVED, accumulation=4 // world, first=SAVED)
    shards = engine.mst.store
    moved = [int(shards.weight(i)[~mask.flags()].count_nonzero()) for i, mask in enumerate(engine.mst.masks)]
    return found, moved


@pytest.fixture(scope="module", params=[2, 3])
def converted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("universal")
    digests = pool.run(saves, 2, request.param, str(folder))[0]
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(folder / "saved"),
            output_folder=str(folder / "saved_universal"),
            inject_missing_state=True,
            **WHOLE_COMMAND,
        )
    )
    assert not (folder / "saved_universal" / "mst").exists(), "DeepSpeed leaves the masks behind"
    return request.param, folder, digests


@pytest.mark.parametrize("world", [1, 2])
def test_masks_are_found_beside_what_deepspeed_converted(converted, world):
    stage, folder, digests = converted
    for found, moved in pool.run(loads, world, stage, str(folder), "saved_universal"):
        assert found == digests and not any(moved)


def test_without_them_every_rank_says_so_in_one_line(converted, tmp_path):
    stage, folder, _ = converted
    shutil.copytree(folder / "saved_universal", tmp_path / "alone")
    shutil.copytree(folder / "saved", tmp_path / "other")
    head = next((tmp_path / "other" / "mst").glob("rank_00000*"))
    head.write_bytes(head.read_bytes().replace(b'\\"step\\": 6', b'\\"step\\": 7'))  # the masks of another checkpoint
    first, second = pool.run(loads, 2, stage, str(tmp_path), "alone")
    assert first == second and len(first.splitlines()) == 1
    assert "ds_to_universal does not copy them" in first and first.count("mst reshape CHECKPOINT OUT") == 1
    assert "folder" not in first, "nothing is to be copied by hand"


def test_masks_copied_into_it_are_its_own(converted, tmp_path):
    stage, folder, digests = converted
    shutil.copytree(folder / "saved_universal", tmp_path / "copy")
    shutil.copytree(folder / "saved" / "mst", tmp_path / "copy" / "mst")
    for found, _ in pool.run(loads, 2, stage, str(tmp_path), "copy"):
        assert found == digests

"""`training.async_save` in other loops: the files of a save that blocks, and a load that waits for them."""

import hashlib
import os
import signal
from pathlib import Path

import pytest

import mst_scale
from tests.support import pool
from tests.support.toy_engine import OFFLOAD, STAGES, mst_config, train
from tests.support.toys import toy

pytestmark = pytest.mark.full


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def started(stage, world, method="mst", **extra):
    config = mst_config(stage, world, method=method, **extra)
    config["training"]["async_save"] = True
    return mst_scale.initialize(model=toy(), config=config)[0]


def both(rank, world, folder, stage, method):
    """Checkpoints of the same states with the writer and without; one is loaded before anybody has waited for it."""
    engine = started(stage, world, method)
    blocking = engine.save_checkpoint.__wrapped__
    train(engine, rank, world, 4)
    engine.save_checkpoint(f"{folder}/async", client_state={"mine": 4})
    blocking(f"{folder}/plain", client_state={"mine": 4})
    losses = train(engine, rank, world, 3, first=4)
    engine.save_checkpoint(f"{folder}/async", tag="second", save_latest=False)
    blocking(f"{folder}/plain", tag="second", save_latest=False)
    engine.load_checkpoint(f"{folder}/async", tag="global_step4")
    again = train(engine, rank, world, 3, first=4)
    engine.mst.finish_save()
    engine.mst.saves.close()
    return losses == again


@pytest.mark.parametrize("method", ["mst", "dense"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_files_are_those_of_a_save_that_blocks(tmp_path, stage, method):
    assert pool.run(both, 2, str(tmp_path), stage, method) == [True, True]
    ours, theirs = digests(tmp_path / "async"), digests(tmp_path / "plain")
    assert ours == theirs and "latest" in ours and len(ours) >= 3
    assert (tmp_path / "async" / "latest").read_text() == "global_step4"


def with_a_failed_save(rank, world, folder):
    """An engine that has saved step 1, and whose save of step 2 rank 0 has not written."""
    engine = started(1, world)
    train(engine, rank, world, 1)
    engine.save_checkpoint(folder)
    engine.mst.finish_save()
    if rank == 0:
        os.kill(engine.mst.saves.process.pid, signal.SIGSTOP)
    train(engine, rank, world, 1, first=1)
    engine.save_checkpoint(folder)
    if rank == 0:
        engine.mst.saves.process.kill()
    return engine


def failing(rank, world, folder):
    engine = with_a_failed_save(rank, world, folder)
    try:
        engine.mst.finish_save()
    except OSError as error:
        return str(error), sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    finally:
        engine.mst.saves.close()


def test_a_save_that_failed_is_an_error_of_whoever_waits_for_it(tmp_path):
    for error, left in pool.run(failing, 2, str(tmp_path)):
        assert "step 2 was not saved" in error and left == ["global_step1"]
    assert (tmp_path / "latest").read_text() == "global_step1"


def offloaded(rank, world, folder):
    engine = started(2, world, **OFFLOAD)
    train(engine, rank, world, 1)
    engine.save_checkpoint(folder)
    return engine.mst.saves is None, (Path(folder) / "latest").read_text()


def test_offloaded_states_are_saved_by_blocking(tmp_path):
    assert pool.run(offloaded, 1, str(tmp_path)) == [(True, "global_step1")]


def saving_after_a_failure(rank, world, folder, waits):
    """What a killed program has left is there before the first save."""
    left = Path(folder) / "global_step9.0123abcd.partial"
    left.mkdir(exist_ok=True)
    engine = with_a_failed_save(rank, world, folder)
    train(engine, rank, world, 1, first=2)
    if waits:
        with pytest.raises(OSError, match="was not saved"):
            engine.mst.finish_save()
    engine.save_checkpoint(folder)  # blocks, because the one before has failed
    there = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    engine.mst.saves.close()
    return there


@pytest.mark.parametrize("waits", [False, True])
def test_after_a_failed_save_the_next_one_blocks(tmp_path, waits):
    assert pool.run(saving_after_a_failure, 2, str(tmp_path), waits) == [["global_step1", "global_step3"]] * 2
    assert (tmp_path / "latest").read_text() == "global_step3"


def with_two_engines(rank, world, folder):
    """The second engine's first save leaves the first one's alone, which is under way."""
    first, second = started(1, world), started(1, world)
    train(first, rank, world, 1)
    train(second, rank, world, 1)
    first.save_checkpoint(folder, tag="before")
    first.mst.finish_save()
    under_way = Path(folder) / "first.0123abcd.partial"
    under_way.mkdir(exist_ok=True)
    second.save_checkpoint(folder, tag="second")
    second.mst.finish_save()
    for engine in (first, second):
        engine.mst.saves.close()
    return under_way.is_dir()


def test_two_engines_save_into_one_folder(tmp_path):
    assert pool.run(with_two_engines, 1, str(tmp_path)) == [True]


def saved_twice(rank, world, folder, in_background):
    """The names in a folder that has files of an earlier save by more ranks."""
    engine = started(1, world)
    train(engine, rank, world, 1)
    (Path(folder) / "last" / "universal").mkdir(parents=True)
    (Path(folder) / "last" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_text("old")
    save = engine.save_checkpoint if in_background else engine.save_checkpoint.__wrapped__
    save(folder, tag="last")
    engine.mst.finish_save()
    engine.mst.saves.close()
    return sorted(path.name for path in (Path(folder) / "last").iterdir())


@pytest.mark.parametrize("in_background", [False, True])
def test_a_tag_that_is_saved_again_keeps_nothing_of_the_save_before(tmp_path, in_background):
    (names,) = pool.run(saved_twice, 1, str(tmp_path), in_background)
    assert names == ["mp_rank_00_model_states.pt", "mst", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]

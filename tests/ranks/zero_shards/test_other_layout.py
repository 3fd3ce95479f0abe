"""A loop of one's own that resumes on other ranks, or at another stage, gets a line with the command that lets it."""

import pytest

import mst_scale
from mst_scale.checkpoints.reshape import reshape
from mst_scale.errors import UserError
from mst_scale.zero_shards.other_layout import misfit
from tests.support import pool
from tests.support.engines import whole_masks
from tests.support.toy_engine import mst_config, train
from tests.support.toys import toy


def saved(rank, world, stage, folder):
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, "fp32"))
    train(engine, rank, world, 4)
    engine.save_checkpoint(folder)


def loaded(rank, world, stage, folder):
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, "fp32"))
    try:
        engine.load_checkpoint(folder)
    except UserError as error:
        return str(error)
    return f"loaded step {engine.mst.step}"


def reshaped(rank, world, stage, folder):
    config = mst_config(stage, world, "fp32")
    config["training"]["reshape_on_load"] = True
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    engine.load_checkpoint(folder)
    first, losses = whole_masks(engine), train(engine, rank, world, 2, first=4)
    return first, losses


def weights_of_another_layout(rank, world, stage, folder):
    config = mst_config(stage, world, "fp32")
    config["training"]["reshape_on_load"] = True
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    engine.load_checkpoint(folder, load_module_only=True)
    return engine.mst.step, float(sum(p.detach().double().square().sum() for p in engine.module.parameters()))


def squares(rank, world, stage, folder):
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, "fp32"))
    engine.load_checkpoint(folder)
    return float(sum(p.detach().double().square().sum() for p in engine.module.parameters()))


def whole(rank, world, stage, folder):
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, "fp32"))
    train(engine, rank, world, 4)
    return whole_masks(engine)


def followed(rank, world, stage, folder, tag):
    config = {**mst_config(stage, world, "fp32"), "checkpoint": {"load_universal": True}}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    engine.load_checkpoint(folder, tag=tag)
    return engine.mst.step


CASES = [((2, 2), (2, 1)), ((1, 1), (1, 2)), ((3, 3), (2, 1)), ((2, 3), (2, 2)), ((2, 0), (2, 2)), ((0, 1), (2, 2))]


@pytest.mark.parametrize(("stages", "worlds"), CASES)
def test_another_layout_names_the_command_and_that_works(tmp_path, stages, worlds):
    pool.run(saved, worlds[0], stages[0], str(tmp_path))
    for said in pool.run(loaded, worlds[1], stages[1], str(tmp_path)):
        assert f"`mst reshape {tmp_path / 'global_step4'}`" in said and "\n" not in said
    reshape(tmp_path / "global_step4")
    assert pool.run(loaded, worlds[1], stages[1], str(tmp_path)) == ["loaded step 4"] * worlds[1], "by the same call"
    folder = str(tmp_path / "global_step4")
    assert pool.run(followed, worlds[1], stages[1], folder, "universal") == [4] * worlds[1], "and by DeepSpeed's key"
    assert pool.run(loaded, worlds[0], stages[0], str(tmp_path)) == ["loaded step 4"] * worlds[0], "its own files still"


@pytest.mark.parametrize(("stage", "worlds"), [(1, (1, 2)), (2, (2, 1)), (3, (2, 1)), (0, (1, 2))])
def test_a_load_makes_the_copy_it_needs_if_the_config_says_so(tmp_path, stage, worlds):
    """`training.reshape_on_load`: the masks are those that were saved, and training goes on."""
    pool.run(saved, worlds[0], stage, str(tmp_path))
    masks = pool.run(whole, worlds[0], stage, str(tmp_path))[0]
    for _ in range(2):  # the second time the copy is there
        for found, losses in pool.run(reshaped, worlds[1], stage, str(tmp_path)):
            assert found == masks and len(losses) == 2
    assert pool.run(loaded, worlds[0], stage, str(tmp_path)) == ["loaded step 4"] * worlds[0], "its own files still"


def test_weights_alone_are_loaded_without_a_copy(tmp_path):
    pool.run(saved, 2, 2, str(tmp_path))
    (found,) = pool.run(weights_of_another_layout, 1, 1, str(tmp_path))
    assert found == (0, pytest.approx(pool.run(squares, 2, 2, str(tmp_path))[0], rel=1e-12))
    assert not list(tmp_path.glob("*/universal"))


def test_the_same_layout_and_other_failures_are_left_alone(tmp_path):
    pool.run(saved, 2, 2, str(tmp_path))
    assert pool.run(loaded, 2, 1, str(tmp_path)) == ["loaded step 4"] * 2, "stages 1 and 2 write the same files"
    step = tmp_path / "global_step4"
    assert misfit(step, 2, 2) is None and misfit(step, 2, 4) is not None and misfit(step, 3, 2) is not None
    for path in step.glob("*optim_states.pt"):
        path.write_bytes(b"cut short")
    with pytest.raises(pool.RankError) as caught:
        pool.run(loaded, 2, 2, str(tmp_path))
    assert "mst reshape" not in str(caught.value)


def test_files_tell_how_ranks_shared_the_model(tmp_path):
    for name in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt", "layer_00-model_00-model_states.pt"):
        (tmp_path / name).touch()
    assert misfit(tmp_path, 0, 1, parts=2, pipeline=True) is None
    for parts, pipeline in ((1, False), (2, False), (4, True)):
        assert "model" in misfit(tmp_path, 0, 1, parts, pipeline)


def without_a_checkpoint(rank, world, stage, more, folder):
    config = mst_config(stage, world)
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    engine.save_checkpoint(folder, tag="here")
    said = []
    # of its own files, DeepSpeed then loads none
    nowhere = [{"tag": "here"}, {"load_dir": f"{folder}/empty"}] if more else []
    for given in ({"tag": "there"}, {"tag": "empty"}, {"load_dir": f"{folder}/other"}, *nowhere):
        again, *_ = mst_scale.initialize(model=toy(), config=config | more)
        try:
            again.load_checkpoint(**{"load_dir": folder, **given})
        except UserError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("more", [{}, {"checkpoint": {"load_universal": True}}], ids=["own files", "universal"])
def test_a_checkpoint_that_is_not_there_is_named(tmp_path, stage, more):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("latest", "latest_universal"):
        (tmp_path / "other" / name).write_text("gone")
    for said in pool.run(without_a_checkpoint, 2, stage, more, str(tmp_path)):
        if more:
            assert said.pop().startswith(f"{tmp_path}/empty/latest_universal does not exist")
            assert said.pop().startswith(f"{tmp_path}/here does not have the universal layout: run `mst reshape")
        assert said == [
            f"there is no checkpoint {tmp_path}/there: the folder has here",
            f"there is no checkpoint {tmp_path}/empty: the folder has here",
            f"there is no checkpoint {tmp_path}/other/gone: the folder has none",
        ]

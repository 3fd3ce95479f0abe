"""Training in blocks of weights beside a DeepSpeed engine: the same guarantees as in weights."""

import logging

import pytest

import mst_scale
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.config import METHODS, load, to_dict
from mst_scale.errors import UserError
from tests.ranks.engine.test_engine import invariants, masks_from_given_scores
from tests.ranks.sparse_linear.test_training import config as gpt_config
from tests.ranks.sparse_linear.test_training import losses_and_masks, mean_over_ranks
from tests.support import block_oracle, pool
from tests.support.engines import whole_masks
from tests.support.messages import logged
from tests.support.toy_engine import OFFLOAD, mst_config, train
from tests.support.toys import toy

pytestmark = pytest.mark.full

BLOCKS = {"block": 4, "min_blocks": 1}  # parameters of 37 × 13, 13 × 37 and 7 × 13: ragged, cut inside of blocks


def test_the_same_weights_and_gradients_give_bit_identical_masks():
    reference = None
    for stage, world in ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (2, 4), (3, 2), (3, 4)):
        (result, *others) = pool.run(masks_from_given_scores, world, stage, BLOCKS, 0.5)
        assert all(other == result for other in others)
        reference = reference or result
        assert len(result) >= 10 and result == reference, f"stage {stage}, {world} ranks"
    assert len({tuple(digests.values()) for digests in reference}) > 5, "the topology really moves"


@pytest.mark.parametrize("method", ["mst", "rigl", "set", "mest", "snfs", "static", "gmp"])
def test_every_method_holds_its_targets(method):
    """min_blocks = 0: targets are met to the block."""
    config = mst_config(1, 2, method=method, steps=28, topology={"granularity": {"block": 4, "min_blocks": 0}})
    config["mst"]["sparsity"] = {**METHODS[method].preset["sparsity"], "max": 0.7}
    config["mst"]["topology"] |= METHODS[method].preset["topology"]
    for faults, _ in pool.run(invariants, 2, config, 28):
        assert faults == []


@pytest.mark.parametrize(("stage", "precision", "more"), [(0, "bf16", {}), (2, "bf16", OFFLOAD), (3, "fp32", {})])
def test_after_every_step_inactive_means_zero_everywhere(stage, precision, more):
    config = mst_config(stage, 2, precision, steps=28, topology={"granularity": {"block": 4, "min_blocks": 0}}, **more)
    for faults, changed in pool.run(invariants, 2, config, 28):
        assert faults == [] and changed > 20


def block_masks(controller) -> list:
    """Of one process: each mask as its blocks; asserts that it consists of whole ones."""
    shapes = [s.shape for s in controller.store.slices]
    return [
        block_oracle.active_blocks(mask.flags().view(shape).numpy(), 4).reshape(grid)
        for mask, shape, grid in zip(controller.masks, shapes, controller.topology.shapes.values(), strict=True)
    ]


def rows_and_columns(rank, world):
    config = mst_config(0, 1, topology={"granularity": {"block": 4, "min_blocks": 2}})
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    fewest = 100
    for step in range(34):
        train(engine, rank, world, 1, first=step)
        for blocks in block_masks(engine.mst):
            fewest = min(fewest, blocks.sum(0).min(), blocks.sum(1).min())
    return int(fewest), engine.mst.sparsity


def test_every_block_row_and_column_keeps_its_least():
    ((fewest, _),) = pool.run(rows_and_columns, 1)
    assert fewest == 2


def block_densities(rank, world):
    config = mst_config(2, world, topology={"granularity": {"block": 4, "min_blocks": 1}})
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 20)
    tiles = [
        block_oracle.active_blocks(mask.whole(exchange).numpy(), 4)
        for mask, exchange in zip(engine.mst.masks, engine.mst.state.exchange.of, strict=True)
    ]
    return list(engine.mst.densities().values()), [float(found.mean()) for found in tiles]


def test_products_are_counted_in_whole_blocks():
    """As forecasts count them: a block at an edge costs as much as any other."""
    for found, expected in pool.run(block_densities, 2):
        assert found == pytest.approx(expected, rel=1e-12) and min(found) < 0.6


def save_and_go_on(rank, world, folder, granularity):
    """Ten steps, a save, four more; then another engine loads and takes the same four."""
    config = mst_config(2, world, topology={"granularity": granularity})
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 10)
    engine.save_checkpoint(folder, tag="here")
    train(engine, rank, world, 4, first=10)
    other, *_ = mst_scale.initialize(model=toy(), config=config)
    other.load_checkpoint(folder, tag="here")
    train(other, rank, world, 4, first=10)
    elements = mst_config(2, world)
    third, *_ = mst_scale.initialize(model=toy(), config=elements)
    try:
        third.load_checkpoint(folder, tag="here")
        refusal = "none"
    except ValueError as error:
        refusal = str(error)
    return whole_masks(engine), whole_masks(other), refusal


def test_a_checkpoint_goes_on_in_the_same_blocks_and_in_no_other(tmp_path):
    for before, after, refusal in pool.run(save_and_go_on, 2, str(tmp_path), BLOCKS):
        assert before == after
        assert "another granularity" in refusal
    assert inspect(tmp_path / "here").granularity == BLOCKS


def warnings_at_the_start(rank, world):
    config = mst_config(0, 1, topology={"granularity": {"block": 4, "min_blocks": 3}})
    with logged(logging.WARNING) as found:
        mst_scale.initialize(model=toy(), config=config)
    return found


def test_layers_that_cannot_reach_the_target_are_named():
    (((message,)),) = pool.run(warnings_at_the_start, 1)
    assert "min_blocks = 3 keeps 3 of 3 parameters denser" in message
    assert "up.weight has 10 × 4 blocks and keeps 30 or more of them instead of 7" in message


# --- the config ---

MINIMAL = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def test_granularity_is_read_and_written():
    assert load(MINIMAL).mst.topology.granularity == "element"
    for override in ('mst.topology.granularity={"block": 32}', "mst.topology.granularity.block=32"):
        experiment = load(MINIMAL, [override])
        assert (experiment.mst.topology.granularity.block, experiment.mst.topology.granularity.min_blocks) == (32, 2)
        assert load(to_dict(experiment)) == experiment


@pytest.mark.parametrize(
    ("granularity", "message"),
    [
        ("blocks", "must be 'element' or 'channel' or an object, not 'blocks'"),
        ({"block": 24}, "mst.topology.granularity.block must be"),
        ({"block": 16, "min_blocks": -1}, "min_blocks must be"),
        ({"blocks": 16}, "unknown key 'mst.topology.granularity.blocks': the nearest valid one is"),
        (16, "must be 'element' or 'channel' or an object"),
    ],
)
def test_a_wrong_granularity_is_refused(granularity, message):
    with pytest.raises(UserError) as error:
        load({**MINIMAL, "mst": {"topology": {"granularity": granularity}}})
    assert message in str(error.value)


# --- compute ---


def test_a_cpu_multiplies_with_the_weights_of_the_blocks():
    """The kernel for single weights takes any mask; tolerance as in tests/ranks/sparse_linear/test_training.py."""
    runs = {}
    for backend in ("dense", "cpu"):
        config = gpt_config(2, 2, backend)
        config["mst"]["topology"]["granularity"] = BLOCKS
        runs[backend] = pool.run(losses_and_masks, 2, config, 1)
    dense, sparse = mean_over_ranks(runs["dense"]), mean_over_ranks(runs["cpu"])
    assert (dense - sparse).abs().max() < 2e-4
    assert [indexed for _, _, indexed in runs["cpu"]] == [5, 5]

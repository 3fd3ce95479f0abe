"""Methods that make a weight a function of what is stored: the same on any ranks and stage, resumed, and at rest."""

from __future__ import annotations

import copy

import pytest
import torch

import mst_scale
from mst_scale.checkpoints.multiplied import multiplied_weights_of
from mst_scale.checkpoints.reshape import reshape
from mst_scale.config import load
from mst_scale.errors import UserError
from mst_scale.flops.ledger import forecast
from mst_scale.methods import METHODS, Method, NoOptions, WeightFunction, register
from tests.support import pool
from tests.support.function_runs import SHAPE, STEPS, TURN, advance, batch, config, model, plain, weights
from tests.support.toy_engine import mst_config, train, watched
from tests.support.toys import toy, toy_batch

pytestmark = pytest.mark.full

FUNCTIONS = [name for name, method in METHODS.items() if method.function]


def trained(rank: int, world: int, name: str, stage: int, **mst):
    engine, *_ = mst_scale.initialize(model=model(), config=config(name, stage, world, **mst))
    losses = advance(engine, rank, world, 0, STEPS)
    return losses, engine.mst.sparsity


def fused(rank, world, name):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    raw = mst_config(0, world, method=name)
    raw["mst"]["targets"] = {"exclude": ["*self_attn*"], "lm_head": False}
    with pytest.raises(UserError, match=r"fuses its products reads linear1\.weight.*targets\.exclude"):
        mst_scale.initialize(model=layer, config=raw)


def test_a_layer_of_torch_that_reads_stored_weights_by_itself_is_rejected():
    pool.run(fused, 1, "powerprop")


def not_finite(rank, world, name):
    made = model()
    with torch.no_grad():
        made.blocks[0].mlp.up.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"mlp\.up\.weight has a weight that is not finite"):
        mst_scale.initialize(model=made, config=config(name, 1, world))


@pytest.mark.parametrize("name", ["monarch", "top-kast"])
def test_a_weight_that_is_not_finite_is_rejected_on_all_ranks(name):
    pool.run(not_finite, 2, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_training_is_that_of_the_definition_on_any_ranks_and_stage(name):
    (by_hand,) = pool.run(plain, 1, name, {})
    ((alone, sparsity),) = pool.run(trained, 1, name, 0)
    assert alone[:TURN] == pytest.approx(by_hand, rel=2e-4)
    assert sparsity == 0
    for stage in (1, 2, 3):
        for losses, _ in pool.run(trained, 2, name, stage):
            assert losses == pytest.approx(alone, rel=2e-4), stage


def trained_in_subgroups(rank: int, world: int, size: int, matrices_first: bool):
    raw = config("monarch", 3, world)
    raw["zero_optimization"]["sub_group_size"] = size
    made = model()
    groups = [{"params": [p for p in made.parameters() if (p.dim() == 2) == is_matrix]} for is_matrix in (False, True)]
    groups = groups[::-1] if matrices_first else groups
    engine, *_ = mst_scale.initialize(model=made, model_parameters=groups, config=raw)
    return advance(engine, rank, world, 0, STEPS)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_turns_dense_with_any_sub_groups_of_zero_3(world):
    whole = pool.run(trained_in_subgroups, world, 10**9, True)
    for size, matrices_first in ((100, True), (10**9, False)):
        for losses, expected in zip(pool.run(trained_in_subgroups, world, size, matrices_first), whole, strict=True):
            assert losses == pytest.approx(expected, rel=2e-4)


def on_one_batch(rank: int, world: int, name: str, precision: str):
    """Losses of a batch that comes again and again."""
    engine, *_ = mst_scale.initialize(model=model(), config=config(name, 2, world, precision))
    return [advance(engine, rank, world, 0, 1)[0] for _ in range(STEPS)]


@pytest.mark.parametrize("name", ["monarch", "top-kast"])
def test_bf16(name):
    full, half = (pool.run(on_one_batch, 2, name, precision)[0] for precision in ("fp32", "bf16"))
    assert half == pytest.approx(full, rel=2e-2), "bf16 keeps 8 bits, and eight updates add up"
    assert half[-1] < half[0] - 0.3, "it learns the batch by heart"


def sparse_to_the_end(rank: int, world: int, name: str, folder: str):
    """A run whose schedule ends sparse: after its last step, its layers, and the weights in its file."""
    raw = config(name, 1, world)
    raw["mst"]["sparsity"] = {"variation": "sparse", "max": 0.5}
    engine, *_ = mst_scale.initialize(model=model(), config=raw)
    advance(engine, rank, world, 0, STEPS)
    functions = engine.mst.functions
    engine.save_checkpoint(folder, tag="end")
    held = all(product.function is not None for product in functions.products.values())
    return held, engine.mst.sparsity, sorted(functions.targets)


@pytest.mark.parametrize("name", ["sr-ste", "top-kast", "spartan"])
def test_a_run_that_ends_sparse_ends_with_its_functions(name, tmp_path):
    """What evaluates and exports it multiplies with the weights that it trained, half of them zero."""
    held, sparsity, targets = pool.run(sparse_to_the_end, 2, name, str(tmp_path))[0]
    assert held and sparsity == pytest.approx(0.5, abs=0.01)
    weights = multiplied_weights_of(tmp_path / "end")
    zeros = torch.cat([(weights.read(name) == 0).flatten() for name in targets])
    assert float(zeros.float().mean()) == pytest.approx(0.5, abs=0.01)


def resumed(rank: int, world: int, how: tuple[str, int], folder: str, stop: int):
    name, stage = how
    raw = config(name, stage, world)
    engine, *_ = mst_scale.initialize(model=model(), config=copy.deepcopy(raw))
    advance(engine, rank, world, 0, stop)
    if stop < STEPS:
        engine.save_checkpoint(folder, tag="half")
        with torch.no_grad():
            loss = float(engine(*batch(99, 0, 1)))
        engine, *_ = mst_scale.initialize(model=model(), config=copy.deepcopy(raw))
        engine.load_checkpoint(folder, tag="half")
        advance(engine, rank, world, stop, STEPS)
        return [w.numpy().tobytes() for w in weights(engine)], loss
    return [w.numpy().tobytes() for w in weights(engine)], None


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["s-ste", "monarch", "spartan"])
def test_a_run_that_is_resumed_ends_bit_for_bit_alike_and_its_files_hold_the_weights(name, stage, tmp_path):
    whole = [found for found, _ in pool.run(resumed, 2, (name, stage), "", STEPS)]
    for stop in (3, TURN, TURN + 1):
        folder = tmp_path / str(stop)
        results = pool.run(resumed, 2, (name, stage), str(folder), stop)
        assert [found for found, _ in results] == whole, stop
        found, dense = multiplied_weights_of(folder / "half"), model().eval()
        with torch.no_grad():
            for n, p in dense.named_parameters():
                p.copy_(found.read(n))
            assert float(dense(*batch(99, 0, 1))) == pytest.approx(results[0][1], rel=1e-5), stop


def powerprop_under_masks(rank: int, world: int, stage: int, method: str = "powerprop", rate: float = 1e-2):
    config = mst_config(stage, world, method=method, steps=28)
    config["optimizer"]["params"]["lr"] = rate
    config["mst"] |= {"sparsity": {"variation": "sv", "max": 0.8}, "targets": {"lm_head": False}}
    config["mst"]["topology"] |= {"policy": "rigl", "update_schedule": "1-cosine"}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    controller = engine.mst
    faults, history = watched(engine, rank, world, 20)
    still = 0
    for i, mask in enumerate(controller.masks):
        still += int((mask.flags() & (controller.store.weight(i) == 0)).sum())
    return faults, history, controller.densities(), controller.gradient_densities(), still


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_powerpropagation_under_masks_of_a_policy(stage):
    """Inactive weights are zero, targets are held; gradients are masked, and counted so; what has grown moves."""
    for faults, history, densities, gradients, still in pool.run(powerprop_under_masks, 2, stage):
        assert faults == [] and len(history) > 5
        assert max(densities.values()) < 1 and gradients is None
        assert still == 0, "active, and exactly 0"


def warmly_started(rank: int, world: int, stage: int, folder: str):
    """Losses of one batch: of a run that is saved, and of one that begins with its weights and masks."""
    raw = mst_config(stage, world, method="powerprop", steps=28)
    raw["mst"] |= {"sparsity": {"variation": "sv", "max": 0.8}, "targets": {"lm_head": False}}
    raw["mst"]["topology"] |= {"policy": "rigl"}
    losses, densities = [], []
    for begins in (False, True):
        engine, *_ = mst_scale.initialize(model=toy(), config=copy.deepcopy(raw))
        if begins:
            mst_scale.warm_start(engine, f"{folder}/saved")
        else:
            train(engine, rank, world, 12)
            engine.save_checkpoint(folder, tag="saved")
        with torch.no_grad():
            losses.append(float(engine(*toy_batch(99, 0))))
        densities.append(engine.mst.densities())
    return losses, densities


@pytest.mark.parametrize("stage", [1, 3])
def test_a_warm_start_takes_weights_and_masks_of_powerpropagation(stage, tmp_path):
    for (saved, begun), densities in pool.run(warmly_started, 2, stage, str(tmp_path)):
        assert begun == pytest.approx(saved, rel=1e-5)
        assert densities[0] == densities[1] and max(densities[0].values()) < 1
    reshape(tmp_path / "saved", tmp_path / "compact", form="compact")
    expected, found = (multiplied_weights_of(tmp_path / name) for name in ("saved", "compact"))
    assert found.compact.keys() == densities[0].keys()
    assert all(torch.equal(found.read(name), expected.read(name)) for name in expected.shapes)


def test_under_powerpropagation_grows_what_grows_without_it():
    """While no weight moves, RigL sees the same magnitudes and the same order of gradients."""
    (power, *_), (plain, *_) = (pool.run(powerprop_under_masks, 2, 1, method, 0.0) for method in ("powerprop", "rigl"))
    assert power[1] == plain[1] and len(power[1]) > 5


def test_the_ledger_counts_masked_gradients_under_masks():
    sparse = {"sparsity": {"variation": "sparse", "max": 0.5}, "topology": {"policy": "static"}}
    power, static = ({**config(name, 1, 1, **sparse), "model": SHAPE} for name in ("powerprop", "static"))
    static["mst"]["targets"] = {"lm_head": False}
    assert forecast(load(power)).mean == forecast(load(static)).mean


def test_the_ledger_counts_each_product():
    raw = {**config("sr-ste", 1, 1), "model": SHAPE}
    raw["mst"]["sparsity"] = {"variation": "sparse", "max": 0.5}
    half = forecast(load(raw))
    dense = half.dense["paper"]
    layers = dense.matrices - dense.head
    by_hand = (dense.total - layers) + layers * (0.5 + 0.5 + 1) / 3  # forward, gradient of x, gradient of the weight
    assert half.mean["paper"].total == pytest.approx(by_hand)


# --- a method of somebody else ---


class Halved(WeightFunction):
    def __init__(self, options: NoOptions):
        del options

    def weight(self, stored, kept, scale):
        return stored / 2

    def begin(self, weight):
        return 2 * weight, 1.0


HALVED = Method(
    "stores twice the weight", {"sparsity": {"variation": "sparse", "max": 0.5}, "targets": {"lm_head": False}},
    cites="this test", function=Halved,
)  # fmt: skip


def with_a_toy_method(rank: int, world: int):
    register("halved", HALVED)
    return trained(rank, world, "halved", 1), trained(rank, world, "dense", 1, sparsity={})


def test_a_method_of_ones_own_needs_nothing_but_itself():
    for (halved, _), (dense, _) in pool.run(with_a_toy_method, 2):
        assert halved[0] == pytest.approx(dense[0], rel=1e-5), "the same first weights"
        assert halved[1] != dense[1], "and another path: Adam's step is half as large for what is halved"


# --- what is rejected ---


def rejected(rank: int, world: int):
    def said(mst: dict, name: str = "sr-ste", **more) -> str:
        with pytest.raises(UserError) as caught:
            mst_scale.initialize(model=model(), config={**config(name, 1, world, **mst), **more})
        return str(caught.value)

    return {
        "head": said({"targets": {"lm_head": True}}),
        "schedule": said({"sparsity": {"variation": "sv"}}),
        "option": said({"options": {"q": 3}}),
        "value": said({"options": {"n": 4}}),
        "shape": said({"options": {"n": 3, "m": 6}}),
        "products": said({"options": {"products": "semi-structured"}}),
        "max": said({"options": {"n": 1, "m": 4}}),
        "muon": said({}, optimizer={"type": "Muon", "params": {"lr": 1e-3}}),
    }


def test_what_does_not_fit_is_rejected():
    (said,) = pool.run(rejected, 1)
    assert "wte.weight is a tied head" in said["head"]
    assert "mst.sparsity.variation = sv does not work with method sr-ste: choose one of sparse, sd" in said["schedule"]
    assert "unknown key 'mst.options.q'" in said["option"] and "mst.options" in said["value"]
    assert "groups of 6" in said["shape"] and "AdamW" in said["muon"]
    assert "set it to 0.75" in said["max"]
    assert "mst.options.products" in said["products"]

"""Dead units beside a DeepSpeed engine: the same numbers and the same woken weights on any ranks and stage."""

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import mst_scale
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.config.blocks import ModelConfig
from mst_scale.dead_units.units import LineFlags, find_units
from mst_scale.models import build
from mst_scale.pretrain import building
from mst_scale.shard import Shard
from tests.support import pool, tiny_run
from tests.support.toy_engine import STAGES, full, mst_config
from tests.support.toys import deepspeed_config, toy
from tests.support.whole_runs import MST, arguments, attempt

pytestmark = pytest.mark.full

STEPS, DENSE_FROM = 10, 8
DEAD = {"mlp": (6, 74), "value": (6, 30), "query_key": (6, 30)}  # at the start
CONTEXT, VOCAB = 6, 19


def model():
    """Odd widths, so that rows straddle ranks; biases; some units that are dead from the start."""
    torch.manual_seed(4)
    shape = {"n_layer": 2, "n_head": 3, "n_embd": 15, "d_ff": 37, "seq_length": CONTEXT, "vocab_size": VOCAB}
    made = build(ModelConfig(**shape, vocab_multiple=1, bias=True))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return with_dead_units(made)


def with_dead_units(made):
    """Three a layer, of each kind."""
    parameters = dict(made.named_parameters())
    for some in find_units(made)[0]:
        dead = torch.zeros(some.count, dtype=torch.bool)
        dead[[1, 4, some.count - 1]] = True
        for part in (part for factor in some.factors for part in factor.parts):
            parameter = parameters[part.name].data
            parameter.index_fill_(part.axis, part.spread(dead, parameter.shape[part.axis]).nonzero().view(-1), 0.0)
    return made


def config(stage, world, precision="fp32", *, wake=True):
    raw = deepspeed_config(stage, world, precision)
    raw["optimizer"]["params"]["torch_adam"] = True
    raw["training"] = {"steps": STEPS, "seed": 3}
    raw["mst"] = {
        "method": "mst",
        "sparsity": {"max": 0.8, "warmup": 2, "ultra": 2, "restore": 4, "stages": 2},
        "topology": {"interval": 2, "revive_dead_units": wake},
        "targets": {"lm_head": False},
        "attention": {"pattern": "dense"},
    }
    return raw


def batch(step, position):
    generator = torch.Generator().manual_seed(1000 * step + position)
    tokens = torch.randint(VOCAB, (8, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def advance(engine, rank, first, stop):
    for step in range(first, stop):
        engine.backward(engine(*batch(step, rank)))
        engine.step()


def plainly_counted(engine, world):
    """A definition on whole matrices, from rows and columns of the gathered weights by their shapes alone."""
    mst = engine.mst
    live = mst.units
    whole = {}
    for i, piece in enumerate(live.shards.slices):
        flat = torch.zeros(math.prod(piece.shape))
        flat[piece.start : piece.start + piece.length] = live.shards.weight(i).float()
        if mst.state.exchange.of[0].group is not None:
            torch.distributed.all_reduce(flat)
        whole[piece.name] = flat.view(piece.shape)
    counts = {"mlp": 0, "value": 0, "query_key": 0}
    for block in ("blocks.0.", "blocks.1."):
        w = {name.removeprefix(block): t for name, t in whole.items() if name.startswith(block)}
        d = w["attention.proj.weight"].shape[1]
        up = w["mlp.up.weight"].abs().sum(1) + w["mlp.up.bias"].abs()
        counts["mlp"] += int(((up == 0) & (w["mlp.down.weight"].abs().sum(0) == 0)).sum())
        qkv = w["attention.qkv.weight"].abs().sum(1) + w["attention.qkv.bias"].abs()
        q, k, v = qkv.split(d)
        counts["value"] += int(((v == 0) & (w["attention.proj.weight"].abs().sum(0) == 0)).sum())
        counts["query_key"] += int(((q == 0) & (k == 0)).sum())
    return counts


def given(rank, world, stage):
    """Weights stand still (no learning rate), some units are dead: what is counted, and what a step wakes."""
    raw = config(stage, world)
    raw["optimizer"]["params"] |= {"lr": 0.0, "weight_decay": 0.0}
    raw["mst"]["sparsity"]["max"] = 0.3
    engine, *_ = mst_scale.initialize(model=model(), config=raw)
    mst, found = engine.mst, []

    def fixed(i):
        piece = mst.store.slices[i]
        generator = torch.Generator().manual_seed(100 * mst.step + i)
        return torch.randn(math.prod(piece.shape), generator=generator)[
            piece.start : piece.start + piece.length
        ].clone()

    mst.store.gradient, mst.store.put_gradient = fixed, lambda i, gradient: None
    for step in range(STEPS):
        advance(engine, rank, step, step + 1)
        counts = mst.dead_units()
        found.append(counts)
        assert {kind: dead for kind, (dead, _) in counts.items()} == plainly_counted(engine, world)
    weights = {mask.name: full(engine, mst.store.weight(i), i, world) for i, mask in enumerate(mst.masks)}
    return found, {name: weight.numpy().tobytes() for name, weight in weights.items()}


def test_counts_and_revived_weights_are_bit_identical_on_any_ranks_and_stage():
    reference = None
    for stage in STAGES:
        for world in (1, 2, 3):
            (result, *others) = pool.run(given, world, stage)
            assert all(other == result for other in others)
            reference = reference or result
            assert result[0] == reference[0], f"stage {stage}, {world} ranks"
            assert result[1] == reference[1], f"stage {stage}, {world} ranks: woken weights"
    counts = reference[0]
    assert counts[0] == DEAD and counts[DENSE_FROM - 1] == counts[-1] == {kind: (0, n) for kind, (_, n) in DEAD.items()}


def around_revival(rank, world, stage, precision, wake, dense=()):  # noqa: PLR0917
    """(dead units, loss on one batch) before the step that makes all dense, after it and at the end."""
    raw = config(stage, world, precision, wake=wake)
    raw["mst"]["targets"] |= {"exclude": list(dense)}
    engine, *_ = mst_scale.initialize(model=model(), config=raw)
    groups = engine.optimizer.param_groups
    advance(engine, rank, 0, DENSE_FROM - 1)
    found, rate = [measured(engine)], groups[0]["lr"]
    for group in groups:  # the update itself would change the loss
        group["lr"] = 0.0
    advance(engine, rank, DENSE_FROM - 1, DENSE_FROM)
    found.append(measured(engine))
    assert engine.mst.changed_at == DENSE_FROM and engine.mst.masks.dense
    for group in groups:
        group["lr"] = rate
    advance(engine, rank, DENSE_FROM, STEPS)
    return [*found, measured(engine)]


@torch.no_grad()
def measured(engine):
    return engine.mst.dead_units(), float(engine(*batch(99, 0)))


def dead(counts):
    return {kind: count for kind, (count, _) in counts.items()}


@pytest.mark.parametrize(("stage", "precision"), [*((stage, "fp32") for stage in STAGES), (1, "bf16"), (3, "bf16")])
def test_restoration_revives_all_dead_units_without_changing_the_loss(stage, precision):
    before, after, end = pool.run(around_revival, 2, stage, precision, True)[0]
    assert all(count >= 6 for count in dead(before[0]).values())
    assert not any(dead(after[0]).values()) and not any(dead(end[0]).values())
    assert after[1] == before[1], "bit for bit"
    assert end[1] != after[1]


@pytest.mark.parametrize("never_sparse", ["up", "down"])
def test_a_revived_unit_may_have_a_matrix_that_was_never_sparse(never_sparse):
    """What is never sparse is never written to: its zeros keep what the unit adds at 0."""
    before, after, _ = pool.run(around_revival, 2, 2, "fp32", True, [f"*.mlp.{never_sparse}.*"])[0]
    assert all(count >= 6 for count in dead(before[0]).values())
    assert not any(dead(after[0]).values()) and after[1] == before[1]


def test_without_revival_units_stay_dead():
    before, after, end = pool.run(around_revival, 2, 2, "fp32", False)[0]
    assert after == before and end[0] == before[0] and all(count >= 6 for count in dead(before[0]).values())
    assert end[1] != after[1], "although it trains"


def gradients_of_the_dead(rank, world, wake):
    """The largest gradient of each unit that is dead before the step that makes all dense, after that step."""
    engine, *_ = mst_scale.initialize(model=model(), config=config(0, 1, wake=wake))
    units = find_units(engine.module)[0]
    parameters = dict(engine.module.named_parameters())
    advance(engine, rank, 0, DENSE_FROM - 1)
    flags = LineFlags(units, {name: p.shape for name, p in parameters.items()})
    for name in flags.shapes:
        weight = parameters[name].detach()
        flags.add(Shard.whole(name, weight.shape), weight.view(-1))
    advance(engine, rank, DENSE_FROM - 1, DENSE_FROM)
    engine.module.zero_grad()
    engine.module(*batch(50, 0)).backward()
    sizes = []
    for some in units:
        for unit in some.dead(some.zero_factors(flags.nonzero)).nonzero().view(-1).tolist():
            lines = [factor.weight for factor in some.factors]
            gradients = [parameters[part.name].grad.select(part.axis, part.first + unit) for part in lines]
            sizes.append(max(float(gradient.abs().max()) for gradient in gradients))
    return sizes


def test_a_dead_unit_has_no_gradient_and_a_revived_one_has():
    (asleep,), (revived,) = (pool.run(gradients_of_the_dead, 1, wake) for wake in (False, True))
    assert len(asleep) == len(revived) >= 18
    assert all(size == 0 for size in asleep) and all(size > 0 for size in revived)


def moments_of_revived(rank, world, stage):
    """By matrix, of a woken unit's weights: the least v as a share of the matrix's mean, the largest |m|, their number;
    and which matrices were dense before, so that nothing of them grows."""
    engine, *_ = mst_scale.initialize(model=model(), config=config(stage, world))
    mst, live = engine.mst, engine.mst.units
    places = {}
    finish = live.finish

    def noticed(updated):
        if live.revival is not None:
            places.update({name: live.starting(name) for name in live.revival.started})
        finish(updated)

    live.finish = noticed
    advance(engine, rank, 0, DENSE_FROM - 1)
    dense = {mask.name for mask in mst.masks if mask.dense}
    advance(engine, rank, DENSE_FROM - 1, DENSE_FROM)
    found = {}
    for name, where in places.items():
        states = mst.store.states([s.name for s in mst.store.slices].index(name))
        if len(where):
            v, m = states["exp_avg_sq"], states["exp_avg"][where]
            found[name] = float(v[where].min() / v.mean()), float(m.abs().max()), len(where)
    return found, dense


@pytest.mark.parametrize("world", [1, 2])
def test_moments_of_revived_weights_start_like_those_of_grown_ones(world):
    """In a matrix too that was dense already: its outgoing weights were zero, and without a gradient."""
    results = pool.run(moments_of_revived, world, 1)
    assert sum(count for found, _ in results for *_, count in found.values()) > 100
    dense = {name for found, before in results for name in found if name in before}
    assert any(name.endswith("proj.weight") for name in dense)
    for found, _ in results:
        for name, (share_of_mean, largest_m, _) in found.items():
            assert share_of_mean > (0.3 if world == 1 else 0.01), name  # a slice may lie above the mean of all
            assert largest_m == 0.0 or name in dense, name


def resumed(rank, world, stage, folder, stop):
    """Train to `stop`, save, go on in a new engine; the weights at the end, bit for bit."""
    raw = config(stage, world)
    engine, *_ = mst_scale.initialize(model=model(), config=raw)
    advance(engine, rank, 0, stop)
    if stop < STEPS:
        engine.save_checkpoint(folder, tag="half")
        engine, *_ = mst_scale.initialize(model=model(), config=raw)
        engine.load_checkpoint(folder, tag="half")
        advance(engine, rank, stop, STEPS)
    return [engine.mst.store.weight(i).numpy().tobytes() for i in range(len(engine.mst.masks))]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_resumed_before_and_after_revival_is_bit_identical(stage, tmp_path):
    whole = pool.run(resumed, 2, stage, "", STEPS)
    for stop in (DENSE_FROM - 1, DENSE_FROM):
        assert pool.run(resumed, 2, stage, str(tmp_path / str(stop)), stop) == whole
    before, after = (inspect(tmp_path / str(stop) / "half").dead_units for stop in (DENSE_FROM - 1, DENSE_FROM))
    assert all(count >= 6 for count in dead(before).values()) and not any(dead(after).values())


def without_units(rank, world):
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
    return engine.mst.dead_units()


def test_a_model_whose_units_are_not_known_has_none():
    assert pool.run(without_units, 1) == [{}]


def whole_run(rank, world, argv):
    """A run of `pretrain` whose model has dead units from the start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "build", lambda config, tensor: with_dead_units(build(config, tensor)))
        return attempt(rank, world, argv)


def test_a_run_records_revived_units_in_its_files(tmp_path):
    assert pool.run(whole_run, 2, arguments(tmp_path, mst=MST)) == [(0, "")] * 2
    rows = tiny_run.rows(tmp_path / "out")
    dead_units = [row["dead_units"] for row in rows]
    assert dead_units[0] == 9 and dead_units[-1] == 0
    events = json.loads((tmp_path / "out" / "run.json").read_text())["events"]
    fell = [b["step"] for a, b in pairwise(rows) if b["dead_units"] < a["dead_units"]]
    assert [event["step"] for event in events if event["what"] == "revived dead units"] == fell
    assert any("of 64 MLP neurons" in event["units"] for event in events)

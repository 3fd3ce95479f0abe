"""Which ways to share a model are possible, and which setting is recommended."""

from dataclasses import replace

import pytest

from mst_scale.config import load
from mst_scale.config.parallel import KEYS, check_parallel
from mst_scale.errors import UserError
from mst_scale.plan.answer import plan
from mst_scale.plan.gpus import machine
from mst_scale.plan.memory import memory
from mst_scale.plan.recommend import CLOSE, fitting, layout_problem, layouts, recommend, ways
from mst_scale.plan.setting import setting_of
from mst_scale.plan.step_time import longest_stretches, mean_step_seconds
from tests.support.plan_configs import MODEL, ready, setting
from tests.support.tiny_run import ROOT


@pytest.mark.parametrize("name", ["gpt2_xl", "gpt3_2.7b"])
def test_the_recommended_fits_and_nothing_is_much_faster(name):
    e = ready(name)
    s, card = setting_of(e, 8), machine("a100-40gb", 8)
    best = recommend(fitting(e, s, card), s)
    longest = longest_stretches(e)
    candidates = [candidate for way in ways(s) for candidate in way]
    assert best.memory.fits(card.gpu) and best.setting.batch == s.batch
    for other in candidates:
        if memory(e, other).fits(card.gpu):
            assert best.run_step <= mean_step_seconds(e, other, card, longest) * (1 + CLOSE)
    assert all(c.accumulate == "fp32" and c.stage >= 2 for c in candidates), "it keeps accumulation in fp32"


@pytest.mark.parametrize(
    ("sizes", "stage", "said"),
    [
        ({"tensor": 8}, 3, None),
        ({"sequence": 5}, 2, "groups of sequence 5"),
        ({"tensor": 16}, 2, "tensor 16 does not fit in a node: use a divisor of its 8 GPUs"),
        ({"sequence": 64}, 2, "sequence 64 must divide the 40 heads of a rank and the context of 2048"),
        ({"tensor": 8, "sequence": 8}, 2, "sequence 8 must divide the 5 heads"),
        ({"pipeline": 64}, 1, "pipeline 64 has more stages than the model's 40 layers"),
        ({"pipeline": 2, "sequence": 2}, 1, "omit --sp or --pp"),
        ({"pipeline": 2}, 2, "--set zero_optimization.stage=1"),
        ({"pipeline": 2, "tensor": 4}, 1, None),
    ],
)
def test_what_can_be(sizes, stage, said):
    found = layout_problem(ready("gpt3_13b").model, replace(setting(stage=stage), **sizes), 8)
    assert found is None if said is None else said in found


def test_what_models_cannot_be_shared():
    bert, s = ready("bert_base").model, replace(setting(stage=1), ranks=8)
    assert "model.arch is bert" in layout_problem(bert, replace(s, pipeline=2), 8)
    dropped = replace(MODEL, dropout=0.1)
    assert "model.dropout is 0.1" in layout_problem(dropped, replace(s, tensor=2), 8)
    assert (
        "model.dropout" in layout_problem(dropped, replace(s, sequence=2), 8) and layout_problem(dropped, s, 8) is None
    )


MUON = 'optimizer={"type": "Muon", "params": {"lr": 1e-3}}'
CUT, SHARED = ("tensor", "pipeline"), ("tensor", "pipeline", "sequence")


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "override", "axes", "said"),
    [
        ("powerprop", "mst.targets.lm_head=false", CUT, "method powerprop needs whole matrices"),
        ("sr-ste", "mst.sparsity.max=0.5", CUT, "method sr-ste needs whole matrices"),
        ("monarch", "mst.sparsity.max=0.5", CUT, "method monarch needs whole matrices"),
        ("stack", "mst.grow_from=runs/small", SHARED, "method stack needs the whole model"),
        ("mst", MUON, CUT, "sparse training with Muon has not been tested"),
        ("mst", "training.init=weights", SHARED, "training.init needs the whole model"),
    ],
)
def test_what_the_run_refuses_is_neither_proposed_nor_planned(method, override, axes, said):
    file, target = ROOT / "ds_configs" / "gpt3_1.3b.json", machine("a100-80gb", 16)
    answer = plan(load(file, [override], method), 16, target)
    proposed = {axis for axis in SHARED for row in answer.layouts if getattr(row.setting, axis) > 1}
    assert proposed == set(SHARED) - set(axes)
    usual = plan(load(file), 16, target)
    assert {axis for axis in SHARED for row in usual.layouts if getattr(row.setting, axis) > 1} == set(SHARED)
    for axis in axes:
        with pytest.raises(UserError, match=said) as planned:
            plan(load(file, [override], method), 16, target, fixed={axis: 2})
        with pytest.raises(UserError, match=said) as run:
            check_parallel(load(file, [override, f"{KEYS[axis]}=2"], method))
        assert str(planned.value) == str(run.value), "one rule"


def test_every_layout_can_be_and_keeps_the_batch():
    e = ready("gpt3_13b")
    own = setting_of(e, 64)
    found = list(layouts(e.model, own, 8, {}))
    assert len({s.sizes for s in found}) == len(found) > 20
    for s in found:
        assert s.batch == own.batch and layout_problem(e.model, s, 8) is None and s.tensor * s.sequence <= 8
        assert s.pipeline == 1 or (s.stage == 1 and s.sequence == 1)
    assert {s.tensor for s in layouts(e.model, own, 4, {})} == {1, 2, 4}, "nodes of 4"
    assert {s.pipeline for s in layouts(e.model, own, 8, {"pipeline": 4})} == {4}


@pytest.mark.full
def test_what_is_proposed_is_the_fastest_that_keeps_its_gradients_type():
    e = ready("gpt3_175b", "mst.compute.compact=off")
    own, target = setting_of(e, 512), machine("a100-80gb", 512, network=200)
    found = fitting(e, own, target)
    best = recommend(found, own)
    allowed = [c for c in found if c.setting.accumulate == "fp32"]
    assert best.run_step <= allowed[0].run_step * (1 + CLOSE)
    assert best.setting.pipeline == 1 and best.setting.accumulate == "fp32"
    answer = plan(e, 512, target)
    (refused,) = [line for line in answer.why if line.startswith("not proposed")]
    assert "pipeline" in refused and "in bf16, not in fp32" in refused
    piped = recommend(fitting(e, own, target, {"pipeline": 8}), own, {"pipeline": 8})
    assert piped.setting.pipeline == 8 and piped.setting.stage == 1 and piped.setting.accumulate == "bf16"

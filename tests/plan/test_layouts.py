"""What ranks that share a model hold, send and wait for, by hand; which ways can be, and which is proposed and why."""

from dataclasses import replace

import pytest

from mst_scale.config import ModelConfig, load
from mst_scale.config.parallel import KEYS, check_parallel
from mst_scale.plan.activations import WHOLE, Share, activations, block_bytes
from mst_scale.plan.answer import plan
from mst_scale.plan.clock import inside_a_node, seconds, sharing_seconds, step_seconds
from mst_scale.plan.exchange import exchange
from mst_scale.plan.gpus import machine
from mst_scale.plan.held import held, share
from mst_scale.plan.layouts import layouts, problem
from mst_scale.plan.links import links
from mst_scale.plan.memory import memory
from mst_scale.plan.parameters import parameters
from mst_scale.plan.recommend import CLOSE, fitting, recommend
from mst_scale.plan.setting import setting_of
from mst_scale.plan.traffic import Call, traffic
from tests.support.tiny_run import ROOT

A100 = machine("a100-80gb", 64)
MODEL = ModelConfig(n_layer=5, n_head=4, n_embd=64, seq_length=128, vocab_size=1000, bias=True)


def ready(name: str, *overrides: str):
    return load(ROOT / "ds_configs" / f"{name}.json", overrides)


def setting(name="gpt3_13b", gpus=64, stage=2, **sizes):
    s = replace(setting_of(ready(name), gpus).at_stage(stage), **sizes, micro=1)
    return replace(s, accumulation=1024 // s.data)


def total(found):
    return sum(p.numel for p in found)


def test_a_tensor_group_holds_the_model_once_and_its_vectors_and_ends_each():
    whole, d = total(parameters(MODEL)), 64
    s = replace(setting(), ranks=4, tensor=4)
    matrices, biases = 5 * 12 * d * d, 5 * (3 * d + 4 * d)  # cut: qkv's and up's biases too
    left = whole - matrices - biases
    assert total(held(MODEL, s)) == left + (matrices + biases) // 4
    shapes = {p.name: p.shape for p in held(MODEL, s)}
    assert shapes["blocks.0.attention.qkv.weight"] == (48, 64) and shapes["blocks.0.attention.qkv.bias"] == (48,)
    assert shapes["blocks.4.mlp.down.weight"] == (64, 64) and shapes["blocks.4.mlp.down.bias"] == (64,)
    assert shapes["wte.weight"] == (MODEL.padded_vocab, 64)


def test_stages_hold_every_layer_once_and_a_tied_head_twice():
    s = replace(setting(stage=1), ranks=2, pipeline=2)
    first, last = ({p.name for p in held(MODEL, s, stage)} for stage in (0, 1))
    assert first & last == {"wte.weight"} and first | last == {p.name for p in parameters(MODEL)}
    assert "blocks.2.ln_1.weight" in first and "blocks.3.ln_1.weight" in last, "5 layers: 3 and 2"
    assert "wpe.weight" in first and "ln_f.weight" in last
    untied = replace(MODEL, tied_head=False)
    ends = [held(untied, s, stage) for stage in (0, 1)]
    assert total(ends[0]) + total(ends[1]) == total(parameters(untied))


def test_activations_of_a_share():
    whole = block_bytes(MODEL, 2, 2)
    d, f, tokens = 64, 256, 2 * 128
    assert block_bytes(MODEL, 2, 2, Share(tensor=4)) == tokens * ((4 * d + d + 2 * f // 4) * 2 + 16 + 4)
    assert block_bytes(MODEL, 2, 2, Share(sequence=4)) == whole // 4
    assert activations(MODEL, 2, 2, False, WHOLE) == activations(MODEL, 2, 2, False)
    s = replace(setting(stage=1), ranks=4, pipeline=4, accumulation=8)
    part = share(MODEL, s, 0)
    assert (part.layers, part.on_their_way, part.head) == (2, 4, False)
    assert share(MODEL, s, 3) == Share(1, 1, 1, True, 1, True)
    assert activations(MODEL, 2, 2, False, part).kept == 4 * 2 * whole + 8 * tokens
    assert share(MODEL, replace(s, accumulation=2), 0).on_their_way == 2, "never more than there are"


def test_calls_of_a_micro_batch():
    e = ready("gpt3_13b")
    stream = 2048 * 5120 * 2 if e.model.n_embd == 5120 else 2048 * e.model.n_embd * 2
    calls = exchange(e.model, setting(tensor=8, sequence=2))
    assert calls["tensor"] == [Call("all-reduce", stream // 2)] * (4 * e.model.n_layer)
    assert calls["sequence"] == [Call("all-to-all", stream // 2 // 8)] * (8 * e.model.n_layer)
    assert calls["pipeline"] == []
    again = exchange(e.model, setting(tensor=8, recompute=True))["tensor"]
    assert len(again) == 6 * e.model.n_layer
    piped = exchange(e.model, setting(stage=1, pipeline=4))
    assert piped["pipeline"] == [Call("send", stream)] * 2 and not piped["tensor"]
    assert not any(exchange(e.model, setting()).values())


def test_groups_lie_in_nodes_as_ranks_are_placed():
    assert [inside_a_node(8, 1, 8), inside_a_node(8, 8, 8), inside_a_node(64, 2, 8), inside_a_node(2, 32, 8)] == [
        8,
        1,
        4,
        1,
    ]
    e = A100.efficiency.network
    call = Call("all-reduce", 10**9)
    inside = 20e-6 + 2 * 3 * 4e-6 + 2 * 7 / 8 * 1e9 / (300e9 * e)
    assert seconds([call], 8, 1, A100) == pytest.approx(inside), "a tensor group: NVLink"
    across = 20e-6 + 2 * 3 * 12e-6 + 2 * 7 / 8 * 1e9 / (25e9 * e)
    assert seconds([call], 8, 8, A100) == pytest.approx(across), "one GPU of each node: its own port"
    ulysses = 20e-6 + 4e-6 + 0.5 * 1e9 / (300e9 * e)
    assert seconds([Call("all-to-all", 10**9)], 2, 1, A100) == pytest.approx(ulysses)
    assert seconds([Call("send", 10**9)], 2, 32, A100) == pytest.approx(20e-6 + 12e-6 + 1e9 / (25e9 * e))
    model = ready("gpt3_13b").model
    found = {link.shared: link.over for link in links(model, setting(tensor=4, sequence=2), A100)}
    assert found == {"tensor": "NVLink", "sequence": "NVLink", "data": "network"}
    found = {link.shared: link.over for link in links(model, setting(stage=1, tensor=8, pipeline=4), A100)}
    assert found == {"tensor": "NVLink", "pipeline": "network", "data": "network"}
    assert links(model, setting(tensor=8, sequence=2), A100)[1].over == "network"


def test_zero_cuts_over_those_that_hold_the_same():
    model = ready("gpt3_13b").model
    s = setting(tensor=8, sequence=2)
    assert (s.data, s.shards, s.batch) == (4, 8, 1024)
    sent = sum(c.payload for c in traffic(model, s).micro)
    assert sent == 2 * total(held(model, s)), "a micro-batch all-reduces what a rank holds, bf16"
    assert traffic(model, setting(gpus=8, tensor=8)).micro == [], "nobody holds the same"


def test_a_pipeline_waits_and_computes_no_more():
    e = ready("gpt3_13b")
    s = setting(stage=1, pipeline=4)
    t = step_seconds(e, s, A100)
    busy = t.products + t.attention + t.elementwise + t.sharing
    assert t.bubble == pytest.approx(3 / s.accumulation * busy) and t.waits == pytest.approx(1 + 3 / 64)
    assert t.bubble / (t.bubble + busy) == pytest.approx(3 / (64 + 3)), "(p - 1)/(m + p - 1) of the time"
    plain = step_seconds(e, setting(stage=1), A100)
    assert plain.bubble == plain.sharing == 0.0 and plain.waits == 1.0
    assert t.products == pytest.approx(plain.products, rel=0.08), "the last stage has the head besides"
    assert t.sharing == pytest.approx(s.accumulation * sharing_seconds(e.model, s, A100)["pipeline"])


def test_a_shared_model_needs_less_each():
    e = ready("gpt3_13b")
    whole = memory(e, setting())
    for sizes in ({"tensor": 2}, {"sequence": 2}):
        assert memory(e, setting(**sizes)).activations.kept < whole.activations.kept
    assert memory(e, setting(tensor=8)).weights == pytest.approx(whole.weights / 8, rel=0.2)
    assert memory(e, setting(sequence=8)).weights == whole.weights
    one, four = (memory(e, setting(stage=1, pipeline=p)) for p in (1, 4))
    assert four.weights < one.weights / 3 and four.activations.kept > one.activations.kept / 2


@pytest.mark.parametrize(
    ("sizes", "stage", "said"),
    [
        ({"tensor": 8}, 3, None),
        ({"sequence": 5}, 2, "cannot be cut into groups of sequence 5"),
        ({"tensor": 16}, 2, "tensor 16 would leave the node: take a divisor of its 8 GPUs"),
        ({"sequence": 64}, 2, "sequence 64 must divide the 40 heads of a rank and the context of 2048"),
        ({"tensor": 8, "sequence": 8}, 2, "sequence 8 must divide the 5 heads"),
        ({"pipeline": 64}, 1, "pipeline 64 is longer than the model's 40 layers"),
        ({"pipeline": 2, "sequence": 2}, 1, "a pipeline cuts no sequences"),
        ({"pipeline": 2}, 2, "a pipeline runs at ZeRO-0 and 1, not 2"),
        ({"pipeline": 2, "tensor": 4}, 1, None),
    ],
)
def test_what_can_be(sizes, stage, said):
    found = problem(ready("gpt3_13b").model, replace(setting(stage=stage), **sizes), 8)
    assert found is None if said is None else said in found


def test_what_models_cannot_be_shared():
    bert, s = ready("bert_base").model, replace(setting(stage=1), ranks=8)
    assert "a pipeline runs a GPT" in problem(bert, replace(s, pipeline=2), 8)
    dropped = replace(MODEL, dropout=0.1)
    assert "model.dropout is 0.1" in problem(dropped, replace(s, tensor=2), 8)
    assert "model.dropout" in problem(dropped, replace(s, sequence=2), 8) and problem(dropped, s, 8) is None


MUON = 'optimizer={"type": "Muon", "params": {"lr": 1e-3}}'
CUT, SHARED = ("tensor", "pipeline"), ("tensor", "pipeline", "sequence")


@pytest.mark.parametrize(
    ("method", "override", "axes", "said"),
    [
        ("powerprop", "mst.targets.lm_head=false", CUT, "method powerprop wants every matrix whole"),
        ("sr-ste", "mst.sparsity.max=0.5", CUT, "method sr-ste wants every matrix whole"),
        ("monarch", "mst.sparsity.max=0.5", CUT, "method monarch wants every matrix whole"),
        ("stack", "mst.grow_from=runs/small", SHARED, "grown weights, and this one is cut by"),
        ("mst", MUON, CUT, "not tested with Muon in layers or models cut over ranks"),
        ("mst", "training.init=weights", SHARED, "training.init fills a model that is whole"),
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
        with pytest.raises(ValueError, match=said) as planned:
            plan(load(file, [override], method), 16, target, fixed={axis: 2})
        with pytest.raises(ValueError, match=said) as run:
            check_parallel(load(file, [override, f"{KEYS[axis]}=2"], method))
        assert str(planned.value) == str(run.value), "one rule"


def test_every_layout_can_be_and_keeps_the_batch():
    e = ready("gpt3_13b")
    own = setting_of(e, 64)
    found = list(layouts(e.model, own, 8, {}))
    assert len({s.sizes for s in found}) == len(found) > 20
    for s in found:
        assert s.batch == own.batch and problem(e.model, s, 8) is None and s.tensor * s.sequence <= 8
        assert s.pipeline == 1 or (s.stage == 1 and s.sequence == 1)
    assert {s.tensor for s in layouts(e.model, own, 4, {})} == {1, 2, 4}, "nodes of 4"
    assert {s.pipeline for s in layouts(e.model, own, 8, {"pipeline": 4})} == {4}


def test_what_is_proposed_is_the_fastest_that_keeps_its_gradients_type():
    e = ready("gpt3_175b")
    own, target = setting_of(e, 512), machine("a100-80gb", 512, network=200)
    found = fitting(e, own, target)
    best = recommend(e, own, target)
    allowed = [c for c in found if c.setting.accumulate == "fp32"]
    assert best.seconds.total <= allowed[0].seconds.total * (1 + CLOSE)
    assert best.setting.pipeline == 1 and best.setting.accumulate == "fp32"
    answer = plan(e, 512, target)
    (refused,) = [line for line in answer.why if line.startswith("not proposed")]
    assert "pipeline" in refused and "in bf16, not in fp32" in refused
    piped = recommend(e, own, target, {"pipeline": 8})
    assert piped.setting.pipeline == 8 and piped.setting.stage == 1 and piped.setting.accumulate == "bf16"


def test_a_batch_of_fewer_sequences_than_gpus_is_shared_by_groups():
    answer = plan(ready("gpt3_175b"), 1024, machine("a100-80gb", 1024))
    assert answer.setting == answer.recommended.setting and answer.setting.batch == 1536
    assert answer.setting.sizes.model > 1 and "data 1,024 cannot share 1,536 sequences" in answer.why[-1]
    with pytest.raises(ValueError, match="cannot be shared by 7 processes"):
        plan(ready("gpt3_13b"), 7, machine("a100-80gb", 7))


def test_a_size_that_is_fixed_is_planned_with_the_best_beside_it():
    e, target = ready("gpt3_13b"), machine("a100-80gb", 64)
    answer = plan(e, 64, target, fixed={"tensor": 4, "pipeline": 2})
    assert (answer.setting.tensor, answer.setting.pipeline, answer.setting.stage) == (4, 2, 1)
    assert answer.setting == answer.recommended.setting and answer.given.sizes.model == 1
    assert all((row.setting.tensor, row.setting.pipeline) == (4, 2) for row in answer.layouts)
    with pytest.raises(ValueError, match="tensor 16 would leave the node"):
        plan(e, 64, target, fixed={"tensor": 16})

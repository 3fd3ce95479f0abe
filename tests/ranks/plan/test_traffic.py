"""Every collective of a real step on 2 ranks, byte for byte: of dense steps, topology steps and shared sequences."""

from collections import Counter

import pytest
import torch

from mst_scale.config import ModelConfig, load
from mst_scale.plan import topology
from mst_scale.plan.setting import Setting, held, parameters, setting_of
from mst_scale.plan.traffic import Call, exchange, traffic
from tests.support import plan_measured as measured
from tests.support import pool
from tests.support.plan_configs import config, ready, setting, total

KINDS = {"all_reduce": "all-reduce", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}
EACH = {"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 0}
CASES = {
    "0 fp32": config(0, "fp32"),
    "0 bf16": config(0, "bf16"),
    "1 bf16": config(1, "bf16"),
    "1 fp32": config(1, "fp32", tied_head=False, bias=True),
    "2 bf16": config(2, "bf16+fp32"),
    "2 bert": config(2, "bf16", arch="bert", bias=True),
    "2 fp32, one bucket": config(2, "fp32", bucket=10**6, accumulation=1),
    "3 all ahead": config(3, "bf16+fp32", zero={"stage3_param_persistence_threshold": 40}),
    "3 one by one": config(3, "bf16", zero={**EACH, "stage3_max_reuse_distance": 12_000}),
    "3 at once forgotten": config(3, "fp32", zero={**EACH, "stage3_max_reuse_distance": 0}, bias=True),
    "3 recomputed": config(
        3, "bf16", zero={**EACH, "stage3_max_reuse_distance": 12_000}, activation_checkpointing=True, tied_head=False
    ),
    "3 short looks ahead": config(
        3, "bf16", zero={"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 5_000,
                         "stage3_max_reuse_distance": 3_000, "stage3_max_live_parameters": 20_000}
    ),
    **{
        f"{stage} {precision}, compact": config(
            stage, precision, mst={
                "method": "set", "sparsity": {"variation": "sparse", "max": 0.9}, "targets": {"lm_head": True},
                "topology": {"interval": 100, "check_every": 0}, "compute": {"compact": "auto", "backend": "dense"},
            }, zero=EACH if stage == 3 else None, n_embd=64,
        )
        for stage, precision in ((0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "bf16+fp32"), (2, "fp32"), (3, "bf16"))
    },
}  # fmt: skip


def logs(rank, world, configs):
    return [measured.calls(rank, world, raw) for raw in configs]


@pytest.mark.full
def test_every_call_of_a_dense_step():
    (found, other) = pool.run(logs, 2, list(CASES.values()))
    assert found == other
    for (name, raw), log in zip(CASES.items(), found, strict=True):
        experiment = load(raw)
        setting = setting_of(experiment, 2)
        wanted = traffic(experiment.model, setting).of_step(setting.accumulation)
        real = Counter((KINDS[kind], size) for kind, size in log)
        assert Counter((call.kind, call.payload) for call in wanted) == real, name


STEP = 6  # a topology step of the ultra phase, and a drift check


def sparse(stage, precision="fp32", *, policy=None, backend="dense", block=None, zero=None, **model):
    mst = {
        "method": policy or "mst",
        "sparsity": {"max": 0.7, **({} if policy else {"warmup": 0.2, "ultra": 0.5, "restore": 0.2})},
        "topology": {"interval": 1, "check_every": STEP, **({"granularity": {"block": block}} if block else {})},
        "compute": {"backend": backend},
    }
    return config(stage, precision, accumulation=1, mst=mst, zero=zero, **model)


LARGE = {"n_embd": 192, "n_layer": 1, "vocab_size": 500}  # layers that are sampled, and some that are listed whole
SPARSE = {
    "0": sparse(0),
    "1 large": sparse(1, **LARGE),
    "2 bf16, rigl, their masks": sparse(2, "bf16", policy="rigl", backend="cpu"),
    "2 set, auto": sparse(2, policy="set", backend="auto"),
    "1 bf16, set in blocks": sparse(1, "bf16", policy="set", block=4),
    "3 mest, sub-groups, their masks": sparse(3, policy="mest", backend="cpu", zero={"sub_group_size": 4000}),
    "3 snfs": sparse(3, policy="snfs"),
    "3 in blocks": sparse(3, block=8, backend="auto"),
}


def topology_logs(rank, world, configs):
    return [measured.topology_calls(rank, world, raw, STEP) for raw in configs]


@pytest.mark.full
def test_every_call_of_a_topology_step():
    """Byte for byte, given what depends on the weights: how many layers each round of refinement found open, and at
    which the first bracket missed. Of rounds there are as many as are expected, give or take three."""
    (found, other) = pool.run(topology_logs, 2, list(SPARSE.values()))
    assert found == other
    for (name, raw), real in zip(SPARSE.items(), found, strict=True):
        experiment = load(raw)
        setting = setting_of(experiment, 2)
        wanted = topology.calls(experiment, setting, STEP, real["opened"], real["again"])
        masked = [p for p in parameters(experiment.model) if p.name in real["masked"]]
        assert bool(masked) == ("their masks" in name), name
        drift = Counter(c.payload for c in topology.drift_check(experiment, setting))
        of_replicas = Counter(size for kind, size in real["calls"] if kind == "mst_drift_all_reduce")
        calls = Counter(c.payload for c in wanted.all + topology.whole_masks(masked)) + (drift - of_replicas)
        assert calls == Counter(size for kind, size in real["calls"] if kind == "mst_all_reduce"), name
        if setting.stage and "blocks" not in name:
            expected = topology.calls(experiment, setting, STEP).rounds
            assert abs(len(real["opened"]) - len(expected)) <= 3, name


def test_one_rank_sends_nothing():
    experiment = load(config(2, "bf16"))
    assert traffic(experiment.model, setting_of(load({**config(2, "bf16"), "train_batch_size": 2}), 1)).of_step(2) == []


@pytest.mark.parametrize(("stage", "factor"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_how_often_gradients_are_sent(stage, factor):
    """With 2 micro-batches a step: stages 2 and 3 send gradients with each."""
    experiment = load(config(stage, "bf16"))
    calls = traffic(experiment.model, setting_of(experiment, 2)).of_step(2)
    weights = 33_440
    kind = "scatter" if stage == 3 else "all-reduce"
    assert sum(c.payload for c in calls if c.kind == kind and c.payload > 8) == factor * 2 * weights


SHAPE = {"n_layer": 3, "n_head": 4, "n_embd": 32, "seq_length": 64, "vocab_size": 100}
MICRO = 2


def exchanged(rank: int, world: int, recompute: bool) -> list[int]:
    """Bytes of every all-to-all of a forward and a backward pass."""
    import deepspeed.comm
    import torch.distributed as dist

    from mst_scale.hybrid_sparse_attention import sequence_parallel
    from mst_scale.models.gpt import GPT

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", dist_init_required=False, verbose=False)
    model = GPT(ModelConfig(**SHAPE, activation_checkpointing=recompute))
    sequence_parallel(model, dist.group.WORLD)
    found, inner = [], dist.all_to_all_single

    def counted(output, input, **more):  # as DeepSpeed names them
        found.append(input.numel() * input.element_size())
        return inner(output=output, input=input, **more)

    dist.all_to_all_single = counted
    try:
        tokens = torch.zeros(MICRO, SHAPE["seq_length"] // world, dtype=torch.long)
        model(tokens, tokens).backward()
    finally:
        dist.all_to_all_single = inner
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_every_exchange_of_a_shared_sequence(recompute):
    s = Setting(2, 2, "fp32", "fp32", MICRO, 1, recompute=recompute, sequence=2)
    wanted = exchange(ModelConfig(**SHAPE), s)["sequence"]
    first, second = pool.run(exchanged, 2, recompute)
    assert first == second and [Call("all-to-all", size) for size in first] == wanted


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


def test_zero_cuts_over_those_that_hold_the_same():
    model = ready("gpt3_13b").model
    s = setting(tensor=8, sequence=2)
    assert (s.data, s.shards, s.batch) == (4, 8, 1024)
    sent = sum(c.payload for c in traffic(model, s).micro)
    assert sent == 2 * total(held(model, s)), "a micro-batch all-reduces what a rank holds, bf16"
    assert traffic(model, setting(gpus=8, tensor=8)).micro == [], "nobody holds the same"


def test_ring_volumes():
    assert (
        Call("all-reduce", 800).sent(4) == 1200 and Call("gather", 800).sent(4) == Call("scatter", 800).sent(4) == 600
    )

"""Every part of the memory model against the tensors of real runs on 2 ranks, and activations against autograd.

The runs cover stages 0 to 3, fp32, bf16 and offload. What autograd keeps for backward is seen by its own hooks.
"""

import gc
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from mst_scale.config import ModelConfig, load
from mst_scale.hybrid_sparse_attention import Pattern, set_pattern
from mst_scale.models.bert import BERT
from mst_scale.models.gpt import GPT
from mst_scale.plan.memory import Memory, _kept, block_bytes, memory
from mst_scale.plan.setting import Share, setting_of, share
from tests.support import plan_measured as measured
from tests.support import pool
from tests.support.plan_configs import MODEL, MST, config, ready, setting

pytestmark = pytest.mark.full

WITHIN = 0.1  # padding, histograms and what is alive for an instant
WIDE = {"n_embd": 64, "vocab_size": 1000}
PARTLY = {"stage3_param_persistence_threshold": 100}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def case(stage, precision, **more):
    zero = {**(PARTLY if stage == 3 else {}), **more.pop("zero", {})}
    return config(stage, precision, mst=MST, zero=zero, **{**WIDE, **more})


CASES = {
    "0 fp32": case(0, "fp32"),
    "0 bf16": case(0, "bf16"),
    "1 bf16, one bucket": case(1, "bf16", bucket=10**6),
    "2 fp32": case(2, "fp32"),
    "2 bf16, added up in fp32": case(2, "bf16+fp32", zero={"overlap_comm": True}),
    "3 fp32": case(3, "fp32", bucket=10**6),
    "3 bf16": case(3, "bf16"),
    "3 bf16, added up in fp32": case(3, "bf16+fp32"),
    "2 layers larger than a sample": case(2, "bf16+fp32", n_embd=192, bucket=200_000, accumulation=1),
    "2 offloaded": case(2, "bf16+fp32", zero=OFFLOADED),
    "3 offloaded": case(3, "bf16+fp32", zero=OFFLOADED),
}


def constant(kind: str, policy: str = "mst") -> dict:
    """The "mst" block of a run that is sparse from the first step to the last."""
    return {
        "method": "set", "sparsity": {"variation": "sparse", "max": 0.9}, "targets": {"lm_head": True},
        "topology": {"interval": 1, "policy": policy, "random_ratio": 0.5 if policy == "mst" else None},
        "compute": {"compact": kind, "backend": "dense"},
    }  # fmt: skip


COMPACT = {
    f"{stage} {precision}": config(
        stage, precision, mst=constant("auto"), zero=PARTLY if stage == 3 else {}, **{**WIDE, "n_embd": 128}
    )
    for stage, precision in ((1, "bf16"), (2, "bf16+fp32"), (2, "fp32"), (3, "bf16"), (3, "fp32"))
}


def held(rank, world, configs):
    return [measured.bytes_held(rank, world, raw) for raw in configs]


@pytest.fixture(scope="module")
def runs():
    """By case: the larger of what two ranks hold."""
    results = pool.run(held, 2, list(CASES.values()))
    ranks = zip(*results, strict=True)
    return {
        name: {part: max(rank[part] for rank in pair) for part in pair[0]}
        for name, pair in zip(CASES, ranks, strict=True)
    }


def modelled(name: str) -> Memory:
    experiment = load(CASES[name])
    return memory(experiment, replace(setting_of(experiment, 2), fused=False))  # no fused Adam on a CPU


@pytest.mark.parametrize("name", [name for name in CASES if "offloaded" not in name])
def test_parts_that_are_held(runs, name):
    wanted, real = modelled(name), runs[name]
    assert real["weights"] == pytest.approx(wanted.weights, rel=WITHIN)
    assert real["optimizer"] == pytest.approx(wanted.optimizer, rel=WITHIN)
    assert real["masks"] == pytest.approx(wanted.masks, rel=WITHIN)
    assert real["gradients"] == pytest.approx(wanted.step_gradients, rel=WITHIN)


def test_states_of_compact_layers():
    """Optimizer states, master weights and gradients within 2 %; the index, on every rank, next to the masks."""
    ranks = zip(*pool.run(held, 2, list(COMPACT.values())), strict=True)
    for (name, raw), found in zip(COMPACT.items(), ranks, strict=True):
        experiment = load(raw)
        s = replace(setting_of(experiment, 2), fused=False)
        assert s.compacted is not None
        wanted = memory(experiment, s)
        real = {part: max(rank[part] for rank in found) for part in found[0]}
        states = real["optimizer"] + real["gradients"]
        assert states == pytest.approx(wanted.optimizer + wanted.step_gradients, rel=0.02), name
        assert real["weights"] == pytest.approx(wanted.weights, rel=0.02), name
        assert real["masks"] + real["index"] == pytest.approx(wanted.masks, rel=0.02), name
        stored = memory(experiment, replace(s, compact=None))
        assert wanted.optimizer < 0.3 * stored.optimizer, "position embeddings and the like are dense"


@pytest.mark.parametrize("name", CASES)
def test_the_fullest_moments(runs, name):
    """Without activations, which autograd keeps out of Python's sight, and as collectives see them, before a reduced
    gradient is converted. On a CPU the host's share lies in one place with the rest."""
    wanted, real = modelled(name), runs[name]
    backward = max(wanted.backward - wanted.activations.total, wanted.reduction) - wanted.converted + wanted.host
    assert real["backward"] == pytest.approx(backward, rel=WITHIN)
    assert real["step"] == pytest.approx(wanted.step + wanted.host + wanted.host_step, rel=WITHIN)


def kept(config: ModelConfig, micro: int, dtype: torch.dtype, pattern: Pattern) -> int:
    """Bytes of all storages kept for backward that are not weights: saved by autograd, or by DeepSpeed's recomputation,
    which keeps the inputs of blocks itself."""
    model = (GPT if config.causal else BERT)(config).to(dtype)
    set_pattern(model, pattern)
    tokens = torch.randint(config.vocab_size, (micro, config.seq_length))
    targets = tokens.clone()
    targets[:, config.predicted :] = -1  # all of them but what BERT predicts
    gc.collect()
    before = measured.live()
    found: dict[int, int] = {}
    alive = []  # so that no storage is freed and counted under another's address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before or tensor is tokens:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, targets)
    found |= {key: size for key, size in measured.live().items() if key not in before}
    loss.backward()
    return sum(found.values())


def kept_bytes(model: ModelConfig, micro: int, width: int, recompute: bool) -> int:
    """What a plan counts when the forward pass of a whole model is done."""
    block, ends = _kept(model, micro, width, Share())
    return model.n_layer * (micro * model.seq_length * model.n_embd * width if recompute else block) + ends


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {"n_layer": 4, "n_head": 2, "n_embd": 128, "seq_length": 128, "vocab_size": 200},
        {"n_layer": 2, "n_head": 4, "n_embd": 32, "d_ff": 200, "seq_length": 128, "vocab_size": 1000, "bias": True},
        {"arch": "bert", "n_layer": 3, "n_head": 2, "n_embd": 128, "seq_length": 128, "vocab_size": 500, "bias": True},
    ],
)
def test_kept_for_backward(shape, dtype, recompute):
    config = ModelConfig(**shape, activation_checkpointing=recompute)
    wanted = kept_bytes(config, 3, dtype.itemsize, recompute)
    assert kept(config, 3, dtype, Pattern("dense")) == pytest.approx(wanted, rel=WITHIN)


def test_sparse_attention_keeps_the_same():
    config = ModelConfig(n_layer=2, n_head=2, n_embd=64, seq_length=512, vocab_size=100)
    wanted = kept_bytes(config, 2, 4, False)
    assert kept(config, 2, torch.float32, Pattern("strided", 64)) == pytest.approx(wanted, rel=WITHIN)


def test_activations_of_a_share():
    whole = block_bytes(MODEL, 2, 2, Share())
    d, f, tokens = 64, 256, 2 * 128
    assert block_bytes(MODEL, 2, 2, Share(tensor=4)) == tokens * ((4 * d + d + 2 * f // 4) * 2 + 16 + 4)
    assert block_bytes(MODEL, 2, 2, Share(sequence=4)) == whole // 4
    s = replace(setting(stage=1), ranks=4, pipeline=4, accumulation=8)
    part = share(MODEL, s, 0)
    assert (part.layers, part.in_flight, part.head) == (2, 4, False)
    assert share(MODEL, s, 3) == Share(1, 1, 1, True, 1, True)
    assert _kept(MODEL, 2, 2, part) == (whole, 8 * tokens)
    assert share(MODEL, replace(s, accumulation=2), 0).in_flight == 2, "never more than there are"


def test_a_shared_model_needs_less_each():
    e = ready("gpt3_13b")
    whole = memory(e, setting())
    for sizes in ({"tensor": 2}, {"sequence": 2}):
        assert memory(e, setting(**sizes)).activations.kept < whole.activations.kept
    assert memory(e, setting(tensor=8)).weights == pytest.approx(whole.weights / 8, rel=0.2)
    assert memory(e, setting(sequence=8)).weights == whole.weights
    one, four = (memory(e, setting(stage=1, pipeline=p)) for p in (1, 4))
    assert four.weights < one.weights / 3 and four.activations.kept > one.activations.kept / 2


def test_more_gpus_hold_less_each():
    e = ready("gpt3_6.7b", "train_micro_batch_size_per_gpu=1")
    for stage in (1, 2, 3):
        sizes = [memory(e, setting_of(e, ranks).at_stage(stage)).peak for ranks in (8, 64, 512)]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    peaks = [memory(e, setting_of(e, 64).at_stage(stage)).peak for stage in (0, 1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True)

import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mst_scale.config import MODELS, ModelConfig
from mst_scale.errors import UserError
from mst_scale.flops.formulas import Flops, dense_step_flops, forward_flops, matrices, step_flops
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.models import GPT
from mst_scale.sparsity_variation import SparsityConfig

SMALL = ModelConfig()  # GPT-2 small, 1024 tokens, 50304 rows
TINY = ModelConfig(**MODELS["tiny"])
HSA = Pattern("strided", 256)
PRINTED = 0.05e9  # the paper prints one decimal of a GFLOP


def test_the_papers_table():
    assert abs(dense_step_flops(SMALL).total - 874.8e9) < PRINTED  # printed 847.8: two digits swapped (PAPER.md)
    assert abs(dense_step_flops(TINY).total - 212.7e9) < PRINTED
    assert abs(step_flops(SMALL, density=0.2).total - 267.7e9) < PRINTED


def mst_mean(accounting: str = "paper", head: bool = True) -> float:
    """Mean FLOPs of a step over the paper's run: HSA until step 120,000, then dense attention."""
    run = SparsityConfig(warmup=10_000, ultra=100_000, restore=10_000).schedule(140_000, TopologyConfig(interval=100))

    def cost(segment) -> float:
        density: float | dict[str, float] = 1 - segment.sparsity
        if not head:
            density = {m.name: 1 - segment.sparsity for m in matrices(SMALL) if m.component != "head"}
        pattern = HSA if segment.start < 120_000 else Pattern("dense")
        return step_flops(SMALL, density, pattern, accounting).total

    return run.mean(cost)


def test_the_papers_mst_row():
    assert abs(mst_mean() - 219.4e9) < 0.1e9  # 219.45: this reading of the schedule, PAPER.md
    assert dense_step_flops(SMALL).total / mst_mean() == pytest.approx(3.99, abs=0.005)


def test_the_assumptions_of_the_factor_of_four():
    """On the sparse head (without it 2.2×) and on counting dense attention as the full square (without it 3.9×)."""
    paper, causal = (dense_step_flops(SMALL, accounting).total for accounting in ("paper", "causal"))
    assert paper / mst_mean(head=False) == pytest.approx(2.19, abs=0.005)
    assert causal / mst_mean("causal") == pytest.approx(3.87, abs=0.005)
    assert causal / mst_mean("causal", head=False) == pytest.approx(2.08, abs=0.005)


BERT = ModelConfig(**MODELS["bert-base"])


def bert_mean(stride: int = 128, **changes: float) -> float:
    """The reduction over the paper's schedule; stride = context/4 as in the paper."""
    model, pattern = dataclasses.replace(BERT, **changes), Pattern("strided", stride)
    run = SparsityConfig(warmup=10_000, ultra=100_000, restore=10_000).schedule(140_000, TopologyConfig(interval=100))
    mean = run.mean(
        lambda s: step_flops(model, 1 - s.sparsity, pattern if s.start < 120_000 else Pattern("dense")).total
    )
    return dense_step_flops(model).total / mean


def test_bert_base_costs_under_a_third():
    assert bert_mean() == pytest.approx(3.76, abs=0.005)
    assert bert_mean(stride=256) > 3
    assert bert_mean(mask_share=0.999) > 3, "and with a head that computes every position"


def test_bert_by_hand():
    shape = {"n_layer": 2, "n_head": 1, "n_embd": 2, "d_ff": 5, "seq_length": 20, "vocab_size": 7, "vocab_multiple": 1}
    model = ModelConfig(arch="bert", **shape)
    assert model.predicted == 3  # 15 % of 20
    for accounting in ("paper", "causal"):  # it sees both sides: the square, whoever counts
        counted = forward_flops(model, accounting=accounting)
        assert counted.head == 3 * 3 * 2 + 3 * 3 * 7  # positions · (2·2 - 1) · outputs: transform, decoder
        assert counted.scores == counted.reduce == 2 * 2 * 400 * 2
    pattern = Pattern("strided", 5)
    pairs = pattern.mask(20, causal=False).sum().item()
    assert step_flops(model, pattern=pattern).scores == pytest.approx(3 * 2 * 2 * pairs * 2)
    assert step_flops(model, pattern=pattern, accounting="causal") == step_flops(model, pattern=pattern)


def test_one_layer_by_hand():
    model = ModelConfig(n_layer=2, n_head=1, n_embd=2, d_ff=5, seq_length=3, vocab_size=7, vocab_multiple=1)
    assert forward_flops(model) == Flops(
        qkv=2 * 3 * 3 * 6,  # layers · tokens · (2·2 - 1) · outputs
        scores=2 * 2 * 9 * 2,  # layers · 2 · pairs · width
        reduce=2 * 2 * 9 * 2,
        proj=2 * 3 * 3 * 2,
        ffw1=2 * 3 * 3 * 5,
        ffw2=2 * 3 * 9 * 2,
        head=3 * 3 * 7,
    )
    assert forward_flops(model, accounting="causal").scores == 2 * 2 * 6 * 2
    assert step_flops(model) == 3 * forward_flops(model)


def test_density_may_differ_by_matrix():
    named = {m.name: 0.2 for m in matrices(SMALL)}
    assert step_flops(SMALL, named) == step_flops(SMALL, 0.2)
    one = step_flops(SMALL, {"blocks.3.mlp.up.weight": 0.5})
    dense = dense_step_flops(SMALL)
    assert dense.total - one.total == pytest.approx(dense.ffw1 / 12 / 2), "half of one layer; the rest is dense"
    assert one.matrices - one.ffw1 == dense.matrices - dense.ffw1
    assert step_flops(SMALL, {}) == dense


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_the_models(tied: bool):
    config = ModelConfig(n_layer=2, n_head=2, n_embd=8, d_ff=24, seq_length=4, vocab_size=10, tied_head=tied)
    model = GPT(config)
    listed = {m.name: (m.outputs, m.inputs) for m in matrices(config)}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() == 2}
    embeddings = {"wpe.weight"} if tied else {"wte.weight", "wpe.weight"}
    assert listed == {name: shape for name, shape in shapes.items() if name not in embeddings}


def test_sparse_attention_costs_the_same_pairs_in_both_accountings():
    paper, causal = (step_flops(SMALL, pattern=HSA, accounting=a) for a in ("paper", "causal"))
    assert paper.attention == pytest.approx(causal.attention)
    assert paper.scores == pytest.approx(3 * 12 * 2 * 231_040 * 768)
    assert paper.attention / dense_step_flops(SMALL).attention == pytest.approx(0.2203, abs=5e-5)
    assert causal.attention / dense_step_flops(SMALL, "causal").attention == pytest.approx(0.440, abs=5e-4)


def test_flops_add_and_scale():
    a, b = step_flops(SMALL), step_flops(TINY, 0.5)
    assert (a + b).total == pytest.approx(a.total + b.total)
    assert (0.5 * a).head == (a * 0.5).head == a.head / 2
    assert a.total == pytest.approx(math.fsum(dataclasses.astuple(a)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 1.5}, "1.5 is not a fraction"),
        ({"density": {"wte.weight": -0.1}}, "wte.weight = -0.1 is not a fraction"),
        ({"density": {"lm_head.weight": 0.5}}, "this model has no matrix 'lm_head.weight'"),
        ({"accounting": "generous"}, "'generous' is unknown: choose one of paper, causal"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        step_flops(SMALL, **arguments)


def test_torchs_counter_agrees_term_by_term():
    """FlopCounterMode on a real forward and backward pass with biases. Its terms and ours:

    matrices    torch counts 2·I per output and token, the paper 2·I - 1; three times, as backward is 2 · forward
    attention   equal: the full square, twice forward and four times backward. That holds for unfused attention, which
                is what runs here. Fused kernels torch counts with 5 products backward (they compute the scores again),
                or not at all (the CPU's).
    """
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, seq_length=24, vocab_size=100, bias=True)
    batch = 3
    model, tokens = GPT(config), torch.zeros(batch, config.seq_length, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    assert counted.keys() == {"aten.mm", "aten.addmm", "aten.bmm"}

    ours = batch * step_flops(config)
    one_more = 3 * batch * config.seq_length * sum(m.outputs for m in matrices(config))
    assert counted["aten.mm"] + counted["aten.addmm"] == ours.matrices + one_more
    assert counted["aten.bmm"] == ours.attention
    # and against the causal accounting: the pairs above the diagonal, for two products, forward and twice backward
    above = config.seq_length * (config.seq_length - 1) // 2
    causal = batch * step_flops(config, accounting="causal")
    assert counted["aten.bmm"] - causal.attention == batch * config.n_layer * 2 * 3 * 2 * config.n_embd * above


def test_torchs_counter_agrees_component_by_component():
    """Forward alone, module by module: torch's 2·I against the paper's 2·I - 1, nothing else."""
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, d_ff=48, seq_length=24, vocab_size=100, tied_head=False)
    model, tokens = GPT(config), torch.zeros(1, config.seq_length, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    modules = counter.get_flop_counts()
    ours = forward_flops(config)
    for component, path in (
        ("qkv", "attention.qkv"),
        ("proj", "attention.proj"),
        ("ffw1", "mlp.up"),
        ("ffw2", "mlp.down"),
    ):
        counted = sum(sum(modules[f"GPT.blocks.{layer}.{path}"].values()) for layer in range(config.n_layer))
        outputs = sum(m.outputs for m in matrices(config) if m.component == component)
        assert counted == getattr(ours, component) + config.seq_length * outputs
    assert sum(modules["GPT.lm_head"].values()) == ours.head + config.seq_length * config.padded_vocab
    inside = sum(modules["GPT.blocks.0.attention"].values())
    products = sum(sum(modules[f"GPT.blocks.0.attention.{part}"].values()) for part in ("qkv", "proj"))
    assert 2 * (inside - products) == ours.attention, "q·k and attention·v of two layers: both count the full square"

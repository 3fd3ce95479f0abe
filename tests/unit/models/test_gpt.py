import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from mst_scale import models
from mst_scale.config import MODELS, ModelConfig
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, set_pattern
from mst_scale.models import GPT, initial_weights
from mst_scale.models import gpt as gpt_file
from mst_scale.models.initial_weights import not_drawn
from mst_scale.models.pipelined_gpt import PositionEmbedding

TOY = ModelConfig(n_layer=2, n_head=2, n_embd=32, seq_length=16, vocab_size=60)


def build(seed: int = 0, **changes: object) -> GPT:
    torch.manual_seed(seed)
    return GPT(dataclasses.replace(TOY, **changes))


def tokens(length: int = 16, batch: int = 3) -> torch.Tensor:
    return torch.randint(0, 60, (batch, length), generator=torch.Generator().manual_seed(7))


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# Shape ----------------------------------------------------------------------------------------------------------------


def by_hand(n: int, d: int, f: int, rows: int, context: int) -> int:
    block = 3 * d * d + d * d + d * f + f * d + 2 * d  # qkv, proj, up, down, two norms
    return rows * d + context * d + n * block + d


# layers, width d, context, and the sum 50304·d + context·d + layers·(12·d² + 2·d) + d (no bias, tied head), by shell
# arithmetic. 50304 is 50257 padded to a multiple of 64.
PRESETS = {
    "gpt2": (12, 768, 1024, 124_373_760),
    "gpt2-medium": (24, 1024, 1024, 354_599_936),
    "gpt2-large": (36, 1280, 1024, 773_582_080),
    "gpt2-xl": (48, 1600, 1024, 1_556_840_000),
    "gpt3-1.3b": (24, 2048, 2048, 1_315_276_800),
    "gpt3-2.7b": (32, 2560, 2048, 2_650_769_920),
    "gpt3-6.7b": (32, 4096, 2048, 6_657_150_976),
    "gpt3-13b": (40, 5120, 2048, 12_851_368_960),
    "gpt3-175b": (96, 12288, 2048, 174_591_848_448),
    "tiny": (6, 384, 1024, 30_331_776),
}


def test_every_preset_is_in_the_table():
    assert {name for name, shape in MODELS.items() if shape.get("arch") != "bert"} == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets(name: str):
    layers, width, context, total = PRESETS[name]
    with torch.device("meta"):  # shapes without memory: 175B included
        model = GPT(ModelConfig(**MODELS[name]))
    assert sum(p.numel() for p in model.parameters()) == total
    assert by_hand(layers, width, 4 * width, 50304, context) == total


def test_gpt2_as_published_has_124439808_parameters():
    """Hugging Face's count for `gpt2`: biases, 50257 rows, tied head."""
    with torch.device("meta"):
        model = GPT(ModelConfig(bias=True, vocab_multiple=1))
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_names_are_those_of_the_contract():
    layer = ["ln_1", "attention.qkv", "attention.proj", "ln_2", "mlp.up", "mlp.down"]
    weights = ["wte", "wpe", *(f"blocks.{i}.{name}" for i in range(2) for name in layer), "ln_f"]
    assert [name for name, _ in build().named_parameters()] == [f"{name}.weight" for name in weights]
    assert [name for name, _ in build(tied_head=False).named_parameters()] == [
        f"{name}.weight" for name in [*weights, "lm_head"]
    ]
    with_bias = {name for name, _ in build(bias=True, tied_head=False).named_parameters()}
    assert with_bias == {f"{name}.{kind}" for name in [*weights, "lm_head"] for kind in ("weight", "bias")} - {
        "wte.bias", "wpe.bias", "lm_head.bias"
    }  # fmt: skip
    assert set(build().state_dict()) == {f"{name}.weight" for name in weights}, "no buffers, no second head"


def test_the_head_names_itself():
    tied, untied = build(), build(tied_head=False)
    assert tied.get_output_embeddings().weight is tied.wte.weight
    assert untied.get_output_embeddings().weight is untied.lm_head.weight


# Values ---------------------------------------------------------------------------------------------------------------


def test_logits_are_padded_and_causal():
    model, x = build().eval(), tokens()
    logits = model(x)
    assert logits.shape == (3, 16, 64) and logits.dtype == torch.float32
    changed = x.clone()
    changed[:, 9] += 1
    later = model(changed % 60)
    # the same products in the same order, whatever stands to the right; 1e-6 for a kernel that cuts rows otherwise
    torch.testing.assert_close(later[:, :9], logits[:, :9], rtol=0, atol=1e-6)
    assert (later[:, 9:] - logits[:, 9:]).abs().amax(-1).min() > 1e-4


def test_a_shorter_sequence_is_a_prefix():
    model, x = build().eval(), tokens()
    torch.testing.assert_close(model(x[:, :5]), model(x)[:, :5], rtol=0, atol=1e-6)  # float32 rounding of O(1) logits


def test_a_sequence_longer_than_the_context_is_rejected():
    with pytest.raises(UserError, match=r"17 tokens .* model\.seq_length = 16"):
        PositionEmbedding(TOY.seq_length, TOY.n_embd)(torch.zeros(1, 17, TOY.n_embd))
    with pytest.raises(UserError, match=r"17 tokens .* model\.seq_length = 16"):
        build()(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_the_mean_cross_entropy_of_the_logits(tied: bool):
    model, x = build(tied_head=tied), tokens()
    targets = tokens().roll(1, 0)
    targets[0, :7] = -1  # does not count
    expected = F.cross_entropy(model(x).view(-1, 64), targets.view(-1), ignore_index=-1)
    expected.backward()
    want = gradients(model)
    model.zero_grad()
    loss = model(x, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, want[name], rtol=1e-4, atol=1e-7, msg=name)  # other order of float32 sums


def test_padding_rows_are_ordinary_rows():
    """As in nanoGPT: no masking. They take part in the softmax, and learn from it that they never occur."""
    model = build(tied_head=False)
    loss = model(tokens(), tokens())
    loss.backward()
    assert abs(loss.item() - math.log(64)) < 0.1, "untrained, it spreads over all 64 rows; logits are ~0.1"
    assert model.lm_head.weight.grad[60:].abs().amax() > 0
    assert model.wte.weight.grad[60:].abs().amax() == 0, "no token names them"


def test_gelu_is_gpt2s_tanh_approximation():
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    by_formula = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    mlp = gpt_file.MLP(1, 1, bias=False).double()
    torch.nn.init.ones_(mlp.up.weight)
    torch.nn.init.ones_(mlp.down.weight)
    torch.testing.assert_close(mlp(x[:, None])[:, 0].detach(), by_formula, rtol=0, atol=1e-14)  # float64 rounding
    assert (F.gelu(x) - by_formula).abs().max() > 1e-4, "the exact GELU would be told apart"


def test_a_sparse_pattern_reaches_every_block():
    model, x = build().eval(), tokens()
    dense = model(x)
    assert set_pattern(model, Pattern("strided", 4)) == 2
    assert (model(x) - dense).abs().max() > 1e-4
    set_pattern(model, Pattern("dense"))
    assert torch.equal(model(x), dense)


# Initialisation -------------------------------------------------------------------------------------------------------


def test_initialisation_is_gpt2s():
    model = build(n_layer=8, n_embd=128, vocab_size=1000, bias=True, tied_head=False)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            expected = 1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0
            assert (p == expected).all(), name
            continue
        std = 0.02 / math.sqrt(16) if name.endswith(("proj.weight", "down.weight")) else 0.02
        n = p.numel()
        # six standard errors of a sample of n normals: never by chance (the seed is fixed), always with another scale
        assert abs(p.mean().item()) < 6 * std / math.sqrt(n), name
        assert abs(p.std().item() / std - 1) < 6 / math.sqrt(2 * n), name


def test_initialisation_follows_the_seed():
    first, second, other = build(1), build(1), build(2)
    for name, p in first.named_parameters():
        assert torch.equal(p, second.get_parameter(name))
        assert p.dim() == 1 or not torch.equal(p, other.get_parameter(name))
    torch.manual_seed(1)
    assert torch.equal(GPT(TOY).wte.weight, first.wte.weight)
    assert not torch.equal(GPT(TOY).wte.weight, first.wte.weight), "two models in a row are two models"


@pytest.mark.parametrize("arch", ["gpt", "bert"])
def test_init_std_scales_the_first_weights(arch: str):
    def named(std: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        return dict(models.build(dataclasses.replace(TOY, arch=arch, init_std=std)).named_parameters())

    weak, strong = named(0.02), named(0.1)
    for name, p in weak.items():
        factor = 5 if p.dim() == 2 else 1
        torch.testing.assert_close(strong[name], factor * p, msg=name)


def test_no_two_matrices_share_their_values():
    weights = [p.flatten()[:64] / p.std() for p in build().parameters() if p.dim() == 2]
    for i, a in enumerate(weights):
        for b in weights[:i]:
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.6  # 64 values: 4.8 standard errors


def test_initialisation_in_pieces_has_no_seam(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(initial_weights, "INIT_CHUNK", 1000)
    weight = build().wte.weight.detach().view(-1)
    assert weight.numel() == 2048
    assert not torch.equal(weight[:48], weight[1000:1048]) and not torch.equal(weight[:48], weight[2000:])
    assert weight.abs().min() > 0


# Options --------------------------------------------------------------------------------------------------------------


def test_dropout_acts_in_training_only():
    model, x = build(dropout=0.5), tokens()
    assert not torch.equal(model(x), model(x))
    model.eval()
    reference = build().eval()
    assert torch.equal(model(x), reference(x)), "dropout changes no weight"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_changes_no_gradient(dropout: float):
    """Bit for bit, unconfigured, on the CPU; with dropout the random state is replayed."""
    plain, recomputing = build(dropout=dropout), build(dropout=dropout, activation_checkpointing=True)
    for model in (plain, recomputing):
        torch.manual_seed(3)
        model.loss = model(tokens(), tokens())
        model.loss.backward()
    assert torch.equal(plain.loss, recomputing.loss)
    want = gradients(plain)
    for name, grad in gradients(recomputing).items():
        assert torch.equal(grad, want[name]), name


@pytest.mark.parametrize("case", ["frozen embeddings", "autocast"])
def test_activation_checkpointing_changes_no_gradient_under(case: str):
    """A reentrant checkpoint gives no gradient to a function whose input needs none, and forgets autocast."""
    found = []
    for recompute in (False, True):
        model = build(activation_checkpointing=recompute)
        model.wte.weight.requires_grad_(case == "autocast")
        model.wpe.weight.requires_grad_(case == "autocast")
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            loss = model(tokens(), tokens())
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(g is not None and torch.equal(g, want) for g, want in zip(found[1], found[0], strict=True))


def test_activation_checkpointing_recomputes_blocks_and_only_in_training():
    model = build(activation_checkpointing=True)
    calls = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    loss = model(tokens(), tokens())
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 4, "once more in the backward pass"
    with torch.no_grad():
        model(tokens())
    model.eval()(tokens(), tokens()).backward()
    assert len(calls) == 8, "evaluation keeps what it computes"


def test_bfloat16_is_sane():
    """The loss of a bf16 module is float32, and the float32 model's within what bf16 weights and activations allow."""
    exact, low = build(bias=True), build(bias=True).bfloat16()
    loss, want = low(tokens(), tokens()), exact(tokens(), tokens())
    assert loss.dtype == torch.float32 and low(tokens()).dtype == torch.bfloat16
    # bf16 rounds each value by up to 2^-9 = 0.2 %; logits here are ~0.1, so the loss moves by less than 0.01
    assert abs(loss.item() - want.item()) < 0.01
    assert loss.item() != loss.bfloat16().item(), "and is not rounded to bf16 on the way"
    loss.backward()
    want.backward()
    for name, grad in gradients(low).items():
        reference = exact.get_parameter(name).grad
        error = (grad.float() - reference).norm() / reference.norm()
        assert error < 0.05, f"{name}: {error}"  # a few roundings of 2^-9 in a row, relative to the whole tensor


def test_compiled_model_gives_the_same_loss():
    model = build(n_layer=1)
    eager = model(tokens(), tokens())
    eager.backward()
    want = gradients(model)
    model.zero_grad()
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens(), tokens())  # no C++ compiler needed
    loss.backward()
    torch.testing.assert_close(loss, eager)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, want[name], rtol=1e-4, atol=1e-7, msg=name)  # float32 sums in another order


def test_weights_that_are_written_next_are_zeros():
    shape = ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=8, vocab_size=64)
    with not_drawn():
        parameters = dict(GPT(shape).named_parameters())
    assert not any(p.any() for name, p in parameters.items() if p.dim() > 1)
    torch.manual_seed(0)
    first = GPT(shape).state_dict()
    torch.manual_seed(0)
    assert all(torch.equal(value, first[name]) for name, value in GPT(shape).state_dict().items())
    assert first["wte.weight"].std() > 0

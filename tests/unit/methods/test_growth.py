"""Growths against definitions of their own, matrix by matrix in float64; what they promise of the function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.data.corpus import open_tokens
from mst_scale.data.sampler import Sampler
from mst_scale.errors import UserError
from mst_scale.methods import METHODS, Growth
from mst_scale.methods.baselines.larger_models import SIDES, Operators, widths
from mst_scale.models.gpt import GPT
from mst_scale.pretrain.growth import GrowthGradients
from tests.support import tiny_run

SMALL = ModelConfig(n_layer=2, n_head=2, n_embd=16, seq_length=12, vocab_size=30, vocab_multiple=4)


def growth(name: str, **options) -> Growth:
    method = METHODS[name]
    return method.growth(method.options(**options))


def weights_of(config: ModelConfig, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: parameter.shape for name, parameter in GPT(config).named_parameters()}
    return {name: 0.3 * torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}


def logits(config: ModelConfig, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = torch.arange(3 * config.seq_length).view(3, -1) * 7 % config.vocab_size
    with torch.no_grad():
        return torch.func.functional_call(GPT(config).double(), weights, (tokens,))


def no_gradients(weights, step):
    raise AssertionError("this growth is not trained")


def test_stack_repeats_the_layers_in_their_order():
    large = replace(SMALL, n_layer=6)
    small = weights_of(SMALL)
    grown = growth("stack").grow(small, SMALL, large, no_gradients, 0)
    assert {name: tuple(weight.shape) for name, weight in grown.items()} == {
        name: tuple(parameter.shape) for name, parameter in GPT(large).named_parameters()
    }
    for name, weight in grown.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = {"0": "0", "1": "1", "2": "0", "3": "1", "4": "0", "5": "1"}[parts[1]]
        assert torch.equal(weight, small[".".join(parts)]), name


@pytest.mark.parametrize("new_layers", ["copy", "random", "zero"])
def test_expand_puts_layers_behind_those_of_the_smaller_model(new_layers):
    config = replace(SMALL, n_layer=2, bias=True)
    large, small = replace(config, n_layer=5), weights_of(config)
    grown = growth("expand", new_layers=new_layers).grow(small, config, large, no_gradients, 7)
    fresh = GPT(large)
    assert {name: tuple(weight.shape) for name, weight in grown.items()} == {
        name: tuple(parameter.shape) for name, parameter in fresh.named_parameters()
    }
    assert all(torch.equal(grown[name], weight) for name, weight in small.items()), "what was there stays"
    if new_layers == "zero":
        torch.testing.assert_close(logits(large, grown), logits(config, small), rtol=1e-12, atol=1e-12)
    if new_layers == "copy":
        assert torch.equal(grown["blocks.4.mlp.up.weight"], small["blocks.0.mlp.up.weight"])
    if new_layers == "random":
        again = growth("expand", new_layers=new_layers).grow(small, config, large, no_gradients, 7)
        other = growth("expand", new_layers=new_layers).grow(small, config, large, no_gradients, 8)
        assert all(torch.equal(grown[name], again[name]) for name in grown)
        assert not torch.equal(grown["blocks.3.mlp.up.weight"], other["blocks.3.mlp.up.weight"])
        for name, parameter in fresh.named_parameters():
            if name.startswith(("blocks.2", "blocks.3", "blocks.4")):
                spread = float(parameter.detach().std())
                assert float(grown[name].std()) == pytest.approx(spread, rel=0.2, abs=1e-12), name
                assert float(grown[name].mean()) == pytest.approx(float(parameter.detach().mean()), abs=3e-3), name


@pytest.mark.parametrize(("tied", "bias"), [(True, False), (True, True), (False, True)])
def test_ligo_matrix_by_matrix(tied, bias):
    """Any B and D, in the paper's form: W_l = Σ_k D_lk · B_out W_k A_inᵀ, with A = B over the number of copies."""
    config = replace(SMALL, tied_head=tied, bias=bias)
    large = replace(config, n_layer=3, n_embd=40, n_head=5, d_ff=100)
    small = weights_of(config)
    operators = Operators(config, large, small["wte.weight"], noise=0.1, seed=1)
    generator = torch.Generator().manual_seed(9)
    for matrix in operators.parameters:
        matrix.copy_(torch.randn(matrix.shape, generator=generator))
    grown, b, d = operators.grown(small), operators.width, operators.depth
    assert set(b) == {"stream", "q", "k", "v", "hidden"} and set(d) == {*SIDES, "ln_1", "ln_2"}

    def a(name: str) -> torch.Tensor:
        wide, narrow = b[name].shape
        copies = [sum(1 for i in range(wide) if i % narrow == j) for j in range(narrow)]
        return torch.stack([b[name][:, j] / copies[j] for j in range(narrow)], dim=1)

    def matrix(layer: int, kind: str, sides: tuple[str, str], name: str, rows: slice = slice(None)) -> torch.Tensor:
        outputs, inputs = b[sides[0]], a(sides[1])
        wide = [torch.einsum("po,oi,ni->pn", outputs, small[f"blocks.{k}.{name}"][rows], inputs) for k in (0, 1)]
        return d[kind][layer, 0] * wide[0] + d[kind][layer, 1] * wide[1]

    def vector(layer: int, kind: str, outputs: str, name: str, rows: slice = slice(None)) -> torch.Tensor:
        wide = [torch.einsum("po,o->p", b[outputs], small[f"blocks.{k}.{name}"][rows]) for k in (0, 1)]
        return d[kind][layer, 0] * wide[0] + d[kind][layer, 1] * wide[1]

    last = a("stream") if tied else b["stream"]  # the norm before a tied head
    expected = {
        "wte.weight": torch.einsum("vi,pi->vp", small["wte.weight"], b["stream"]),
        "wpe.weight": torch.einsum("ti,pi->tp", small["wpe.weight"], b["stream"]),
        **{name: torch.einsum("i,pi->p", small[name], last) for name in small if name.startswith("ln_f.")},
    }
    if not tied:
        expected["lm_head.weight"] = torch.einsum("vi,ni->vn", small["lm_head.weight"], a("stream"))
    thirds = {"q": slice(0, 16), "k": slice(16, 32), "v": slice(32, 48)}
    for at in range(3):
        block = {
            "ln_1.weight": vector(at, "ln_1", "stream", "ln_1.weight"),
            "ln_2.weight": vector(at, "ln_2", "stream", "ln_2.weight"),
            "attention.qkv.weight": torch.cat(
                [matrix(at, name, (name, "stream"), "attention.qkv.weight", rows) for name, rows in thirds.items()]
            ),
            "attention.proj.weight": matrix(at, "attention.proj", ("stream", "v"), "attention.proj.weight"),
            "mlp.up.weight": matrix(at, "mlp.up", ("hidden", "stream"), "mlp.up.weight"),
            "mlp.down.weight": matrix(at, "mlp.down", ("stream", "hidden"), "mlp.down.weight"),
        }
        if bias:
            qkv = [vector(at, name, name, "attention.qkv.bias", rows) for name, rows in thirds.items()]
            block["attention.qkv.bias"] = torch.cat(qkv)
            makes = {"ln_1": "stream", "ln_2": "stream", "attention.proj": "stream", "mlp.up": "hidden"}
            for name, outputs in {**makes, "mlp.down": "stream"}.items():
                block[f"{name}.bias"] = vector(at, name, outputs, f"{name}.bias")
        expected |= {f"blocks.{at}.{name}": weight for name, weight in block.items()}
    assert grown.keys() == expected.keys() == dict(GPT(large).named_parameters()).keys()
    for name, weight in expected.items():
        torch.testing.assert_close(grown[name], weight, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "wider",
    [
        {"n_embd": 32, "n_head": 4},
        {"n_embd": 48, "n_head": 6, "d_ff": 100},
        {"d_ff": 100},
        {"n_embd": 32, "n_head": 4, "n_layer": 5},
    ],
    ids=str,
)
def test_the_first_operators_keep_the_function_where_the_width_is_a_multiple(wider, tied):
    """The logits are those of the small model, its layers stacked where there are more of them."""
    config = replace(SMALL, bias=True, tied_head=tied)
    small, large = weights_of(config), replace(config, **wider)
    grown = growth("ligo", steps=0, noise=0.0).grow(small, config, large, no_gradients, 0)
    deep = replace(config, n_layer=large.n_layer)
    stacked = {
        name: small[name.replace(f"blocks.{layer}.", f"blocks.{layer % 2}.")]
        for name in dict(GPT(deep).named_parameters())
        for layer in [int(name.split(".")[1]) if name.startswith("blocks.") else 0]
    }
    torch.testing.assert_close(logits(large, grown), logits(deep, stacked), rtol=1e-12, atol=1e-12)


def test_they_nearly_keep_it_where_it_is_not():
    small, large = weights_of(SMALL), replace(SMALL, n_embd=24, n_head=3)
    grown = growth("ligo", steps=0, noise=0.0).grow(small, SMALL, large, no_gradients, 0)
    before, after = logits(SMALL, small), logits(large, grown)
    assert 1e-6 < (after - before).std() < 0.25 * before.std()


def test_noise_parts_the_copies_and_the_seed_decides_it():
    small, large = weights_of(SMALL), replace(SMALL, n_embd=32, n_head=4)
    operators = Operators(SMALL, large, small["wte.weight"], noise=0.01, seed=1)
    for name, (mine, theirs) in widths(SMALL, large).items():
        matrix, eye = operators.width[name], torch.eye(theirs).double()
        assert torch.equal(matrix[:theirs], eye)
        apart = (matrix[theirs:] - eye[torch.arange(theirs, mine) % theirs]).norm(dim=1)
        assert (apart > 0).all() and float(apart.mean()) == pytest.approx(0.01, rel=0.3), name
    one, again, other = (
        growth("ligo", steps=0).grow(small, SMALL, large, no_gradients, seed)["wte.weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(one[:, :16], small["wte.weight"])


def test_training_lowers_the_loss_of_the_first_operators(tmp_path: Path):
    small = replace(SMALL, vocab_size=64, seq_length=tiny_run.CONTEXT)
    large = replace(small, n_layer=4, n_embd=32, n_head=4)
    folder = tiny_run.corpus(tmp_path / "corpus")
    train, val = (Sampler(open_tokens(folder, split), small.seq_length, 7) for split in ("train", "val"))
    torch.manual_seed(1)
    weights = {name: p.detach() for name, p in GPT(small).named_parameters()}
    data = GrowthGradients(small, train, 8, 8)
    optimizer = torch.optim.Adam(weights.values(), lr=1e-2)
    for step in range(40):
        for name, gradient in data(weights, step).items():
            weights[name].grad = gradient
        optimizer.step()

    def loss(method: Growth) -> float:
        data = GrowthGradients(large, train, 8, 4)
        grown = method.grow(weights, small, large, data, 5)
        assert len(data.losses) == method.steps
        check = GrowthGradients(large, val, 16, 16)
        check(grown, 0)
        return check.losses[0]

    plain, trained = loss(growth("ligo", steps=0)), loss(growth("ligo", steps=30, rate=1e-3))
    assert trained < plain - 0.05
    assert loss(growth("ligo", steps=30, rate=1e-3)) == trained, "the same seed, the same weights"


def test_flops_of_the_operators_by_hand():
    """Each product of an application, counted one by one; thrice in a step of training, once more at the end."""
    large = replace(SMALL, n_layer=3, n_embd=32, n_head=4, d_ff=100)

    def product(m: int, n: int, p: int) -> int:
        return m * p * (n + n - 1)

    one = 0
    for (p, o), (n, i) in [
        ((32, 16), (32, 16)), ((32, 16), (32, 16)), ((32, 16), (32, 16)), ((32, 16), (32, 16)),
        ((100, 64), (32, 16)), ((32, 16), (100, 64)),
    ]:  # fmt: skip
        one += 2 * (product(p, o, i) + product(p, i, n)) + product(3, 2, p * n)
    one += product(32 + 12, 16, 32)  # embeddings of tokens (30 in rows of 4) and of positions
    assert growth("ligo", steps=7).flops(SMALL, large) == 22 * one
    untied = replace(SMALL, tied_head=False)
    assert growth("ligo", steps=0).flops(untied, replace(large, tied_head=False)) == one + product(32, 16, 32)
    assert growth("stack").flops(SMALL, replace(SMALL, n_layer=4)) == 0


@pytest.mark.parametrize(
    ("method", "key", "change"),
    [
        ("stack", "n_layer", {"n_layer": 3}),
        ("stack", "n_embd", {"n_layer": 4, "n_embd": 32}),
        ("stack", "n_head", {"n_layer": 4, "n_head": 4}),
        ("stack", "d_ff", {"n_layer": 4, "d_ff": 65}),
        ("expand", "n_layer", {"n_layer": 1}),
        ("expand", "n_embd", {"n_layer": 3, "n_embd": 32}),
        ("expand", "d_ff", {"n_layer": 3, "d_ff": 65}),
        ("ligo", "n_layer", {"n_layer": 1}),
        ("ligo", "n_embd", {"n_embd": 8, "n_head": 1}),
        ("ligo", "d_ff", {"d_ff": 60}),
        ("ligo", "n_head to 4", {"n_embd": 32}),
        ("ligo", "n_head .*: set another n_embd", {"n_embd": 36, "n_head": 3}),
        ("ligo", "vocab_size", {"vocab_size": 31}),
        ("ligo", "vocab_multiple", {"vocab_multiple": 64}),
        ("stack", "seq_length", {"seq_length": 24}),
        ("stack", "bias", {"bias": True}),
        ("stack", "tied_head", {"tied_head": False}),
        ("stack", "arch", {"arch": "bert"}),
    ],
)
def test_a_pair_of_models_that_does_not_fit_is_rejected(method, key, change):
    with pytest.raises(UserError, match=rf"model\.{key}"):
        growth(method).check_supported(SMALL, replace(SMALL, **change))


def test_a_bert_is_not_grown():
    bert = replace(SMALL, arch="bert")
    with pytest.raises(UserError, match=r"model\.arch"):
        growth("stack").check_supported(bert, replace(bert, n_layer=4))


def test_new_layers_are_one_of_three():
    with pytest.raises(UserError, match=r"mst.options.new_layers"):
        METHODS["expand"].options(new_layers="big")


@pytest.mark.parametrize("options", [{"steps": -1}, {"rate": 0.0}, {"noise": -0.1}])
def test_options_that_cannot_be(options):
    with pytest.raises(UserError, match=f"mst.options.{next(iter(options))}"):
        METHODS["ligo"].options(**options)

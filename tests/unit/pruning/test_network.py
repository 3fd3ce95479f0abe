"""The order of the network: what each block's layers see is what the blocks before it, pruned, give them."""

import copy
import dataclasses
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import nn

from mst_scale.config import ModelConfig, TargetsConfig
from mst_scale.data.sampler import open_sampler
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import UserError
from mst_scale.models import build
from mst_scale.pruning import METHODS, prune_model
from mst_scale.pruning.method import NM, Amount, products
from mst_scale.pruning.network import calibration_batches, open_calibration
from tests.support import tiny_run
from tests.support.twins import GPT2, MASKED, Twins, randomised

HALF = Amount(Fraction(1, 2))
looking = pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.of_inputs is not None])
both = pytest.mark.parametrize("twins", [pytest.param(GPT2, id="gpt"), pytest.param(MASKED, id="bert")])


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(7)
    return [(torch.randint(0, 101, (2, 32)), torch.randint(0, 101, (2, 32))) for _ in range(count)]


def model_of(twins: Twins, tied: bool) -> nn.Module:
    return randomised(build(dataclasses.replace(twins.small, tied_head=tied))).eval().double()


def pruned_plainly(model: nn.Module, method_name: str) -> None:
    """Block by block, each time with the whole model from its first token on."""
    method = METHODS[method_name]
    assert method.of_inputs is not None
    stages = [dict(block.named_modules()) for block in model.blocks]
    stages.append({name: m for name, m in model.named_children() if name in ("transform", "lm_head")})
    for stage in stages:
        layers = [module for module in stage.values() if isinstance(module, nn.Linear)]
        seen: dict[nn.Module, list[torch.Tensor]] = {layer: [] for layer in layers}

        def see(layer, given, _, seen=seen):
            seen[layer].append(given[0].flatten(0, -2))

        handles = [layer.register_forward_hook(see) for layer in layers]
        for tokens, targets in batches():
            model(tokens, targets)
        for handle in handles:
            handle.remove()
        for layer in layers:
            if seen[layer]:
                method.prune(layer.weight.data, method.of_inputs(torch.cat(seen[layer])), HALF)


@looking
@both
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_each_block_gets_the_outputs_of_pruned_blocks(twins: Twins, tied: bool, name: str):
    """Sums are taken in another order: what stays differs by rounding, and no score lies that close to the next."""
    ours = model_of(twins, tied)
    plain = copy.deepcopy(ours)
    names = choose_targets(ours, TargetsConfig())
    left = prune_model(ours, METHODS[name], dict.fromkeys(names, HALF), batches())
    pruned_plainly(plain, name)
    bert = twins is MASKED  # its decoder's weight goes past nn.Linear, tied or not
    assert left == (["wte.weight"] if tied else ["lm_head.weight"] if bert else [])
    for (key, found), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found == 0, expected == 0), key
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        if key in names and key not in left:
            assert (found == 0).double().mean() == pytest.approx(0.5, abs=1e-3)


@looking
def test_a_model_that_computes_nothing_finite_is_rejected(name: str):
    model = model_of(GPT2, True)
    model.wpe.weight.data[3] = float("inf")
    with pytest.raises(UserError, match=r"blocks\.0\.attention\.qkv\.weight"):
        prune_model(model, METHODS[name], {"blocks.0.attention.qkv.weight": HALF}, batches(1))


@looking
def test_nothing_to_prune_by_is_rejected(name: str):
    with pytest.raises(UserError, match=r"wte\.weight.*mst\.targets.*--method magnitude"):
        prune_model(model_of(GPT2, True), METHODS[name], {"wte.weight": HALF}, batches(1))


@pytest.mark.parametrize("name", METHODS)
def test_a_weight_that_is_not_finite_is_named(name: str):
    model = model_of(GPT2, True)
    found = "blocks.1.mlp.up.weight"
    with torch.no_grad():
        dict(model.named_parameters())[found][0, 0] = float("nan")
    with pytest.raises(
        UserError, match=r"mlp\.up\.weight has a weight that is not finite: choose an earlier checkpoint"
    ):
        prune_model(model, METHODS[name], {found: HALF}, batches())


def test_the_model_is_left_without_hooks():
    model = model_of(GPT2, True)
    prune_model(model, METHODS["wanda"], {"blocks.1.mlp.up.weight": HALF}, batches(1))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert [name for name, p in model.named_parameters() if (p == 0).sum() > 1000] == ["blocks.1.mlp.up.weight"]


# --- a trained model ---

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=64, seq_length=tiny_run.CONTEXT, vocab_size=64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[nn.Module, str]:
    """(a GPT after 80 steps, its corpus)."""
    folder = str(tiny_run.corpus(tmp_path_factory.mktemp("corpus")))
    torch.manual_seed(0)
    model, sampler = build(CONFIG), open_sampler(folder, "train", CONFIG, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(80):
        optimizer.zero_grad()
        model(*sampler.batch(step, range(16))).backward()
        optimizer.step()
    return model.eval(), folder


@pytest.mark.parametrize("amount", [HALF, Amount.of(NM(2, 4)), Amount.of(NM(4, 8))])
@torch.no_grad()
def test_outputs_of_trained_layers_suffer_least_with_sparsegpt(trained, amount: Amount):
    """Of each layer by itself, with the inputs that it has in the dense model."""
    model, folder = copy.deepcopy(trained[0]), trained[1]
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    grams: dict[str, torch.Tensor] = {}

    def see(name: str, _: nn.Module, given: tuple[torch.Tensor]) -> None:
        grams[name] = grams.get(name, 0) + products(given[0].flatten(0, -2).double())

    for name, layer in layers.items():
        layer.register_forward_pre_hook(partial(see, name))
    for tokens, _ in calibration_batches(open_calibration(folder, CONFIG, 64), 64):
        model(tokens)
    for name, layer in layers.items():
        errors = {}
        for how, method in METHODS.items():
            before, gram = layer.weight.double(), grams[name]
            after = before.clone()
            method.prune(after, gram.diagonal() if how == "wanda" else gram, amount)
            errors[how] = float(((before - after) @ gram * (before - after)).sum())
        assert errors["sparsegpt"] <= min(errors["wanda"], errors["magnitude"]), (name, errors)


@torch.no_grad()
def test_a_trained_model_loses_least_with_sparsegpt(trained):
    """80 % of each layer."""
    dense, folder = trained
    seen = calibration_batches(open_calibration(folder, CONFIG, 64), 64)
    validation, losses = open_sampler(folder, "val", CONFIG, 1).batch(0, range(64)), {}
    names = [name for name in choose_targets(dense, TargetsConfig()) if name != "wte.weight"]
    for how, method in METHODS.items():
        model = copy.deepcopy(dense)
        prune_model(model, method, dict.fromkeys(names, Amount(Fraction(4, 5))), seen)
        losses[how] = float(model(*validation))
    assert float(dense(*validation)) < losses["sparsegpt"] < min(losses["wanda"], losses["magnitude"])

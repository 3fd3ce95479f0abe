import dataclasses

import pytest
import torch
import torch.nn.functional as F

from mst_scale.config import MODELS, ModelConfig, TargetsConfig
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import UserError
from mst_scale.flops.formulas import matrices
from mst_scale.hybrid_sparse_attention import Pattern, set_pattern
from mst_scale.models import BERT, GPT, build
from tests.ranks.models.test_zero_init import compare_training
from tests.support.pool import run

TOY = ModelConfig(arch="bert", n_layer=2, n_head=2, n_embd=32, seq_length=16, vocab_size=60, bias=True)


def made(seed: int = 0, **changes: object) -> BERT:
    torch.manual_seed(seed)
    return BERT(dataclasses.replace(TOY, **changes))


def tokens() -> torch.Tensor:
    return torch.randint(0, 60, (3, 16), generator=torch.Generator().manual_seed(7))


def targets() -> torch.Tensor:
    return torch.where(torch.arange(16) % 5 == 1, tokens().roll(1, 0), -1)


def gradients(model: BERT) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


# 109,514,298 is Hugging Face's count for `BertForMaskedLM` of bert-base-uncased, 335,174,458 of bert-large-uncased.
@pytest.mark.parametrize(("name", "total"), [("bert-base", 109_514_298), ("bert-large", 335_174_458)])
def test_parameters_of_presets(name: str, total: int):
    from transformers import BertConfig, BertForMaskedLM

    from mst_scale.hugging_face.names import hugging_face_config

    config = ModelConfig(**MODELS[name] | {"vocab_multiple": 1})
    with torch.device("meta"):
        ours, theirs = BERT(config), BertForMaskedLM(BertConfig(**hugging_face_config(config)))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) == total


def test_the_config_chooses_the_model():
    assert isinstance(build(TOY), BERT)
    assert isinstance(build(dataclasses.replace(TOY, arch="gpt")), GPT)
    for wrong, arch in ((GPT, "bert"), (BERT, "gpt")):
        with pytest.raises(UserError, match=f"model.arch is '{arch}'"):
            wrong(dataclasses.replace(TOY, arch=arch))


def test_it_sees_both_sides():
    model, x = made().eval(), tokens()
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 60
    assert (model(changed) - model(x)).abs().amax(-1).min() > 1e-6, "every position notices"
    set_pattern(model, Pattern("strided", 3))
    moved = (model.blocks[0](x_of(model, changed)) - model.blocks[0](x_of(model, x))).abs().amax(-1)
    assert ((moved > 0) == Pattern("strided", 3).mask(16, causal=False)[:, 9]).all(), "a sparse one who is allowed to"


def x_of(model: BERT, tokens: torch.Tensor) -> torch.Tensor:
    return model.ln_e(model.wte(tokens) + model.wpe.weight + model.wtt.weight[0])


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_counts_chosen_positions_only(tied: bool):
    """And the head computes no others: the same loss and gradients as from the logits of every position."""
    model = made(tied_head=tied)
    rows = []
    model.ln_h.register_forward_hook(lambda _, x, __: rows.append(x[0].shape))
    expected = F.cross_entropy(model(tokens()).view(-1, 64), targets().view(-1), ignore_index=-1)
    expected.backward()
    want = gradients(model)
    model.zero_grad()
    loss = model(tokens(), targets())
    loss.backward()
    assert rows == [(3, 16, 32), (9, 32)]
    torch.testing.assert_close(loss, expected)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, want[name], rtol=1e-4, atol=1e-7, msg=name)  # other order of float32 sums


def test_initialisation_is_berts():
    model = made(n_layer=4, n_embd=128, vocab_size=1000, tied_head=False)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (1.0 if "ln_" in name and name.endswith("weight") else 0.0)).all(), name
        else:
            # six standard errors of a sample of n normals: never by chance (the seed is fixed)
            assert abs(p.std().item() / 0.02 - 1) < 6 / (2 * p.numel()) ** 0.5, name
    assert torch.equal(made(1).transform.weight, made(1).transform.weight)
    assert not torch.equal(made(1).transform.weight, made(2).transform.weight)


@pytest.mark.parametrize("head", [True, False])
def test_targets_are_matrices_never_positions_or_types(head: bool):
    model = made()
    layer = ["attention.qkv", "attention.proj", "mlp.up", "mlp.down"]
    inner = [f"blocks.{i}.{name}.weight" for i in range(2) for name in layer] + ["transform.weight"]
    chosen = set(choose_targets(model, TargetsConfig(lm_head=head)))
    assert chosen == set(inner) | ({"wte.weight"} if head else set())


@pytest.mark.parametrize("tied", [True, False])
def test_the_ledger_lists_its_matrices(tied: bool):
    config = dataclasses.replace(TOY, tied_head=tied)
    listed = {m.name: (m.outputs, m.inputs) for m in matrices(config)}
    embeddings = {"wpe.weight", "wtt.weight"} | (set() if tied else {"wte.weight"})
    shapes = {name: tuple(p.shape) for name, p in BERT(config).named_parameters() if p.dim() == 2}
    assert listed == {name: shape for name, shape in shapes.items() if name not in embeddings}


def test_activation_checkpointing_changes_no_gradient():
    plain, recomputing = made(), made(activation_checkpointing=True)
    calls = []
    recomputing.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, recomputing):
        model(tokens(), targets()).backward()
    assert len(calls) == 2
    want = gradients(plain)
    for name, grad in gradients(recomputing).items():
        assert torch.equal(grad, want[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_zero3_trains_as_the_plain_model(tied: bool):
    """Built under `deepspeed.zero.Init`, the head's own bias included."""
    run(compare_training, 2, dataclasses.replace(TOY, tied_head=tied, activation_checkpointing=tied))


def test_bfloat16_is_sane():
    exact, low = made(), made().bfloat16()
    loss, want = low(tokens(), targets()), exact(tokens(), targets())
    assert loss.dtype == torch.float32
    # bf16 rounds each value by up to 2^-9 = 0.2 %; logits here are ~0.1, so the loss moves by less than 0.01
    assert abs(loss.item() - want.item()) < 0.01
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in low.parameters())


def test_a_sequence_longer_than_the_positions_is_rejected():
    with pytest.raises(UserError, match=r"17 tokens .* model\.seq_length = 16"):
        made()(torch.zeros(1, 17, dtype=torch.long))

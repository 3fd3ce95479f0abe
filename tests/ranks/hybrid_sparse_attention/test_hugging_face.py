"""Models of transformers with our attention: the definition's logits, patterns that switch, and what is refused."""

import logging
import types

import pytest
import torch

import mst_scale
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, attach, set_pattern
from mst_scale.hybrid_sparse_attention.hugging_face import hugging_face_attention, unsupported_reason
from tests.support import pool
from tests.support.messages import logged
from tests.support.toys import deepspeed_config

LENGTH = 24
SPARSE = Pattern("strided", 5)


def gpt2(**more):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=LENGTH, vocab_size=64, **(none | more))
    return GPT2LMHeadModel(config)


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48,
        max_position_embeddings=LENGTH, vocab_size=64, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokens(batch=2):
    return torch.randint(64, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def reference(model, pattern, padding=None):
    """Their own attention under a mask of ours, given as a 4-D additive mask."""
    seen = pattern.mask(LENGTH)[None, None]
    if padding is not None:
        seen = seen & padding[:, None, None, :].bool()
    model.set_attn_implementation("eager")
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return model(tokens(), attention_mask=mask.expand(2, 1, LENGTH, LENGTH)).logits


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("pattern", [SPARSE, Pattern("fixed", 5), Pattern("dense")], ids=lambda p: p.kind)
@torch.no_grad()
def test_the_logits_are_those_of_a_masked_model(make, pattern):
    model = make().eval()
    expected = reference(model, pattern)
    if pattern.kind != "dense":
        model.set_attn_implementation("sdpa")
        assert (model(tokens()).logits - expected).abs().max() > 1e-3, "the pattern matters"
    assert attach(model, pattern) is None
    assert (model(tokens()).logits - expected).abs().max() < 1e-5  # float32 sums in another order


@torch.no_grad()
def test_each_layer_has_its_scale():
    model = gpt2(scale_attn_by_inverse_layer_idx=True).eval()
    expected = reference(model, SPARSE)
    attach(model, SPARSE)
    assert (model(tokens()).logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("make", [gpt2, llama])
@torch.no_grad()
def test_padding_and_a_cache_give_the_same(make):
    from transformers import StaticCache

    model = make().eval()
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[0, 19:] = 0
    expected, whole = reference(model, SPARSE, padding), reference(model, SPARSE)
    attach(model, SPARSE)
    found = model(tokens(), attention_mask=padding).logits
    assert (found - expected)[padding.bool()].abs().max() < 1e-5
    for empty in (None, StaticCache(model.config, max_cache_len=LENGTH + 7), StaticCache(model.config, LENGTH)):
        cache, pieces = empty, []
        for start, end in ((0, 9), (9, 10), (10, LENGTH)):  # a prompt, one token, several
            out = model(tokens()[:, start:end], past_key_values=cache, use_cache=True)
            cache, pieces = out.past_key_values, [*pieces, out.logits]
        assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-5, type(cache)


@pytest.mark.parametrize("make", [gpt2, llama])
@torch.no_grad()
def test_padding_and_a_static_cache_together(make):
    from transformers import StaticCache

    model = make().eval()
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[0, :4], padding[1, 7:10] = 0, 0
    expected = reference(model, SPARSE, padding)
    attach(model, SPARSE)
    cache = StaticCache(model.config, max_cache_len=LENGTH + 7)
    for start, end in ((0, 9), (9, 10), (10, LENGTH)):
        known, places = padding[:, :end], torch.arange(start, end)[None]
        out = model(tokens()[:, start:end], attention_mask=known, position_ids=places, past_key_values=cache)
        real = padding[:, start:end].bool()
        assert (out.logits - expected[:, start:end])[real].abs().max() < 1e-5, (start, end)


def test_gradients_flow():
    model = llama()
    attach(model, SPARSE)
    model(tokens(), labels=tokens()).loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits = reference(model, SPARSE)[:, :-1].reshape(-1, 64)
    torch.nn.functional.cross_entropy(logits, tokens()[:, 1:].reshape(-1)).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def train(rank, world, make, more):
    config = deepspeed_config(2, world)
    config["training"] = {"steps": 12}
    config["mst"] = {
        "method": "mst",
        "sparsity": {"max": 0.9},
        "topology": {"interval": 2},
        "attention": {"pattern": "strided", "stride": 5},
        "targets": {"include": ["*layers.*" if make is llama else "transformer.h.*"], "lm_head": False},
    }
    with logged(logging.WARNING) as warnings:
        engine, *_ = mst_scale.initialize(model=make(**more), config=config)
    text = torch.arange(8 * LENGTH).view(8, LENGTH) % 7
    losses, patterns = [], []
    for _ in range(12):
        kinds = {m.mst_pattern.kind for m in engine.module.modules() if hasattr(m, "mst_pattern")}
        loss = engine(input_ids=text, labels=text).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        patterns.append(kinds)
    return losses, patterns, engine.mst.schedule.sparse_until, warnings


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_pattern_switches_by_schedule(make):
    for losses, patterns, until, _ in pool.run(train, 2, make, {}):
        assert patterns == [{"strided"}] * until + [{"dense"}] * (12 - until) and 0 < until < 12
        assert losses[-1] < losses[0]


def test_an_unsupported_case_gives_the_reason():
    found = pool.run(train, 2, gpt2, {"attn_pdrop": 0.1})
    for losses, patterns, _, _ in found:
        assert patterns == [set()] * 12 and losses[-1] < losses[0]
    warnings = found[0][3]  # those of the first rank are shown
    (line,) = (line for line in warnings if "attention stays dense" in line)
    assert "attention stays dense: GPT2Config has attn_pdrop = 0.1" in line
    assert "attn_pdrop=0.0" in line and "from_pretrained" in line


@pytest.mark.parametrize("sinks", [torch.ones(2), torch.zeros(1)])
def test_unknown_arguments_are_rejected(sinks):
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(UserError, match="s_aux"):
        hugging_face_attention(torch.nn.Identity(), q, q, q, None, s_aux=sinks)


def test_other_layers_are_left_alone():
    from transformers import MistralConfig, MistralForCausalLM

    tiny = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}
    model = MistralForCausalLM(MistralConfig(**tiny, intermediate_size=16, vocab_size=9, sliding_window=4))
    before = model.config._attn_implementation
    assert "sliding window" in attach(model, SPARSE)
    assert model.config._attn_implementation == before and set_pattern(model, SPARSE) == 0
    assert "SelfAttention" in attach(torch.nn.Linear(2, 2), SPARSE)
    assert "cross-attention" in attach(gpt2(add_cross_attention=True), SPARSE)
    latent = types.SimpleNamespace(qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    assert "another size" in unsupported_reason(latent)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("pattern", [SPARSE, Pattern("fixed", 5)], ids=lambda p: p.kind)
@torch.no_grad()
def test_packed_texts_are_computed_as_if_each_was_alone(make, pattern):
    model, ids = make().eval(), tokens(1)[:, :18]
    attach(model, pattern)
    positions = torch.cat([torch.arange(7), torch.arange(11)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(ids[:, :7]).logits, model(ids[:, 7:]).logits], dim=1)
    assert (packed - alone).abs().max() < 1e-5


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("pattern", [SPARSE, Pattern("fixed", 5)], ids=lambda p: p.kind)
@torch.no_grad()
def test_padding_before_a_sequence_does_not_move_its_pattern(make, pattern):
    model, alone = make().eval(), tokens(1)[:, :15]
    attach(model, pattern)
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), alone], dim=1)
    mask = (torch.arange(18) >= 3).long()[None]
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    assert (logits[:, 3:] - model(alone).logits).abs().max() < 1e-5
    generated = (model.generate(x, attention_mask=m, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, -6:]
                 for x, m in ((ids, mask), (alone, torch.ones_like(alone))))  # fmt: skip
    assert torch.equal(*generated)


def test_of_a_model_that_reads_images_the_text_is_sparse():
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}

    def llava(**more):
        vision = CLIPVisionConfig(**small, image_size=28, patch_size=14)
        config = LlavaConfig(vision_config=vision, text_config=llama(**more).config)
        return LlavaForConditionalGeneration(config)

    model = llava()
    assert attach(model, SPARSE) is None
    sparse = [name for name, module in model.named_modules() if hasattr(module, "mst_pattern")]
    assert len(sparse) == 2 and all("language_model" in name for name in sparse)
    assert "attention_dropout" in attach(llava(attention_dropout=0.1), SPARSE)

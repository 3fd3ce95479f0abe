"""Decoding token by token gives the logits of the whole model."""

import pytest
import torch

from mst_scale.generation.cache import visible_keys
from mst_scale.generation.decoder import load_decoder
from mst_scale.hybrid_sparse_attention import Pattern
from tests.support.sparse_gpt import DENSE, SHAPE, sparse_gpt, weights_of

PATTERNS = [DENSE, Pattern("strided", 5), Pattern("strided", 1), Pattern("fixed", 7), Pattern("strided", 100)]
# float32 with sums over at most 128 values, in two blocks: rounding of some 1e-6 of the largest logit
RTOL = 2e-5


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_visible_keys_are_those_of_the_pattern(pattern: Pattern):
    mask = pattern.mask(60)
    for position in range(60):
        seen = visible_keys(pattern, position)
        expected = mask[position].nonzero().view(-1)
        assert torch.equal(torch.arange(position + 1) if seen is None else seen, expected), position


@pytest.mark.parametrize("pattern", PATTERNS[:4], ids=str)
@pytest.mark.parametrize("shape", [{}, {"bias": True, "tied_head": False}], ids=["tied", "bias, own head"])
@pytest.mark.parametrize("prompt", [1, 2, 5, 17, 48])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
def test_logits_are_those_of_the_model_at_every_position(fused: bool, prompt: int, shape: dict, pattern: Pattern):
    model = sparse_gpt(0.8, pattern, **shape)
    decoder = load_decoder(weights_of(model, pattern))
    assert decoder.fused
    decoder.fused = fused
    tokens = torch.randint(70, (2, SHAPE["seq_length"]))
    with torch.no_grad():
        expected = model(tokens)
    cache = decoder.new_cache(2, SHAPE["seq_length"])
    found = [decoder.logits(tokens[:, :prompt], cache, last=False)]
    for position in range(prompt, SHAPE["seq_length"]):
        found.append(decoder.logits(tokens[:, position : position + 1], cache))
    assert (torch.cat(found, 1) - expected).abs().max() <= RTOL * expected.abs().max()


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.96])
def test_dense_and_sparse_matrices_give_the_same(sparsity: float):
    model = sparse_gpt(sparsity, head=False)
    decoder = load_decoder(weights_of(model))
    tokens = torch.randint(70, (1, 20))
    with torch.no_grad():
        expected = model(tokens)[:, -1:]
    assert (decoder.logits(tokens, decoder.new_cache(1, 20)) - expected).abs().max() <= RTOL * expected.abs().max()
    forms = {name: type(matrix).__name__ for name, matrix in decoder.matrices.items()}
    assert forms["wte.weight"] == "DenseMatrix"
    assert forms["blocks.0.mlp.up.weight"] == ("SparseMatrix" if sparsity > 0.4 else "DenseMatrix")


def test_bfloat16_weights_are_computed_as_they_are():
    model = sparse_gpt(0.8)
    decoder = load_decoder(weights_of(model), torch.bfloat16)
    tokens = torch.randint(70, (1, 20))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16())
        expected = model(tokens)[:, -1:]
    found = decoder.logits(tokens, decoder.new_cache(1, 20))
    # the position embedding is dense and only read; every product is with float32 activations
    assert (found - expected).abs().max() <= RTOL * expected.abs().max()


def test_only_the_keys_of_the_pattern_are_read():
    pattern = Pattern("strided", 5)
    decoder = load_decoder(weights_of(sparse_gpt(0.8, pattern), pattern))
    tokens = torch.randint(70, (1, 30))
    cache = decoder.new_cache(1, 31)
    decoder.logits(tokens, cache)
    hidden = [key for key in range(30) if not pattern.mask(31)[30, key]]
    for layer in range(2):
        cache.keys[layer][:, :, hidden] = torch.nan
        cache.values[layer][:, :, hidden] = torch.nan
    assert decoder.logits(torch.tensor([[3]]), cache).isfinite().all()


@pytest.mark.parametrize("shape", [{}, {"n_embd": 48, "n_head": 3, "d_ff": 50}], ids=["even", "odd widths"])
@pytest.mark.parametrize("batch", [1, 3, 9, 20])
def test_fused_blocks_are_those_of_torch(batch: int, shape: dict):
    decoder = load_decoder(weights_of(sparse_gpt(0.8, **shape)))
    tokens = torch.randint(70, (batch, 12))
    before = torch.get_num_threads()
    found = []
    try:
        for fused, threads in ((False, 1), (True, 1), (True, 3)):
            torch.set_num_threads(threads)
            decoder.fused = fused
            cache = decoder.new_cache(batch, 12)
            decoder.logits(tokens[:, :2], cache)
            found.append(torch.cat([decoder.logits(tokens[:, i : i + 1], cache) for i in range(2, 12)], 1))
    finally:
        torch.set_num_threads(before)
    assert (found[1] - found[0]).abs().max() <= RTOL * found[0].abs().max()
    assert torch.equal(found[1], found[2])

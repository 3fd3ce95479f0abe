"""Weights are drawn unless all of them are written next."""

import torch

from mst_scale.config import ModelConfig
from mst_scale.models.gpt import GPT
from mst_scale.models.initial_weights import not_drawn


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

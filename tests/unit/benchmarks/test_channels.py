"""The prototype of whole channels: its active weights form a smaller dense layer."""

from __future__ import annotations

import pytest
import torch
from mst_scale.benchmarks.studies import channels

from mst_scale.checkpoints.open_masks import OpenMasks
from mst_scale.config import ModelConfig
from mst_scale.errors import UserError
from mst_scale.models import GPT

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=16, seq_length=8, vocab_size=8)


def test_units_are_active_or_inactive_as_a_whole():
    model = GPT(CONFIG)
    masks = channels.channel_masks(model, 2, 0.25, seed=1)
    assert len(masks) == 8 and "wte.weight" not in masks
    for block in ("blocks.0", "blocks.1"):
        up, down = masks[f"{block}.mlp.up.weight"], masks[f"{block}.mlp.down.weight"]
        neurons = up.all(1)
        assert torch.equal(up, neurons[:, None].expand_as(up)) and torch.equal(down, neurons.expand_as(down))
        assert neurons.sum() == 16
        q, k, v = masks[f"{block}.attention.qkv.weight"].all(1).chunk(3)
        assert torch.equal(q, k) and not torch.equal(q, v), "a score needs both, a value is another unit"
        assert torch.equal(masks[f"{block}.attention.proj.weight"].all(0), v)
        for active in (q, v):
            assert active.view(2, 8).sum(1).tolist() == [2, 2], "as many in each head"
    first, second = (masks[f"blocks.{i}.mlp.up.weight"] for i in range(2))
    assert not torch.equal(first, second)


def test_the_file_is_one_that_a_run_takes(tmp_path, capsys):
    out = tmp_path / "channels.safetensors"
    assert channels.main(["--width", "16", "--heads", "2", "--density", "0.25", "--out", str(out)]) == 0
    assert "8 matrices, 25.0% of their weights active" in capsys.readouterr().out
    expected = channels.channel_masks(GPT(CONFIG), 2, 0.25, seed=1)
    for name, mask in expected.items():
        assert torch.equal(OpenMasks(out).mask(name, tuple(mask.shape)), mask)
    with pytest.raises(UserError, match=r"--density 1\.5"):
        channels.main(["--width", "16", "--density", "1.5", "--out", str(out)])

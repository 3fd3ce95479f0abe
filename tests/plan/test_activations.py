"""What autograd really keeps for backward, by its own hooks, against the formula."""

import gc

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from mst_scale.config import ModelConfig
from mst_scale.hybrid_sparse_attention import Pattern, set_pattern
from mst_scale.models.bert import BERT
from mst_scale.models.gpt import GPT
from mst_scale.plan.activations import activations
from tests.plan import measured

WITHIN = 0.1


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
    wanted = activations(config, 3, dtype.itemsize, recompute).kept
    assert kept(config, 3, dtype, Pattern("dense")) == pytest.approx(wanted, rel=WITHIN)


def test_sparse_attention_keeps_the_same():
    config = ModelConfig(n_layer=2, n_head=2, n_embd=64, seq_length=512, vocab_size=100)
    wanted = activations(config, 2, 4, False).kept
    assert kept(config, 2, torch.float32, Pattern("strided", 64)) == pytest.approx(wanted, rel=WITHIN)

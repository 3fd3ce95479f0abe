"""Construction under `deepspeed.zero.Init` and training under ZeRO-3, on two ranks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mst_scale.config import ModelConfig
from mst_scale.models import GPT
from mst_scale.models import build as model_of
from tests.support.pool import run

TOY = ModelConfig(n_layer=3, n_head=2, n_embd=32, seq_length=16, vocab_size=60, bias=True)
# Many equal layers, so that "one layer" and "the model" are far apart: 24 · 12 · 64² · 4 bytes = 4.7 MB of matrices.
DEEP = ModelConfig(n_layer=24, n_head=2, n_embd=64, seq_length=16, vocab_size=60)


def zero3(bf16: bool = False) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": bf16},
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        # nothing stays gathered: every use of a parameter has to fetch it, the tied head's too
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    }


def build(config: ModelConfig, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return model_of(config)


def build_partitioned(config: ModelConfig, seed: int, bf16: bool = False) -> nn.Module:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=zero3(bf16)):
        return build(config, seed)


class LiveBytes(TorchDispatchMode):
    """Most bytes of tensor memory that were alive at once, looked at after every torch operation.

    Every storage that an operation returns is held by a weak reference until it is freed. (The profiler's allocation
    events would miss what gloo's threads free.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        self.storages = {ref: size for ref, size in self.storages.items() if not ref.expired()}
        self.most = max(self.most, sum(self.storages.values()))
        return result


def peak_bytes(construct: Callable[[], nn.Module]) -> int:
    with LiveBytes() as live:
        construct()
    return live.most


def compare_memory(rank: int, world: int) -> tuple[int, int]:
    build_partitioned(TOY, 0)  # DeepSpeed's own first-time buffers
    whole = peak_bytes(lambda: build(DEEP, 0))
    return whole, peak_bytes(lambda: build_partitioned(DEEP, 0))


def test_no_rank_ever_has_the_whole_model():
    with torch.device("meta"):
        sizes = [4 * p.numel() for p in GPT(DEEP).parameters()]
    model, largest = sum(sizes), max(sizes)
    for whole, partitioned in run(compare_memory, 2):
        assert whole >= model, "the measure sees a model that is whole"
        # its half, and of the parameter at hand the full values and one copy (measured: 2 · largest)
        assert model / 2 <= partitioned <= model / 2 + 3 * largest < 0.6 * model


def compare_weights(rank: int, world: int, bf16: bool) -> None:
    import deepspeed

    # ranks that were seeded differently still agree: rank 0 decides
    whole, partitioned = build(TOY, 5), build_partitioned(TOY, 5 + rank, bf16)
    for (name, p), q in zip(partitioned.named_parameters(), whole.parameters(), strict=True):
        assert p.numel() == 0, f"{name} is not partitioned"
        with deepspeed.zero.GatheredParameters([p]):
            assert p.dtype == (torch.bfloat16 if bf16 else torch.float32)
            assert torch.equal(p.data, q.data.to(p.dtype)), name


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_are_those_of_the_plain_model(bf16: bool):
    """Bit for bit; in bf16 the float32 values, rounded."""
    run(compare_weights, 2, bf16)


def compare_training(rank: int, world: int, config: ModelConfig) -> None:
    import deepspeed

    plain, model = build(config, 1), build_partitioned(config, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    settings = zero3() | {"zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=optimizer)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(2):  # the second forward pass runs on DeepSpeed's recorded trace
        sample = torch.randint(0, 60, (4, 17), generator=torch.Generator().manual_seed(step))
        mine = sample[2 * rank : 2 * rank + 2]
        loss = engine(mine[:, :-1], mine[:, 1:])
        expected = plain(mine[:, :-1], mine[:, 1:])
        torch.testing.assert_close(loss, expected)
        engine.backward(loss)
        reference.zero_grad()
        plain(sample[:, :-1], sample[:, 1:]).backward()  # the mean of both ranks' gradients
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            got = deepspeed.utils.safe_get_full_grad(p)
            # float32 sums in another order (two halves, then their mean): a few ulps of the largest term
            torch.testing.assert_close(got, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        engine.step()
        reference.step()
    engine.eval()
    with torch.no_grad():
        torch.testing.assert_close(engine(mine[:, :-1]), plain(mine[:, :-1]), rtol=1e-4, atol=1e-5)
    engine.destroy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation_checkpointing", [True, False])
def test_zero3_trains_as_the_plain_model(tied: bool, activation_checkpointing: bool):
    run(
        compare_training,
        2,
        dataclasses.replace(TOY, tied_head=tied, activation_checkpointing=activation_checkpointing),
    )

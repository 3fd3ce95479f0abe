"""What two ranks that share sequences really exchange in a micro-batch, call by call, against the plan."""

import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.plan.exchange import exchange
from mst_scale.plan.setting import Setting
from mst_scale.plan.traffic import Call
from tests.support import pool

SHAPE = {"n_layer": 3, "n_head": 4, "n_embd": 32, "seq_length": 64, "vocab_size": 100}
MICRO = 2


def exchanged(rank: int, world: int, recompute: bool) -> list[int]:
    """Bytes of every all-to-all of a forward and a backward pass."""
    import deepspeed.comm
    import torch.distributed as dist

    from mst_scale.hybrid_sparse_attention import sequence_parallel
    from mst_scale.models.gpt import GPT

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", dist_init_required=False, verbose=False)
    model = GPT(ModelConfig(**SHAPE, activation_checkpointing=recompute))
    sequence_parallel(model, dist.group.WORLD)
    found, inner = [], dist.all_to_all_single

    def counted(output, input, **more):  # as DeepSpeed names them
        found.append(input.numel() * input.element_size())
        return inner(output=output, input=input, **more)

    dist.all_to_all_single = counted
    try:
        tokens = torch.zeros(MICRO, SHAPE["seq_length"] // world, dtype=torch.long)
        model(tokens, tokens).backward()
    finally:
        dist.all_to_all_single = inner
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_every_exchange_of_a_shared_sequence(recompute):
    s = Setting(2, 2, "fp32", "fp32", MICRO, 1, recompute=recompute, sequence=2)
    wanted = exchange(ModelConfig(**SHAPE), s)["sequence"]
    first, second = pool.run(exchanged, 2, recompute)
    assert first == second and [Call("all-to-all", size) for size in first] == wanted

"""The padding of a rank's parts at stage 3 is 0, so an optimizer that takes norms over a rank's buffer ignores it."""

import deepspeed
import pytest
import torch

import mst_scale
from tests.ranks.zero_shards.test_settings import all_of
from tests.support import pool
from tests.support.toy_engine import mst_config, train
from tests.support.toys import deepspeed_config, toy, toy_batch

ADAFACTOR = {"type": "Adafactor", "params": {"lr": 1e-2}}
STEPS = 3


def with_nan_in_new_memory(make):
    """What `make` returns, with NaN in the memory that torch leaves uninitialized."""
    torch.use_deterministic_algorithms(True)
    try:
        return make()
    finally:
        torch.use_deterministic_algorithms(False)


def padding_of_deepspeed(rank, world):
    config = deepspeed_config(3, world, optimizer=ADAFACTOR, zero_allow_untested_optimizer=True)
    model = toy()
    engine = with_nan_in_new_memory(
        lambda: deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    )
    return any(bool(flat.isnan().any()) for flat in engine.optimizer.fp32_partitioned_groups_flat)


def test_deepspeed_leaves_it_uninitialized():
    assert pool.run(padding_of_deepspeed, 2) == [False, True]


def adafactor(rank, world, precision):
    config = mst_config(3, world, precision, method="dense", optimizer=ADAFACTOR)
    config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    engine = with_nan_in_new_memory(lambda: mst_scale.initialize(model=toy(), config=config)[0])
    train(engine, rank, world, STEPS)
    return all_of(engine)


def by_hand(world):
    """Adafactor on the vector of each rank: its equal part of every parameter, the last ones with zeros at the end."""
    model = toy()
    parts = [-(-p.numel() // world) for p in model.parameters()]

    def vectors(tensors):
        padded = [
            torch.nn.functional.pad(t.flatten(), (0, n * world - t.numel()))
            for t, n in zip(tensors, parts, strict=True)
        ]
        return [torch.cat([t[r * n : (r + 1) * n] for t, n in zip(padded, parts, strict=True)]) for r in range(world)]

    masters = [v.clone() for v in vectors([p.detach() for p in model.parameters()])]
    optimizers = [torch.optim.Adafactor([v], **ADAFACTOR["params"]) for v in masters]
    for step in range(STEPS):
        model.zero_grad()
        sum(model(*toy_batch(step, rank)) for rank in range(world)).div(world).backward()
        for rank, gradient in enumerate(vectors([p.grad for p in model.parameters()])):
            masters[rank].grad = gradient
            optimizers[rank].step()
        split = [v.split(parts) for v in masters]
        for i, parameter in enumerate(model.parameters()):
            whole = torch.cat([of_rank[i] for of_rank in split])[: parameter.numel()]
            parameter.data.copy_(whole.view(parameter.shape))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.full
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.02)])
def test_adafactor_takes_norms_with_zeros_there(precision, tolerance):
    """Of bf16, weights are rounded to 8 bits, and gradients are computed with them."""
    wanted = by_hand(2)
    for found in pool.run(adafactor, 2, precision):
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)

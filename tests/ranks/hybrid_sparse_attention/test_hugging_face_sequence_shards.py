"""Models of transformers on parts of sequences: DeepSpeed's Ulysses around our attention, whole patterns inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mst_scale
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, SequenceShard, attach
from mst_scale.hybrid_sparse_attention.hugging_face import NAME
from tests.support import pool
from tests.support.engines import whole_masks
from tests.support.toys import deepspeed_config

LENGTH, STEPS, SPARSE = 32, 12, Pattern("strided", 4)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48,
        max_position_embeddings=LENGTH, vocab_size=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def cut_by_deepspeed(model: Any, world: int, core: str) -> Any:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    return UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation=core, sequence_parallel_size=world, micro_batch_size=2
    )


def forget(core: str) -> None:
    """What DeepSpeed keeps of it in the process."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel_state_sp._release_sequence_parallel_groups()
    groups.mpu = None
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop(core, None)


def samples() -> list[dict[str, torch.Tensor]]:
    """Micro-batches of two sequences; the labels of the first nine tokens do not count."""
    made = []
    for step in range(STEPS):
        walk = torch.randint(3, (2, LENGTH), generator=torch.Generator().manual_seed(step)).cumsum(1) % 64
        labels = walk.clone()
        labels[:, :9] = -100
        made.append({"input_ids": walk, "position_ids": torch.arange(LENGTH).expand(2, LENGTH), "labels": labels})
    return made


def parts_of_samples(mpu: Any, rank: int, world: int) -> Any:
    """By DeepSpeed's adapter, which takes from the loaders of all ranks in turn; on one rank the same by hand."""
    if mpu is None:
        for sample in samples():
            labels = F.pad(sample.pop("labels"), (0, 1), value=-100)
            yield {**sample, "shift_labels": labels[:, 1:]}
        return
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    group = mpu.get_sequence_parallel_group()
    yield from UlyssesSPDataLoaderAdapter(samples()[rank::world], rank, group, world, "cpu")


def loss_of_the_tutorial(logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
    """Of each rank's mean and count, gathered with their gradients: these are summed over ranks, each rank's loss being
    the whole one, so that they are so many times too large; stage 3 averages them."""
    from torch.distributed.nn.functional import all_gather

    count = (labels != -100).sum()
    mean = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / count.clamp(min=1)
    counts = all_gather(count, group=group)
    total = sum(m * n for m, n in zip(all_gather(mean, group=group), counts, strict=True))
    return total / sum(counts)


def loss_of_parts(logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
    part, counted = SequenceShard(group), labels != -100
    count = part.count(counted)
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return part.mean(total / (counted.sum() if count is None else count))


def train(rank: int, world: int, stage: int) -> tuple[list[float], list[float], list[list[str]], int]:
    model = llama()
    assert attach(model, SPARSE) is None
    mpu = cut_by_deepspeed(model, world, NAME)
    try:
        config = deepspeed_config(stage, 1)
        config |= {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "training": {"steps": 30, "seed": 3}}
        config["mst"] = {
            "method": "mst",
            "sparsity": {"max": 0.8},
            "topology": {"interval": 3},
            "attention": {"stride": 4, "dense_from": 24},
            "targets": {"lm_head": False},
        }
        engine, *_ = mst_scale.initialize(model=model, mpu=mpu, config=config)
        group = None if mpu is None else mpu.get_sequence_parallel_group()
        loss_of = loss_of_the_tutorial if stage == 3 and mpu is not None else loss_of_parts
        losses, norms, masks = [], [], []
        for batch in parts_of_samples(mpu, rank, world):
            labels = batch.pop("shift_labels")
            loss = loss_of(engine(**batch, use_cache=False).logits, labels, group)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            norms.append(float(engine.get_global_grad_norm()))
            if engine.mst.changed_at == engine.mst.step:
                masks.append(whole_masks(engine))
        return losses, norms, masks, engine.mst.attended
    finally:
        forget(NAME)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_llama_trains_as_on_one_rank(stage: int) -> None:
    ((losses, norms, masks, attended),) = pool.run(train, 1, stage)
    assert len(losses) == STEPS and len(masks) >= 3 and attended == 2
    for world in (2, 4):  # on four ranks the two heads of keys are each held twice
        for rank in pool.run(train, world, stage):
            assert rank[0] == pytest.approx(losses, abs=1e-5) and rank[1] == pytest.approx(norms, rel=1e-4)
            assert len(rank[2]) == len(masks) and rank[3] == 2


def logits_of_parts(rank: int, world: int) -> tuple[torch.Tensor, str, str | None]:
    sample, rows = samples()[0], slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    model = llama().eval()
    attach(model, SPARSE)
    mpu = cut_by_deepspeed(model, world, NAME)
    tokens, positions = (sample[key][:, rows] for key in ("input_ids", "position_ids"))
    with torch.no_grad():
        logits = model(tokens, position_ids=positions, use_cache=False).logits
    said = ""
    if mpu is not None:
        with pytest.raises(UserError) as caught:  # a second text begins at 20
            model(tokens, position_ids=torch.where(positions < 20, positions, positions - 20), use_cache=False)
        said = str(caught.value)
    forget(NAME)
    other = llama()
    other.set_attn_implementation("sdpa")
    wrapped = cut_by_deepspeed(other, world, "sdpa")
    reason = attach(other, SPARSE)
    assert wrapped is None or other.config._attn_implementation == "sdpa"
    forget("sdpa")
    return logits, said, reason


def test_the_pattern_is_of_the_whole_sequence_or_the_reason_is_given() -> None:
    ((whole, _, none),) = pool.run(logits_of_parts, 1)
    assert none is None
    ranks = pool.run(logits_of_parts, 2)
    assert torch.allclose(torch.cat([rank[0] for rank in ranks], 1), whole, atol=1e-5)
    for _, packed, reason in ranks:
        assert "position_ids" in packed
        assert reason is not None and "call attach before register_with_transformers" in reason

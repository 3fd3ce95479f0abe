"""Sequences cut over ranks: training, masks and checkpoints are those of one rank."""

from __future__ import annotations

import functools
import logging
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import mst_scale
from mst_scale.comm import Mesh, ParallelDims
from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.models.bert import BERT
from tests.support import pool
from tests.support.cut_sequences import SHAPE, batch, config, mesh_of, mine, model, train
from tests.support.engines import whole_masks
from tests.support.messages import logged
from tests.support.toy_engine import STAGES, mst_config
from tests.support.toys import deepspeed_config, toy

STEPS = 30
# fp32: sums in another order, 1e-6 a step at most. bf16: weights and activations have 8 bits (2⁻⁸ = 0.004 of a loss of
# 4), and a mask may turn on two scores that round apart.
ROUNDING = {"fp32": 1e-5, "bf16": 0.06}
# (ranks, of them a sequence): sequences of 32 tokens in parts of 16 and 8; two shares of the batch with two parts each
LAYOUTS = {"fp32": [(2, 2), (4, 4), (4, 2)], "bf16": [(2, 2), (4, 4)]}


def mean_losses(ranks: list[Any]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*(rank[0] for rank in ranks), strict=True)]


def compare(stage: int, precision: str, layouts: list[tuple[int, int]], recompute: bool = False, **more: Any) -> None:
    (alone,) = pool.run(train, 1, 1, stage, precision, STEPS, recompute, more)
    assert len(alone[1]) >= 8 and len({tuple(masks.values()) for masks in alone[1]}) >= 8, "masks change several times"
    for world, sequence in layouts:
        ranks = pool.run(train, world, sequence, stage, precision, STEPS, recompute, more)
        assert mean_losses(ranks) == pytest.approx(alone[0], abs=ROUNDING[precision])
        assert ranks[0][2][0] == pytest.approx(alone[2][0], rel=1e-5 if precision == "fp32" else 1e-2), "of a gradient"
        assert all(rank[1] == ranks[0][1] and rank[2] == ranks[0][2] for rank in ranks)
        for first in range(0, world, sequence):
            assert all(rank[0] == ranks[first][0] for rank in ranks[first : first + sequence]), "one loss a sequence"


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", LAYOUTS)
def test_training_is_that_of_one_rank(stage: int, precision: str) -> None:
    compare(stage, precision, LAYOUTS[precision])


def test_so_it_is_with_blocks_recomputed_and_products_of_masks() -> None:
    compare(2, "fp32", [(2, 2)], recompute=True, compute={"backend": "cpu"})


class Given(nn.Module):
    """Its gradients are the ones drawn for the step, to the last bit, however many ranks share it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(12, 36, bias=False), nn.Linear(36, 20, bias=False)

    def forward(self, step: int, share: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        loss = torch.zeros(())
        for layer in (self.up, self.down):
            y = layer(torch.eye(layer.in_features))  # the weight, transposed
            drawn = torch.randint(-99, 99, y.shape, generator=generator) / 128
            loss = loss + (y * drawn).sum() * share
        return loss


def with_given_gradients(rank: int, world: int, sequence: int, stage: int) -> list[list[str]]:
    with mesh_of(sequence) as mesh:
        raw = deepspeed_config(stage, mesh.data, gradient_clipping=0.0)
        raw |= {"training": {"steps": STEPS, "seed": 3}}
        raw["mst"] = {"method": "mst", "sparsity": {"max": 0.8}, "topology": {"interval": 3}}
        raw["mst"]["targets"] = {"include": ["*.weight"], "lm_head": False}
        engine, *_ = mst_scale.initialize(model=Given(), mpu=mesh, config=raw)
        seen = []
        for step in range(STEPS):
            engine.backward(engine(step, 1 / sequence))
            engine.step()
            if engine.mst.changed_at == step + 1:
                seen.append(whole_masks(engine))
        return seen


@functools.cache
def given_to_one_rank() -> list[list[str]]:
    return pool.run(with_given_gradients, 1, 1, 0)[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", [(2, 2), (4, 4), (4, 2)])
def test_equal_weights_and_gradients_give_equal_masks_in_every_layout(stage: int, layout: tuple[int, int]) -> None:
    world, sequence = layout
    expected = given_to_one_rank()
    assert len({tuple(masks.values()) for masks in expected}) >= 8
    assert pool.run(with_given_gradients, world, sequence, stage) == [expected] * world


def through_a_checkpoint(rank: int, world: int, folder: str, stage: int) -> tuple[list[float], list[float], bool]:
    with mesh_of(world) as mesh:

        def engine_of() -> Any:
            return mst_scale.initialize(model=model(), mpu=mesh, config=config(stage, mesh, "fp32", STEPS))[0]

        def steps(engine: Any, first: int) -> list[float]:
            losses = []
            for step in range(first, first + 4):
                loss = engine(*mine(mesh, *batch(step, SHAPE["seq_length"])))
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            return losses

        engine = engine_of()
        steps(engine, 0)
        engine.save_checkpoint(folder, tag="here")
        went_on = steps(engine, 4)
        again = engine_of()
        again.load_checkpoint(folder, tag="here")
        return went_on, steps(again, 4), whole_masks(engine) == whole_masks(again)


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_goes_on(tmp_path: Any, stage: int) -> None:
    for went_on, again, same_masks in pool.run(through_a_checkpoint, 2, str(tmp_path), stage):
        assert went_on == again and same_masks


def bert_losses(rank: int, world: int) -> tuple[float, list[torch.Tensor]]:
    from mst_scale.hybrid_sparse_attention import sequence_parallel

    torch.manual_seed(0)
    bert = BERT(ModelConfig(arch="bert", **SHAPE)).double()
    with mesh_of(world) as mesh:
        sequence_parallel(bert, mesh.sequence_group)
        tokens, targets = mine(mesh, *batch(0, SHAPE["seq_length"]))
    loss = bert(tokens, targets)
    loss.backward()
    return float(loss.detach()), [p.grad for p in bert.parameters() if p.grad is not None]


def test_bert_follows_too() -> None:
    import deepspeed.comm  # noqa: F401

    ((loss, gradients),) = pool.run(bert_losses, 1)
    ranks = pool.run(bert_losses, 2)
    assert [rank[0] for rank in ranks] == pytest.approx([loss] * 2, abs=1e-12)
    for expected, *parts in zip(gradients, *(rank[1] for rank in ranks), strict=True):
        assert torch.allclose(sum(parts), expected, atol=1e-12)


# --- what is refused, and what is said ---


def refusals(rank: int, world: int) -> dict[str, str]:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as theirs
    from deepspeed.utils import groups
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64, attn_pdrop=0.0))
    cut, whole, sliced = Mesh(ParallelDims(sequence=2)), Mesh(ParallelDims()), Mesh(ParallelDims(tensor=2))

    class Apart(Mesh):
        def get_data_parallel_group(self) -> Any:
            return whole.tensor_group  # this rank alone

    deepspeed.init_distributed("gloo")  # a mesh asks for it
    theirs.initialize_sequence_parallel(2)
    cases: dict[str, tuple[nn.Module, Any, int]] = {
        "other files": (model(), Apart(ParallelDims(sequence=2)), 2),
        "slices of layers": (toy(), sliced, 1),
        "transformers by a mesh": (gpt2, cut, 2),
        "gpt2 by theirs": (gpt2, theirs, 2),
        "heads": (model(n_head=1), cut, 2),
    }
    said = {}
    for name, (refused, mpu, stage) in cases.items():
        with pytest.raises(UserError) as caught:
            mst_scale.initialize(model=refused, mpu=mpu, config=mst_config(stage, 1))
        said[name] = str(caught.value)
        groups.mpu = None
    theirs._release_sequence_parallel_groups()
    engine, *_ = mst_scale.initialize(model=model(), mpu=cut, config=config(2, cut, "fp32", STEPS))
    for name, length in (("uneven", 8 + rank), ("long", 17)):
        with pytest.raises(UserError) as caught:
            engine(torch.zeros(2, length, dtype=torch.long))
        said[name] = str(caught.value)
    groups.mpu = None
    engine, *_ = mst_scale.initialize(model=toy(), mpu=whole, config=mst_config(2, 2))  # a mesh that cuts nothing
    groups.mpu = None
    return said


def test_refusals() -> None:
    for said in pool.run(refusals, 2):
        assert "get_sequence_data_parallel_group" in said["other files"]
        assert "the mesh splits layers over 2 ranks, but no layer of Toy is split" in said["slices of layers"]
        assert "UlyssesSPAttentionHF.register_with_transformers" in said["transformers by a mesh"]
        assert "GPT2LMHeadModel does not support split sequences" in said["gpt2 by theirs"]
        assert "1 heads cannot be split over 2 ranks" in said["heads"]
        assert "parts of 8 to 9 tokens: give each of the 2 ranks an equal part" in said["uneven"]
        assert "34 tokens does not fit model.seq_length = 32" in said["long"]


def warnings(rank: int, world: int) -> list[str]:
    from mst_scale.comm import speak
    from mst_scale.engine.sequences import cut_sequences
    from mst_scale.hybrid_sparse_attention import SelfAttention

    speak()
    with logged(logging.INFO) as said, mesh_of(2) as mesh:
        for own in (toy(), nn.Sequential(SelfAttention(8, 2)), model()):
            cut_sequences(own, mesh)
    return [line for line in said if "sequences are split" in line]


def test_a_model_of_ones_own_is_told_what_is_left_to_it() -> None:
    first, second = pool.run(warnings, 2)
    assert len(first) == 2 and not second, "one rank speaks"
    assert "Toy has no attention layers of mst_scale" in first[0]
    assert "Sequential must itself compute positions" in first[1]

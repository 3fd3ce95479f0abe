"""The GPT in stages, with and without slices, against the whole model on one rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.cut_models import TINY, Training, assert_equals_one_rank, assert_rejected, built
from tests.support.pool import run


def _weights(rank: int, world: int, sizes: dict[str, int], changes: dict[str, Any]) -> tuple[int, set[str]]:
    """First weights bit for bit, under the GPT's names; what this rank holds."""
    from mst_scale.models import GPT
    from mst_scale.tensor_parallel import marked_cut

    mesh, model = built(sizes, seed=5 + rank, **changes)
    torch.manual_seed(5)  # the first rank's
    whole = dict(GPT(dataclasses.replace(TINY, **changes)).named_parameters())
    assert set(model.logical_names) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        cut, reference = marked_cut(p), whole[model.logical_names[name]]
        assert torch.equal(p, reference if cut is None else cut.of(reference)), name
    return mesh.stage, set(model.logical_names.values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tensor", [1, 2])
def test_stages_hold_the_whole_model(tied: bool, tensor: int):
    from mst_scale.models import GPT

    with torch.device("meta"):
        names = {name for name, _ in GPT(dataclasses.replace(TINY, tied_head=tied)).named_parameters()}
    ranks = run(_weights, 2 * tensor, {"pipeline": 2, "tensor": tensor}, {"tied_head": tied})
    first = set().union(*(held for stage, held in ranks if stage == 0))
    last = set().union(*(held for stage, held in ranks if stage == 1))
    assert first | last == names
    assert first & last == ({"wte.weight"} if tied else set())
    assert {name.split(".")[1] for name in first if name.startswith("blocks")} == {"0", "1"}
    assert "ln_f.weight" in last and "wpe.weight" in first


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("sizes", [{"pipeline": 2}, {"pipeline": 2, "tensor": 2}], ids=["two", "two-by-two"])
@pytest.mark.parametrize("tied", [True, False])
def test_training_equals_that_on_one_rank(stage: int, sizes: dict[str, int], tied: bool):
    """Losses and gradient norms, which count what stages and slices have in common once. float32, another order."""
    how = Training(stage, steps=6, model={"tied_head": tied, "activation_checkpointing": not tied})
    assert_equals_one_rank(2 * sizes.get("tensor", 1), sizes, how, 1e-5)


def test_two_replicas_of_two_stages():
    how = Training(stage=1, steps=20)
    assert_equals_one_rank(4, {"pipeline": 2}, how, 1e-4)


@pytest.mark.full
def test_eight_ranks_cut_all_three_ways():
    how = Training(stage=1, steps=5)
    assert_equals_one_rank(8, {"pipeline": 2, "tensor": 2}, how, 1e-5)


def test_bf16():
    """Within a few of bfloat16's steps (8 bits)."""
    how = Training(stage=1, steps=3, deepspeed={"bf16": {"enabled": True}})
    assert_equals_one_rank(4, {"pipeline": 2, "tensor": 2}, how, 2e-2)


@pytest.mark.parametrize(
    "sizes, changes, words",
    [
        ({"pipeline": 2}, {"arch": "bert"}, "model.arch"),
        ({"pipeline": 2}, {"n_layer": 1}, "each stage needs a block"),
        ({"pipeline": 2}, {"dropout": 0.1}, "model.dropout = 0.1"),
        ({"pipeline": 3}, {}, "start a multiple of 3"),
    ],
)
def test_indivisible_sizes_are_rejected_in_one_line(sizes: dict[str, int], changes: dict[str, Any], words: str):
    assert_rejected(sizes, changes, words)

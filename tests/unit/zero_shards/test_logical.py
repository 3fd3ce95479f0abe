"""What DeepSpeed's AutoTP says of a cut parameter becomes rows × columns of the whole; anything else is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap, contiguous_split_map, sub_param_map

from mst_scale.errors import UserError
from mst_scale.shard import Cut, Shard
from mst_scale.zero_shards.logical import cut_from_pieces, cut_of, named_parameters


@pytest.mark.parametrize(
    ("told", "shape"),
    [
        (contiguous_split_map((6, 4), [2, 3, 1], 0), (6, 4)),
        (contiguous_split_map((6, 4), [1, 3], 1), (6, 4)),
        (contiguous_split_map((6, 4), [6, 0], 0), (6, 4)),
        (contiguous_split_map((7,), [4, 3], 0), (7,)),
        (contiguous_split_map((3, 4, 5), [1, 3], 1), (12, 5)),  # three fused matrices, seen as one
        (sub_param_map((9, 4), [3, 6], [[1, 2], [2, 4]], 0), (9, 4)),  # q, k and v of other sizes
        (sub_param_map((5, 8), [3, 5], [[1, 2], [2, 3]], 1), (5, 8)),
        (sub_param_map((5, 8), [3, 5], [[1, 2], [0, 5]], 1), (5, 8)),
    ],
)
def test_pieces_are_rows_and_columns(told: ParamAffineMap, shape: tuple[int, ...]):
    """DeepSpeed's own extraction is the definition."""
    whole = torch.arange(math.prod(shape))
    for rank, pieces in told.pieces_by_rank.items():
        cut = cut_from_pieces(shape, pieces)
        shard = Shard("w", cut, 0, math.prod(cut.local_matrix))
        assert np.array_equal(
            shard.logical(torch.arange(shard.length)), told.extract(whole.view(told.logical_shape), rank).view(-1)
        )


def test_what_is_not_rows_and_columns_is_refused():
    swapped = [AffinePiece((2, 4), 4, (4, 1), 0, (4, 1), [0]), AffinePiece((1, 4), 0, (4, 1), 8, (4, 1), [0])]
    with pytest.raises(UserError, match="is not rows × columns: masks cannot follow"):
        cut_from_pieces((6, 4), swapped)
    with pytest.raises(UserError, match="scaled"):
        cut_from_pieces((6, 4), [AffinePiece((2, 4), 0, (4, 1), 0, (4, 1), [0], scale=0.5)])


def test_a_layer_that_does_not_say_how_it_cuts_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    assert cut_of(parameter) == Cut.whole((3, 4))
    parameter.tensor_model_parallel = True
    with pytest.raises(UserError, match="its layer does not describe how"):
        cut_of(parameter)
    told = {"unsupported_reason": "it interleaves blocks", "original_shape": (6, 4), "replicated": False}
    parameter.ds_autotp_universal_checkpoint_meta = {"conversion": told}
    with pytest.raises(UserError, match="it interleaves blocks: masks cannot follow"):
        cut_of(parameter)
    told["unsupported_reason"] = None
    with pytest.raises(UserError, match="does not describe how"):
        cut_of(parameter)


def test_a_stage_of_a_pipeline_says_what_its_layers_are_called():
    stage = torch.nn.Linear(2, 2)
    stage.logical_names = {"weight": "blocks.3.up.weight"}
    assert [name for name, _ in named_parameters(stage)] == ["blocks.3.up.weight", "bias"]

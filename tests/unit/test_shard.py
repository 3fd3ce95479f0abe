"""Parts of a parameter, by ranges, against indices of a whole one."""

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.shard import Cut


def test_a_cut_is_its_rows_by_its_columns():
    whole = torch.arange(60).view(6, 10)
    cut = Cut((6, 10), ((0, 1), (4, 6)), ((2, 3), (7, 10)))
    assert cut.local_shape == (3, 4)
    assert torch.equal(cut.of(whole), whole[[0, 4, 5]][:, [2, 7, 8, 9]])


def test_a_vector_is_a_column_and_more_dimensions_are_columns_together():
    vector, tensor = torch.arange(6), torch.arange(60).view(6, 5, 2)
    assert torch.equal(Cut((6,), ((1, 3), (5, 6)), ((0, 1),)).of(vector), vector[[1, 2, 5]])
    assert torch.equal(Cut((6, 5, 2), ((4, 6),), ((0, 10),)).of(tensor), tensor[4:])
    assert torch.equal(Cut((6, 5, 2), ((4, 6),), ((1, 4),)).of(tensor), tensor.view(6, 10)[4:, 1:4])


@pytest.mark.parametrize("shape", [(6,), (6, 10), (6, 5, 2)])
def test_the_whole_is_a_cut_too(shape: tuple[int, ...]):
    cut, tensor = Cut.whole(shape), torch.randn(shape)
    assert cut.is_whole and cut.local_shape == shape and torch.equal(cut.of(tensor), tensor)
    assert not Cut(shape, ((0, 5),), cut.columns).is_whole


def test_values_out_of_range_are_rejected():
    with pytest.raises(UserError, match="must be ascending ranges"):
        Cut((6, 10), ((0, 6),), ((8, 11),))

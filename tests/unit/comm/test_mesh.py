"""A mesh where no ranks have met."""

import pytest

from mst_scale.comm import Mesh, ParallelDims
from mst_scale.errors import UserError


def test_ranks_meet_before_a_mesh_is_made():
    with pytest.raises(UserError, match=r"call deepspeed.init_distributed\(\) first"):
        Mesh(ParallelDims(tensor=2))

"""What a universal copy could not hold is rejected before anything is written."""

from pathlib import Path

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.zero_shards.universal import _reject_paths, _reject_untrained

TRAINED = {"param_shapes": [{"a.weight": torch.Size([2, 2])}]}


def test_buffers_of_a_pipeline_are_rejected():
    """They stand in the files of its layers."""
    with pytest.raises(UserError, match=r"buffer norm\.running_mean.*warm_start"):
        _reject_untrained(Path("checkpoint"), [{"module": None, "buffer_names": ["norm.running_mean"], **TRAINED}])
    _reject_untrained(Path("checkpoint"), [{"module": None, "buffer_names": [], **TRAINED}])


def test_tensors_that_are_not_trained_are_rejected_unless_they_are_buffers_or_tied():
    module = {"a.weight": torch.ones(2, 2), "b": torch.ones(2), "head": torch.ones(2, 2)}
    state = {"module": module, "buffer_names": ["b"], "shared_params": {"head": "a.weight"}, **TRAINED}
    _reject_untrained(Path("checkpoint"), [state])
    with pytest.raises(UserError, match="holds frozen"):
        _reject_untrained(Path("checkpoint"), [{**state, "module": {**module, "frozen": torch.ones(1)}}])


@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_names_that_are_paths_are_rejected(name):
    with pytest.raises(UserError, match="is a path"):
        _reject_paths(Path("checkpoint"), [name])

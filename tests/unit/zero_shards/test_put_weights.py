"""A universal load leaves Adam's count of updates where its kernel reads it."""

import pytest
import torch

from mst_scale.zero_shards.put_weights import _count_for


@pytest.mark.parametrize("flag", ["fused", "capturable"])
def test_a_count_follows_the_weights_as_in_torchs_load_state_dict(flag):
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer, count = torch.optim.Adam([parameter], foreach=False), torch.tensor(5.0)
    for on in (False, True):
        settings = {**optimizer.state_dict()["param_groups"][0], flag: on}
        optimizer.load_state_dict({"state": {0: {"step": count}}, "param_groups": [settings]})
        wanted, found = optimizer.state[parameter]["step"], _count_for(parameter, count, [{}, settings])
        assert (found.device, found.dtype) == (wanted.device, wanted.dtype)
        assert (found.device.type == "meta") == on


def test_a_count_is_copied_and_a_number_stays():
    count = torch.tensor(5.0)
    for groups in ([{}], [{"fused": True}]):
        found = _count_for(torch.zeros(2), count, groups)
        assert found == 5 and found.data_ptr() != count.data_ptr()
    assert _count_for(torch.zeros(2), 5, [{"fused": True}]) == 5

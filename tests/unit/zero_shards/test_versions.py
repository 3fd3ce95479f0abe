"""Versions of DeepSpeed and torch that the interface to DeepSpeed does not know are rejected."""

import deepspeed
import pytest

from mst_scale.zero_shards import start


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0"])
def test_another_deepspeed_or_torch_is_rejected(version):
    with pytest.raises(ImportError, match=f"needs DeepSpeed 0.19.x, this is {version}"):
        start.check_versions(version)
    with pytest.raises(ImportError, match=r"torch>=2\.8"):
        start.check_versions(deepspeed.__version__, "2.7.1")

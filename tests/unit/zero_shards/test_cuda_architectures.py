"""DeepSpeed can read TORCH_CUDA_ARCH_LIST after `use_readable_architectures`."""

import os
from types import SimpleNamespace

import pytest

from mst_scale.zero_shards import start


@pytest.mark.parametrize(
    ("given", "read"),
    [("9.0a", "9.0"), ("8.0;9.0a+PTX", "8.0;9.0+PTX"), ("10.0f 8.6", "10.0 8.6"), ("8.0 9.0+PTX", "8.0 9.0+PTX")],
)
def test_letters_are_removed(monkeypatch, caplog, given, read):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    monkeypatch.setattr(start, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    start.use_readable_architectures()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == read
    for one in read.replace(";", " ").split():
        assert all(part.split("+")[0].isdigit() for part in one.split("."))  # as DeepSpeed parses it


def test_without_a_gpu_nothing_changes(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    start.use_readable_architectures()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0a"

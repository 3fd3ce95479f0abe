"""Fixtures for tests of compiled kernels: one thread, and the kernel as another processor has it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mst_scale import compiled


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: waking threads costs more than it brings, most of all where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of_another_processor(name: str, cpp: Any) -> tuple[Any, Any]:
    """Two fixtures for the kernel that the module `cpp` loads: it built without this machine's widest vectors, and a
    test's use of that."""

    @pytest.fixture(scope="session", params=["-mno-avx512f", "-mno-avx"], ids=["avx2", "sse"])
    def narrower_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("kernels")
        library = ctypes.CDLL(str(compiled.build(name, cpp.SOURCES, folder, [request.param, "-O0"])))
        cpp.declare(library)
        return library

    @pytest.fixture
    def another_processor(narrower_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpp, "library", lambda: narrower_library)

    return narrower_library, another_processor

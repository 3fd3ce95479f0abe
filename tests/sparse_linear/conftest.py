"""Fixtures of this folder's tests."""

from __future__ import annotations

import ctypes

import pytest

from mst_scale import compiled
from mst_scale.sparse_linear import cpp
from tests.hybrid_sparse_attention.conftest import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="session", params=["-mno-avx512f", "-mno-avx"], ids=["avx2", "sse"])
def narrower_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel as another processor has it, built without this machine's widest vectors."""
    folder = tmp_path_factory.mktemp("kernels")
    library = ctypes.CDLL(str(compiled.build("sparse_linear", cpp.SOURCES, folder, [request.param, "-O0"])))
    cpp.declare(library)
    return library


@pytest.fixture
def another_processor(narrower_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "library", lambda: narrower_library)

"""A text of several chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.texts import words


@pytest.fixture
def big_text(tmp_path: Path) -> Path:
    """7 MB: 7 chunks."""
    path = tmp_path / "big.txt"
    path.write_text(words(20_000) * 70)
    assert path.stat().st_size > 7e6
    return path

"""The folder of a tiny study."""

import json
from pathlib import Path

import pytest

from tests.support.tiny_study import TINY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    return tmp_path

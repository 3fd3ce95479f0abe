"""A load of the universal layout says which checkpoint it takes if another one was saved later."""

from __future__ import annotations

import logging
import os

from mst_scale.zero_shards import saving
from tests.support.messages import logged


def test_a_later_save_in_another_layout_is_named(tmp_path):
    universal, latest = tmp_path / "latest_universal", tmp_path / "latest"
    universal.write_text("old")
    for text, time, lines in (("old", 20, 0), ("new", 5, 0), ("new", 20, 1), ("not a/name", 20, 0)):
        latest.write_text(text)
        os.utime(universal, (10, 10))
        os.utime(latest, (time, time))
        with logged(logging.WARNING) as found:
            saving._warn_of_a_later_save(universal)
        assert len(found) == lines, text
        assert all("loading old" in line and "new was saved later" in line for line in found)
    latest.unlink()
    saving._warn_of_a_later_save(universal)

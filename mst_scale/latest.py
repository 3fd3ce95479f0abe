"""Reads the files `latest` and `latest_universal`, by which DeepSpeed names the newest checkpoint of a folder."""

from __future__ import annotations

from pathlib import Path

from mst_scale.errors import Damaged

LONGEST = 255  # bytes of a file's name


def tag_in(latest: Path) -> str:
    """Return the tag in such a file: the name of a folder beside it. Anything else is Damaged."""
    try:
        tag = latest.read_text("utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or not tag.isprintable() or len(tag) > LONGEST or Path(tag).name != tag:
        raise Damaged(f"{latest} is damaged: it does not hold the name of a checkpoint; name the checkpoint itself")
    return tag

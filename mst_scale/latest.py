"""Reads the files `latest` and `latest_universal`, in which DeepSpeed names the latest checkpoint of a folder."""

from __future__ import annotations

from pathlib import Path

from mst_scale.errors import Damaged

_MAX_NAME = 255  # bytes of a file name


def tag_in(latest: Path) -> str:
    """Return the tag in such a file, which is the name of a folder next to it.

    Raises:
        Damaged: if the file contains anything else.
    """
    try:
        tag = latest.read_text("utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or not tag.isprintable() or len(tag) > _MAX_NAME or Path(tag).name != tag:
        raise Damaged(f"{latest} is damaged: it does not contain the name of a checkpoint; pass the checkpoint's path")
    return tag

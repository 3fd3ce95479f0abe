"""Finds the files that are shipped with the package: ready-made configs and launchers."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def folder(name: str) -> Path:
    """Return the path of a shipped folder: inside the package in a wheel, next to it in a clone."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name

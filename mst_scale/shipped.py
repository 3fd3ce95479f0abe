"""Finds what comes with the package and is none of its modules: ready configs, launchers."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def folder(name: str) -> Path:
    """In the package where it is installed from a wheel, beside it in a clone."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name

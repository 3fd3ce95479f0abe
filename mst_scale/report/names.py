"""Groups the names of matrices by kind, and shortens them for legends and axes."""

from __future__ import annotations

from collections.abc import Iterable

from mst_scale.run_logging.snapshots import kind_of


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names of the same matrix in different blocks."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    return kinds


def short_name(name: str) -> str:
    """Shorten `blocks.3.attention.qkv.weight` to `3 attention.qkv`, and `blocks.*.mlp.up.weight` to `mlp.up`."""
    parts = [part for part in name.removesuffix(".weight").split(".") if part != "*"]
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if numbers:
        parts = parts[numbers[0] :]
        return f"{parts[0]} {'.'.join(parts[1:])}"
    return ".".join(parts[-2:]) if len(parts) > 2 or "*" in name else ".".join(parts)


def block_of(name: str) -> str:
    """Return the number of the block in a name, or ""."""
    return next((part for part in name.split(".") if part.isdigit()), "")

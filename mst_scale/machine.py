"""Reads what a machine has: its processor, and the installed versions of packages."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path


def installed(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def processor_entries() -> dict[str, str]:
    """Return the entries of the first processor in /proc/cpuinfo by name; {} if there is no such file."""
    found: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found

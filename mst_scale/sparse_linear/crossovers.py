"""Looks up the sparsity from which a sparse layer is faster than a dense one, as measured.

The user's table, crossover.json in the cache folder, which `measuring` and `mst bench linear --tune` write, takes
precedence over the one shipped with the package. A row for single weights names the processor and the version of torch
it was measured with, and counts only there, because different machines may share a home directory. The shipped rows
name their series of processors; on others they are only what is assumed if nothing is to be measured (a plan, or
MST_SCALE_MEASURE=0). This file does not import torch: a plan reads it too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mst_scale import compiled
from mst_scale.compiled import cache_folder
from mst_scale.files import locked, write_atomically
from mst_scale.machine import installed, processor_entries

SHIPPED = Path(__file__).parent / "crossover.json"
log = logging.getLogger("mst_scale")
# `auto` keeps layers with fewer weights dense: the fixed cost of a call outweighs what it saves.
SMALLEST = 1 << 16


def crossover(
    backend: str, dtype: str, shape: tuple[int, ...], *, threads: int = 1, block: int = 1, anywhere: bool = True
) -> float | None:
    """Return the sparsity from which the backend is faster in the nearest case of the table; None if there is none.

    Args:
        backend: "cpu" or "block".
        dtype: of the weight, as "float32".
        shape: of the weight.
        threads: of a backend on CPUs.
        block: the side of the blocks of which masks are made.
        anywhere: count rows that were measured on other processors too.
    """
    if backend == "cpu":
        block = 1  # it computes weight by weight, even if masks are made of blocks
    rows = [
        row for row in table() if _kind(row) == (backend, dtype, block) and (anywhere or _names_this_processor(row))
    ]
    if not rows:
        return None

    def distance(row: dict[str, Any]) -> float:
        outputs, inputs = row["shape"]
        return (
            abs(math.log2(outputs / shape[0]))
            + abs(math.log2(inputs / shape[1]))
            + abs(math.log2(row.get("threads", 1) / threads))
        )

    return float(min(rows, key=distance)["sparsity"])


@functools.cache
def table() -> list[dict[str, Any]]:
    """Return the rows measured here, and the shipped rows for every backend, dtype and block that was not."""
    here = [row for row in measured_here() if is_of_here(row)]
    kinds = set(map(_kind, here))
    return [*here, *(row for row in _rows(SHIPPED) if _kind(row) not in kinds)]


def own() -> Path:
    """Return the path of the user's table."""
    return cache_folder() / "crossover.json"


def measured_here() -> list[dict[str, Any]]:
    """Return the rows of the user's table; none if nothing has been measured."""
    try:
        return _rows(own())
    except (FileNotFoundError, RuntimeError):  # RuntimeError: there is no home directory
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is not a table of crossovers (%r): remove it, or run mst bench linear --tune", own(), error)
        return []


@functools.cache
def here() -> dict[str, str]:
    """Return what decides the speed of layers on a CPU besides threads and dtype: the processor, and torch."""
    known = processor_entries()
    model = known.get("model name") or known.get("CPU part") or platform.processor() or platform.machine()
    numbers = [known[name] for name in ("cpu family", "model") if name in known]
    torch = installed("torch") or ""  # torch is not needed to make a plan
    return {"cpu": " ".join([model, "/".join(numbers)]).strip(), "torch": torch}


@functools.cache
def kernel_version() -> str:
    """Return a digest of the compiled kernel's sources: what was measured counts for that kernel."""
    sources = [*(Path(__file__).parent / "cpp_kernel").glob("*"), *Path(compiled.__file__).parent.glob("*.h")]
    texts = b"".join(path.read_bytes() for path in sorted(sources))
    return hashlib.sha256(texts).hexdigest()[:12]


def measured_so(dtype: str, threads: int) -> list[dict[str, Any]]:
    """Return the rows of the CPU kernel that were measured on this processor, with this version of it."""
    kind, wanted = ("cpu", dtype, 1), {"gains", "topology_step"}
    rows = [row for row in measured_here() if wanted <= row.keys() and _kind(row) == kind and is_of_here(row)]
    return [row for row in rows if (row.get("threads"), row.get("kernel")) == (threads, kernel_version())]


def add(rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to the user's table, replacing rows of the same case; several processes may do so at a time."""
    try:
        folder = own().parent
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "crossover.lock"):
            cases = [_case(row) for row in rows]
            keep([*rows, *(row for row in measured_here() if _case(row) not in cases)])
    except (OSError, RuntimeError) as error:
        log.warning("crossovers cannot be saved and will be measured again (%s): set MST_SCALE_CACHE", error)


def keep(rows: list[dict[str, Any]]) -> None:
    """Write the user's table; if this is interrupted, the old one stays."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    own().parent.mkdir(parents=True, exist_ok=True)
    write_atomically(own(), f'{{\n  "crossovers": [\n{lines}\n  ]\n}}\n')
    table.cache_clear()


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file; KeyError, TypeError or ValueError if `keep` did not write it."""
    rows = list(json.loads(path.read_text())["crossovers"])
    for row in rows:
        _kind(row)
        _outputs, _inputs = row["shape"]
        float(row["sparsity"])
    return rows


def is_of_here(row: dict[str, Any]) -> bool:
    """Return whether a row was measured on this processor and torch; rows that name neither count everywhere."""
    return all(row.get(name, value) == value for name, value in here().items())


def _names_this_processor(row: dict[str, Any]) -> bool:
    """Whether the row names this processor, or, as the shipped ones do, the series that it belongs to."""
    return here()["cpu"].startswith(row.get("cpu") or "\0")


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*_kind(row), row.get("threads"), tuple(row["shape"]), row.get("cpu"), row.get("torch"))


def _kind(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["backend"], row["dtype"], row.get("block", 1)

"""Looks up the sparsity from which skipping masked weights is faster than a dense product, as measured.

crossover.json in the cache folder, which `mst bench linear --tune` writes, goes before the one that is shipped. Without
torch, for a plan reads them too.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from mst_scale.compiled import cache_folder

SHIPPED = Path(__file__).parent / "crossover.json"
log = logging.getLogger("mst_scale")
# Layers with fewer weights than this are dense for `auto`: a call's fixed costs outweigh what it saves.
SMALLEST = 1 << 16


def crossover(backend: str, dtype: str, shape: tuple[int, ...], *, threads: int = 1, block: int = 1) -> float | None:
    """The sparsity from which the backend is faster, of the nearest case in the table."""
    block = 1 if backend in ("cpu", "mkl") else block  # these multiply with single weights, even if masks have blocks
    rows = [row for row in table() if _kind(row) == (backend, dtype, block)]
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
    """What was measured here; of a backend, dtype and block that was not, what is shipped."""
    here = measured_here()
    kinds = set(map(_kind, here))
    return [*here, *(row for row in _rows(SHIPPED) if _kind(row) not in kinds)]


def own() -> Path:
    """The table of this machine's user."""
    return cache_folder() / "crossover.json"


def measured_here() -> list[dict[str, Any]]:
    """The rows of `own`: none before --tune has run."""
    try:
        return _rows(own())
    except (FileNotFoundError, RuntimeError):  # RuntimeError: there is no home to look into
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s holds no crossovers (%r): remove it, or measure anew: mst bench linear --tune", own(), error)
        return []


def keep(rows: list[dict[str, Any]]) -> None:
    """All of `own`, or, if this is interrupted, what was there before."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    new = own().with_suffix(".new")
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(f'{{\n  "crossovers": [\n{lines}\n  ]\n}}\n')
    os.replace(new, own())
    table.cache_clear()


def _rows(path: Path) -> list[dict[str, Any]]:
    """KeyError, TypeError or ValueError where they are not what `keep` writes."""
    rows = list(json.loads(path.read_text())["crossovers"])
    for row in rows:
        _kind(row)
        _outputs, _inputs = row["shape"]
        float(row["sparsity"])
    return rows


def _kind(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["backend"], row["dtype"], row.get("block", 1)

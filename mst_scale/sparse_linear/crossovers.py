"""Looks up the sparsity from which skipping masked weights is faster than a dense product, as measured.

The table is crossover.json, which `mst bench linear --tune` rewrites. No torch is imported, because `mst plan` reads it
too.
"""

from __future__ import annotations

import functools
import json
import math
import os
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "crossover.json"
# Layers with fewer weights than this are dense for `auto`: a call's fixed costs outweigh what it saves.
SMALLEST = 1 << 16


def crossover(backend: str, dtype: str, shape: tuple[int, ...], *, threads: int = 1, block: int = 1) -> float | None:
    """The sparsity from which the backend is faster, of the nearest case in the table."""
    block = 1 if backend in ("cpu", "mkl") else block  # these multiply with single weights, even if masks have blocks
    rows = [r for r in table() if (r["backend"], r["dtype"], r.get("block", 1)) == (backend, dtype, block)]
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
    return list(json.loads(TABLE.read_text())["crossovers"])


def rewrite(rows: list[dict[str, Any]]) -> None:
    """Write the whole table; if this is interrupted, the table before stays."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    new = TABLE.with_suffix(".new")
    new.write_text(f'{{\n  "crossovers": [\n{lines}\n  ]\n}}\n')
    os.replace(new, TABLE)
    table.cache_clear()

"""Looks up the sparsity from which skipping masked weights is faster than a dense product, as measured.

crossover.json in the cache folder, which `measuring` and `mst bench linear --tune` write, goes before the one that is
shipped. A row of single weights says on which processor and with which torch it was measured, and counts there alone:
machines that differ may share a home. Without torch, for a plan reads them too.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
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
    here = [row for row in measured_here() if is_of_here(row)]
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


@functools.cache
def here() -> dict[str, str]:
    """What decides how fast a CPU's layers are, beside threads and dtype: the processor, and who multiplies."""
    known: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        name, _, value = line.partition(":")
        known.setdefault(name.strip(), value.strip())
    model = known.get("model name") or known.get("CPU part") or platform.processor() or platform.machine()
    numbers = [known[name] for name in ("cpu family", "model") if name in known]
    try:
        torch = version("torch")
    except PackageNotFoundError:  # where a plan is made
        torch = ""
    return {"cpu": " ".join([model, "/".join(numbers)]).strip(), "torch": torch}


def measured_so(backend: str, dtype: str, threads: int) -> list[dict[str, Any]]:
    """Rows that `measuring` or --tune has kept on this processor."""
    kind = (backend, dtype, 1)
    rows = [row for row in measured_here() if "gains" in row and _kind(row) == kind and row.get("threads") == threads]
    return [row for row in rows if is_of_here(row)]


def add(rows: Sequence[dict[str, Any]]) -> None:
    """To `own`, in the place of rows of the same case; others may add theirs meanwhile. Without a home: nothing."""
    try:
        folder = own().parent
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "crossover.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel even if this process is killed
            cases = [_case(row) for row in rows]
            keep([*rows, *(row for row in measured_here() if _case(row) not in cases)])
    except (OSError, RuntimeError) as error:
        log.warning("what was measured is not kept, and will be measured again (%s): set MST_SCALE_CACHE", error)


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


def is_of_here(row: dict[str, Any]) -> bool:
    """Whether a row is of this processor; rows that do not say are of the user's."""
    return all(row.get(name, value) == value for name, value in here().items())


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*_kind(row), row.get("threads"), tuple(row["shape"]), row.get("cpu"), row.get("torch"))


def _kind(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["backend"], row["dtype"], row.get("block", 1)

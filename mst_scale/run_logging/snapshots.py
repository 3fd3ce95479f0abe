"""Keeps a small summary of the weights at the end of each phase, because checkpoints are deleted.

`RUN/snapshots/step00003000.npz` takes a few hundred kB for any model size. It contains mean, standard deviation and
number of active weights of every matrix that can be sparse, and pictures of a few of them with at most CELLS × CELLS
cells (mean magnitude, fraction of active weights). It consists of arrays and JSON, so reading it does not execute code.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mst_scale.errors import Damaged
from mst_scale.files import write_atomically

FOLDER = "snapshots"
CELLS = 96
PICTURES = 12  # at most


@dataclass(frozen=True)
class Matrix:
    """One parameter as a matrix of `shape`; `std` is over all weights, `std_active` over the active ones."""

    name: str
    shape: tuple[int, int]
    active: int
    mean: float
    std: float
    std_active: float
    largest: float


@dataclass(frozen=True)
class Snapshot:
    """The weights after `step` optimizer steps, in the phase of the last of them."""

    step: int
    phase: str
    sparsity: float
    parameters: int  # of the whole model
    matrices: list[Matrix]
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # mean |w| of each cell, by parameter name
    active: dict[str, np.ndarray] = field(default_factory=dict)  # share of active weights of each cell


def kind_of(name: str) -> str:
    """Return the name of the same matrix in every block: `blocks.3.mlp.up.weight` → `blocks.*.mlp.up.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names of the same matrix in different blocks."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    return kinds


def pictured(names: list[str]) -> list[str]:
    """Return the matrices whose pictures are kept: one of each kind in the first block and in the middle one."""
    kinds = by_kind(names)
    repeated = {kind: members for kind, members in kinds.items() if len(members) > 1} or kinds
    chosen = {m for members in repeated.values() for m in (members[0], members[len(members) // 2])}
    if len(chosen) > PICTURES:
        chosen = {members[0] for members in repeated.values()}
    return [name for name in names if name in chosen][:PICTURES]


def grid(shape: tuple[int, int]) -> tuple[int, int]:
    """Return the (rows, columns) of cells in a matrix's picture."""
    return min(CELLS, shape[0]), min(CELLS, shape[1])


def save(run: Path, snapshot: Snapshot) -> None:
    """Write a snapshot atomically, with magnitudes to 0.1 % (fp16) and fractions to 0.4 % (one byte)."""
    about = {k: v for k, v in asdict(snapshot).items() if k not in ("weights", "active")}
    arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}
    for name, cells in snapshot.weights.items():
        arrays[f"weights:{name}"] = cells.astype(np.float16)
        arrays[f"alive:{name}"] = np.round(255 * snapshot.active[name]).astype(np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    path = run / FOLDER / f"step{snapshot.step:08d}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def load(path: Path) -> Snapshot:
    """Read a snapshot.

    Raises:
        Damaged: if the file cannot be parsed.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            names = [key.partition(":")[2] for key in arrays.files if key.startswith("weights:")]
            weights = {name: arrays[f"weights:{name}"].astype(np.float32) for name in names}
            active = {name: arrays[f"alive:{name}"].astype(np.float32) / 255 for name in names}
        matrices = [Matrix(**{**entry, "shape": tuple(entry["shape"])}) for entry in about.pop("matrices")]
        return Snapshot(**about, matrices=matrices, weights=weights, active=active)
    except (ValueError, KeyError, TypeError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error) as error:
        raise Damaged(f"{path} cannot be read ({type(error).__name__}: {error})") from None


def paths(run: Path) -> list[Path]:
    """Return all snapshots of a run, the oldest first."""
    return sorted((run / FOLDER).glob("step????????.npz"))


def cut(run: Path, step: int) -> None:
    """Remove the snapshots after `step`, to which a run is rolled back."""
    for path in paths(run):
        if int(path.stem.removeprefix("step")) > step:
            path.unlink()

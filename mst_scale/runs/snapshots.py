"""Keeps a small summary of the weights at the end of each phase, for checkpoints do not last.

`RUN/snapshots/step00003000.npz`, a few hundred kB whatever the model's size: mean, standard deviation and count of
living weights of every matrix that can be sparse, and of a few of them a picture of at most CELLS × CELLS cells (mean
magnitude, share alive). Only arrays and JSON: nothing is run by reading one.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mst_scale.errors import Damaged

FOLDER = "snapshots"
CELLS = 96
PICTURES = 12  # at most so many matrices are pictured


@dataclass(frozen=True)
class Matrix:
    """One parameter as a matrix of `shape`; its standard deviations are over all weights, and over the living."""

    name: str
    shape: tuple[int, int]
    active: int
    mean: float
    std: float
    std_active: float
    largest: float


@dataclass(frozen=True)
class Snapshot:
    """The weights after `step` optimizer steps, in the phase that the last of them ran in."""

    step: int
    phase: str
    sparsity: float
    parameters: int
    """Parameters of the whole model."""
    matrices: list[Matrix]
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """Mean |w| of each cell, by parameter name."""
    alive: dict[str, np.ndarray] = field(default_factory=dict)
    """Share of living weights of each cell."""


def kind_of(name: str) -> str:
    """`blocks.3.mlp.up.weight` → `blocks.*.mlp.up.weight`: the same matrix in every block."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def pictured(names: list[str]) -> list[str]:
    """Whose pictures are kept: each kind of matrix in the first block and in the middle one."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    repeated = {kind: members for kind, members in kinds.items() if len(members) > 1} or kinds
    chosen = {m for members in repeated.values() for m in (members[0], members[len(members) // 2])}
    if len(chosen) > PICTURES:
        chosen = {members[0] for members in repeated.values()}
    return [name for name in names if name in chosen][:PICTURES]


def grid(shape: tuple[int, int]) -> tuple[int, int]:
    """Cells of a matrix's picture."""
    return min(CELLS, shape[0]), min(CELLS, shape[1])


def path_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step{step:08d}.npz"


def save(run: Path, snapshot: Snapshot) -> None:
    """Written whole or not at all. Half precision holds a magnitude to 0.1 %, a byte a share to 0.4 %."""
    about = {k: v for k, v in asdict(snapshot).items() if k not in ("weights", "alive")}
    arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}
    for name, cells in snapshot.weights.items():
        arrays[f"weights:{name}"] = cells.astype(np.float16)
        arrays[f"alive:{name}"] = np.round(255 * snapshot.alive[name]).astype(np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    path = path_of(run, snapshot.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".partial")
    try:
        draft.write_bytes(buffer.getvalue())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def load(path: Path) -> Snapshot:
    """Read one snapshot; a file that cannot be parsed is Damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            names = [key.partition(":")[2] for key in arrays.files if key.startswith("weights:")]
            weights = {name: arrays[f"weights:{name}"].astype(np.float32) for name in names}
            alive = {name: arrays[f"alive:{name}"].astype(np.float32) / 255 for name in names}
        matrices = [Matrix(**{**entry, "shape": tuple(entry["shape"])}) for entry in about.pop("matrices")]
        return Snapshot(**about, matrices=matrices, weights=weights, alive=alive)
    except (ValueError, KeyError, TypeError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error) as error:
        raise Damaged(f"{path} cannot be read ({type(error).__name__}: {error})") from None


def paths(run: Path) -> list[Path]:
    """All snapshots of a run, oldest first."""
    return sorted((run / FOLDER).glob("step????????.npz"))


def cut(run: Path, step: int) -> None:
    """Remove what lies after a run's present step: it was set back to a checkpoint, or begins anew."""
    for path in paths(run):
        if int(path.stem.removeprefix("step")) > step:
            path.unlink()

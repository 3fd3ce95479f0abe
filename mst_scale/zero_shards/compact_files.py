"""The file in a checkpoint that says which weights its compact parameters store.

    <tag>/mst/compact.safetensors    for each compact parameter the packed bits of its active weights (1/8 byte per
                                     weight), with the shape of its matrix in the file's metadata

DeepSpeed's files of such a checkpoint hold the K values of a parameter, and zeros up to a multiple of 64.
`weight_files` reads this file with them and gives whole matrices to all readers. A universal copy (`mst reshape`) has
no such file: it holds matrices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mst_scale import snapshot
from mst_scale.errors import Damaged
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.distribution import stored_length
from mst_scale.zero_shards.compact_index import CompactIndex

FOLDER, NAME, FORMAT = "mst", "compact.safetensors", "mst_scale compact 1"


class StoredIndex:
    """The index of one compact parameter in a checkpoint."""

    def __init__(self, shape: tuple[int, ...], bits: Tensor):
        self.shape, self.bits = shape, bits

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the values in the flattened matrix, ascending."""
        return packed_bits.indices(self.bits, math.prod(self.shape))

    @property
    def stored(self) -> int:
        """The length of the parameter in DeepSpeed's files."""
        return stored_length(len(self.positions))

    def between(self, start: int, end: int) -> tuple[int, int]:
        """Return which values [first, last) stand in the range [start, end) of the flattened matrix."""
        first, last = torch.searchsorted(self.positions, torch.tensor([start, end])).tolist()
        return first, last


def file_of(checkpoint: Path) -> Path:
    """Return the path of the file."""
    return checkpoint / FOLDER / NAME


def save(checkpoint: Path, indexes: Sequence[CompactIndex]) -> None:
    """Write the indexes of a model; one rank does."""
    path = file_of(checkpoint)
    tensors = {index.name: _bits_of(index) for index in indexes}
    shapes = {index.name: list(index.shape) for index in indexes}
    try:
        snapshot.save_tensors(tensors, path, {"mst": json.dumps({"format": FORMAT, "shapes": shapes})})
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {path}: {error}") from None


def read(checkpoint: Path) -> dict[str, StoredIndex]:
    """Return the indexes of a checkpoint's compact parameters by name; {} if it has none.

    Raises:
        Damaged: the file cannot be read.
    """
    path = file_of(checkpoint)
    if not path.is_file() or (checkpoint / "zero").is_dir():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            head = json.loads((file.metadata() or {}).get("mst", "null"))
            if not isinstance(head, dict) or head.get("format") != FORMAT:
                raise Damaged(f"{path} is not a compact index of this version ({FORMAT})")
            shapes = {name: tuple(int(side) for side in shape) for name, shape in head["shapes"].items()}
            return {name: StoredIndex(shape, file.get_tensor(name)) for name, shape in shapes.items()}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise Damaged(f"{path} is damaged or cut short ({error})") from None


def _bits_of(index: CompactIndex) -> Tensor:
    flags = torch.zeros(index.numel, dtype=torch.bool)
    flags[index.positions.cpu().long()] = True
    return packed_bits.pack(flags)

"""The files in a checkpoint that say which weights its compact parameters store.

    <tag>/mst/compact.safetensors    for each compact parameter the packed bits of its active weights (1/8 byte per
                                     weight), with the shape of its matrix in the file's metadata
    <tag>/mst/compact_01.safetensors …    the same of each further stage of a pipeline

DeepSpeed's files of such a checkpoint hold the K values of a parameter, and zeros up to a multiple of 64.
`weight_files` reads these files with them and gives whole matrices to all readers. A universal copy (`mst reshape`)
holds matrices and has no such file, unless its form is compact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mst_scale import snapshot, tensor_files
from mst_scale.checkpoint_folders import is_universal
from mst_scale.errors import Damaged, UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.shard import Shard
from mst_scale.sparse_linear.compact_index import CompactIndex

FOLDER, NAMES = "mst", "compact*.safetensors"
FORMAT, OF_STAGES = "mst_scale compact 1", "mst_scale compact 2"  # versions that know no stages reject the second


def digest_of(index: CompactIndex) -> int:
    """Return the digest of the mask of these weights, which the checkpoint's client_state has too."""
    mask = LayerMask(Shard.whole(index.name, index.shape), torch.device("cpu"))
    mask.set_flags(index.flags(), index.count)
    return mask.digest()


def file_of(checkpoint: Path, stage: int = 0) -> Path:
    """Return the path of the file of a pipeline's stage; the first one is in every checkpoint of compact storage."""
    return checkpoint / FOLDER / (f"compact_{stage:02d}.safetensors" if stage else "compact.safetensors")


def other_storage(checkpoint: Path, compact: bool) -> str | None:
    """Return how the storage of a checkpoint's weights differs from this run's; None if it is the same.

    Either storage continues from a universal checkpoint.
    """
    if is_universal(checkpoint) or file_of(checkpoint).is_file() == compact:
        return None
    stored = {False: "whole matrices", True: "only active weights (mst.compute.compact)"}
    return f"{checkpoint} stores {stored[not compact]}, but this run's layers store {stored[compact]}"


def remove(checkpoint: Path) -> None:
    """Remove the files of a checkpoint whose weights are matrices now."""
    for path in (checkpoint / FOLDER).glob(NAMES):
        path.unlink()


def save(checkpoint: Path, indexes: Sequence[CompactIndex], stage: int = 0, stages: int = 1) -> None:
    """Write the indexes of a model, or of a stage of its pipeline; one rank does."""
    tensors = {index.name: packed_bits.pack(index.flags().cpu()) for index in indexes}
    shapes = {index.name: list(index.shape) for index in indexes}
    head: dict[str, Any] = {"format": FORMAT, "shapes": shapes}
    if stages > 1:
        head |= {"format": OF_STAGES, "stage": stage, "stages": stages}
    snapshot.save_tensors(tensors, file_of(checkpoint, stage), {"mst": json.dumps(head)})


def read(checkpoint: Path) -> dict[str, CompactIndex]:
    """Return the indexes of a checkpoint's compact parameters by name; {} if it has none.

    Raises:
        Damaged: a file is missing or cannot be read.
        UserError: a file is of another version.
    """
    if not file_of(checkpoint).is_file():
        return {}
    found, stages = _read(file_of(checkpoint), 0)
    for stage in range(1, stages):
        further, of_stages = _read(file_of(checkpoint, stage), stage)
        if of_stages != stages:
            raise Damaged(f"{file_of(checkpoint, stage)} belongs to another checkpoint: copy the {FOLDER} folder again")
        found = {**further, **found}  # stages have the same index of a tied parameter
    return found


def _read(path: Path, stage: int) -> tuple[dict[str, CompactIndex], int]:
    """Return the indexes in a file, and the number of files."""
    with tensor_files.opened(path) as file:
        head, tensors = tensor_files.head_of(file), tensor_files.tensors_of(file)
    known = head.get("format") if isinstance(head, dict) else None
    if known not in (FORMAT, OF_STAGES):
        raise UserError(
            f"{path} has the format {known!r}, and this version of mst_scale reads {FORMAT!r} and {OF_STAGES!r}: read "
            "the checkpoint with the version that saved it, and convert it there (mst reshape CHECKPOINT OUT)"
        )
    if head.get("stage", 0) != stage:
        raise Damaged(f"{path} is the file of stage {head.get('stage', 0)}: it was renamed or copied from elsewhere")
    try:
        found = {}
        for name, sides in head["shapes"].items():
            bits, shape = tensors[name], tuple(int(side) for side in sides)
            if bits.dtype != torch.uint8 or bits.numel() != packed_bits.byte_count(math.prod(shape)):
                raise ValueError(f"{name} has {bits.numel()} values of {bits.dtype} for a matrix of {shape}")
            found[name] = CompactIndex(name, shape, packed_bits.indices(bits, math.prod(shape)))
        return found, int(head.get("stages", 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{path} is damaged ({error!r})") from None

"""Reads and writes masks in an open format for other tools: one safetensors file, parameter name → mask.

bool of the parameter's shape       true where the weight is kept; what a notebook writes with `save_file`
uint8, one bit per weight           in the order of `numpy.packbits` over the flattened parameter; the shapes stand
                                    in the file's metadata, {"shapes": {name: shape}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mst_scale.checkpoints import finding, mask_files
from mst_scale.comm import Damaged
from mst_scale.errors import UserError
from mst_scale.files import PARTIAL
from mst_scale.mixed_growing import packed_bits
from mst_scale.tensor_files import save

Named = Iterable[tuple[str, Tensor]]


def write(path: Path, masks: Named, packed: bool = False) -> int:
    """Write (name, bool mask) pairs, and return their number."""
    tensors, shapes = {}, {}
    for name, mask in masks:
        shapes[name] = list(mask.shape)
        flat = mask.cpu().contiguous()
        tensors[name] = packed_bits.pack(flat.view(-1)) if packed else flat
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + PARTIAL)
    try:
        save(tensors, draft, {"shapes": json.dumps(shapes)})
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return len(tensors)


class OpenMasks:
    """A file of masks; one is read at a time."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise UserError(f"there is no mask file {path}: create it with mst masks SOURCE {path}")
        try:
            with safe_open(path, framework="pt") as file:
                self.names = list(file.keys())
                self.shapes = json.loads((file.metadata() or {}).get("shapes", "{}"))
        except (SafetensorError, ValueError) as error:
            if path.suffix == ".safetensors":
                raise Damaged(f"{path} is not a safetensors file, or damaged ({error})") from None
            raise UserError(f"{path} is not a safetensors file of masks ({error}): name one, or create it") from None
        except OSError as error:
            raise Damaged(f"{path} cannot be read ({error})") from None

    def mask(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the mask of a parameter of this shape, as bool."""
        with safe_open(self.path, framework="pt") as file:
            found: Tensor = file.get_tensor(name)
        packed = found.dtype == torch.uint8 and found.dim() == 1 and len(shape) > 1
        stated = tuple(self.shapes.get(name, shape if packed else found.shape))
        if stated != shape or (packed and found.numel() != packed_bits.byte_count(math.prod(shape))):
            raise UserError(f"{self.path}: the mask of {name} has shape {stated}, but the parameter has {shape}")
        return packed_bits.unpack(found, math.prod(shape)).view(shape) if packed else found != 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            with safe_open(self.path, framework="pt") as file:
                shape = tuple(self.shapes.get(name) or file.get_slice(name).get_shape())
            yield name, self.mask(name, shape)


def of_source(source: Path) -> Named:
    """Return the masks of a checkpoint, a run or a file of masks, or of the zeros in a transformers folder.

    If a folder has both a checkpoint and weights, as a Trainer writes them, the masks are those of the checkpoint.
    """
    if source.is_file():
        return OpenMasks(source)
    weights = sorted(source.glob("*.safetensors")) if finding.of_other_loops(source) is None else []
    return _of_zeros(weights) if weights else _of_checkpoint(finding.locate(source))


def _of_checkpoint(checkpoint: Path) -> Named:
    if mask_files.are_expected(checkpoint):
        found = mask_files.read_all(checkpoint)
        yield from ((name, found.whole(name)) for name in found.head["names"])


def _of_zeros(files: Iterable[Path]) -> Named:
    """Yield the masks of the matrices that have zeros."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no dict)
                    value = file.get_tensor(name)
                    if value.dim() > 1 and value.is_floating_point() and not value.all():
                        yield name, value != 0
        except SafetensorError as error:
            raise Damaged(f"{path} is damaged or cut short ({error})") from None

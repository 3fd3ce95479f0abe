"""Writes and reads compact files: safetensors with the nonzero values of each sparse matrix and one bit per weight.

A tensor NAME of the model is stored as one of

    NAME                       the tensor itself, if that takes fewer bytes
    NAME.mask, NAME.values     uint8, one bit per weight in the order of `numpy.packbits` over the flattened tensor, and
                               the values at the set bits in the same order; a value without a bit is 0

and the file's metadata, all of it strings, says

    format     "mst_scale.compact"
    version    "1"; a reader rejects numbers that it does not know
    model      JSON: the shape of the model, by the keys of the `model` block
    shapes     JSON: {NAME: shape} of the tensors that are stored in two parts
    about      JSON: step, method, tokenizer, attention pattern of the training
    sha256     over the lines "key=value" of the other metadata in the order of keys, and then the bytes of all tensors
               in the order of names
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mst_scale import tensor_files
from mst_scale.errors import UserError
from mst_scale.mixed_growing.packed_bits import byte_count, pack, unpack
from mst_scale.tensor_files import COMPACT, save

FILE = "model.safetensors"
VERSION = "1"
MASK, VALUES = ".mask", ".values"


def split(tensor: torch.Tensor, active: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (bits, values) of a tensor; None if they would take as many bytes as the tensor.

    `active` marks weights to store even if they are 0. Of the others, -0.0 becomes 0.0.
    """
    flat = tensor.contiguous().view(-1)
    kept = flat != 0
    if active is not None:
        kept |= active.reshape(-1)
    if byte_count(len(kept)) + int(kept.sum()) * flat.element_size() >= tensor.nbytes:
        return None
    return pack(kept), flat[kept]


def write(
    path: Path,
    tensors: Iterable[tuple[str, torch.Tensor, torch.Tensor | None]],
    model: Mapping[str, Any],
    about: Mapping[str, Any],
) -> int:
    """Write (name, tensor, active weights or None) to a file, and return its size; memory holds the compact form."""
    parts: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, tensor, active in tensors:
        found = split(tensor, active)
        if found is None:
            parts[name] = tensor.contiguous()
        else:
            parts[name + MASK], parts[name + VALUES] = found
            shapes[name] = list(tensor.shape)
    metadata = {"format": COMPACT, "version": VERSION}
    metadata |= {key: json.dumps(value) for key, value in (("model", model), ("shapes", shapes), ("about", about))}
    save(parts, path, {**metadata, "sha256": _digest(metadata, parts)})
    return path.stat().st_size


@dataclass(frozen=True)
class CompactFile:
    """An opened compact file, whose digest was found to be right."""

    path: Path
    model: dict[str, Any]
    about: dict[str, Any]
    parts: dict[str, torch.Tensor] = field(repr=False)
    """The stored tensors, mapped from the file: memory is taken by those that are read."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the tensors that are stored in two parts."""

    @property
    def names(self) -> list[str]:
        """The names of the model's tensors."""
        halves = {name + kind for name in self.shapes for kind in (MASK, VALUES)}
        return [*self.shapes, *(name for name in self.parts if name not in halves)]

    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's tensors by name."""
        return {name: self.shapes.get(name) or tuple(self.parts[name].shape) for name in self.names}

    def sparse(self, name: str) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None:
        """Return (values, bits, shape) of a tensor; None if it is stored whole."""
        if name not in self.shapes:
            return None
        return self.parts[name + VALUES], self.parts[name + MASK], self.shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in its full shape."""
        found = self.sparse(name)
        if found is None:
            return self.parts[name]
        values, bits, shape = found
        dense = torch.zeros(math.prod(shape), dtype=values.dtype)
        dense[unpack(bits, len(dense))] = values
        return dense.view(shape)


def masks_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names of the sparse matrices in a compact file, and their masks, as bool.

    Of those that are stored whole, because nearly all of their weights are active, the masks are those of their zeros.
    """
    found = open_compact(path)
    for name, tensor in found.parts.items():
        if name in found.names and tensor.dim() > 1 and not (active := tensor != 0).all():
            yield name, active
    for name, shape in found.shapes.items():
        if len(shape) > 1:
            yield name, unpack(found.parts[name + MASK], math.prod(shape)).view(shape)


def is_compact(path: Path) -> bool:
    """Return whether a file, or model.safetensors in a folder, begins like a compact file; it may be damaged."""
    return tensor_files.is_compact(file_of(path))


def file_of(path: Path) -> Path:
    """Return the compact file that a path means: itself, or model.safetensors in it."""
    return path / FILE if path.is_dir() else path


def open_compact(path: Path) -> CompactFile:
    """Open a compact file and check its digest.

    Raises:
        UserError: if it is no compact file, of a later version, or damaged.
    """
    path = file_of(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: mst export RUN OUT --compact writes one") from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or cut short ({error}): export the run again, or copy it again") from None
    if metadata.get("format") != COMPACT:
        raise UserError(f"{path} is not a compact file of mst_scale: mst export RUN OUT --compact writes one")
    if metadata.get("version") != VERSION:
        raise UserError(
            f"{path} has layout version {metadata.get('version')}, and this mst_scale reads {VERSION}: export the run "
            "again, or install the version that wrote the file"
        )
    if metadata.pop("sha256", None) != _digest(metadata, parts):
        raise UserError(f"{path} is damaged (its sha256 differs): export the run again, or copy it again")
    try:
        model, shapes, about = (json.loads(metadata[key]) for key in ("model", "shapes", "about"))
        return CompactFile(path, model, about, parts, {name: tuple(shape) for name, shape in shapes.items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged (its header: {error!r}): export the run again, or copy it again") from None


def _digest(metadata: Mapping[str, str], parts: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for key in sorted(metadata):
        digest.update(f"{key}={metadata[key]}\n".encode())
    for name in sorted(parts):
        if parts[name].numel():
            digest.update(parts[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

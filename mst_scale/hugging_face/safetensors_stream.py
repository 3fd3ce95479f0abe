"""Writes the weights of a Hugging Face folder piece by piece, for models that do not fit into memory.

A safetensors file is a JSON header (names, shapes, offsets) followed by the values. All shapes are known beforehand, so
the header is written first and the values follow piece by piece. What is larger than `shard_bytes` goes into several
files and `model.safetensors.index.json`, as transformers does it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
Shape = tuple[int, ...]
Source = Callable[[str], Iterator[torch.Tensor]]  # a tensor's values in order, in pieces of any shape


def write_model(folder: Path, shapes: Mapping[str, Shape], source: Source, dtype: str, shard_bytes: int) -> list[Path]:
    """`model.safetensors`, or its parts and their index; returns the files with weights."""
    size = DTYPES[dtype][1].itemsize
    shards: list[dict[str, Shape]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        numel = math.prod(shape) * size
        if shards[-1] and filled + numel > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += numel
    count = len(shards)
    names = [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        _write(folder / file, shard, source, dtype)
    if count > 1:
        total = size * sum(math.prod(shape) for shape in shapes.values())
        where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return [folder / file for file in names]


def _write(path: Path, shapes: Mapping[str, Shape], source: Source, dtype: str) -> None:
    label, torch_dtype = DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + math.prod(shape) * torch_dtype.itemsize
        header[name] = {"dtype": label, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            written = 0
            for piece in source(name):
                values = piece.to(torch_dtype).contiguous().view(-1)
                file.write(values.view(torch.uint8).numpy().data)
                written += values.numel()
            assert written == math.prod(shape), f"{name}: {written} values for {shape}"

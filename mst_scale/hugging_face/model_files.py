"""Writes the weights of an exported model as safetensors files, in pieces, into a folder that is renamed when complete.

A safetensors file is a JSON header (names, shapes, offsets) followed by the values. All shapes are known in advance, so
the values can be written one after the other.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

Shape = tuple[int, ...]
Pieces = Callable[[str], Iterator[torch.Tensor]]  # a tensor's values in order, in pieces of any shape
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja",
)  # fmt: skip
DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}


def write_model(folder: Path, shapes: Mapping[str, Shape], pieces: Pieces, dtype: str, shard_bytes: int) -> list[Path]:
    """Write tensors to `model.safetensors`, or to several files of `shard_bytes` and their index; return the files."""
    size = DTYPES[dtype][1].itemsize
    shards: list[dict[str, Shape]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        n_bytes = math.prod(shape) * size
        if shards[-1] and filled + n_bytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += n_bytes
    count = len(shards)
    names = [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        _write_safetensors(folder / file, shard, pieces, dtype)
    if count > 1:
        total = size * sum(math.prod(shape) for shape in shapes.values())
        file_of = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        write_json(folder / "model.safetensors.index.json", index)
    return [folder / file for file in names]


def _write_safetensors(path: Path, shapes: Mapping[str, Shape], pieces: Pieces, dtype: str) -> None:
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
            for piece in pieces(name):
                values = piece.to(torch_dtype).contiguous().view(-1)
                file.write(values.view(torch.uint8).numpy().data)
                written += values.numel()
            assert written == math.prod(shape), f"{name}: {written} values for {shape}"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")

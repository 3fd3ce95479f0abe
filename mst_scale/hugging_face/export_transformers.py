"""Writes a checkpoint of a transformers model as a folder that transformers loads, in the model's own architecture.

`config.json` is the model's own, with a block `mst_scale` (step, method, and the attention that it was trained with);
weights are the fp32 masters and pass through memory piece by piece. Tokenizer and generation files that lie beside the
configuration are copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mst_scale.data.tokenizer import write_tokenizer
from mst_scale.hugging_face import model_card
from mst_scale.hugging_face.safetensors_stream import write_model
from mst_scale.hugging_face.transformers_source import TransformersSource

COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja",
)  # fmt: skip


def write_folder(
    source: TransformersSource, folder: Path, *, dtype: str, shard_bytes: int, tokenizer: str | None
) -> tuple[dict[str, Any], str]:
    """Fill `folder`. Returns what the export reports of it, and why there are no tokenizer files ("" if there are)."""
    note = ""
    if tokenizer is not None:
        note = write_tokenizer(folder, tokenizer, int(source.config.get("vocab_size", 0)))[1]
    for name in COMPANIONS:
        if not (folder / name).exists() and (found := source.beside(name)) is not None:
            shutil.copy2(found, folder / name)
    if tokenizer is None and source.tokenizer is None:
        note = (
            f"no tokenizer files: none lie in {source.checkpoint.parent}; save the tokenizer there "
            "(tokenizer.save_pretrained), or name one with --tokenizer"
        )
    zeros = counted = 0

    def pieces(name: str) -> Iterator[torch.Tensor]:
        nonlocal zeros, counted
        for piece in source.pieces(name):
            if name in source.targets:
                zeros, counted = zeros + int((piece == 0).sum()), counted + piece.numel()
            yield piece

    shapes = source.shapes()
    files = write_model(folder, shapes, pieces, dtype, shard_bytes)
    about: dict[str, Any] = {"step": source.step, "method": source.method, "tokenizer": tokenizer}
    if source.pattern.kind != "dense":
        about["attention"] = asdict(source.pattern)
    config = {**source.config, "dtype": dtype, "architectures": [type(source.skeleton).__name__], "mst_scale": about}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    parameters = sum(p.numel() for p in source.skeleton.parameters())
    done = {"parameters": parameters, "zeros": zeros, "matrices": counted, "files": [file.name for file in files]}
    card = model_card.of_transformers(source, {**done, "step": source.step}, note)
    (folder / "README.md").write_text(card)
    return done, note

"""Writes a run as a folder with one compact file, tokenizer files and a README."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mst_scale.comm import logger
from mst_scale.compact_files import layout
from mst_scale.compact_files.weights import ModelWeights, model_block, open_weights
from mst_scale.data.tokenizer import chosen, write_tokenizer
from mst_scale.errors import UserError
from mst_scale.files import draft_of
from mst_scale.hugging_face.model_files import DTYPES, TOKENIZER_FILES

README = """\
# A compact file of mst_scale

`model.safetensors` holds the nonzero weights of a model and one bit per weight (layout version {version};
docs/generation.md of mst_scale describes it and reads it with a few lines of numpy). It takes {bytes:,} bytes; the same
weights stored dense take {dense_bytes:,}.
"""
COMMANDS = """
    mst generate FOLDER --prompt TEXT
    mst eval FOLDER --tasks lambada
"""


@dataclass(frozen=True)
class CompactExport:
    """What an export has written.

    Attributes:
        nonzero: Weights that are stored with a value, among all `parameters`.
        bytes: The size of the file.
        dense_bytes: The size of all parameters in the same dtype, stored dense.
        tokenizer: The tokenizer whose files were written.
        method: The method that trained the model, if it is known.
    """

    source: Path
    out: Path
    step: int | None
    parameters: int
    nonzero: int
    sparse_matrices: int
    bytes: int
    dense_bytes: int
    tokenizer: str | None
    method: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values, with the share of the dense size."""
        return {
            **asdict(self),
            "source": str(self.source),
            "out": str(self.out),
            "share_of_dense": round(self.bytes / self.dense_bytes, 4),
        }


def export_compact(
    path: Path, out: Path, *, dtype: str = "float32", tokenizer: str | None = None, config: Path | None = None
) -> CompactExport:
    """Write the folder `out` from a run, a checkpoint, or a GPT-2 of transformers.

    Args:
        path: The folder of a run, a checkpoint or a model.
        out: The folder to write; it must not exist.
        dtype: "float32", "bfloat16" or "float16".
        tokenizer: A tokenizer to name in the file instead of the corpus's own.
        config: The experiment, for a checkpoint that is not next to it.

    Raises:
        UserError: if an argument is wrong, or it is not a model of ours.
        Damaged: if a file of the checkpoint was cut short.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    if out.exists():
        raise UserError(f"{out} exists: choose another OUT")
    weights = open_weights(path, config, causal=False)
    text = chosen(tokenizer, weights.tokenizer, str(path))
    about = {**weights.about(), "tokenizer": text and text.name, "tokenizer_identity": text and text.identity}
    counts, own = _Counts(), None if text is None else text.name
    with draft_of(out) as draft:
        _, note = write_tokenizer(draft, own, weights.config.vocab_size)
        if note and tokenizer is None and (path / "tokenizer.json").is_file():
            for name in TOKENIZER_FILES:
                if (path / name).is_file():
                    shutil.copy2(path / name, draft / name)
            note, own = "", "the model's own"
        tensors = counts.of(weights, DTYPES[dtype][1])
        size = layout.write(draft / layout.FILE, tensors, model_block(weights.config), about)
        dense = counts.parameters * DTYPES[dtype][1].itemsize
        readme = README.format(version=layout.VERSION, bytes=size, dense_bytes=dense)
        (draft / "README.md").write_text(readme + (COMMANDS if weights.config.causal else ""))
    if note:
        logger.warning("%s", note)
    return CompactExport(
        path, out, weights.step, counts.parameters, counts.nonzero, counts.sparse, size, dense,
        None if note else own, about.get("method"),
    )  # fmt: skip


class _Counts:
    """Counts weights while they pass."""

    def __init__(self) -> None:
        self.parameters = self.nonzero = self.sparse = 0

    def of(self, weights: ModelWeights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        for name in weights.names:
            tensor = weights.read(name).to(dtype)
            active = weights.mask(name) if weights.mask is not None and name in weights.masks else None
            self.parameters += tensor.numel()
            self.nonzero += int(tensor.count_nonzero())
            self.sparse += tensor.dim() > 1 and not bool(tensor.all())
            yield name, tensor, active

"""What decides every byte of a corpus: the source, how it is tokenized and split, and where reading stops.

A source is named by
- `stdlib`: the sources of the running Python's standard library; `package:NAME`: those of an installed package;
- `openwebtext`: the paper's data set, with nanoGPT's split; or another data set of the Hugging Face hub;
- a folder that `datasets` has written with `save_to_disk`;
- files, globs and folders: `.txt`, `.jsonl`, `.parquet`, compressed `.jsonl`, and `.json`, `.csv`, `.arrow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from mst_scale.data.tokenizer import tokenizer_identity
from mst_scale.errors import UserError

STDLIB, PACKAGE = "stdlib", "package:"
OPENWEBTEXT, OPENWEBTEXT_ON_HUB = "openwebtext", "Skylion007/openwebtext"
OPENWEBTEXT_VAL_FRACTION = 0.0005  # nanoGPT's
CODE_VAL_FRACTION = 0.02  # a few hundred thousand tokens of 10 MB
OTHER_VAL_FRACTION = 0.01


@dataclass(frozen=True)
class Recipe:
    """What decides every byte of a corpus. None means the source's default, which is filled in here."""

    source: str | Sequence[str] = STDLIB
    tokenizer: str | None = None  # `byte` for stdlib and packages, else `gpt2`
    text_key: str = "text"  # the JSON key or table column that holds a document
    val_fraction: float | None = None  # 0.0005 for openwebtext, 0.02 for stdlib and packages, else 0.01
    max_bytes: int | None = None  # stop reading here
    seed: int = 2357  # of the train/validation split: nanoGPT's
    subset: str | None = None  # hub: the configuration, as in load_dataset(name, subset)
    split: str = "train"  # hub, saved: the split to read
    val_split: str | None = None  # hub, saved: a split to validate on, in place of a part of `split`
    revision: str | None = None  # hub: a commit, tag or branch
    stream: bool = False  # hub: read while downloading and keep no copy; openwebtext is then not split as nanoGPT does

    def __post_init__(self) -> None:
        paths = self.paths
        if not paths or not all(paths):
            raise UserError("no source: name 'stdlib', a data set of the Hugging Face hub, or files")
        word = paths[0] if len(paths) == 1 else ""
        object.__setattr__(self, "source", word or tuple(paths))
        if self.tokenizer is None:
            object.__setattr__(self, "tokenizer", "byte" if is_code(word) else "gpt2")
        if self.val_fraction is None:
            usual = OPENWEBTEXT_VAL_FRACTION if word == OPENWEBTEXT else OTHER_VAL_FRACTION
            object.__setattr__(self, "val_fraction", CODE_VAL_FRACTION if is_code(word) else usual)
        if not 1e-6 <= self.held_out < 1:
            raise UserError(f"val_fraction must lie in [0.000001, 1), not {self.val_fraction}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must lie in [0, 2^32), not {self.seed}")
        if self.val_split is not None and self.val_split == self.split:
            raise UserError(f"val_split {self.val_split!r} is the split to train on: name another, or leave it out")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UserError(f"max_bytes must be at least 1, not {self.max_bytes}")

    @property
    def paths(self) -> list[str]:
        """The source as a list of names."""
        return [self.source] if isinstance(self.source, str) else list(self.source)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer, with the default filled in."""
        assert self.tokenizer is not None
        return self.tokenizer

    @property
    def held_out(self) -> float:
        """The validation fraction, with the default filled in."""
        assert self.val_fraction is not None
        return self.val_fraction

    def first_stated(self, *names: str) -> str | None:
        """Return the first of these options that does not have its default; None if all have."""
        return next((f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default), None)

    def identity(self) -> dict[str, Any]:
        """Return the recipe as JSON values. Two recipes of one identity make the same corpus from the same data."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return content | {"source": self.paths, "tokenizer": tokenizer_identity(self.tokenizer_name)}


def is_code(source: str | Sequence[str]) -> bool:
    """Return whether the source is the code of Python's library or of a package."""
    return isinstance(source, str) and (source == STDLIB or source.startswith(PACKAGE))

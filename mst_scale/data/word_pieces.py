"""Turns text into BERT's word pieces.

Words and punctuation marks apart, each word cut into the longest pieces that the vocabulary has, from the left. The
vocabulary is BERT's `vocab.txt`, one piece a line, its line the id: a local file, or `bert-base-uncased` and
`bert-base-cased` from the Hugging Face hub. One without any capital letter is for text in lower case without accents,
as BERT's own; that is seen from the file and logged.

A text ends with [SEP]; a run adds [CLS] and [MASK] (masking.py). Their names inside a text are ordinary text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mst_scale.errors import UserError

HUB = ("bert-base-uncased", "bert-base-cased")  # as google-bert/NAME; the large models have the same vocabularies
NEEDED = ("[UNK]", "[CLS]", "[SEP]", "[MASK]")
PIECE = 1 << 15  # characters tokenised at once: the library keeps some 200 bytes a piece of each
log = logging.getLogger("mst_scale")


class WordPieceTokenizer:
    def __init__(self, name: str, path: Path):
        self.name = name
        pieces = _vocabulary(path)
        ids = {piece: number for number, piece in enumerate(pieces)}
        self.vocab_size = len(pieces)
        self.end_of_text = ids["[SEP]"]
        self.start: int | None = ids["[CLS]"]
        self.mask: int | None = ids["[MASK]"]
        self.lowercase = not any(piece != piece.lower() for piece in pieces if not piece.startswith("["))
        log.info("%s: %d word pieces, %s", path, len(pieces), "lower case" if self.lowercase else "cased")
        self.tokenizer = _tokenizer(ids, self.lowercase)

    def encode(self, text: str) -> np.ndarray:
        ids = [self.tokenizer.encode(part, add_special_tokens=False).ids for part in _parts(text)]
        return np.concatenate([np.asarray(part, dtype=np.uint32) for part in [*ids, []]])

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self.tokenizer.decode([i for i in ids if i != self.end_of_text])
        return text

    def save(self, folder: Path) -> None:
        """tokenizer.json and tokenizer_config.json, as `AutoTokenizer` reads them: [CLS] text [SEP]."""
        from tokenizers import Tokenizer, processors

        saved = Tokenizer.from_str(self.tokenizer.to_str())
        ids = saved.get_vocab()
        special = [piece for piece in (*NEEDED, "[PAD]") if piece in ids]
        saved.add_special_tokens(special)
        saved.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
        saved.save(str(folder / "tokenizer.json"))
        named = {f"{piece[1:-1].lower()}_token": piece for piece in special}
        loading = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        (folder / "tokenizer_config.json").write_text(json.dumps(loading, indent=2) + "\n")


def vocabulary_file(name: str) -> Path:
    """Where the vocabulary of a tokenizer lies, downloaded once if it is the hub's."""
    if name not in HUB:
        return Path(name)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"google-bert/{name}", "vocab.txt"))
    except Exception as error:  # no network, a proxy, a hub that is down: each has a class of its own
        raise OSError(
            f"the vocabulary of tokenizer {name!r} cannot be downloaded ({type(error).__name__}): pass the path of its "
            f"vocab.txt (https://huggingface.co/google-bert/{name}), or use 'byte'"
        ) from None


def _vocabulary(path: Path) -> list[str]:
    try:
        pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # splitlines() knows other ends too
    except FileNotFoundError:
        raise UserError(f"no vocabulary {path}; give BERT's vocab.txt, or use 'byte'") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; is this BERT's vocab.txt?") from None
    if missing := [piece for piece in NEEDED if piece not in pieces]:
        raise UserError(f"{path} has no line {missing[0]}; is this BERT's vocab.txt?")
    if len(set(pieces)) < len(pieces):
        twice = next(piece for number, piece in enumerate(pieces) if piece in pieces[:number])
        raise UserError(f"{path} has {twice!r} on two lines; copy it again")
    return pieces


def _tokenizer(ids: dict[str, int], lowercase: bool) -> Any:
    try:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    except ImportError:
        raise UserError("word pieces need the package tokenizers: pip install tokenizers") from None
    tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _parts(text: str) -> Iterator[str]:
    """Cut after a blank: no word is cut unless it is longer than a part."""
    start = 0
    while start < len(text):
        stop = start + PIECE
        if stop < len(text):
            blank = max(text.rfind(" ", start, stop), text.rfind("\n", start, stop))
            stop = blank + 1 if blank >= start else stop
        yield text[start:stop]
        start = stop

"""Writes tokenizer files with which `AutoTokenizer.from_pretrained` encodes text as the run did.

`tokenizer.json` (byte-level BPE, what transformers loads without further code) and `tokenizer_config.json`:

- `byte`: 256 tokens and no merges, id = byte, 256 ends a text;
- `gpt2` and rank files split like it: the vocabulary is the ranks, and the merges are found from them, each token being
  split into the two parts from which BPE builds it. Written only where the ranks are available (tiktoken downloads
  them once);
- BERT's word pieces, with [CLS] before and [SEP] behind a text.

Other encodings split text by other patterns; no files are written for them.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from mst_scale.data.tokenizer import SPLIT_LIKE_GPT2, is_missing, is_rank_file, load_tokenizer
from mst_scale.data.word_pieces import WordPieceTokenizer
from mst_scale.errors import UserError

END = "<|endoftext|>"


def write_tokenizer(folder: Path, name: str | None, vocab_size: int) -> tuple[int | None, str]:
    """(id that ends a text, why no files were written or ""). A vocabulary that the model does not hold is refused."""
    if name is None:
        return None, "no tokenizer files: the run does not say which tokenizer made its corpus; --tokenizer names one"
    if is_missing(name):
        return None, f"no tokenizer files: {name} is not there any more; --tokenizer names it where it lies now"
    try:
        tokenizer = load_tokenizer(name)
    except OSError as error:
        return None, f"no tokenizer files: {error}"
    if tokenizer.vocab_size > vocab_size:
        raise UserError(f"tokenizer {name!r} has {tokenizer.vocab_size} ids, and the model only {vocab_size}")
    if name == "byte":
        vocabulary, merges = {character: byte for byte, character in enumerate(characters())}, []
    elif name in SPLIT_LIKE_GPT2 or is_rank_file(name):
        ranks: dict[bytes, int] = tokenizer.encoding._mergeable_ranks  # type: ignore[attr-defined]
        vocabulary, merges = {_spelt(token): rank for token, rank in ranks.items()}, merges_of(ranks)
    elif isinstance(tokenizer, WordPieceTokenizer):
        tokenizer.save(folder)
        return tokenizer.end_of_text, ""
    else:
        return tokenizer.end_of_text, f"no tokenizer files: {name!r} splits text in its own way; use tiktoken with it"
    described = _described(vocabulary, merges, tokenizer.end_of_text, split_words=name != "byte")
    (folder / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False) + "\n")
    loading = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(loading, indent=2) + "\n")
    return tokenizer.end_of_text, ""


def characters() -> list[str]:
    """The visible character that byte-level BPE writes for each byte, as GPT-2's files do."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


_CHARACTERS = characters()


def _spelt(token: bytes) -> str:
    return "".join(_CHARACTERS[byte] for byte in token)


def merges_of(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The merges in order: a token of rank r comes from the two parts that the merges before r leave of it."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        if len(token) > 1:
            left, right = _last_two(token, rank, ranks)
            merges.append((_spelt(left), _spelt(right)))
    return merges


def _last_two(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts))]
        best, i = min(joined)
        if best >= rank:
            raise UserError(f"the rank file is not one of BPE: {token!r} cannot be put together from lower ranks")
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _described(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], end_of_text: int, *, split_words: bool
) -> dict[str, Any]:
    """The contents of tokenizer.json."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split_words}
    end = {
        "id": end_of_text, "content": END, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {**vocabulary, END: end_of_text},
            "merges": [list(pair) for pair in merges],
        },
    }

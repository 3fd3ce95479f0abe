"""Turns text into token ids.

Ways to name a tokenizer:
- `byte`: the 256 bytes of UTF-8 and an end of text, 257 ids; needs no vocabulary;
- `gpt2` (the paper's) or any other encoding name of tiktoken; tiktoken downloads its vocabulary once;
- a path to a `.tiktoken` rank file (lines of "base64-token rank"), for machines without a network. Text is split by
  GPT-2's pattern and the end of text is the id after the last rank, so `r50k_base.tiktoken` gives the very ids of
  `gpt2`. Files of encodings with another pattern (`cl100k_base.tiktoken`, …) are refused, not silently mis-split;
- `bert-base-uncased`, `bert-base-cased` or a path to a `vocab.txt`: BERT's word pieces (word_pieces.py).

Special tokens inside a text are encoded as ordinary text; only the end of text is ever emitted, by `prepare`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mst_scale.data.word_pieces import HUB, WordPieceTokenizer, vocabulary_file
from mst_scale.errors import UserError

SPLIT_LIKE_GPT2 = ("gpt2", "r50k_base")  # encodings whose rank file is complete with that pattern
# Identities of the same ids; the last is of r50k_base.tiktoken, as tiktoken itself checks it.
GPT2_IDS = {*SPLIT_LIKE_GPT2, "sha256:306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"}
SHORTEST_HALF = 1 << 10  # characters; no pattern fails on a shorter text
DOWNLOAD_SECONDS = 60.0  # vocabularies are 1-4 MB; a network that drops packets would otherwise hang for minutes


class Tokenizer(Protocol):
    name: str
    vocab_size: int  # ids are 0 … vocab_size - 1
    end_of_text: int
    start: int | None  # BERT's [CLS] and [MASK]
    mask: int | None

    def encode(self, text: str) -> np.ndarray:
        """Unsigned ids, without the end of text."""

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """One id per byte of UTF-8; 256 ends a text."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256
    start: int | None = None
    mask: int | None = None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i != self.end_of_text).decode(errors="replace")


class BpeTokenizer:
    """A tiktoken encoding."""

    start: int | None = None
    mask: int | None = None

    def __init__(self, name: str, encoding: Any):
        self.name = name
        self.encoding = encoding
        self.vocab_size: int = encoding.n_vocab
        try:
            self.end_of_text: int = encoding.eot_token
        except KeyError:
            raise UserError(f"tokenizer {name!r} has no <|endoftext|>; choose one that has, like gpt2") from None

    def encode(self, text: str) -> np.ndarray:
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # The regular expression fails on a run of about 100,000 blanks: encode the text in halves.
            half = len(text) // 2
            if half < SHORTEST_HALF:
                raise
            return np.concatenate([self.encode(text[:half]), self.encode(text[half:])])

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode([i for i in ids if i != self.end_of_text])


def load_tokenizer(name: str) -> Tokenizer:
    if name == "byte":
        return ByteTokenizer()
    if is_vocabulary(name):
        return WordPieceTokenizer(name, vocabulary_file(name))
    if is_rank_file(name):
        return BpeTokenizer(name, _encoding_from_ranks(Path(name)))
    return BpeTokenizer(name, _encoding_by_name(name))


def is_vocabulary(name: str) -> bool:
    return name in HUB or name.endswith(".txt")


def is_rank_file(name: str) -> bool:
    return not is_vocabulary(name) and (name.endswith(".tiktoken") or "/" in name)


def is_file(name: str) -> bool:
    return is_rank_file(name) or name.endswith(".txt")


def tokenizer_identity(name: str) -> str:
    """What decides the ids: the name, or the content of a file wherever it lies."""
    return f"sha256:{hashlib.sha256(_read(Path(name))).hexdigest()}" if is_file(name) else name


def is_missing(name: str) -> bool:
    """Whether it names a file that does not lie there (any more)."""
    return is_file(name) and not Path(name).is_file()


@dataclass(frozen=True)
class TrainedWith:
    """The tokenizer of a model's corpus, which may have been made on another machine."""

    name: str
    identity: str | None
    """None: it was a file, which is not here, and nothing tells what was in it."""


def trained_with(name: str, noted: str | None = None) -> TrainedWith:
    """`noted` is the identity that was written down then, if one was."""
    return TrainedWith(name, noted or (None if is_missing(name) else tokenizer_identity(name)))


def chosen(given: str | None, before: TrainedWith | None, model: str) -> TrainedWith | None:
    """The tokenizer to use: the one asked for, wherever its file lies, which must give the ids of the one before."""
    if given is None:
        return before
    identity = tokenizer_identity(given)
    if before is not None and not same_ids(before.identity, identity):
        cure = "name that file where it lies now" if is_missing(before.name) else "leave --tokenizer out"
        raise UserError(f"{model} was trained with tokenizer {before.name!r}, not {given!r}: {cure}")
    return TrainedWith(os.path.abspath(given) if is_file(given) else given, identity)


def same_ids(one: str | None, other: str | None) -> bool:
    """Whether two identities give the same ids, or may: None is not known."""
    return None in (one, other) or one == other or {one, other} <= GPT2_IDS


def token_dtype(vocab_size: int) -> np.dtype:
    """2 bytes a token while the ids fit, else 4: nanoGPT's layout and its natural extension."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32).newbyteorder("<")


def _encoding_by_name(name: str) -> Any:
    import tiktoken

    known = tiktoken.list_encoding_names()
    if name not in known:
        near = difflib.get_close_matches(name, ["byte", *HUB, *known], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        names = ", ".join(("byte", *HUB, *known))
        raise UserError(
            f"unknown tokenizer {name!r}{hint} (known: {names}, or the path of a .tiktoken file or a vocab.txt)"
        )
    try:
        return _within(DOWNLOAD_SECONDS, lambda: tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:  # no network, or a proxy's page instead of the file
        url = getattr(getattr(error, "request", None), "url", None)
        where = ""
        if url is not None:  # tiktoken names a cached file by the digest of its address
            where = f" with {url} saved in it as {hashlib.sha1(url.encode()).hexdigest()}"
        raise OSError(
            f"the vocabulary of tokenizer {name!r} cannot be downloaded ({type(error).__name__}): set "
            f"TIKTOKEN_CACHE_DIR to a folder{where}, or pass the path of a .tiktoken rank file (r50k_base.tiktoken is "
            "gpt2's), or use 'byte'"
        ) from None


def _within(seconds: float, load: Callable[[], Any]) -> Any:
    """`load()`, or TimeoutError: tiktoken's download itself has no time limit."""
    outcome: list[tuple[Any, Exception | None]] = []

    def attempt() -> None:
        try:
            outcome.append((load(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no tokenizer file {path}; give a .tiktoken file or a vocab.txt, or use 'byte'") from None


def _encoding_from_ranks(path: Path) -> Any:
    import base64

    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]  # GPT-2's

    if path.stem in set(tiktoken.list_encoding_names()).difference(SPLIT_LIKE_GPT2):
        raise UserError(
            f"{path} belongs to {path.stem!r}, which does not split text like GPT-2: ask for tokenizer "
            f"{path.stem!r} and give tiktoken its file through TIKTOKEN_CACHE_DIR"
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(f"{path}:{number}: expected 'base64-token rank'; is this a .tiktoken file?") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        what = f"{len(missing)} of the 256 single bytes" if missing else "ranks 0, 1, 2, … without gaps"
        raise UserError(f"{path} is not a complete rank file: it lacks {what}; copy it again")
    return tiktoken.Encoding(
        path.stem,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
    )

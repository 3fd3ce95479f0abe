"""Turns text into token ids, and writes the files with which transformers does the same.

A tokenizer is named by
- `byte`: the 256 bytes of UTF-8 and an end of text, 257 ids; needs no vocabulary;
- `gpt2` (the paper's) or another encoding of tiktoken, which downloads its vocabulary once;
- the path of a `.tiktoken` rank file (lines of "base64-token rank"), for machines without a network. Text is split by
  GPT-2's pattern and the end of text is the id after the last rank, so `r50k_base.tiktoken` gives the ids of `gpt2`.
  Files of encodings with another pattern (`cl100k_base.tiktoken`, …) are rejected: they would split text wrongly;
- `bert-base-uncased`, `bert-base-cased` (from the Hugging Face hub) or the path of a `vocab.txt`: BERT's word pieces,
  one per line. A vocabulary without capital letters is for text in lower case without accents, as in BERT.

Special tokens inside a text are encoded as ordinary text. Only the end of text ([SEP] for word pieces) is ever written,
by `prepare`; the sampler adds [CLS] and [MASK].
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from mst_scale.errors import UserError

BERT_NAMES = ("bert-base-uncased", "bert-base-cased")  # google-bert/NAME; the large models have the same vocabularies
BERT_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPLIT_LIKE_GPT2 = ("gpt2", "r50k_base")  # encodings that a rank file and GPT-2's pattern describe completely
# Identities of the same ids; the last is of r50k_base.tiktoken, as tiktoken itself checks it.
GPT2_IDS = {*SPLIT_LIKE_GPT2, "sha256:306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"}
END = "<|endoftext|>"
MIN_HALF = 1 << 10  # characters; the pattern never fails on a shorter text
log = logging.getLogger("mst_scale")
DOWNLOAD_SECONDS = 60.0  # vocabularies are 1-4 MB; a network that drops packets would otherwise hang for minutes


@dataclass(frozen=True)
class Tokenizer:
    """Encodes text as ids below `vocab_size`, without the end of text, and decodes them."""

    name: str
    vocab_size: int
    end_of_text: int
    encode: Callable[[str], np.ndarray]  # unsigned ids
    text_of: Callable[[list[int]], str]
    start: int | None = None  # BERT's [CLS]
    mask: int | None = None  # BERT's [MASK]
    write_files: Callable[[Path], None] | None = None  # those with which transformers encodes alike

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of these ids, without the end of text."""
        return self.text_of([i for i in ids if i != self.end_of_text])


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of this name or path.

    Raises:
        UserError: if the name is unknown, or the file is not a vocabulary.
        OSError: if a vocabulary cannot be downloaded.
    """
    if name == "byte":
        return _bytes()
    if name in BERT_NAMES:
        return _word_pieces(name, _download_vocabulary(name))
    if name.endswith(".txt"):
        return _word_pieces(name, Path(name))
    return _bpe(name, _encoding_from_ranks(Path(name)) if _is_rank_file(name) else _encoding_by_name(name))


def _is_rank_file(name: str) -> bool:
    return not name.endswith(".txt") and (name.endswith(".tiktoken") or "/" in name)


def is_file(name: str) -> bool:
    """Return whether the tokenizer is named by the path of a file."""
    return _is_rank_file(name) or name.endswith(".txt")


def token_dtype(vocab_size: int) -> np.dtype:
    """2 bytes per token while the ids fit, else 4: nanoGPT's layout and its natural extension."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32).newbyteorder("<")


def _bytes() -> Tokenizer:
    return Tokenizer(
        "byte",
        vocab_size=257,
        end_of_text=256,
        encode=lambda text: np.frombuffer(text.encode(), dtype=np.uint8),
        text_of=lambda ids: bytes(ids).decode(errors="replace"),
        write_files=partial(_write_bpe, {bytes([byte]): byte for byte in range(256)}, 256, split_words=False),
    )


# Byte-pair encodings of tiktoken ------------------------------------------------------------------------------------


def _bpe(name: str, encoding: Any) -> Tokenizer:
    def encode(text: str) -> np.ndarray:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # The regular expression fails on a run of about 100,000 blanks: encode the text in halves.
            half = len(text) // 2
            if half < MIN_HALF:
                raise
            return np.concatenate([encode(text[:half]), encode(text[half:])])

    try:
        end: int = encoding.eot_token
    except KeyError:
        raise UserError(f"tokenizer {name!r} has no {END}; choose one that has, like gpt2") from None
    write = None
    if name in SPLIT_LIKE_GPT2 or _is_rank_file(name):
        write = partial(_write_bpe, encoding._mergeable_ranks, end, split_words=True)

    def text_of(ids: list[int]) -> str:
        try:
            return str(encoding.decode(ids))
        except KeyError:  # some encodings have gaps, whose ids a model may predict
            return b"".join(map(bytes_of, ids)).decode(errors="replace")

    def bytes_of(one: int) -> bytes:
        try:
            return bytes(encoding.decode_single_token_bytes(one))
        except KeyError:
            return "\ufffd".encode()

    return Tokenizer(name, encoding.n_vocab, end, encode, text_of, write_files=write)


def _encoding_by_name(name: str) -> Any:
    import tiktoken

    known = tiktoken.list_encoding_names()
    if name not in known:
        near = difflib.get_close_matches(name, ["byte", *BERT_NAMES, *known], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        names = ", ".join(("byte", *BERT_NAMES, *known))
        raise UserError(
            f"unknown tokenizer {name!r}{hint} (known: {names}, or the path of a .tiktoken file or a vocab.txt)"
        )
    try:
        with ThreadPool(1) as pool:  # of a daemon thread: tiktoken's download itself has no time limit
            return pool.apply_async(tiktoken.get_encoding, (name,)).get(DOWNLOAD_SECONDS)
    except (OSError, ValueError, multiprocessing.TimeoutError) as error:  # no network, or a proxy's page instead
        url = getattr(getattr(error, "request", None), "url", None)
        where = ""
        if url is not None:  # tiktoken names a cached file by the digest of its address
            where = f" with {url} saved in it as {hashlib.sha1(url.encode()).hexdigest()}"
        raise OSError(
            f"the vocabulary of tokenizer {name!r} cannot be downloaded ({type(error).__name__}): set "
            f"TIKTOKEN_CACHE_DIR to a folder{where}, or pass the path of a .tiktoken rank file (r50k_base.tiktoken is "
            "gpt2's), or use 'byte'"
        ) from None


def _encoding_from_ranks(path: Path) -> Any:
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
        lacks = f"{len(missing)} of the 256 single bytes" if missing else "ranks 0, 1, 2, … without gaps"
        raise UserError(f"{path} is not a complete rank file: it lacks {lacks}; copy it again")
    special = {END: len(ranks)}
    return tiktoken.Encoding(path.stem, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


# BERT's word pieces -------------------------------------------------------------------------------------------------


def _word_pieces(name: str, path: Path) -> Tokenizer:
    """Words and punctuation apart, each word cut into the longest pieces of the vocabulary, from the left."""
    try:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, normalizers, pre_tokenizers
    except ImportError:
        raise UserError("word pieces need the package tokenizers: pip install tokenizers") from None
    pieces = _read_vocabulary(path)
    ids = {piece: number for number, piece in enumerate(pieces)}
    lowercase = not any(piece != piece.lower() for piece in pieces if not piece.startswith("["))
    log.info("%s: %d word pieces, %s", path, len(pieces), "lower case" if lowercase else "cased")
    library = Library(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()

    def encode(text: str) -> np.ndarray:
        return np.asarray(library.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    return Tokenizer(
        name, len(pieces), ids["[SEP]"], encode, library.decode, start=ids["[CLS]"], mask=ids["[MASK]"],
        write_files=partial(_write_word_pieces, library),
    )  # fmt: skip


def _download_vocabulary(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"google-bert/{name}", "vocab.txt"))
    except Exception as error:  # no network, a proxy, a hub that is down: each has a class of its own
        raise OSError(
            f"the vocabulary of tokenizer {name!r} cannot be downloaded ({type(error).__name__}): pass the path of its "
            f"vocab.txt (https://huggingface.co/google-bert/{name}), or use 'byte'"
        ) from None


def _read_vocabulary(path: Path) -> list[str]:
    try:
        pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # splitlines() knows other ends too
    except FileNotFoundError:
        raise UserError(f"no vocabulary {path}; give BERT's vocab.txt, or use 'byte'") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; is this BERT's vocab.txt?") from None
    if missing := [piece for piece in BERT_TOKENS if piece not in pieces]:
        raise UserError(f"{path} has no line {missing[0]}; is this BERT's vocab.txt?")
    if len(set(pieces)) < len(pieces):
        twice = next(piece for number, piece in enumerate(pieces) if piece in pieces[:number])
        raise UserError(f"{path} has {twice!r} on two lines; copy it again")
    return pieces


# The tokenizer that a model was trained with ------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedWith:
    """The tokenizer of a model's corpus, which may have been made on another machine.

    `identity` is None if it was a file that is missing here and whose content was not recorded.
    """

    name: str
    identity: str | None


def tokenizer_identity(name: str) -> str:
    """Return what determines the ids: the name, or the digest of a file wherever it is."""
    return f"sha256:{hashlib.sha256(_read(Path(name))).hexdigest()}" if is_file(name) else name


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no tokenizer file {path}; give a .tiktoken file or a vocab.txt, or use 'byte'") from None


def is_missing(name: str) -> bool:
    """Return whether the name is a path where there is no file (any more)."""
    return is_file(name) and not Path(name).is_file()


def trained_with(name: str, recorded: str | None = None) -> TrainedWith:
    """Describe a tokenizer by its name and, if it was recorded, the identity that it had then."""
    return TrainedWith(name, recorded or (None if is_missing(name) else tokenizer_identity(name)))


def chosen(given: str | None, before: TrainedWith | None, model: str) -> TrainedWith | None:
    """Return the tokenizer to use: `given`, or else `before`.

    Raises:
        UserError: if it has other ids than the tokenizer that `model` was trained with.
    """
    if given is None:
        if before is not None and is_file(before.name) and not is_missing(before.name):
            _check_unchanged(before, model)
        return before
    identity = tokenizer_identity(given)
    if before is not None and given == before.name:
        _check_unchanged(before, model)
    if before is not None and not same_ids(before.identity, identity):
        fix = "name the file where it is now" if is_missing(before.name) else "leave --tokenizer out"
        raise UserError(f"{model} was trained with tokenizer {before.name!r}, not {given!r}: {fix}")
    return TrainedWith(os.path.abspath(given) if is_file(given) else given, identity)


def _check_unchanged(before: TrainedWith, model: str) -> None:
    if not same_ids(before.identity, tokenizer_identity(before.name)):
        raise UserError(
            f"{model} was trained with tokenizer {before.name!r}, and this file has changed since: name one with the "
            "original content (--tokenizer)"
        )


def same_ids(one: str | None, other: str | None) -> bool:
    """Return whether two identities give, or may give, the same ids; None is not known."""
    return None in (one, other) or one == other or {one, other} <= GPT2_IDS


# Files for transformers' AutoTokenizer ------------------------------------------------------------------------------


def write_tokenizer(folder: Path, name: str | None, vocab_size: int) -> tuple[int | None, str]:
    """Write `tokenizer.json` and `tokenizer_config.json`, which encode text as the tokenizer `name` does.

    Byte-level BPE for `byte` (without merges), `gpt2` and rank files, whose merges are derived from the ranks; word
    pieces with [CLS] and [SEP] around a text. Other encodings split text by other patterns.

    Returns:
        The id that ends a text, and the reason why no files were written ("" if they were).

    Raises:
        UserError: if the model's `vocab_size` is too small for the tokenizer.
    """
    if name is None:
        return (
            None,
            "no tokenizer files: the run does not say which tokenizer made its corpus; name it with --tokenizer",
        )
    if is_missing(name):
        return None, f"no tokenizer files: {name} no longer exists; give its new path with --tokenizer"
    try:
        tokenizer = load_tokenizer(name)
    except OSError as error:
        return None, f"no tokenizer files: {error}"
    if tokenizer.vocab_size > vocab_size:
        raise UserError(f"tokenizer {name!r} has {tokenizer.vocab_size} ids, and the model only {vocab_size}")
    if tokenizer.write_files is None:
        return tokenizer.end_of_text, f"no tokenizer files: {name!r} splits text in its own way; use tiktoken with it"
    tokenizer.write_files(folder)
    return tokenizer.end_of_text, ""


def _write_loading(folder: Path, options: dict[str, Any]) -> None:
    loading = {"tokenizer_class": "PreTrainedTokenizerFast", **options}
    (folder / "tokenizer_config.json").write_text(json.dumps(loading, indent=2) + "\n")


def _write_word_pieces(library: Any, folder: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import processors

    saved = Library.from_str(library.to_str())
    ids = saved.get_vocab()
    special = [piece for piece in (*BERT_TOKENS, "[PAD]") if piece in ids]
    saved.add_special_tokens(special)
    saved.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    saved.save(str(folder / "tokenizer.json"))
    _write_loading(folder, {f"{piece[1:-1].lower()}_token": piece for piece in special})


def byte_characters() -> list[str]:
    """Return the visible character that byte-level BPE writes for each byte, as GPT-2's files do."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the merges in order: a token of rank r comes from the two parts that the merges before r leave of it.

    Raises:
        UserError: if the ranks are not those of a byte-pair encoding.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best, i = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts)))
            if best >= rank:
                raise UserError(f"the rank file is not one of BPE: {token!r} cannot be built from lower ranks")
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _write_bpe(ranks: dict[bytes, int], end_of_text: int, folder: Path, *, split_words: bool) -> None:
    characters = byte_characters()

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split_words}
    end = {
        "id": end_of_text, "content": END, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {**{spelled(token): rank for token, rank in ranks.items()}, END: end_of_text},
        "merges": [[spelled(left), spelled(right)] for left, right in merges_of(ranks)],
    }  # fmt: skip
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False) + "\n")
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    _write_loading(folder, {**special, "clean_up_tokenization_spaces": False})

"""Turns a prompt into token ids and ids into text, with the tokenizer that a model was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mst_scale.compact_files.weights import ModelWeights
from mst_scale.data.tokenizer import Tokenizer, chosen, is_missing, load_tokenizer
from mst_scale.errors import UserError
from mst_scale.hugging_face.sources import import_transformers

UNFINISHED = "\ufffd"  # what bytes that are not a whole character decode to


def tokenizer_for(weights: ModelWeights, given: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model, or `given`.

    Raises:
        UserError: if there is none, it has other ids than the model's own, or more than the model.
        OSError: if its vocabulary cannot be downloaded.
    """
    named = chosen(given, weights.tokenizer, str(weights.path))
    folder = weights.path if weights.path.is_dir() else weights.path.parent
    has_files = given is None and (folder / "tokenizer.json").is_file()
    if has_files and (named is None or is_missing(named.name)):
        found = _of_transformers(folder)
    elif named is None:
        raise UserError(f"{weights.path} does not say which tokenizer made its corpus: name it with --tokenizer")
    elif is_missing(named.name):
        raise UserError(
            f"{weights.path}: its tokenizer {named.name} is missing: name the file where it is now (--tokenizer)"
        )
    else:
        try:
            found = load_tokenizer(named.name)
        except OSError:  # its vocabulary cannot be downloaded
            if not has_files:
                raise
            found = _of_transformers(folder)
    if found.vocab_size > weights.config.vocab_size:
        raise UserError(
            f"tokenizer {found.name!r} has {found.vocab_size} ids, but the model only {weights.config.vocab_size}: "
            "name the one that it was trained with (--tokenizer)"
        )
    return found


def _of_transformers(folder: Path) -> Tokenizer:
    """Return the tokenizer in a folder of transformers."""
    AutoTokenizer = import_transformers(f"the tokenizer in {folder}").AutoTokenizer
    try:
        found = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # transformers raises errors of many kinds
        raise UserError(
            f"{folder} has no tokenizer that transformers can load ({type(error).__name__}): name one (--tokenizer)"
        ) from None

    def encode(text: str) -> np.ndarray:
        ids = found(text, add_special_tokens=False)["input_ids"]
        if found.unk_token_id in ids and found.unk_token not in text:
            raise UserError(f"the prompt has a word that the tokenizer of {folder} does not know: leave it out")
        return np.asarray(ids, dtype=np.int64)

    end = -1 if found.eos_token_id is None else int(found.eos_token_id)
    return Tokenizer(f"of {folder}", len(found), end, encode, found.decode)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids of a prompt.

    Raises:
        UserError: if it is empty, not text, or has a part that the tokenizer does not know.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid UTF-8: write it in the encoding of the terminal") from None
    ids = [int(i) for i in tokenizer.encode(prompt)]
    if not ids:
        raise UserError("the prompt is empty: give at least one token of text to continue")
    if tokenizer.mask is not None:  # word pieces: what is in no piece becomes [UNK]
        unknown = int(tokenizer.encode("x" * 101)[0])  # every word of more than 100 characters is [UNK]
        if unknown in ids:
            known = tokenizer.decode(ids[: ids.index(unknown)])
            after = f" after {known[-20:]!r}" if known else " at its beginning"
            raise UserError(
                f"the prompt has a word{after} that tokenizer {tokenizer.name!r} does not know: leave it out"
            )
    return ids


class Decoded:
    """The text of a growing list of ids, given out as soon as its characters are whole.

    Args:
        tokenizer: what decodes the ids.
        prompt: the ids before them: word pieces are joined to what precedes them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._prompt = list(prompt)
        self._start = len(tokenizer.decode(self._prompt))
        self._given = 0

    @property
    def text(self) -> str:
        """The text of all ids, without the prompt."""
        return self.tokenizer.decode([*self._prompt, *self.ids])[self._start :]

    def add(self, token: int) -> str:
        """Add a token and return the characters that it completes."""
        self.ids.append(token)
        return self._after(self.text.rstrip(UNFINISHED))

    def rest(self) -> str:
        """Return what no further token will complete."""
        return self._after(self.text)

    def _after(self, text: str) -> str:
        new, self._given = text[self._given :], max(self._given, len(text))
        return new

"""The pieces of a text give the ids of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.data import cutting
from mst_scale.data.cutting import LINE_START, cut, pieces
from mst_scale.data.tokenizer import Tokenizer, load_tokenizer
from tests.data.texts import rank_file


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(rank_file(tmp_path_factory.mktemp("bpe") / "small.tiktoken")))


@pytest.mark.parametrize(
    ("window", "at"),
    [
        (b"one two\nthree four", 7),  # before the newline, though a space comes later
        (b"one\n\n\nthree", 5),  # before the last of a run of newlines
        (b"one two  three", 8),
        (b"\nthree", 5),  # a blank at the very start would leave an empty piece
        (b"abcdef", 5),
        ("ab漢字".encode(), 5),  # 2 + 3 + 3 bytes: between the two characters
    ],
)
def test_where_a_piece_ends(window: bytes, at: int):
    assert cut(window) == at


def test_where_validation_begins():
    assert cut(b"one\n\ntwo three", LINE_START) == 5
    assert cut(b"one\r\ntwo three", LINE_START) == 5
    assert cut(b"one two three", LINE_START) == 7


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.text(alphabet="abthe42.é漢'", min_size=1, max_size=8),
            st.sampled_from([" ", "\n", "\n\n", "   ", "\t\n", " \n\t ", "\r\n"]),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_ids_of_pieces_are_ids_of_the_whole(bpe: Tokenizer, parts_of_text: list[tuple[str, str]]):
    text = "".join(word + blank for word, blank in parts_of_text)  # blanks everywhere, so that no cut is forced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "PIECE_BYTES", 64)
        patch.setattr(cutting, "WINDOW", 64)
        parts = list(pieces(text))
    assert "".join(parts) == text
    assert all(0 < len(part.encode()) <= 64 for part in parts)
    assert np.concatenate([bpe.encode(part) for part in parts]).tolist() == bpe.encode(text).tolist()


@settings(deadline=None, max_examples=100, derandomize=True)
@given(text=st.text(min_size=1, max_size=400))
def test_any_text_is_cut_into_itself(text: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "PIECE_BYTES", 16)
        patch.setattr(cutting, "WINDOW", 8)
        assert "".join(pieces(text)) == text

"""Cuts a long text into pieces that can be tokenised on their own.

Tokenising needs memory in proportion to its input, and a text file of 100 GB is one document. So a text is handed to
the tokenizer in pieces of at most PIECE_BYTES, cut just before the last blank (a newline if there is one) of a run of
blanks. GPT-2's pattern always splits there, so the ids of the pieces are the ids of the whole. Only a text without any
blank for WINDOW bytes (a base64 blob) is cut between two characters, which can change the token at that cut; so can
encodings whose pattern joins newlines to what stands before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

PIECE_BYTES = 1 << 20
WINDOW = 1 << 16  # how far back from its limit a piece may end

Places = tuple[re.Pattern[bytes], ...]  # the first kind of place that occurs is taken, where it occurs last
SEAM: Places = (re.compile(rb"(?s)(?<=.)(?=\n\S)"), re.compile(rb"(?s)(?<=.)(?= \S)"))
LINE_START: Places = (re.compile(rb"(?<=\n)(?=\S)"), re.compile(rb"(?<=\n)(?=.)"), *SEAM)


def cut(window: bytes, places: Places = SEAM) -> int:
    """Where to end a piece: an offset 0 < n < len(window) into text that goes on after its last byte."""
    assert len(window) > 1
    for place in places:
        offsets = [match.start() for match in place.finditer(window)]
        if offsets:
            return offsets[-1]
    end = len(window) - 1
    while end > 1 and window[end] & 0xC0 == 0x80:  # a byte that continues a UTF-8 character
        end -= 1
    return end


def cut_file(handle: BinaryIO, start: int, target: int, places: Places = SEAM) -> int:
    """The same for a file: the end, in (start, target], of the piece that begins at `start`."""
    begin = max(start, target - WINDOW)
    handle.seek(begin)
    return begin + cut(handle.read(target + 1 - begin), places)


def pieces(text: str) -> Iterator[str]:
    """The text whole, or cut; never an empty piece."""
    if len(text) * 4 <= PIECE_BYTES or len(data := text.encode()) <= PIECE_BYTES:
        if text:
            yield text
        return
    start = 0
    while start < len(data):
        stop = start + PIECE_BYTES
        if stop < len(data):
            begin = stop - WINDOW
            stop = begin + cut(data[begin : stop + 1])
        yield data[start:stop].decode()
        start = stop

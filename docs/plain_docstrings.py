"""A Sphinx extension that shows docstrings written in plain text with Markdown's backticks.

Docstrings of the package are Google style, but use `name` for code, |x| for magnitudes and * for products, which mean
something else in reStructuredText. This extension translates them before napoleon reads their sections.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"(`+)(.+?)\1(\w?)", re.DOTALL)
SPECIAL = re.compile(r"([*|_\\])")


def translated(paragraph: str) -> str:
    """Return a paragraph as reStructuredText: code as literals, and everything else without markup."""
    parts, end = [], 0
    for code in CODE.finditer(paragraph):
        after = rf"\ {code[3]}" if code[3] else ""  # a literal ends at the end of a word
        parts += [SPECIAL.sub(r"\\\1", paragraph[end : code.start()]), f"``{code[2]}``{after}"]
        end = code.end()
    return "".join([*parts, SPECIAL.sub(r"\\\1", paragraph[end:])])


def _indent(paragraph: str) -> int:
    return len(paragraph) - len(paragraph.lstrip(" "))


def translate(lines: list[str]) -> list[str]:
    """Return a docstring as reStructuredText. A paragraph further to the right than the one before stays as it is."""
    found: list[str] = []
    around: int | None = None  # the indentation of the text before a block that stays as it is
    before = 0
    for paragraph in re.split(r"\n\n+", "\n".join(lines)):
        if around is None and _indent(paragraph) > before:
            around = before
            found.append(" " * around + "::")
        elif around is not None and _indent(paragraph) <= around:
            around = None
        if around is None:
            before = _indent(paragraph.splitlines()[-1]) if paragraph else 0
        found.append(paragraph if around is not None else translated(paragraph))
    return "\n\n".join(found).split("\n")


def process(*event: Any) -> None:
    """Translate a docstring, the last argument of autodoc's event, in place."""
    lines: list[str] = event[-1]
    lines[:] = translate(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension with Sphinx."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}

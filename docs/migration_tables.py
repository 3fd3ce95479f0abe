"""Write the tables of docs/migration.md from mst_scale/_deprecated.py: `python docs/migration_tables.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mst_scale import _deprecated

PAGE = Path(__file__).parent / "migration.md"
MARKED = re.compile(r"(<!-- table of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
EMPTY = {
    "MOVED": "No module has moved.",
    "RENAMED": "No function, class or attribute has a new name.",
    "CONFIG_KEYS": "No config key has a new name.",
    "FLAGS": "No flag has a new name.",
}


def _rows(name: str) -> Iterable[tuple[str, str]]:
    entries: dict[str | tuple[str, str], str] = getattr(_deprecated, name)
    for old, new in sorted(entries.items()):
        yield (old, new) if isinstance(old, str) else (f"{old[0]}.{old[1]}", f"{old[0]}.{new}")


def table(name: str) -> str:
    """Return the Markdown table of one mapping of `_deprecated`, or a sentence if it is empty."""
    rows = [f"| `{old}` | `{new}` |" for old, new in _rows(name)]
    return "\n".join(["| 0.1 | 0.2 |", "|---|---|", *rows]) if rows else EMPTY[name]


def filled(text: str) -> str:
    """Return the page with its tables written anew."""
    return MARKED.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

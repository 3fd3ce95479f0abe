"""Writes the tables of docs/config.md, and docs/compatibility.md: `python docs/config_tables.py`.

In docs/config.md, each table is between `<!-- keys: BLOCK -->` and `<!-- end -->` and lists the descriptions of the
block. docs/compatibility.md is generated from deepspeed_support.json as a whole.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from mst_scale.config.load import BLOCKS
from mst_scale.config.support import format_remark, format_status, rows
from mst_scale.validation import keys_of

_DOCS = Path(__file__).parent
_TABLE = re.compile(r"(<!-- keys: (\S+) -->\n).*?(<!-- end -->)", re.S)
_SHARES = (14, 70)  # denominators of defaults that are shares of the paper's run

_SUPPORT = """# Compatibility with DeepSpeed

This page lists every key of a DeepSpeed 0.19 config and says whether sparse training works with it. It is generated
from `mst_scale/config/deepspeed_support.json` by `python docs/config_tables.py`. Runs that stay dense (method
`dense`, or `mst.sparsity.max` 0) may use every feature of DeepSpeed. [exactness.md](exactness.md) defines "exact".

- **exact**: a test trains with the key on two CPU ranks and checks after every step that inactive weights, their
  moments and the weights of the forward pass are exactly 0. A key that does not change the arithmetic does not change
  the masks either.
- **harmless**: the key does not affect the optimizer step.
- **rejected**: before training starts, the program ends with a one-line error that states the reason and the fix.
- **untested**: also rejected, unless `mst.allow_untested` names the key. The same holds for any key or value that is
  not on this page.

Where DeepSpeed accepts `null` or `"auto"`, they select its default, which is exact or harmless. A row `a.*` covers
every key of `a` that has no row of its own.
"""


def config_page(text: str) -> str:
    """Return a page with its tables of keys updated."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2]) + found[3], text)


def support_page() -> str:
    """Return docs/compatibility.md."""
    lines = [_SUPPORT.rstrip("\n"), "", "| key | status | remark |", "|---|---|---|"]
    sections: dict[str, dict[str, None]] = {}
    for row in rows():
        sections.setdefault(row.section, {})[row.key] = None
    for section, its in sections.items():
        lines.append(f"| **{section}** | | |")
        lines += [f"| `{key}` | {format_status(key)} | {format_remark(key)} |" for key in its]
    return "\n".join(lines) + "\n"


def _table(path: str) -> str:
    """Return the table of a block; the blocks of `mst` have separate tables."""
    name = path.partition(".")[0]
    descriptions = {key: f"{field.description}{_values(field)}" for key, field in keys_of(BLOCKS[name], name)}
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, value in defaults(BLOCKS[name], name):
        if key.startswith(f"{path}.") and (path != "mst" or key.count(".") == 1):
            shown = "" if key == "mst.options" else f"`{_format_default(value)}`"
            lines.append(f"| `{key}` | {shown} | {descriptions[key]} |")
    return "\n".join(lines) + "\n"


def _values(field: FieldInfo) -> str:
    """List the values of a key that takes one of several, unless its description names them all."""
    values = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()
    if all(f"`{value}`" in str(field.description) for value in values):
        return ""
    return f" Values: {', '.join(f'`{value}`' for value in values)}."


def defaults(cls: Any, path: str) -> list[tuple[str, Any]]:
    """Return (dotted key, default) of the keys of a block, including those of nested blocks."""
    found: list[tuple[str, Any]] = []
    for field in dataclasses.fields(cls):
        made: Any = getattr(cls(), field.name)
        key = f"{path}.{field.name}"
        if dataclasses.is_dataclass(made) and key != "mst.options":
            found += defaults(type(made), key)
        else:
            found.append((key, made))
    return found


def _format_default(value: Any) -> str:
    """Format a default as JSON, or as a fraction of the paper's 140,000 steps."""
    for whole in _SHARES:
        if isinstance(value, float) and len(repr(value)) > 10 and round(value * whole) / whole == value:
            return f"{round(value * whole)}/{whole}"
    return json.dumps(value)


def main() -> None:
    """Rewrite both pages."""
    page = _DOCS / "config.md"
    page.write_text(config_page(page.read_text()))
    (_DOCS / "compatibility.md").write_text(support_page())


if __name__ == "__main__":
    main()

"""Says of every key of a DeepSpeed config whether sparse training is exact with it, before anything starts.

The table is deepspeed_support.txt. Its verdicts:

    exact       a test trains with it: inactive weights, their moments and low-precision copies are exactly 0, and the
                masks are those of the same training without it
    harmless    it does not touch the optimizer step
    refused     masks cannot follow, or DeepSpeed has dropped it
    untested    it may work, but our tests could not try it

A key or value without a line is unclassified. That and what is untested is refused unless mst.allow_unclassified names
the key. Runs that stay dense are free. support_page.py writes the table as docs/compatibility.md.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Collection, Iterator, KeysView, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mst_scale.comm import format_value
from mst_scale.config.method import MSTConfig
from mst_scale.errors import UserError

TABLE = Path(__file__).with_name("deepspeed_support.txt")
VERDICTS = ("exact", "harmless", "refused", "untested")
STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")
SAY_SO = " (say so)"
TESTS = {kind: f"tests/config/test_support.py::test_{kind}" for kind in ("feature", "optimizer")}


@dataclass(frozen=True)
class Row:
    """What is known of a key, or of some of its values, at some stages and precisions."""

    section: str
    key: str
    values: tuple[Any, ...]  # none: of any value
    stages: tuple[int, ...]
    precisions: tuple[str, ...]
    verdict: str
    why: str
    last: str  # the test of what is exact, the cure of what is refused

    @property
    def test(self) -> str:
        """The id of its test in pytest's words."""
        kind, colon, name = self.last.partition(": ")
        return f"{TESTS[kind]}[{name}]" if colon else self.last

    def speaks_of(self, value: Any, stage: int, precision: str) -> bool:
        here = stage in self.stages and precision in self.precisions
        return here and (not self.values or any(_equal(value, known) for known in self.values))


def _equal(value: Any, known: Any) -> bool:
    """Equal as in JSON, where true is not 1; strings in any case, as DeepSpeed takes them."""
    if isinstance(value, str) and isinstance(known, str):
        return value.lower() == known.lower()
    return isinstance(value, bool) == isinstance(known, bool) and bool(value == known)


@functools.cache
def rows() -> tuple[Row, ...]:
    found, section = [], ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("=="):
            section = line.strip("= ")
        elif line and not line.startswith("#"):
            keys, values, where, verdict, why, *last = (cell.strip() for cell in line.split("|"))
            assert verdict in VERDICTS, line
            words = where.split()
            stages = tuple(int(word) for word in words if word.isdigit()) or STAGES
            precisions = tuple(word for word in words if not word.isdigit()) or PRECISIONS
            stated = tuple(json.loads(f"[{values}]"))
            found += [
                Row(section, key, stated, stages, precisions, verdict, why, "".join(last)) for key in keys.split()
            ]
    return tuple(found)


@functools.cache
def _by_key() -> dict[str, list[Row]]:
    """The lines of a config's keys."""
    by_key: dict[str, list[Row]] = {}
    for row in rows():
        if "in code" in row.section:
            continue
        by_key.setdefault(row.key, []).append(row)
    return by_key


@functools.cache
def known_keys() -> KeysView[str]:
    """Top-level keys of a DeepSpeed config."""
    return dict.fromkeys(key.split(".")[0] for key in _by_key()).keys()


def row_of(key: str, value: Any, stage: int, precision: str) -> Row | None:
    """The row for a key; None: unclassified. A key without its own row takes the `.*` row of a block around it."""
    return next((row for row in _rows_of(key) if row.speaks_of(value, stage, precision)), None)


def section_of(key: str) -> str:
    """The section of the table that names a key; empty: none does."""
    return next((row.section for row in _rows_of(key)), "")


def _rows_of(key: str) -> list[Row]:
    own = _by_key().get(key)
    if own is None:
        block, _, _ = key.rpartition(".")
        own = []
        while block and not own:
            own = _by_key().get(f"{block}.*", [])
            block, _, _ = block.rpartition(".")
    return own


def precision_of(deepspeed: Mapping[str, Any]) -> str:
    """In which forward and backward compute."""
    for name in ("bf16", "fp16"):
        block = deepspeed.get(name)
        if isinstance(block, Mapping) and block.get("enabled"):
            return name
    return "fp32"


def stage_of(deepspeed: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a config, 0 where it states none.

    Raises:
        UserError: if the stage is not one of 0, 1, 2 and 3. Every other check depends on it, so it comes first.
    """
    block = deepspeed.get("zero_optimization")
    stage = block.get("stage", 0) if isinstance(block, Mapping) else 0  # what is no object is refused by `stated`
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in STAGES:
        raise UserError(f"zero_optimization.stage = {format_value(stage)}: the stages are 0, 1, 2 and 3")
    return stage


def stated(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of all that a config states. `null` and "auto" state nothing."""
    for name, value in block.items():
        key = f"{path}{name}"
        if value is None or value == "auto":
            continue
        inner = any(known.startswith(f"{key}.") for known in _by_key())
        if inner and not isinstance(value, Mapping):
            raise UserError(f"{key} must be an object, not {json.dumps(value, default=str)}")
        if inner and isinstance(value, Mapping):
            yield from stated(value, f"{key}.")
        else:
            yield key, value


def refuse_unsupported(deepspeed: Mapping[str, Any], mst: MSTConfig) -> list[str]:
    """Raise for the first key that sparse training is not known to be exact with; else what a user should be told."""
    stage = stage_of(deepspeed)
    _refuse_scattered_muon(deepspeed)
    if mst.stays_dense:
        return []
    allowed = mst.allow_unclassified
    precision = precision_of(deepspeed)
    notes = []
    for key, value in stated(deepspeed):
        row, here = row_of(key, value, stage, precision), f"{key} = {json.dumps(value, default=str)}"
        if row is None or row.verdict == "untested":
            what = "is not classified" if row is None else f"is not tested ({row.why})"
            if key not in allowed:
                raise UserError(f"{here} {what} together with sparse training{_near(key, row)}: {_risk(key, allowed)}")
            notes.append(f"{here} {what} together with sparse training, and mst.allow_unclassified lets it in")
        elif row.verdict == "refused":
            raise UserError(f"{here} does not go with sparse training: {row.why}: {row.last}")
        elif row.why.endswith(SAY_SO):
            notes.append(f"{key}: {row.why.removesuffix(SAY_SO)}")
    return notes


def _refuse_scattered_muon(deepspeed: Mapping[str, Any]) -> None:
    """DeepSpeed builds no other, and does not say what would help; dense runs are told too."""
    zero, kind = deepspeed.get("zero_optimization"), dict(deepspeed.get("optimizer") or {}).get("type")
    cut = isinstance(zero, Mapping) and zero.get("stage") == 3 and zero.get("reduce_scatter") is not False
    if cut and _equal(kind, "Muon"):
        raise UserError(
            'optimizer.type = "Muon" takes stage 3 without reduce-scatter only: add "zero_optimization": '
            '{"reduce_scatter": false}, or use stage 2'
        )


def _near(key: str, row: Row | None) -> str:
    """A hint for a misspelt key below the top level, which DeepSpeed may ignore without a word."""
    if row is not None or key in _by_key():
        return ""
    near = difflib.get_close_matches(key, [known for known in _by_key() if "*" not in known], n=1, cutoff=0.9)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _risk(key: str, allowed: Collection[str]) -> str:
    return f'remove it, or take the risk with "mst": {{"allow_unclassified": {json.dumps([*allowed, key])}}}'

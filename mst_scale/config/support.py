"""Checks that sparse training is exact with every key of a DeepSpeed config, before anything starts.

The table is deepspeed_support.json, the only source of what is supported. A status is one of:

    exact       a test trains with it: inactive weights, their moments and low-precision copies are exactly 0, and the
                masks are those of the same training without it
    harmless    it does not touch the optimizer step
    rejected    masks cannot be applied, or DeepSpeed has removed it
    untested    it may work, but our tests do not cover it

A key or value without a row is treated as untested: it is rejected unless mst.allow_untested names the key.
Runs that stay dense may use all of DeepSpeed. docs/config_tables.py writes the table as docs/compatibility.md.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mst_scale.config.deepspeed import PRECISIONS, STAGES, precision_of, stage_of
from mst_scale.config.method import MSTConfig
from mst_scale.errors import UserError

TABLE = Path(__file__).with_name("deepspeed_support.json")
_TESTS = {kind: f"tests/ranks/config/test_support.py::test_{kind}" for kind in ("feature", "optimizer")}


@dataclass(frozen=True)
class Row:
    """The status of a key, or of some of its values, at some stages and precisions."""

    section: str
    key: str
    status: str
    values: tuple[Any, ...] = ()
    """The values that the row applies to; empty for any value."""
    stages: tuple[int, ...] = STAGES
    precisions: tuple[str, ...] = PRECISIONS
    remark: str = ""
    log: bool = False
    """Whether the remark is logged when a run uses the key."""
    test: str = ""
    """The test of an exact key, by its id or as "feature: NAME"."""
    fix: str = ""
    """What to do if the key is rejected."""

    @property
    def test_id(self) -> str:
        """The id of its test in pytest."""
        kind, colon, name = self.test.partition(": ")
        return f"{_TESTS[kind]}[{name}]" if colon else self.test

    def covers(self, value: Any, stage: int, precision: str) -> bool:
        """Return whether the row applies to a value at a ZeRO stage and precision."""
        here = stage in self.stages and precision in self.precisions
        return here and (not self.values or any(_equal(value, known) for known in self.values))


def _equal(value: Any, known: Any) -> bool:
    """Compare as JSON does, where true is not 1; ignore the case of strings, as DeepSpeed does."""
    if isinstance(value, str) and isinstance(known, str):
        return value.lower() == known.lower()
    return isinstance(value, bool) == isinstance(known, bool) and bool(value == known)


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return the table, one row per key; the first row that covers a value applies."""
    found = []
    for section, lines in json.loads(TABLE.read_text()).items():
        for line in lines:
            cells: dict[str, Any] = {name: tuple(it) if isinstance(it, list) else it for name, it in line.items()}
            its_keys = cells.pop("keys")
            found += [Row(section, key, **cells) for key in its_keys]
    return tuple(found)


@functools.cache
def _by_key() -> dict[str, list[Row]]:
    """Return the rows of config keys; rows of sections "in code" are for the documentation only."""
    by_key: dict[str, list[Row]] = {}
    for row in rows():
        if "in code" not in row.section:
            by_key.setdefault(row.key, []).append(row)
    return by_key


def keys() -> KeysView[str]:
    """Return every dotted key of a DeepSpeed config that the table names; "a.*" is all of `a` that has no row."""
    return _by_key().keys()


@functools.cache
def known_keys() -> KeysView[str]:
    """Return the top-level keys of a DeepSpeed config."""
    return dict.fromkeys(key.split(".")[0] for key in _by_key()).keys()


def row_of(key: str, value: Any, stage: int, precision: str) -> Row | None:
    """Return the row for a value; None if there is none. A key without rows takes the `.*` row of a block around it."""
    return next((row for row in _rows_of(key) if row.covers(value, stage, precision)), None)


def section_of(key: str) -> str:
    """Return the section of the table that names a key; empty if none does."""
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


def stated(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all keys that are set in a config; `null` and "auto" count as not set."""
    for name, value in block.items():
        key = f"{path}{name}"
        if value is None or value == "auto":
            continue
        if not any(known.startswith(f"{key}.") for known in _by_key()):
            yield key, value
        elif isinstance(value, Mapping):
            yield from stated(value, f"{key}.")
        else:
            raise UserError(f"{key} must be an object, not {json.dumps(value, default=str)}")


def check_supported(deepspeed: Mapping[str, Any], mst: MSTConfig) -> list[str]:
    """Check a DeepSpeed config against the table.

    Returns:
        Notes about the config to be logged.

    Raises:
        UserError: for the first key with which sparse training is not known to be exact.
    """
    stage = stage_of(deepspeed)
    _check_muon_at_stage_3(deepspeed)
    if mst.stays_dense:
        return []
    allowed = mst.allow_untested
    precision = precision_of(deepspeed)
    notes = []
    for key, value in stated(deepspeed):
        row, setting = row_of(key, value, stage, precision), f"{key} = {json.dumps(value, default=str)}"
        if row is None or row.status == "untested":
            untested = f"{setting} has not been tested with sparse training"
            reason = f" ({_format_clause(row)})" if row is not None else _format_near(key)
            if key not in allowed:
                raise UserError(f"{untested}{reason}: {_format_risk(key, allowed)}")
            notes.append(f"{untested}; mst.allow_untested accepts it")
        elif row.status == "rejected":
            raise UserError(f"{setting} does not work with sparse training: {_format_clause(row)}: {row.fix}")
        elif row.log:
            notes.append(f"{key}: {row.remark}")
    return notes


def _check_muon_at_stage_3(deepspeed: Mapping[str, Any]) -> None:
    """Reject Muon at stage 3 with reduce-scatter, also in dense runs: DeepSpeed fails without naming the fix."""
    zero, kind = deepspeed.get("zero_optimization"), dict(deepspeed.get("optimizer") or {}).get("type")
    scatters = isinstance(zero, Mapping) and zero.get("stage") == 3 and zero.get("reduce_scatter") is not False
    if scatters and _equal(kind, "Muon"):
        raise UserError(
            'at ZeRO stage 3, optimizer.type = "Muon" works only without reduce-scatter: add "zero_optimization": '
            '{"reduce_scatter": false}, or use stage 2'
        )


def _format_clause(row: Row) -> str:
    """Format a remark for use within a sentence; names such as DeepSpeed keep their capital."""
    first, space, rest = row.remark.rstrip(".").partition(" ")
    return f"{first.lower() if first[1:].islower() else first}{space}{rest}"


def _format_near(key: str) -> str:
    """Suggest a key for a misspelled one below the top level, which DeepSpeed may ignore silently."""
    if key in _by_key():
        return ""
    near = difflib.get_close_matches(key, [known for known in _by_key() if "*" not in known], n=1, cutoff=0.9)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _format_risk(key: str, allowed: Collection[str]) -> str:
    return f'remove it, or accept the risk with "mst": {{"allow_untested": {json.dumps([*allowed, key])}}}'


def format_status(key: str) -> str:
    """Describe the status of a key for people: "`false`: harmless; otherwise: rejected"."""
    own = [row for row in rows() if row.key == key]
    if len({row.status for row in own}) == 1:
        return own[0].status
    return "; ".join(f"{_format_condition(row)}: {row.status}" for row in own)


def format_remark(key: str) -> str:
    """Describe the restrictions of a key, each with its fix if it is rejected, in sentences."""
    own = [row for row in rows() if row.key == key]
    shown = [row for row in own if row.remark and (row.remark not in ("Off.", "Default.") or len(own) == 1)]
    values: dict[str, list[Any]] = {}
    for row in shown:
        fix = f" {row.fix[0].upper()}{row.fix[1:]}." if row.fix else ""
        values.setdefault(f"{row.remark}{fix}", []).extend(row.values)
    return " ".join(f"{_format_values(of)}: {text}" if len(values) > 1 and of else text for text, of in values.items())


def _format_condition(row: Row) -> str:
    parts = [_format_values(row.values)] if row.values else []
    if row.stages != STAGES:
        parts.append(f"at stage{'s' * (len(row.stages) > 1)} {', '.join(map(str, row.stages))}")
    if row.precisions != PRECISIONS:
        parts.append(f"with {' or '.join(row.precisions)}")
    return " ".join(parts) or "otherwise"


def _format_values(values: Sequence[Any]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)

"""Writes the schedule in a mask file as JSON, and reads it; text written by version 0.1 can be read as well."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mst_scale.sparsity_variation import PHASES, Schedule


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule in the form in which JSON returns it: with lists instead of tuples."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(schedule)))
    return found


def from_json(value: Any) -> Schedule | None:
    """Return the schedule in a file; None if there is none, or one that cannot be right."""
    if isinstance(value, str):
        value = _from_text(value)
    try:
        schedule = TypeAdapter(Schedule).validate_json(json.dumps(value), strict=True)
    except (ValidationError, ValueError, TypeError, RecursionError):
        return None
    return schedule if _is_sound(schedule) else None


def is_same_until(value: Any, schedule: Schedule, step: int) -> bool:
    """Return whether the schedule in a file makes the same masks as ours until `step`, as a longer run's may.

    The step after `step` is compared too, because its work is prepared in advance.
    """
    before = from_json(value)
    return before is not None and (before == schedule or before.parts_from(schedule, step + 1) is None)


def _from_text(text: str) -> dict[str, Any] | None:
    """Read the repr of 0.1's dataclass, in which phases were pieces and the end of the run was stated twice."""
    try:
        values: dict[str, Any] = {k.arg: k.value for k in ast.parse(text, mode="eval").body.keywords}  # type: ignore[attr-defined]
        pieces = [{k.arg: ast.literal_eval(k.value) for k in piece.keywords} for piece in values.pop("pieces").elts]
        del values["update_until"]
        return {
            **{key: ast.literal_eval(value) for key, value in values.items()},
            "phases": [{"name": piece.pop("phase"), **piece} for piece in pieces],
        }
    except (SyntaxError, ValueError, TypeError, AttributeError, KeyError, RecursionError, MemoryError):
        return None  # ast reports what is nested too deep as MemoryError


def _is_sound(schedule: Schedule) -> bool:
    """Return whether the numbers can form a schedule, and the phases cover the run without gaps."""
    whole = [*schedule.cosine_bounds, *(n for phase in schedule.phases for n in (phase.start, phase.stages))]
    shares = (schedule.max_sparsity, schedule.update_fraction, schedule.update_decay)
    if schedule.interval < 1 or min(whole, default=0) < 0 or not all(0 <= share <= 1 for share in shares):
        return False
    ends = [0, *(phase.stop for phase in schedule.phases)]
    starts = [*(phase.start for phase in schedule.phases), schedule.total_steps]
    named = all(phase.name in PHASES for phase in schedule.phases)
    return named and ends == starts and all(before < after for before, after in pairwise(ends)) and len(ends) > 1

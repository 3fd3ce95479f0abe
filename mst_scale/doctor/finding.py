"""One thing that was looked at: how it is, what to do about it, and the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mst_scale.comm import one_line

SKIP, OK, LOOK, WRONG = "skip", "ok", "look", "wrong"
VERDICTS = (SKIP, OK, LOOK, WRONG)  # from the one that weighs least
NAMED = 4  # ranks that a line names


@dataclass(frozen=True)
class Finding:
    """`skip`: there is nothing to look at here, `look`: it works and could be better, `wrong`: runs would fail."""

    name: str
    verdict: str
    said: str
    cure: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "numbers": _finite(dict(self.numbers))}


def _finite(value: Any) -> Any:
    """JSON has no other numbers: null in their place."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def skip(name: str, said: str) -> Finding:
    return Finding(name, SKIP, said)


def ok(name: str, said: str, **numbers: Any) -> Finding:
    return Finding(name, OK, said, numbers=numbers)


def look(name: str, said: str, cure: str, **numbers: Any) -> Finding:
    return Finding(name, LOOK, said, cure, numbers)


def wrong(name: str, said: str, cure: str, **numbers: Any) -> Finding:
    return Finding(name, WRONG, said, cure, numbers)


def failed(name: str, error: BaseException, cure: str = "") -> Finding:
    """A check that did not come to its end."""
    said = f"{type(error).__name__}: {one_line(error)}"
    return wrong(name, said, cure or "MST_TRACEBACK=1 mst doctor shows where; without that, no run would get further")


def each(checks: Mapping[str, Callable[[], Finding]]) -> list[Finding]:
    """What they find; one that raises does not stop the others."""
    findings = []
    for name, check in checks.items():
        try:
            findings.append(check())
        except Exception as error:
            findings.append(failed(name, error))
    return findings


def merged(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """One finding a name: the worst, in the words of the lowest rank that has it, and which ranks these are."""
    names = dict.fromkeys(finding.name for findings in by_rank for finding in findings)
    found = []
    for name in names:
        of_rank = {r: one for r, findings in enumerate(by_rank) for one in findings if one.name == name}
        worst = max(VERDICTS.index(one.verdict) for one in of_rank.values())
        bad = [rank for rank, one in of_rank.items() if VERDICTS.index(one.verdict) == worst]
        first = of_rank[bad[0]]
        if len(bad) < len(by_rank) and first.verdict in (LOOK, WRONG):
            first = replace(first, said=f"{who(bad, hosts)}: {first.said}", numbers={**first.numbers, "ranks": bad})
        found.append(first)
    return found


def who(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """rank 3 (host), or ranks 1, 3 (hosts), or so many of them."""
    several = len(ranks) > 1
    named = ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    places = list(dict.fromkeys(hosts[rank] for rank in ranks))
    where = ", ".join(places[:NAMED]) + (" …" if len(places) > NAMED else "")
    return f"{'ranks' if several else 'rank'} {named} ({where})"

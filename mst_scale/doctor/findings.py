"""Defines the result of a check, how the results of all ranks are merged, and how they are printed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO

from mst_scale.comm import may_rewrite, one_line

SKIP, OK, LOOK, WRONG = "skip", "ok", "look", "wrong"
_VERDICTS = (SKIP, OK, LOOK, WRONG)  # the least severe first
_COLORS = {SKIP: "2", OK: "32", LOOK: "33", WRONG: "31;1"}
_LISTED = 4  # ranks that a message lists


@dataclass(frozen=True)
class Finding:
    """The result of a check: a verdict, what was found, how to fix it, and the numbers behind it.

    Verdicts: `skip`: there is nothing to check here; `look`: it works but could be better; `wrong`: runs would fail.
    """

    name: str
    verdict: str
    message: str
    fix: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


def skip(name: str, message: str) -> Finding:
    """Return the finding of a check that does not apply here."""
    return Finding(name, SKIP, message)


def ok(name: str, message: str, **numbers: Any) -> Finding:
    """Return the finding of a check without a problem."""
    return Finding(name, OK, message, numbers=numbers)


def look(name: str, message: str, fix: str, **numbers: Any) -> Finding:
    """Return the finding of something that works but could be better."""
    return Finding(name, LOOK, message, fix, numbers)


def wrong(name: str, message: str, fix: str, **numbers: Any) -> Finding:
    """Return the finding of something that would make runs fail."""
    return Finding(name, WRONG, message, fix, numbers)


def failed(name: str, error: BaseException, fix: str = "") -> Finding:
    """Return the finding of a check that raised an error."""
    message = f"{type(error).__name__}: {one_line(error)}"
    return wrong(name, message, fix or "MST_TRACEBACK=1 mst doctor shows where; a run would fail in the same place")


def run_each(checks: Mapping[str, Callable[[], Finding]]) -> list[Finding]:
    """Run independent checks; one that raises does not stop the others."""
    findings = []
    for name, check in checks.items():
        try:
            findings.append(check())
        except Exception as error:
            findings.append(failed(name, error))
    return findings


def merge(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Merge the findings of all ranks: for each name the worst, from the lowest rank that has it, and its ranks."""
    merged = []
    for name in dict.fromkeys(finding.name for findings in by_rank for finding in findings):
        of_rank = {rank: one for rank, findings in enumerate(by_rank) for one in findings if one.name == name}
        worst = max((one.verdict for one in of_rank.values()), key=_VERDICTS.index)
        bad = [rank for rank, one in of_rank.items() if one.verdict == worst]
        finding = of_rank[bad[0]]
        if len(bad) < len(by_rank) and worst in (LOOK, WRONG):
            message = f"{describe_ranks(bad, hosts)}: {finding.message}"
            finding = replace(finding, message=message, numbers={**finding.numbers, "ranks": bad})
        merged.append(finding)
    return merged


def describe_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Describe ranks and their hosts: rank 3 (host), or ranks 1, 3 (hosts), or the first few of many."""
    listed = ", ".join(map(str, ranks[:_LISTED])) + (
        f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    )
    places = list(dict.fromkeys(hosts[rank] for rank in ranks))
    where = ", ".join(places[:_LISTED]) + (" …" if len(places) > _LISTED else "")
    return f"rank{'s' * (len(ranks) > 1)} {listed} ({where})"


class Report:
    """Prints findings as aligned lines while they come, colored on a terminal, or as one JSON list at the end."""

    def __init__(self, out: TextIO, as_json: bool):
        self.out, self.as_json = out, as_json
        self.findings: list[Finding] = []

    def add(self, findings: Sequence[Finding]) -> None:
        """Print these findings."""
        self.findings += findings
        if not self.as_json:
            print(*map(self.line, findings), sep="\n", file=self.out, flush=True)

    def end(self, seconds: float, full: bool = True) -> None:
        """Print the summary, or the JSON list."""
        if self.as_json:
            print(json.dumps([asdict(finding) for finding in self.findings]), file=self.out, flush=True)
            return
        count = {verdict: sum(one.verdict == verdict for one in self.findings) for verdict in _VERDICTS}
        summary = f"{count[OK]} ok, {count[LOOK]} to look at, {count[WRONG]} wrong; {seconds:.0f} s"
        more = "" if full else "; `mst doctor --full` also checks kernels and a few steps of sparse training"
        print(f"\n{summary}{more}", file=self.out, flush=True)

    def line(self, finding: Finding) -> str:
        """Format a finding."""
        verdict = f"{finding.verdict:<5}"
        if may_rewrite(self.out) and not os.environ.get("NO_COLOR"):
            verdict = f"\x1b[{_COLORS[finding.verdict]}m{verdict}\x1b[0m"
        fix = f" → {finding.fix}" if finding.fix else ""
        return f"{verdict} {finding.name:<20} {finding.message}{fix}"

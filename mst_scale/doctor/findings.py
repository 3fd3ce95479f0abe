"""Defines the result of a check, how the results of all ranks are merged, and how they are printed."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO

from mst_scale.comm import may_rewrite, one_line

SKIP, OK, LOOK, WRONG = "skip", "ok", "look", "wrong"
VERDICTS = (SKIP, OK, LOOK, WRONG)  # the least severe first
COLORS = {SKIP: "2", OK: "32", LOOK: "33", WRONG: "31;1"}
NAME_WIDTH = 20
NAMED = 4  # ranks that a line names


@dataclass(frozen=True)
class Finding:
    """The result of a check: what was found, how to fix it, and the numbers behind it.

    Verdicts: `skip`: there is nothing to check here; `look`: it works and could be better; `wrong`: runs would fail.
    """

    name: str
    verdict: str
    said: str
    cure: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The finding for JSON, with null for numbers that are not finite."""
        return {**asdict(self), "numbers": _finite(dict(self.numbers))}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def skip(name: str, said: str) -> Finding:
    """A check that does not apply here."""
    return Finding(name, SKIP, said)


def ok(name: str, said: str, **numbers: Any) -> Finding:
    """A check without a problem."""
    return Finding(name, OK, said, numbers=numbers)


def look(name: str, said: str, cure: str, **numbers: Any) -> Finding:
    """Something that works and could be better."""
    return Finding(name, LOOK, said, cure, numbers)


def wrong(name: str, said: str, cure: str, **numbers: Any) -> Finding:
    """Something that would make runs fail."""
    return Finding(name, WRONG, said, cure, numbers)


def failed(name: str, error: BaseException, cure: str = "") -> Finding:
    """A check that raised an error."""
    said = f"{type(error).__name__}: {one_line(error)}"
    return wrong(name, said, cure or "MST_TRACEBACK=1 mst doctor shows where; a run would fail in the same place")


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
    names = dict.fromkeys(finding.name for findings in by_rank for finding in findings)
    merged = []
    for name in names:
        of_rank = {r: one for r, findings in enumerate(by_rank) for one in findings if one.name == name}
        worst = max(VERDICTS.index(one.verdict) for one in of_rank.values())
        bad = [rank for rank, one in of_rank.items() if VERDICTS.index(one.verdict) == worst]
        first = of_rank[bad[0]]
        if len(bad) < len(by_rank) and first.verdict in (LOOK, WRONG):
            said = f"{describe_ranks(bad, hosts)}: {first.said}"
            first = replace(first, said=said, numbers={**first.numbers, "ranks": bad})
        merged.append(first)
    return merged


def describe_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Describe ranks and their hosts: rank 3 (host), or ranks 1, 3 (hosts), or the first few of many."""
    named = ", ".join(map(str, ranks[:NAMED])) + (f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else "")
    places = list(dict.fromkeys(hosts[rank] for rank in ranks))
    where = ", ".join(places[:NAMED]) + (" …" if len(places) > NAMED else "")
    return f"rank{'s' * (len(ranks) > 1)} {named} ({where})"


class Report:
    """Prints findings as aligned lines while they come, colored on a terminal, or as one JSON list at the end."""

    def __init__(self, out: TextIO, as_json: bool):
        """Print to `out`."""
        self.out, self.as_json = out, as_json
        self.colored = not as_json and may_rewrite(out) and not os.environ.get("NO_COLOR")
        self.findings: list[Finding] = []

    def add(self, findings: Sequence[Finding]) -> None:
        """Print these findings."""
        self.findings += findings
        if not self.as_json:
            for finding in findings:
                print(self.line(finding), file=self.out, flush=True)

    def end(self, seconds: float, full: bool = True) -> None:
        """Print the summary, or the JSON list."""
        if self.as_json:
            print(json.dumps([finding.to_dict() for finding in self.findings]), file=self.out, flush=True)
            return
        count = {verdict: sum(one.verdict == verdict for one in self.findings) for verdict in VERDICTS}
        summary = f"{count[OK]} ok, {count[LOOK]} to look at, {count[WRONG]} wrong; {seconds:.0f} s"
        more = "" if full else "; `mst doctor --full` also checks kernels and a few steps of sparse training"
        print(f"\n{summary}{more}", file=self.out, flush=True)

    def line(self, finding: Finding) -> str:
        """Format a finding."""
        mark = f"{finding.verdict:<5}"
        if self.colored:
            mark = f"\x1b[{COLORS[finding.verdict]}m{mark}\x1b[0m"
        fix = f" → {finding.cure}" if finding.cure else ""
        return f"{mark} {finding.name:<{NAME_WIDTH}} {finding.said}{fix}"


@contextmanager
def progress(what: str, quiet: bool = False) -> Iterator[None]:
    """Print what is being checked if it takes long: a rewritten line on a terminal, else one line per 30 s."""
    live, ended, began = may_rewrite(sys.stderr), threading.Event(), time.monotonic()

    def speak() -> None:
        next_line = 30.0
        with suppress(OSError, ValueError):  # a terminal that was closed
            while not ended.wait(0.5):
                passed = time.monotonic() - began
                if live and passed >= 2:
                    print(f"\r\x1b[K{what} … {passed:.0f} s", end="", file=sys.stderr, flush=True)
                elif not live and passed >= next_line:
                    next_line += 30
                    print(f"mst doctor: {what} … {passed:.0f} s", file=sys.stderr, flush=True)
            if live and time.monotonic() - began >= 2:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    speaker = threading.Thread(target=speak, daemon=True)
    if not quiet:
        speaker.start()
    try:
        yield
    finally:
        ended.set()
        if not quiet:
            speaker.join()

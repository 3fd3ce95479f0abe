"""Shows findings: aligned lines as they come, coloured on a terminal, or one JSON list."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TextIO

from mst_scale.comm import may_rewrite
from mst_scale.doctor.finding import LOOK, OK, SKIP, WRONG, Finding

COLOURS = {SKIP: "2", OK: "32", LOOK: "33", WRONG: "31;1"}
NAME = 20


class Report:
    def __init__(self, out: TextIO, as_json: bool):
        self.out, self.as_json = out, as_json
        self.colours = not as_json and may_rewrite(out) and not os.environ.get("NO_COLOR")
        self.found: list[Finding] = []

    def add(self, findings: Sequence[Finding]) -> None:
        self.found += findings
        if not self.as_json:
            for finding in findings:
                print(self.line(finding), file=self.out, flush=True)

    def end(self, seconds: float, full: bool = True) -> None:
        if self.as_json:
            print(json.dumps([finding.to_dict() for finding in self.found]), file=self.out, flush=True)
            return
        count = {verdict: sum(one.verdict == verdict for one in self.found) for verdict in COLOURS}
        said = f"{count[OK]} ok, {count[LOOK]} to look at, {count[WRONG]} wrong"
        more = "" if full else "; `mst doctor --full` also checks kernels and a few steps of sparse training"
        print(f"\n{said}; {seconds:.0f} s{more}", file=self.out, flush=True)

    def line(self, finding: Finding) -> str:
        mark = f"{finding.verdict:<5}"
        if self.colours:
            mark = f"\x1b[{COLOURS[finding.verdict]}m{mark}\x1b[0m"
        cure = f" → {finding.cure}" if finding.cure else ""
        return f"{mark} {finding.name:<{NAME}} {finding.said}{cure}"

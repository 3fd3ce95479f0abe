"""Write the table of support.py as docs/compatibility.md.

Run `python -m mst_scale.config.support_page > docs/compatibility.md`.
"""

from __future__ import annotations

import json

from mst_scale.config.support import PRECISIONS, SAY_SO, STAGES, rows

HEAD = """# What of DeepSpeed goes with sparse training

Written by `python -m mst_scale.config.support_page > docs/compatibility.md`; tests hold it to the table and to the
tests it names. It speaks of DeepSpeed 0.19 and of runs that mask weights: with method `dense`, or `mst.sparsity.max` 0,
all of DeepSpeed is free. What exactness means, and what is promised: [exactness.md](exactness.md).

- **exact**: a test trains with it on 2 CPU ranks. After every step inactive weights, their moments and what the forward
  reads are exactly 0; where the arithmetic is the same, so are the masks. Other stages than the last are tested with
  `-m slow`.
- **harmless**: it does not touch the optimizer step.
- **refused**: one line before anything starts, with the reason and the cure.
- **untested**: refused too, unless `mst.allow_unclassified` names the key. So is every key and value that is not on
  this page. What is let in is logged.

`null` and `"auto"` leave DeepSpeed's default, which is exact or harmless.
"""


def page() -> str:
    lines, section = [HEAD.rstrip("\n")], ""
    for row in rows():
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", "| key | values | stages | verdict | why | test |", "|---" * 6 + "|"]
        values = ", ".join(f"`{json.dumps(value)}`" for value in row.values) or "any"
        where = "0–3" if row.stages == STAGES else ", ".join(map(str, row.stages))
        where += "" if row.precisions == PRECISIONS else f" in {', '.join(row.precisions)}"
        cure = f": {row.last}" if row.verdict == "refused" else ""
        test = f"`{row.test}`" if row.verdict == "exact" else ""
        why = row.why.removesuffix(SAY_SO)
        lines.append(f"| `{row.key}` | {values} | {where} | {row.verdict} | {why}{cure} | {test} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")

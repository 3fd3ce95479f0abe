"""Runs every method at one small size on equal FLOPs, with tuned rates and three seeds: the study `rivals`.

    mst bench baselines [--out DIR] [--resume] [--budget HOURS] [--page] [--json]

The chart shows loss over FLOPs, with one point per method and the line of dense training; for the rest see
`mst bench study --help`.

examples:
  python -m mst_scale.benchmarks.studies.corpus --out corpora/study
  mst bench baselines --out runs/rivals --resume
"""

from __future__ import annotations

from collections.abc import Sequence

from . import study


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return 0
    return study.main(["rivals", *arguments])

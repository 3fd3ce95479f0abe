"""The parts of a GPU day, in order of worth, and where they run."""

from __future__ import annotations

from .part import Case, Part, Where

__all__ = ["PARTS", "Case", "Part", "Where"]

PARTS = {
    part.name: part
    for part in (
        Part("kernels", "are the kernels right?", 4, 120, 0.1, f"{__name__}.correctness", at_once=8),
        Part("masks", "the same masks as on the CPU?", 2, 60, 0.5, f"{__name__}.correctness"),
        Part("training", "the same training as on the CPU?", 3, 120, 0.5, f"{__name__}.correctness"),
        Part("attention", "how fast is sparse attention?", 6, 240, 0.5, f"{__name__}.speed"),
        Part("linear", "how fast are block linear layers?", 5, 120, 0.5, f"{__name__}.speed"),
        Part("step", "how fast is a step, and the run?", 6, 240, 1.0, f"{__name__}.speed"),
        Part("memory", "does it take what the plan says?", 2, 60, 1.0, f"{__name__}.fit"),
        Part("tests", "do the tests of the kernels pass?", 5, 240, 0.3, f"{__name__}.correctness", at_once=3),
        Part("study", "what does it learn?", 24 * 60, 24 * 3600, 0.9, f"{__name__}.learning"),
    )
}

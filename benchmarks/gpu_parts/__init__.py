"""The parts of `gpu_day` in their order, and the command and device of each."""

from __future__ import annotations

from .part import Case, Part, Where

__all__ = ["GROUPS", "PARTS", "Case", "Part", "Where"]

# What one command runs, and its minutes.
GROUPS = {"correctness": 3.0, "steps": 3.0, "layers": 3.0}

PARTS = {
    part.name: part
    for part in (
        Part("masks", "correctness", "the same masks as on the CPU?", 0.5, 30, 0.2, f"{__name__}.correctness"),
        Part("kernels", "correctness", "are the kernels right?", 1.2, 60, 0.08, f"{__name__}.correctness", at_once=12),
        Part("training", "correctness", "the same training as on the CPU?", 1.5, 80, 0.1, f"{__name__}.correctness", 6),
        Part(
            "compact",
            "correctness",
            "do compact runs have the bits of masked ones?",
            2,
            90,
            0.06,
            f"{__name__}.compact",
            10,
        ),
        Part("step", "steps", "how fast is a whole step?", 3, 120, 1.0, f"{__name__}.speed"),
        Part("density", "steps", "what does a step of compact weights take?", 4, 90, 1.0, f"{__name__}.compact"),
        Part("linear", "layers", "how fast are block linear layers?", 1.2, 45, 0.5, f"{__name__}.speed"),
        Part("attention", "layers", "how fast is sparse attention?", 1, 45, 0.5, f"{__name__}.speed"),
        Part("optimizer", "layers", "how fast is Adam on active weights alone?", 0.5, 30, 0.5, f"{__name__}.speed"),
        Part("memory", "layers", "does it take what the plan says?", 1, 30, 1.0, f"{__name__}.speed"),
    )
}

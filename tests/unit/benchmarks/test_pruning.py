"""`mst bench pruning`: the dense run of equal loss is found, and losses are compared with the same model's own."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from mst_scale.benchmarks import pruning
from mst_scale.errors import UserError

ROOT = Path(__file__).parents[3]


def curve(steps: int) -> float:
    """A loss that falls as a power of the length, down to a floor."""
    return 1.2 + 12.0 / math.sqrt(steps)


@pytest.mark.parametrize("wanted", [1.7, 1.9, 2.4, 3.0])
def test_the_length_that_gives_a_loss(wanted):
    tried = []

    def loss_after(steps: int) -> float:
        tried.append(steps)
        return curve(steps)

    steps = pruning.steps_to(wanted, loss_after, 1000)
    assert abs(curve(steps) - wanted) <= pruning.EQUAL and steps in tried
    assert len(tried) == len(set(tried)) <= pruning.TRIES, "no length is trained twice"


def test_a_loss_that_no_shorter_run_has():
    with pytest.raises(UserError, match=r"1,000 steps end at 1\.5795, above 1\.5000: train more"):
        pruning.steps_to(1.5, curve, 1000)


def test_losses_are_compared_with_the_same_model():
    def found(steps: int, loss: float, worse: float) -> pruning.Found:
        losses = {(way, s): loss + worse * s for way in pruning.WAYS for s in pruning.SPARSITIES}
        return pruning.Found(steps, loss, losses, 3.0)

    row = pruning.row_of("mst", [found(100, 2.0, 1.0), found(100, 2.2, 2.0)])
    assert row["loss"] == 2.1 and row["loss range"] == 0.1
    assert row["lost wanda 0.5"] == pytest.approx(0.75) and row["lost wanda 0.5 range"] == pytest.approx(0.25)
    table = pruning.table([row])
    assert "| lost, sparsegpt | 90 % | +1.3500 ± 0.4500 |" in table and "| trained steps |  | 100, 100 |" in table


def measured() -> dict[tuple[str, str], list[float]]:
    """Loss lost to (method, share) as benchmarks/results/pruning.md has it: of mst, dense of equal loss, dense."""
    lines = [line.split("|")[1:-1] for line in (ROOT / "benchmarks/results/pruning.md").read_text().splitlines()]
    return {
        (cells[0].strip().removeprefix("lost, "), cells[1].strip()): [float(cell.split("±")[0]) for cell in cells[2:]]
        for cells in lines
        if cells and cells[0].strip().startswith("lost,")
    }


@pytest.mark.parametrize(
    ("page", "lost"),
    [
        (
            "docs/models.md",
            {("magnitude", "50 %", 0): 4, ("sparsegpt", "50 %", 0): 4}
            | {("magnitude", "50 %", 1): 2, ("sparsegpt", "50 %", 1): 2},
        ),
        ("docs/does-it-work.md", {("sparsegpt", "80 %", 0): 2, ("sparsegpt", "80 %", 1): 2}),
    ],
)
def test_claims_about_pruned_models_are_those_of_the_committed_result(page, lost):
    """`lost`: the decimals of each number that stands in the text around the link to the result."""
    found = measured()
    parts = re.split(r"\n\n|\n- ", (ROOT / page).read_text())
    (text,) = [part for part in parts if "results/pruning.md" in part]
    for (method, share, column), decimals in lost.items():
        assert re.search(rf"\b{found[method, share][column]:.{decimals}f}\b", text), (method, share, column)

"""The line at the end of a run that sets it beside a recorded one."""

import pytest

from mst_scale.config.blocks import BaselineConfig
from mst_scale.runs.rival import beside

RIVAL = BaselineConfig("dense-short", 1e12, 1.8, 0.01, "0a")


@pytest.mark.parametrize(
    ("val_loss", "flops", "said"),
    [
        (1.7, 0.91e12, "1.8000 (seeds ± 0.0100) with as many FLOPs (1e+12): this run is 0.1000 better"),
        (1.9, 0.89e12, "1.8000 (seeds ± 0.0100) with as many FLOPs (1e+12): this run is 0.1000 worse"),
        (1.805, 0.9e12, "1.8000 (seeds ± 0.0100) with as many FLOPs (1e+12): this run is the same within that"),
        (1.7, 1e12, "1.8000 (seeds ± 0.0100) with 1e+12 FLOPs; this run spent 1.1e+12: not comparable"),
    ],
)
def test_a_run_beside_a_recorded_one(val_loss, flops, said):
    """A tenth more is spent than its rows say."""
    assert beside(RIVAL, {"val_loss": val_loss, "flops": flops}, 0.1e12, ["0a"], 256) == [("beside dense-short", said)]


def test_a_rival_on_another_text_is_none():
    last = {"val_loss": 1.7, "flops": 1e12}
    for corpora in (["0b"], ["0a", "0b"], [None]):
        ((_, said),) = beside(RIVAL, last, 0.0, corpora, 256)
        assert said.startswith("1.8000 (seeds ± 0.0100) on corpus 0a; this run read ") and "not comparable" in said
    assert beside(BaselineConfig(), last, 0.0, ["0a"], 256) == []


def test_a_loss_over_other_sequences_is_not_compared():
    rival = BaselineConfig("dense-short", 1e12, 1.8, 0.01, eval_sequences=256)
    last = {"val_loss": 1.7, "flops": 1e12}
    ((_, said),) = beside(rival, last, 0.0, ["0a"], 64)
    assert said == "1.8000 (seeds ± 0.0100) over 256 sequences; this run took 64: not comparable"
    assert beside(rival, last, 0.0, ["0a"], 256)[0][1].endswith("0.1000 better")


def test_a_loss_that_is_not_finite_is_not_compared():
    ((_, said),) = beside(RIVAL, {"val_loss": None, "flops": 1e12}, 0.0, ["0a"], 256)
    assert said == (
        "1.8000 (seeds ± 0.0100) with as many FLOPs (1e+12); this run's last one is not finite: not comparable"
    )


def test_a_rival_has_flops_and_a_loss():
    with pytest.raises(ValueError, match=r"training\.baseline\.flops must be above 0"):
        BaselineConfig("dense-short", val_loss=1.8)

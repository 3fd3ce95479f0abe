"""The table at the end of a run: how it stands beside a recorded one."""

import pytest

from mst_scale.config.blocks import RivalConfig
from mst_scale.runs.record import beside


@pytest.mark.parametrize(
    ("val_loss", "flops", "said"),
    [
        (1.7, 1.01e12, "1.8000 ± 0.0100 with as many FLOPs (1e+12): this run is 0.1000 better"),
        (1.9, 0.99e12, "1.8000 ± 0.0100 with as many FLOPs (1e+12): this run is 0.1000 worse"),
        (1.805, 1e12, "1.8000 ± 0.0100 with as many FLOPs (1e+12): this run is the same within its spread"),
        (1.7, 1.1e12, "1.8000 ± 0.0100 with 1e+12 FLOPs; this run spent 1.1e+12: not comparable"),
    ],
)
def test_a_run_beside_a_recorded_one(val_loss, flops, said):
    rival = RivalConfig("dense-short", 1e12, 1.8, 0.01)
    assert beside(rival, {"val_loss": val_loss, "flops": flops}, "0a") == said
    with pytest.raises(ValueError, match=r"training\.rival\.flops must be above 0"):
        RivalConfig("dense-short", val_loss=1.8)


def test_a_rival_on_another_text_is_none():
    rival, last = RivalConfig("dense-short", 1e12, 1.8, 0.01, "0a"), {"val_loss": 1.7, "flops": 1e12}
    assert beside(rival, last, "0a").endswith("0.1000 better")
    said = "1.8000 ± 0.0100 on corpus 0a; this one is 0b: not comparable (--method dense-short trains one)"
    assert beside(rival, last, "0b") == said
    assert "this one is None: not comparable" in beside(rival, last, None)

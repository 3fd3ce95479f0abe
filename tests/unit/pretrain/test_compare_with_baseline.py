"""The table at the end of a whole run says how it stands to the run that its config records (`training.baseline`)."""

import pytest

from mst_scale.config import load
from mst_scale.units import format_flops
from tests.ranks.pretrain.test_lengthen import run
from tests.support import tiny_run

NAME = "the dense one"


def reported(folder, out: str, **baseline) -> str:
    """What the table of a run with this baseline says of it, blanks made one."""
    training = {"steps": 8, "lr_schedule": "wsd", "warmup": 2, "decay": 0.25, "baseline": {"name": NAME, **baseline}}
    code, complaints, said = run(folder, out, training=training, mst={"method": "dense"})
    assert (code, complaints) == (0, "")
    (line,) = [line for line in "\n".join(said).splitlines() if NAME in line]
    return " ".join(line.split())


@pytest.mark.full
def test_a_whole_run_is_compared_with_the_recorded_one(tmp_path):
    """The first run gives the facts: its loss, its FLOPs with the optimizer's; its corpus has no digest to compare."""
    assert "not comparable" in reported(tmp_path, "first", flops=1.0, val_loss=4.0)
    last = tiny_run.rows(tmp_path / "first")[-1]
    weights = load(tmp_path / "config.json").model.weights
    recorded = {"flops": last["flops"] + 17 * 8 * weights, "val_loss": last["val_loss"] + 0.5, "spread": 0.1}
    assert reported(tmp_path, "second", **recorded).endswith(
        f"the same FLOPs ({format_flops(recorded['flops'])}); this run is 0.5000 lower"
    )
    assert reported(tmp_path, "third", **recorded, corpus="0b").endswith(
        "this run used one without meta.json: not comparable"
    )

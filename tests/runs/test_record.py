"""What a run's record says for people."""

import json
import math
from types import SimpleNamespace

import pytest

from mst_scale.config.blocks import BaselineConfig
from mst_scale.runs import rival
from mst_scale.runs.record import Record

ROW = {"flops": 1e12, "flops_dense": 1e12, "sparsity": 0.0, "tokens_per_s": 1.0, "tokens": 16}


@pytest.mark.parametrize(("loss", "said"), [(1.25, "1.2500"), (math.nan, "–"), (math.inf, "–")])
def test_the_table_at_the_end_tells_a_loss_that_is_not_finite(tmp_path, loss, said):
    board = SimpleNamespace(enabled=False)
    record = Record(tmp_path, 2, batch=1, step=0, tokens=0, monitor=board, first=True, layers={}, shows=False)
    record.write({"step": 1, "loss": 2.0, "val_loss": 2.0, **ROW})
    record.write({"step": 2, "loss": loss, "val_loss": loss, **ROW})

    def beside(last):
        return rival.beside(BaselineConfig("dense-short", 1e12, 1.8, 0.01), last, 0.0, ["0a"], 256)

    lines = [line.split("  ") for line in record.summary(2, 1.0, 0, beside).splitlines()]
    told = {line[1]: line[-1] for line in lines if len(line) > 2}
    assert told["train loss"].strip() == told["validation loss"].strip() == said
    assert told["beside dense-short"].endswith("0.5500 better" if said != "–" else "not comparable")
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["step"] == 2

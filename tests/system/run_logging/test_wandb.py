"""Weights & Biases receives every metric of a run through DeepSpeed's monitor, here without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny_run
from tests.support.whole_runs import MST, arguments

pytestmark = pytest.mark.full

BLOCK, HEADER = 32_768, 7
"""wandb's offline file is a LevelDB log: blocks of records with a header of checksum, length and type."""


def payloads(path: Path) -> list[bytes]:
    """Return the messages in an offline file: those of one piece (type 1), and of a first, middle and last piece."""
    data, at, pieces, found = path.read_bytes(), HEADER, b"", []
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        pieces += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            found.append(pieces)
            pieces = b""
    return found


def test_an_offline_run_holds_every_metric(tmp_path):
    from wandb.proto import wandb_internal_pb2

    blocks = {
        "wandb": {"enabled": True, "project": "mst_scale"},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv")},
    }
    done = subprocess.run(
        [sys.executable, "-m", "mst_scale.pretrain", *arguments(tmp_path, mst=MST, **blocks)],
        env=tiny_run.environment(WANDB_MODE="offline", WANDB_DIR=str(tmp_path)),
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (offline,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    values: dict[str, dict[int, str]] = {}
    for payload in payloads(offline):
        record = wandb_internal_pb2.Record.FromString(payload)
        for item in record.history.item:
            values.setdefault(item.key or "/".join(item.nested_key), {})[record.history.step.num] = item.value_json
    csv = {path.stem for path in (tmp_path / "csv").rglob("*.csv")}
    assert len(csv) > 20 and csv <= {name.replace("/", "_") for name in values}
    rows = tiny_run.rows(tmp_path / "out")
    found = [float(value) for _, value in sorted(values["mst/loss"].items())]
    assert found == pytest.approx([row["loss"] for row in rows]), "also the last ones"

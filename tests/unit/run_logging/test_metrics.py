import json
import math

from mst_scale.run_logging.metrics import MetricsFile, read


def test_a_resumed_run_removes_rows_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2, 3, 4):
        file.write({"step": step, "loss": 1.0 / step})
    with path.open("a") as torn:
        torn.write('{"step": 5, "lo')
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4], "a torn last line is left out"
    MetricsFile(path, 2).write({"step": 3, "loss": 0.5})
    assert [(row["step"], row["loss"]) for row in read(path)] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def test_a_damaged_line_is_passed_over_and_stays(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}\n', '{"step": \x01}\n', "[3]\n", "\xff\n", '{"step": 2, "seconds": 4.0}\n', '{"step": 3}\n']
    path.write_bytes("".join(lines).encode("latin-1"))
    assert MetricsFile(path, 2).seconds == 4.0
    assert path.read_bytes() == "".join(lines[:-1]).encode("latin-1")
    assert [row["step"] for row in read(path)] == [1, 2]


def test_nan_is_null(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", 0)
    file.write({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    (line,) = (tmp_path / "m.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None}


def test_a_resumed_run_continues_its_clock(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "seconds": 2.5}\n{"step": 2, "seconds": 4.0}\n{"step": 3, "seconds": 7.0}\n')
    assert MetricsFile(path, 2).seconds == 4.0
    path.write_text('{"step": 1}\n')
    assert MetricsFile(path, 1).seconds == MetricsFile(tmp_path / "new.jsonl", 0).seconds == 0.0


def test_rows_that_wait_for_the_disk_survive_a_rollback(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write({"step": 1})
    file._waiting = [json.dumps({"step": step}).encode() + b"\n" for step in (2, 3, 4)]
    file = file.rewound(3)
    file.write({"step": 4})
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4]

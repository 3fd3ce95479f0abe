import io

import pytest

from mst_scale.runs.progress import ProgressLine, clock, table

ROW = {
    "step": 20, "loss": 2.5, "tokens_per_s": 12345.6, "phase": "ultra", "sparsity": 0.8, "target_sparsity": 0.8,
    "flops": 1e12, "flops_dense": 4e12, "step_ms": 12.34,
}  # fmt: skip
DENSE = {**ROW, "phase": "dense", "sparsity": 0.0, "target_sparsity": 0.0, "flops": 4e12}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3661, "1:01:01")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    line = ProgressLine(100, 0, out)
    line.show(ROW)
    line.show({**DENSE, "step": 40})
    first, second = out.getvalue().splitlines()
    assert first.startswith(
        "step  20/100 · loss 2.5000 · ultra, sparsity 80% of 80% · FLOPs ÷4.00, 3 TFLOP saved · step 12.3 ms · "
        "12,346 tokens/s · ETA "
    )
    line.show({**ROW, "step": 60}, dense_ms=9.87)
    assert "3 TFLOP saved · step 12.3 ms (dense 9.87 ms) · " in out.getvalue().splitlines()[-1]
    assert "sparse" not in second and "FLOPs" not in second, "a dense run speaks of no sparsity"


def test_one_line_rewritten_on_a_terminal():
    out = Terminal()
    line = ProgressLine(100, 0, out)
    line.show(ROW)
    line.show({**ROW, "step": 40, "target_sparsity": 0.5})
    line.say("saved")
    text = out.getvalue()
    assert text.count("\n") == 1 and text.count("\r") == 3
    assert "sparsity 80% of 50%" in text
    assert text.endswith("saved\n")


@pytest.mark.parametrize(
    ("variables", "live"),
    [
        ({}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False),  # OpenMPI gives each rank a terminal, wherever the output goes
        ({"OMPI_COMM_WORLD_SIZE": "2", "MST_PROGRESS": "live"}, True),
        ({"MST_PROGRESS": "lines"}, False),
    ],
)
def test_whether_a_line_is_rewritten(monkeypatch, variables, live):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = Terminal()
    line = ProgressLine(100, 0, out)
    line.show(ROW)
    line.close()
    assert ("\r" in out.getvalue()) == live and ("\n" in out.getvalue()) != live


def test_the_table_is_aligned():
    lines = table([("loss", "1"), ("tokens", "22")]).splitlines()
    assert lines[1:3] == ["  loss    1", "  tokens  22"]
    assert lines[0] == lines[3] == "─" * len(lines[2])

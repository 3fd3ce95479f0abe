"""The progress line, and the comparison of sparse steps with the dense steps of the same run."""

import io
import re
from types import SimpleNamespace

import pytest

from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.run_logging.progress import FEWEST, FIRST, ProgressLine, StepTimes, clock, kind_of, table
from tests.support import pool, tiny_run
from tests.support.whole_runs import arguments, attempt

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


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    line = ProgressLine(100, 0, out)
    line.show(ROW)
    line.show({**DENSE, "step": 40})
    first, second = out.getvalue().splitlines()
    assert first.startswith("step  20/100 · ETA ") and first.endswith(
        " · loss 2.5000 · 12,346 tokens/s · ultra, sparsity 80% · FLOPs ÷4.00, 3 TFLOP saved · step 12.3 ms"
    )
    line.show({**ROW, "step": 60}, dense_ms=9.87)
    assert "3 TFLOP saved · step 12.3 ms (dense 9.87 ms)" in out.getvalue().splitlines()[-1]
    assert "sparse" not in second and "FLOPs" not in second, "a dense run speaks of no sparsity"


def test_a_grown_run_has_saved_nothing_while_growth_has_cost_more():
    out = io.StringIO()
    ProgressLine(100, 0, out).show({**ROW, "flops": 9e12})
    assert "sparsity 80%" in out.getvalue() and "saved" not in out.getvalue() and "FLOPs" not in out.getvalue()


def test_a_run_of_unknown_length_has_no_time_left():
    out = io.StringIO()
    ProgressLine(None, 0, out).show(ROW)
    assert out.getvalue().startswith("step 20 · loss 2.5000 · ")


def test_a_narrow_terminal_shows_whole_items(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    ProgressLine(100, 0, out).show(ROW)
    line = out.getvalue().strip()
    assert line.startswith("step  20/100 · ETA ") and line.endswith(" · loss 2.5000 · 12,346 tokens/s")


def test_the_first_step_does_not_count_in_the_time_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("mst_scale.run_logging.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    line = ProgressLine(100, 0, out)
    now[0] = 500.0
    line.begin(1)
    now[0] = 519.0
    line.show(ROW)
    assert "ETA 1:20" in out.getvalue(), "19 steps in 19 s, and 80 are left"


def test_one_line_rewritten_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = Terminal()
    line = ProgressLine(100, 0, out)
    line.show(ROW)
    line.show({**ROW, "step": 40, "target_sparsity": 0.5})
    line.print_message("saved")
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


# --- step times ---


def filled(**steps):
    """Steps of each kind, in ms: (how many, how long)."""
    times = StepTimes()
    for name, (count, ms) in steps.items():
        for _ in range(count):
            kind = "sparse" if name == "topology" else name.replace("_", " ")
            times.add(kind, ms / 1e3, moved=name == "topology")
    return times


def test_topology_steps_count_as_often_as_they_came():
    found = filled(dense=(20, 10.0), sparse=(75, 6.0), topology=(25, 30.0)).comparison
    assert found.dense_ms == pytest.approx(10.0) and found.sparse_ms == pytest.approx(0.75 * 6 + 0.25 * 30)
    assert found.slower


def test_a_run_warns_once_that_its_sparse_steps_are_slower():
    times = filled(dense=(20, 10.0), sparse=(40, 12.0))
    said = times.warning()
    assert re.search(r"12\.0 ms.* 10\.0 ms", said) and times.warning() is None
    assert filled(dense=(20, 10.0), sparse=(40, 9.0)).warning() is None
    assert filled(dense=(20, 10.0), sparse=(40, 10.2)).warning() is None, "within the noise of two medians"


def test_too_few_steps_give_no_warning():
    assert filled(sparse=(40, 12.0)).comparison is None, "a run that is never dense"
    assert filled(dense=(FEWEST["dense"] + FIRST - 1, 1.0), sparse=(40, 12.0)).comparison is None
    assert filled(dense=(20, 1.0), sparse=(FEWEST["sparse"] + FIRST - 1, 12.0)).comparison is None


def test_the_first_steps_of_a_kind_and_single_long_ones_do_not_count():
    times = filled(dense=(20, 10.0))
    for ms in [60_000.0] * FIRST + [6.0] * 30 + [5_000.0] * 3:  # a kernel is compiled; the machine was busy
        times.add("sparse", ms / 1e3, moved=False)
    assert times.comparison.sparse_ms == pytest.approx(6.0)


def test_dense_weights_with_sparse_attention_replace_dense_steps_at_first():
    assert filled(dense_weights=(20, 8.0), sparse=(40, 6.0)).comparison.dense_ms == pytest.approx(8.0)
    both = filled(dense_weights=(20, 8.0), sparse=(40, 6.0), dense=(20, 10.0))
    assert both.comparison.dense_ms == pytest.approx(10.0)


def test_the_kind_of_a_step():
    def of(sparsity, density, pattern="dense", attended=2):
        mst = SimpleNamespace(
            pattern=Pattern(pattern, 4 if pattern == "strided" else 1),
            attended=attended,
            point=SimpleNamespace(sparsity=sparsity),
            schedule=SimpleNamespace(max_sparsity=0.8),
        )
        return kind_of(mst, {"a": density, "b": 1.0})

    assert of(0.0, 1.0) == "dense"
    assert of(0.0, 1.0, "strided") == "dense weights"
    assert of(0.0, 1.0, "strided", attended=0) == "dense"
    assert of(0.8, 0.2) == "sparse"
    assert of(0.4, 0.6) is None, "on the way"


def shown_by(rank, world, argv):
    """A run, and what its progress line showed."""
    lines, put = [], ProgressLine._put
    ProgressLine._put = lambda self, text: lines.append(text)
    try:
        return attempt(rank, world, argv), "".join(lines)
    finally:
        ProgressLine._put = put


def test_a_whole_run_shows_step_times_next_to_its_flops(tmp_path):
    block = {
        "training": {"steps": 100, "log_every": 50, "eval_every": 0, "save_every": 0},
        "mst": {
            "method": "mst",
            "sparsity": {"warmup": 20, "ultra": 40, "restore": 5},
            "attention": {"pattern": "dense"},
        },
    }
    ((code, shown),) = pool.run(shown_by, 1, arguments(tmp_path, **block))
    assert code == (0, "")
    assert all("dense_step_ms" not in row for row in tiny_run.rows(tmp_path / "out")), "metrics stay reproducible"
    assert re.search(r"FLOPs ÷[\d.]+, .* saved · step [\d.e+]+ ms \(dense [\d.e+]+ ms\)", shown)
    assert re.search(r"step time +[\d.]+ ms sparse, [\d.]+ ms dense", shown)

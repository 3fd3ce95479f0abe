"""Crossovers are measured once for each machine, and what a busy machine says is not believed."""

import json

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.sparse_linear import crossovers, dispatch, measuring

SHAPE, OTHER = (320, 256), (256, 320)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A table of its own, and measuring on."""
    monkeypatch.setattr(crossovers, "own", lambda: tmp_path / "crossover.json")
    monkeypatch.setenv("MST_SCALE_MEASURE", "1")
    crossovers.table.cache_clear()
    yield tmp_path
    crossovers.table.cache_clear()


def rows_of(folder):
    return json.loads((folder / "crossover.json").read_text())["crossovers"]


@pytest.fixture
def clock(monkeypatch):
    """Gives out the times that a test says: 10 for dense, and ours for the sparsities of the grid."""
    asked = []

    def in_turns(runs, seconds):
        asked.append(len(runs))
        return None if clock.ours is None else [[time] * 3 for time in (10.0, *clock.ours, clock.topology_step)]

    clock.ours, clock.asked, clock.topology_step = [20.0, 12.0, 6.0, 2.0, 1.0], asked, 22.0
    monkeypatch.setattr(measuring, "in_turns", in_turns)
    return clock


def test_a_row_of_a_real_measurement(monkeypatch):
    monkeypatch.setattr(measuring, "STEADY", 1e9)
    row = measuring.measure("float32", (96, 64), 0.05)
    assert list(map(float, row["gains"])) == list(measuring.GRID) and min(row["gains"].values()) > 0
    assert measuring.GRID[0] <= row["sparsity"] < 1
    assert (row["backend"], row["dtype"], row["shape"]) == ("cpu", "float32", [96, 64])
    assert row["cpu"] and row["torch"] == torch.__version__


def test_the_crossover_is_where_the_kernel_is_faster_by_the_margin(clock):
    """12 at 70 % and 6 at 85 %: the dense 10 / 1.05 lies between them."""
    row = measuring.measure("float32", SHAPE, 1.0)
    assert row["sparsity"] == pytest.approx(0.7 + 0.15 * (12 - 10 / 1.05) / 6, abs=1e-3)
    assert row["gains"] == {"0.5": 0.5, "0.7": 0.833, "0.85": 1.667, "0.95": 5.0, "0.99": 10.0}
    assert row["topology_step"] == 2.0  # 22 - 2 of 10
    clock.ours = [9.0, 8.0, 6.0, 2.0, 1.0]
    assert measuring.measure("float32", SHAPE, 1.0)["sparsity"] == measuring.GRID[0]
    clock.ours = [20.0, 19.0, 18.0, 17.0, 16.0]
    row = measuring.measure("float32", SHAPE, 1.0)
    assert row["sparsity"] > measuring.GRID[-1]
    assert "not faster than dense (0.62 times at 99%)" in measuring.describe([row], 1.0)


def test_what_was_measured_is_kept_for_the_same_machine_dtype_and_threads(clock, cache, monkeypatch):
    (cache / "crossover.json").write_text(json.dumps({"crossovers": [{**MINE, "shape": [8, 8]}]}))
    found, seconds = measuring.measured("float32", [SHAPE, OTHER])
    assert list(found) == [SHAPE, OTHER] and seconds > 0 and len(clock.asked) == 2
    assert [row["shape"] for row in rows_of(cache)] == [list(SHAPE), list(OTHER), [8, 8]], "others' rows stay"
    again, seconds = measuring.measured("float32", [SHAPE, OTHER])
    assert again == found and seconds == 0 and len(clock.asked) == 2
    measuring.measured("bfloat16", [SHAPE])
    torch.set_num_threads(2)
    measuring.measured("float32", [SHAPE])
    assert len(clock.asked) == 4
    monkeypatch.setattr(crossovers, "here", lambda: {"cpu": "another", "torch": torch.__version__})
    measuring.measured("float32", [SHAPE])
    assert len(clock.asked) == 5 and len(rows_of(cache)) == 6, "two machines share a home"


MINE = {"backend": "cpu", "dtype": "float32", "threads": 1, "shape": list(SHAPE), "sparsity": 0.7}


def test_the_tables_leave_out_other_machines(cache):
    rows = [{**MINE, "sparsity": 0.1, "cpu": "another", "torch": torch.__version__}, {**MINE, "sparsity": 0.6}]
    (cache / "crossover.json").write_text(json.dumps({"crossovers": rows}))
    assert crossovers.crossover("cpu", "float32", SHAPE) == 0.6


def test_a_busy_machine_is_not_believed(clock, cache):
    clock.ours = None
    assert measuring.measured("float32", [SHAPE])[0] == {}
    assert rows_of(cache) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_runs_that_differ_too_much_are_a_busy_machine(threads, monkeypatch):
    now, slower = [0.0], iter([1.0, 1.0, 5.0, 5.0, 5.0] * 9)
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(measuring.time, name, lambda: now[0])
    torch.set_num_threads(threads)

    def run():
        now[0] += next(slower)

    assert measuring.in_turns([run], 100.0) is None
    steady = [lambda: now.__setitem__(0, now[0] + 2.0)]
    assert measuring.in_turns(steady, 1.0) == [[2.0] * measuring.LEAST]


def test_threads_that_wait_for_a_core_are_a_busy_machine(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measuring.time, "thread_time", lambda: 0.4 * now[0])
    torch.set_num_threads(2)
    assert measuring.in_turns([lambda: now.__setitem__(0, now[0] + 2.0)], 1.0) is None


def test_when_time_is_over_the_others_are_left_to_the_tables(clock):
    found, _ = measuring.measured("float32", [SHAPE, OTHER], seconds=0.0)
    assert found == {} and clock.asked == []
    assert "2 not measured" in measuring.describe([], 8.0, 2)


def test_of_a_large_matrix_a_part_is_measured():
    assert measuring.part_of(SHAPE) == SHAPE
    assert measuring.part_of((50304, 768)) == (5461, 768) and measuring.part_of((768, 50304)) == (768, 5461)
    assert measuring.part_of((8192, 28672)) == (2048, 2048)


# --- what `auto` asks for ---

SHIPPED = 0.52  # of the nearest shapes


def test_only_layers_that_may_be_worth_it_are_measured(clock, caplog):
    layers = [("float32", SHAPE, 0.9), ("float32", SHAPE, 0.2), ("float32", OTHER, 0.4), ("float32", (16, 16), 0.99)]
    with caplog.at_level("INFO", logger="mst_scale"):
        found = dispatch.crossovers_of("cpu", 1, layers)
    assert found["float32", SHAPE] == pytest.approx(0.762, abs=1e-3) and len(clock.asked) == 1
    assert found["float32", OTHER] == SHIPPED and len(found) == 2
    (line,) = [record.message for record in caplog.records]
    assert "320 × 256 in float32 by 1 thread faster from 76% on (5.0 times at 95%)" in line
    for sparsity, backend in ((0.75, "dense"), (0.77, "cpu")):
        assert dispatch.choose("cpu", torch.float32, SHAPE, sparsity, 1, found)[0] == backend


def test_a_slower_kernel_is_not_taken_whatever_the_shipped_table_says(clock):
    clock.ours = [20.0, 19.0, 18.0, 17.0, 16.0]
    assert dispatch.choose("cpu", torch.bfloat16, SHAPE, 0.84, 1)[0] == "cpu"
    found = dispatch.crossovers_of("cpu", 1, [("bfloat16", SHAPE, 0.84)])
    assert dispatch.choose("cpu", torch.bfloat16, SHAPE, 0.84, 1, found)[0] == "dense"


def test_a_topology_step_counts_by_the_steps_between_two(clock):
    """It costs 2 dense passes: with 10 steps between, 0.2 of one are added to sparse times of 1.2 and 0.6."""
    row = measuring.measure("float32", SHAPE, 1.0)
    often, seldom = measuring.crossover_of(row, 10), measuring.crossover_of(row, 100)
    assert row["sparsity"] < seldom < often == pytest.approx(0.7 + 0.15 * (1.4 - 1 / 1.05) / 0.6, abs=1e-3)
    assert measuring.crossover_of(row, 2) == 1.0, "topology steps alone take as long as dense layers"
    found = dispatch.crossovers_of("cpu", 1, [("float32", SHAPE, 0.9)], 10)
    assert found["float32", SHAPE] == often


def test_another_version_of_the_kernel_is_measured_again(clock, monkeypatch):
    measuring.measured("float32", [SHAPE])
    monkeypatch.setattr(crossovers, "kernel_version", lambda: "another")
    measuring.measured("float32", [SHAPE])
    assert len(clock.asked) == 2


@pytest.mark.parametrize(("processor", "expected"), [("AMD EPYC 25/17", SHIPPED), ("Intel(R) Xeon(R) 6/143", None)])
def test_without_a_measurement_the_shipped_table_counts_for_its_processors_alone(
    clock, monkeypatch, processor, expected
):
    clock.ours = None  # too busy
    monkeypatch.setattr(crossovers, "here", lambda: {"cpu": processor, "torch": torch.__version__})
    found = dispatch.crossovers_of("cpu", 1, [("float32", SHAPE, 0.9)])
    assert found["float32", SHAPE] == expected
    assert dispatch.choose("cpu", torch.float32, SHAPE, 0.9, 1, found)[0] == ("cpu" if expected else "dense")


def test_without_a_measurement_the_nearest_shape_that_was_measured_counts(clock, monkeypatch):
    monkeypatch.setattr(crossovers, "here", lambda: {"cpu": "another", "torch": torch.__version__})
    measuring.measured("float32", [OTHER])
    clock.ours = None
    assert dispatch.crossovers_of("cpu", 1, [("float32", SHAPE, 0.9)])["float32", SHAPE] == pytest.approx(
        0.762, abs=1e-3
    )


def test_measuring_can_be_left_out(clock, monkeypatch):
    monkeypatch.setenv("MST_SCALE_MEASURE", "0")
    found = dispatch.crossovers_of("cpu", 1, [("float32", SHAPE, 0.9)])
    assert found == {("float32", SHAPE): SHIPPED} and clock.asked == []
    monkeypatch.setenv("MST_SCALE_MEASURE", "yes")
    with pytest.raises(UserError, match="MST_SCALE_MEASURE=yes"):
        dispatch.crossovers_of("cpu", 1, [("float32", SHAPE, 0.9)])

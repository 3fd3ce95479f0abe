"""`mst bench goodput`: its numbers are those of the formulas, and both sides get through a killed rank and a NaN."""

import json

import pytest
from mst_scale.benchmarks.goodput_parts import segment
from mst_scale.benchmarks.goodput_parts.segment import FAULTS, Setting, Watched

from mst_scale.benchmarks import goodput

SETTING = {"interval": 200, "timeout": 1, "outage": 30, "rate": 4e6}


def test_what_a_job_has_lost_by_hand():
    """Steps of 0.1 s; after step 8, at 0.3 s, 2 s of silence, and it goes back to step 6."""
    watched = Watched([(0.0, 5), (0.1, 6), (0.2, 7), (0.3, 8), (2.3, 6), (2.4, 7), (2.5, 8), (2.6, 9), (2.7, 10)])
    found = watched.summary(every=2)
    assert found["wall_s"] == pytest.approx(2.7) and found["steps"] == 5 and found["step_s"] == pytest.approx(0.1)
    assert found["silence_s"] == pytest.approx(2.0) and found["repeated"] == 3 and found["rewinds"] == 1
    row = {"side": "ours", "fault": "rank killed", "every": 5, "setting": SETTING, **found}
    assert goodput.lost(row) == pytest.approx(2.2)
    # three repeated steps, and one save of half a step
    assert goodput.fixed(row, cost=0.5, restart=9.0) == pytest.approx(2.2 - 0.35)


def test_the_cost_of_a_save_is_what_the_step_after_it_takes_longer():
    """A step takes 1 s, the one after a save 1.5 s; the fault comes at 60 s."""
    times, now = [], 0.0
    for step in range(5, 105):
        now += 1.5 if (step - 1) % 10 == 0 else 1.0
        times.append((now, step))
    saves = Watched(times, fault_at=60.0).summary(every=10)["saves"]
    assert saves == pytest.approx([0.5] * 5), "those of steps 10 to 50"
    assert goodput.save_cost([{"saves": [3.0, 2.0, *saves]}, {"saves": [0.1]}]) == pytest.approx(0.5)


def book_of(tmp_path) -> goodput.Book:
    book = goodput.Book(tmp_path / "jobs.jsonl")
    for side in segment.SIDES:
        save = 0.125 if side == "ours" else 2.0
        for fault in (None, *FAULTS):
            back = fault in goodput.BACK
            waits = 60.0 * (0.8 if side == "ours" else 1) if fault == "rank frozen" else 0.0
            row = {"step_s": 0.1, "steps": 200, "every": 20, "repeated": 10 * back, "rewinds": int(back)}
            wall = 20 + 10 * save * 0.1 + back * (10 + 1.0) + waits
            book.add({
                "round": 0, "side": side, "fault": fault, "setting": SETTING, "wall_s": wall, "silence_s": 12.0,
                "starts": 1, "saves": [9.0, 9.0, save], **row,
            })  # fmt: skip
    return book


def test_the_share_at_scale_by_hand(tmp_path):
    book = book_of(tmp_path)
    share, every, each = goodput.at_scale(book, "ours")
    assert every == 60, "sqrt(2 · 0.125 · 14,220)"
    assert each["rank killed"] == pytest.approx(10 + 60) and each["disk full"] == pytest.approx(0, abs=1e-9)
    assert each["rank frozen"] == pytest.approx(10 + 480 + 60)
    useful = 14_220 * 2
    assert each["newest damaged"] == pytest.approx(10 + 180)
    mean = (3 * 70 + 190 + 550) / 7
    assert share == pytest.approx(useful / (useful + 237 * 0.125 * 2 + mean))
    _, every, each = goodput.at_scale(book, "plain")
    assert every == 238 and each["rank frozen"] == pytest.approx(10 + 600 + 238)
    assert each["disk full"] == pytest.approx(10 + 1800 + 238)
    assert goodput.at_scale(book, "plain", operator=False)[2]["disk full"] == pytest.approx(10 + 238)


def test_the_page_has_both_sides_and_a_book_is_read_again(tmp_path):
    book = book_of(tmp_path)
    rows = goodput.results(goodput.Book(book.path))
    assert [row["fault"] for row in rows] == [*FAULTS, "whole trace"]
    for row in rows:
        assert row["ours_ms"] is not None and row["baseline"] == goodput.BASELINE and row["speedup"] >= 0
    assert rows[-1]["ours_share_at_scale"] > rows[-1]["baseline_share_at_scale"] > 0.9
    text = goodput.table(rows)
    assert "| rank frozen |" in text and "**computed**" in text
    path = tmp_path / "goodput.svg"
    assert goodput.picture(goodput.plot_of(rows), path.with_suffix(""), "x") == "![x](goodput.svg)" and path.exists()
    json.dumps(rows)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["rank killed", "divergence"])
@pytest.mark.parametrize("side", segment.SIDES)
def test_a_job_gets_through(tmp_path, side, fault):
    setting = Setting(goodput.config(tmp_path), interval=40, timeout=1, outage=1, rate=4e6)
    found = segment.run(side, fault, tmp_path / "job", setting, every=20, seed=1)
    assert found["steps"] >= 40 and found["rewinds"] == 1 and 1 <= found["repeated"] <= 30
    assert found["starts"] == 1
    if fault == "rank killed":
        assert found["silence_s"] > 10 * found["step_s"]

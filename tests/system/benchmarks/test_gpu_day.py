"""`mst bench gpu_day`: every part runs on the CPU with tiny shapes, and no case stops the day."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mst_scale.benchmarks.gpu_parts import GROUPS, PARTS, correctness, speed
from mst_scale.benchmarks.gpu_parts.book import Book, page
from mst_scale.benchmarks.gpu_parts.part import Where

from mst_scale.benchmarks import attention, gpu_day
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import tiles
from tests.support import tiny_run, triton_interpreter

pytestmark = pytest.mark.full

TINY = """
import os, sys, time
from pathlib import Path
from mst_scale.benchmarks import gpu_day
from mst_scale.benchmarks.gpu_parts import PARTS, Where
from mst_scale.benchmarks.gpu_parts.book import Book

out = Path(sys.argv[1])
where = Where(True, out, out / "work")
Book(out).begin(where.machine())
os.environ.update(where.environment())
for name in PARTS:
    if name != "training":
        for number in range(gpu_day.processes(PARTS[name])):
            assert gpu_day.measure(PARTS[name], where, number) == 0, name
"""

FAKE = """
import os, signal, sys, time
from mst_scale.benchmarks import gpu_day
from mst_scale.benchmarks.gpu_parts.book import page
from mst_scale.benchmarks.gpu_parts.part import Case, Part

HERE = __file__

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def fail():
    if os.path.exists(HERE + ".mended"):
        return {"said": "well", "fine": True}
    raise RuntimeError("out of luck\\nand more")

def first(where):
    yield Case("well", lambda: {"said": "3×", "fine": True})
    yield Case("crash", crash)
    yield Case("fail", fail)
    yield Case("hang", lambda: time.sleep(600))
    yield Case("off", lambda: {"said": "off by 3", "fine": False})

def second(where):
    yield Case("late", lambda: time.sleep(600))
    yield Case("beside", lambda: {"said": "done"})

gpu_day.PARTS = {"first": Part("first", "steps", "does it go on?", 2, 0.1, 0.5, "__main__"),
                 "second": Part("second", "layers", "does it end?", 0.25, 9, 0.5, "__main__", at_once=2)}
gpu_day.COMMAND = (sys.executable, HERE)
sys.exit(gpu_day.main())
"""


def where(tmp_path: Path) -> Where:
    return Where(True, tmp_path / "out", tmp_path / "work")


@pytest.mark.slow
def test_every_part_runs_with_tiny_shapes(tmp_path):
    pytest.importorskip("triton")
    triton_interpreter.interpret(["-c", TINY, str(tmp_path)], seconds=600)
    book = Book(tmp_path)
    assert {row["part"] for row in book.rows} == set(PARTS) - {"training"}
    assert not book.bad, book.bad
    assert all(row.get("fine", True) and row["said"] for row in book.rows)
    assert all(row["fine"] for part in ("masks",) for row in book.of(part))
    assert sum("is off by" in row["said"] for row in book.of("kernels")) == 5
    text = page(book, PARTS.values())
    assert "0 wrong or failed" in text and "## linear" in text and "| 32→128 | 16 | 90% | dx |" in text
    assert "| 1.5B | channels-80 |" in text or "| 6.7B | channels-80 |" in text


def test_every_tile_of_every_list_is_checked():
    block = pytest.importorskip("mst_scale.sparse_linear.block")
    lists = [tiles.tiles_of(k, c, torch.bfloat16, d) for k in tiles.KERNELS for c in (80, 90) for d in (64, 128)]
    lists += [
        make(c, side)
        for make in (block.product_tiles, block.gradient_tiles)
        for c in (80, 90)
        for side in (16, 32, 64, 128)
    ]
    assert max(map(len, lists)) == correctness.MOST_TILES


@pytest.mark.slow
def test_training_is_compared_run_by_run(tmp_path, monkeypatch):
    alone, to_dense, compared = PARTS["training"].cases(where(tmp_path))
    assert to_dense.run()["fine"]
    row = alone.run()
    assert row["fine"] and len(row["losses"]) == correctness.STEPS, row
    again = compared.run()
    assert again["fine"] and again["losses"] == row["losses"], "a run that has ended is not repeated"
    other = [{"loss": loss + 2e-4, "sparsity": 0.5} for loss in row["losses"]]
    same = [{"loss": loss, "sparsity": 0.5} for loss in row["losses"]]
    left = [other, same]
    monkeypatch.setattr(correctness, "trained", lambda *_: left.pop())
    assert not compared.run()["fine"]


def test_masks_that_differ_are_seen(monkeypatch, tmp_path):
    case = next(iter(PARTS["masks"].cases(where(tmp_path))))
    assert case.run()["fine"]
    plain, devices = correctness.digests, []

    def digests(device, name, dtype, size, side):
        devices.append(device)
        return plain(device, name, dtype, size, side if len(devices) < 2 else 4)

    monkeypatch.setattr(correctness, "digests", digests)
    assert not case.run()["fine"]
    assert len(devices) == 2


def test_no_case_stops_the_run_and_the_same_command_continues_it(tmp_path):
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    out = tmp_path / "out"
    words = [sys.executable, str(program), "--tiny", "--minutes", "5", "--out", str(out), "--json"]
    code, reported, screen = run(words)
    rows = {row["case"]: row for row in reported["rows"]}
    assert code == 1 and list(rows) == ["well", "crash", "fail", "hang", "off", "beside", "late", "further cases"]
    assert "ended with code -11" in rows["crash"]["failed"]
    assert rows["fail"]["failed"] == "RuntimeError: out of luck"
    assert rows["hang"]["failed"] == "stopped: took too long"
    assert rows["late"]["unfinished"] == "stopped: the part's time was over"
    assert "WRONG: off by 3" in screen and "fail: failed: RuntimeError: out of luck" in screen
    assert "| off | WRONG: off by 3 |" in (out / "gpu_day.md").read_text()

    (tmp_path / "fake.py.mended").touch()
    code, reported, screen = run([*words, "--parts", "first"])
    again = {row["case"]: row for row in reported["rows"]}
    assert again["fail"]["said"] == "well" and again["well"] == rows["well"] and again["off"] == rows["off"]
    assert "  well:" not in screen, "what is there is not measured again"


def test_ctrl_c_ends_the_processes_too(tmp_path):
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    words = [sys.executable, str(program), "--tiny", "--out", str(tmp_path / "out"), "--parts", "second"]
    day = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results = tmp_path / "out" / "results.jsonl"
    tiny_run.wait_for(lambda: results.exists() and '"late", "began"' in results.read_text(), [day], 60)
    day.send_signal(signal.SIGINT)
    assert day.wait(30) != 0
    left = subprocess.run(["pgrep", "-f", str(program)], capture_output=True, text=True, check=False)
    assert not left.stdout


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


def run(words):
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def test_results_of_another_machine_are_not_mixed(tmp_path):
    Book(tmp_path).begin({"gpu": "A", "torch": "2", "start": 1})
    Book(tmp_path).begin({"gpu": "A", "torch": "2", "start": 2})
    with pytest.raises(UserError, match="was measured with gpu A, and this is gpu B: choose another --out"):
        Book(tmp_path).begin({"gpu": "B", "torch": "2", "start": 3})


def test_without_a_gpu_the_error_has_a_fix(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(UserError, match="no CUDA device here: --tiny"):
        gpu_day.main(["--out", str(tmp_path / "day")])
    with contextlib.redirect_stdout(io.StringIO()) as reported, pytest.raises(SystemExit):
        gpu_day.main(["--help"])
    assert all(name in reported.getvalue() for name in PARTS)


def test_the_roofline_of_attention_by_hand(monkeypatch):
    """2 heads of 8 numbers, 4 tokens: a window of 2 that also sees every second key."""
    monkeypatch.setattr(attention, "HEADS", 2)
    monkeypatch.setattr(attention, "HEAD_DIM", 8)
    monkeypatch.setattr(attention, "STRIDE", 2)
    sequences = 16384 // 4
    pairs = sum(1 for i in range(4) for j in range(i + 1) if i - j < 2 or (i - j) % 2 == 0)
    bound = speed.least_ms(4, {"multiply_adds": 1.0, "bytes": 1e18})
    assert bound == 3.5 * 2 * pairs * sequences * 2 * 8
    assert speed.least_ms(4, {"multiply_adds": 1e18, "bytes": 1.0}) == 12 * sequences * 2 * 4 * 8 * 2


def test_a_clock_that_runs_out_in_the_middle_loses_nothing(tmp_path, monkeypatch):
    """The time is over while the third of four cases runs: two results stay, and the next start measures the others."""
    program = tmp_path / "clocked.py"
    slow = tmp_path / "slow"
    slow.touch()
    program.write_text(
        FAKE.split("def crash", maxsplit=1)[0]
        + f"""
def case():
    if os.path.exists({str(slow)!r}):
        time.sleep(600)
    return {{"said": "measured"}}

def only(where):
    for number in range(4):
        yield Case(f"case {{number}}", case if number == 2 else lambda: {{"said": "measured"}})

gpu_day.PARTS = {{"only": Part("only", "steps", "does the clock matter?", 100, 1000, 0.5, "__main__")}}
if __name__ == "__main__":
    sys.exit(gpu_day.main())
"""
    )
    out = tmp_path / "out"
    part = gpu_day.Part("only", "steps", "does the clock matter?", 100, 1000, 0.5, "__main__")
    given = ["--tiny", "--out", str(out)]
    monkeypatch.setattr(gpu_day, "COMMAND", (sys.executable, str(program)))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))

    over = []

    def clock() -> float:
        """The hour is over as soon as the third case has begun, in the first start."""
        if slow.exists() and Book(out).under_way("only", 0) == "case 2":
            over.append(True)
        return 3601.0 if over else 0.0

    def start(number: int) -> dict[str, dict]:
        Book(out).begin({"gpu": "fake", "start": number})
        gpu_day.Day(out, Where(True, out, tmp_path / "work"), given, 3600.0, clock).run(part)
        return {row["case"]: row for row in Book(out).rows}

    first = start(1)
    assert first["case 0"]["said"] == first["case 1"]["said"] == "measured"
    assert first["case 2"]["unfinished"] == "stopped: the part's time was over" and "case 3" not in first
    slow.unlink()
    over.clear()
    second = start(2)
    assert [second[f"case {number}"]["said"] for number in range(4)] == ["measured"] * 4
    assert all(second[f"case {number}"] == first[f"case {number}"] for number in (0, 1)), "they are not measured again"


def test_three_commands_hold_all_parts_within_their_time():
    assert {part.group for part in PARTS.values()} == set(GROUPS)
    assert all(minutes <= 3 for minutes in GROUPS.values())

"""Tasks that are evaluated while a run trains: the same figures as `mst eval` afterwards, under ZeRO-3 too."""

import json

import pytest

from mst_scale.cli import main
from mst_scale.data.prepare import ensure
from tests import pool, tiny_run
from tests.test_bad_input import attempt


def arguments(folder, stage, *more):
    ensure(folder / "bytes", "stdlib", "byte", max_bytes=60_000)
    path = tiny_run.config(
        folder,
        model={"context": 64, "vocab_size": 257},
        data={"dir": str(folder / "bytes")},
        training={"steps": 6},
        zero_optimization={"stage": stage},
    )
    argv = ["--deepspeed_config", str(path), "--out", str(folder / "run"), "--eval-tasks", "lambada,ptb"]
    return [*argv, "--eval-every", "3", "--eval-data", str(folder / "tasks"), *more]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_row_has_what_mst_eval_finds_afterwards(tmp_path, stage, capsys):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "lambada.txt").write_text("return the last word\nimport os and sys\nx y\n")
    (tmp_path / "tasks" / "ptb.txt").write_text("def f(self): return self.x\n" * 20)
    assert pool.run(attempt, 2, arguments(tmp_path, stage)) == [(0, "")] * 2
    rows = [row for row in tiny_run.rows(tmp_path / "run") if "val_loss" in row]
    assert [row["step"] for row in rows] == [3, 6]
    assert all(row["eval/ptb/token_perplexity"] > 1 and 0 <= row["eval/lambada/token_acc"] <= 1 for row in rows)
    assert rows[0]["eval/ptb/token_perplexity"] != rows[1]["eval/ptb/token_perplexity"]
    written = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert written["step"] == 6
    words = ["--tasks", "lambada,ptb", "--data-dir", str(tmp_path / "tasks"), "--json", "--out", str(tmp_path / "e")]
    assert main(["eval", str(tmp_path / "run"), *words]) == 0
    after = json.loads(capsys.readouterr().out)
    for task, metric in (("ptb", "word_perplexity"), ("lambada", "perplexity"), ("lambada", "token_acc")):
        assert rows[1][f"eval/{task}/{metric}"] == pytest.approx(after["tasks"][task]["metrics"][metric], rel=1e-4)


def test_what_is_wrong_is_said_before_the_first_step(tmp_path):
    (tmp_path / "tasks").mkdir()
    (code, text), *_ = pool.run(attempt, 1, arguments(tmp_path, 1, "--eval-tasks", "lambda"))
    assert code == 2 and "unknown task 'lambda': the nearest is 'lambada'" in text
    (code, text), *_ = pool.run(attempt, 1, arguments(tmp_path, 1))
    assert code == 2 and "has no lambada.jsonl or lambada.txt" in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

"""Tasks that are evaluated while a run trains have the metrics of `mst eval` afterwards, under ZeRO-3 too."""

import json
from types import SimpleNamespace

import pytest
import torch

from mst_scale import files
from mst_scale.cli import main
from mst_scale.data.prepare import prepare
from mst_scale.data.recipe import Recipe
from mst_scale.evaluation.evaluate import TasksDuringTraining
from mst_scale.models.gpt import GPT
from mst_scale.pretrain import start
from tests.support import pool, tiny_run, whole_runs
from tests.support.whole_runs import attempt


def arguments(folder, stage, *more):
    prepare(Recipe("stdlib", "byte", max_bytes=60_000), folder / "bytes")
    words = ["--eval-tasks", "lambada,ptb", "--eval-every", "3", "--eval-data", str(folder / "tasks"), *more]
    blocks = {"model": {"seq_length": 64, "vocab_size": 257}, "data": {"dir": str(folder / "bytes")}}
    blocks |= {"training": {"steps": 6}, "zero_optimization": {"stage": stage}}
    return whole_runs.arguments(folder, "run", *words, **blocks)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_the_row_has_the_results_of_a_later_mst_eval(tmp_path, stage, capsys):
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


def tasks_of_a_run(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "lambada.txt").write_text("return the last word\n")
    (tmp_path / "tasks" / "ptb.txt").write_text("def f(self): return self.x\n")
    experiment = start.read_experiment(start.parse_arguments(arguments(tmp_path, 1)))
    alone = SimpleNamespace(first=True, rank=0, world_size=1, on_first=lambda what: what(), all=lambda mine: [mine])
    tasks = TasksDuringTraining(experiment, tmp_path, 2, alone)
    tasks.read()
    return tasks, experiment


def test_a_full_disk_does_not_end_a_run(tmp_path, monkeypatch, caplog):
    def full(path, text):
        raise OSError(28, "No space left on device")

    tasks, experiment = tasks_of_a_run(tmp_path)
    monkeypatch.setattr(files, "write_atomically", full)
    assert tasks.at(Engine(GPT(experiment.model)), 3)["eval/ptb/token_perplexity"] > 1
    assert "the run continues without it" in caplog.text


def test_a_model_that_computes_nan_has_no_metrics_and_trains_on(tmp_path, caplog):
    """The losses decide whether a run has diverged."""
    tasks, experiment = tasks_of_a_run(tmp_path)
    model = GPT(experiment.model)
    model.ln_f.weight.data.fill_(float("nan"))
    assert tasks.at(Engine(model), 3) == {} and "NaN" in caplog.text


def test_a_step_that_is_reached_again_is_evaluated_again(tmp_path):
    """After a rollback it has other weights."""
    tasks, experiment = tasks_of_a_run(tmp_path)
    first, second = (tasks.at(Engine(GPT(experiment.model)), 3) for _ in range(2))
    assert first.keys() == second.keys() and first["eval/ptb/token_perplexity"] != second["eval/ptb/token_perplexity"]
    assert json.loads((tmp_path / "eval.json").read_text())["digest"] is None


class Engine(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, ids):
        return self.module(ids)


def test_errors_are_reported_before_the_first_step(tmp_path):
    (tmp_path / "tasks").mkdir()
    (code, text), *_ = pool.run(attempt, 1, arguments(tmp_path, 1, "--eval-tasks", "lambda"))
    assert code == 2 and "'lambda'" in text and "'lambada'" in text
    absent = arguments(tmp_path, 1, "--eval-tasks", "lambda", "--data", str(tmp_path / "absent"))
    assert pool.run(attempt, 1, absent)[0][1] == text, "before the corpus is prepared"
    (code, text), *_ = pool.run(attempt, 1, arguments(tmp_path, 1))
    assert code == 2 and "lambada.jsonl or lambada.txt" in text
    (tmp_path / "tasks" / "lambada.txt").write_text("a b\n")
    (tmp_path / "tasks" / "ptb.txt").write_text("x")
    (code, text), *_ = pool.run(attempt, 1, arguments(tmp_path, 1))
    assert code == 2 and "ptb.txt" in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

"""Evaluates a model on the tasks of `training.eval_tasks` while it trains.

The tasks of `training.eval_tasks`, whenever the validation loss is taken, on the engine as it stands: its precision and
its attention pattern. Ranks share the windows, under any ZeRO stage. The figures go into the row of metrics.jsonl as
`eval/TASK/METRIC`, and the newest result into eval.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mst_scale.config import Experiment
from mst_scale.distributed import Ranks
from mst_scale.errors import UserError
from mst_scale.evaluation import harness
from mst_scale.evaluation.evaluate import FILE, Settings, evaluate, read_documents, refuse_single_tokens
from mst_scale.evaluation.models import Model, our_text
from mst_scale.evaluation.tasks import Documents, choose
from mst_scale.hugging_face.export import tokenizer_of


class TasksDuringTraining:
    """Documents and tokenizer, read before the first step so that what is wrong with them is said then."""

    def __init__(self, experiment: Experiment, out: Path, micro: int, ranks: Ranks):
        training, self.config = experiment.training, experiment.model
        if self.config.arch != "gpt":
            raise UserError(f"training.eval_tasks are for GPTs, and model.arch is {self.config.arch!r}: leave it out")
        folder = None if training.eval_data is None else Path(training.eval_data)
        self.settings = Settings(data_dir=folder, batch=micro)
        self.out, self.ranks = out, ranks
        harness.load()
        self.tasks = choose(training.eval_tasks or "")
        made_with = tokenizer_of(experiment)
        if made_with is None:
            raise UserError("training.eval_tasks: the corpus does not say which tokenizer made it (data.tokenizer)")
        self.text = our_text(made_with.name, self.config.vocab_size)

    def read(self) -> None:
        """The documents, read by rank 0 for all; every rank calls it."""

        def found() -> dict[str, Documents]:
            docs = read_documents(self.tasks, self.settings)
            refuse_single_tokens(docs, self.tasks, self.text)
            return docs

        self.docs = self.ranks.on_first(found)

    def at(self, engine: Any, step: int) -> dict[str, float]:
        """The figures of this step, by key of the row. A collective: every rank calls it."""
        device = next(engine.module.parameters()).device
        model = Model(
            str(self.out), step, self.out, None, engine, self.config.seq_length, self.config.vocab_size, device,
            self.config.weights,
        )  # fmt: skip
        engine.eval()
        try:
            with torch.no_grad():
                result = evaluate(
                    model,
                    self.text,
                    self.tasks,
                    self.docs,
                    self.settings,
                    out=self.out / FILE,
                    ranks=self.ranks,
                    say=lambda _: None,
                )
        finally:
            engine.train()
        return {
            f"eval/{task}/{metric}": value
            for task, entry in result["tasks"].items()
            for metric, value in entry["metrics"].items()
            if metric not in ("tokens", "words")
        }

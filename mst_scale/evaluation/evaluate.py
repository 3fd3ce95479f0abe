"""Evaluates a model task by task, after training or during it.

Each finished task is written atomically to `eval.<key>.json.unfinished`, which becomes `eval.json` when all tasks are
done. An evaluation that is killed therefore loses at most one task, and running the same command again completes it:
the result of a task is reused if model, settings and documents are the same (by their digests). Results of another
checkpoint or with other settings are kept in `eval.<key>.json`, where the same evaluation finds them. `eval.json`:

    {"model", "parameters", "step", "digest", "tokenizer", "settings": {"context", "stride", "shots", "detokenised"},
     "tasks": {NAME: {"metrics": {…}, "documents": how many, "source", "digest", "seconds"}},
     "versions": {"mst_scale", "torch", "lm_eval"}}

An infinite perplexity is null. The digest of a model that is being trained is null: no result is reused, and only the
latest one is kept (metrics.jsonl has all of them).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mst_scale
from mst_scale.comm import Ranks, logger
from mst_scale.config import Experiment
from mst_scale.errors import DivergedError, UserError
from mst_scale.evaluation import harness
from mst_scale.evaluation.harness import Scorer
from mst_scale.evaluation.models import Model, Text, our_text
from mst_scale.evaluation.tasks import Documents, Task, choose, documents
from mst_scale.files import write_atomically, write_if_possible
from mst_scale.hugging_face.sources import tokenizer_of

FILE = "eval.json"
Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How to evaluate. A context of None is the model's; a stride of None is half of it, as in transformers' docs."""

    data_dir: Path | None = None
    context: int | None = None
    stride: int | None = None
    shots: int = 5
    batch: int = 8

    def windows_of(self, model: Model) -> tuple[int, int]:
        """Return the length of windows for a model and their stride, or raise UserError if they do not fit."""
        context = model.context if self.context is None else self.context
        if not 1 <= context <= model.context:
            raise UserError(f"--context {context}: it must lie between 1 and the model's, {model.context}")
        stride = max(1, context // 2) if self.stride is None else self.stride
        if not 1 <= stride <= context:
            raise UserError(f"--stride {stride}: it must lie between 1 and the context, {context}")
        return context, stride


def read_documents(tasks: Sequence[Task], settings: Settings) -> dict[str, Documents]:
    """Read the documents of all tasks, so that errors in them are found before the first forward pass."""
    if settings.shots < 0:
        raise UserError(f"--shots {settings.shots}: it must be 0 or more")
    return {task.name: documents(task, settings.data_dir, settings.shots) for task in tasks}


def validate_lengths(docs: dict[str, Documents], tasks: Sequence[Task], text: Text) -> None:
    """Raise UserError if a text has fewer than two tokens: its first one is not scored."""
    for task in tasks:
        for doc in docs[task.name].test if task.kind == "text" else ():
            if len(list(text.encode(doc["text"][:1000]))) < 2:
                raise UserError(f"{docs[task.name].source} is a text of one token: there is nothing to predict")


def evaluate(
    model: Model,
    text: Text,
    tasks: Sequence[Task],
    docs: dict[str, Documents],
    settings: Settings,
    *,
    out: Path | None = None,
    ranks: Ranks | None = None,
    log: Callable[[str], None] = logger.info,
    write: Callable[[Path, str], None] = write_atomically,
) -> Result:
    """Evaluate a model on all tasks, whose documents `docs` has by name; return the result, the same on every rank.

    A collective of the `ranks` that share the work. Rank 0 writes the file of results, `out`, by means of `write`.
    """
    first = ranks is None or ranks.first
    context, stride = settings.windows_of(model)
    result: Result = {
        "model": model.name,
        "parameters": model.parameters,
        "step": model.step,
        "digest": model.digest,
        "tokenizer": text.name,
        "settings": {"context": context, "stride": stride, "shots": settings.shots, "detokenised": False},
        "tasks": {},
        "versions": {
            "mst_scale": mst_scale.__version__,
            "torch": torch.__version__,
            "lm_eval": metadata.version("lm_eval"),
        },
    }

    def finished() -> dict[str, Any]:
        return {} if out is None else _finished(out, result)

    before = finished() if ranks is None else ranks.on_first(finished)
    scorer = Scorer(model.logits, context, model.vocab_size, model.device, settings.batch, ranks)
    for task in tasks:
        found = docs[task.name]
        old = before.get(task.name, {})
        if old.get("digest") == found.digest and old.get("versions") == result["versions"]:
            result["tasks"][task.name] = old
            log(f"{task.name}: was evaluated before")
            continue
        start = time.monotonic()
        metrics = harness.evaluate_task(
            task, found, scorer, text.encode, text.end_of_text, stride=stride, shots=settings.shots
        )
        result["tasks"][task.name] = {
            "metrics": metrics,
            "documents": len(found.test),
            "source": found.source,
            "digest": found.digest,
            "versions": result["versions"],
            "seconds": round(time.monotonic() - start, 2),
        }
        log(f"{task.name}: " + ", ".join(f"{key} {value:.4g}" for key, value in metrics.items()))
        if out is not None and first:
            write(_partial_of(out, result), as_json(_with_others(out, result), indent=2) + "\n")
    for name, entry in before.items():  # tasks of an earlier evaluation of the same model stay
        result["tasks"].setdefault(name, entry)
    if out is not None and first:
        whole = _with_others(out, result)
        _keep_other_results(out, result, log)
        write(out, as_json(whole, indent=2) + "\n")
        _partial_of(out, result).unlink(missing_ok=True)
    return result


def _partial_of(out: Path, result: Result) -> Path:
    return _kept_of(out, result).with_suffix(out.suffix + ".unfinished")


def _finished(out: Path, wanted: Result) -> dict[str, Any]:
    """Return the results of finished tasks of the same model with the same settings."""
    tasks: dict[str, Any] = {}
    if wanted["digest"] is None:
        return tasks
    for path in (_kept_of(out, wanted), out, _partial_of(out, wanted)):
        found = _read(path)
        if found is not None and _key(found) == _key(wanted):
            tasks.update(found["tasks"])
    return tasks


def _with_others(out: Path, result: Result) -> Result:
    """Add what is in the files now: another process may evaluate other tasks of the same model."""
    return {**result, "tasks": {**_finished(out, result), **result["tasks"]}}


def _keep_other_results(out: Path, result: Result, log: Callable[[str], None]) -> None:
    """Move results of another model or with other settings, so that `result` does not overwrite them."""
    found = _read(out)
    if found is None or _key(found) == _key(result) or found["digest"] is result["digest"] is None:
        return
    kept = _kept_of(out, found)
    os.replace(out, kept)
    step, stride = found["step"], found["settings"].get("stride")
    log(f"the earlier results ({'' if step is None else f'step {step}, '}stride {stride}) are kept in {kept.name}")


def _kept_of(out: Path, result: Result) -> Path:
    return out.with_name(f"{out.stem}.{hashlib.sha256(_key(result).encode()).hexdigest()[:8]}{out.suffix}")


def _key(result: Result) -> str:
    """Return the values that all results in one file have in common."""
    return json.dumps([result[name] for name in ("digest", "step", "tokenizer", "settings")], sort_keys=True)


def _read(path: Path) -> Result | None:
    """Return the results in a file; None if it has none and can be overwritten."""
    try:
        found = json.loads(path.read_text())
        _key(found)
        return dict(found) if isinstance(found["tasks"], dict) and isinstance(found["settings"], dict) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None


def holds_results(path: Path) -> bool:
    """Return whether a file holds results of an evaluation."""
    return _read(path) is not None


def as_json(result: Result, indent: int | None = None) -> str:
    """Return the result as JSON, with null for infinity, as in metrics.jsonl."""
    return json.dumps(json.loads(json.dumps(result), parse_constant=lambda _: None), indent=indent)


class TasksDuringTraining:
    """The tasks of `training.eval_tasks`, evaluated with each validation loss on the engine as it is.

    The engine's precision, attention pattern and ZeRO stage apply, and the ranks share the windows. Documents and
    tokenizer are read before the first step, so that errors in them are found then. The metrics go into the row of
    metrics.jsonl as `eval/TASK/METRIC`, and the latest result into eval.json.
    """

    def __init__(self, experiment: Experiment, out: Path, micro: int, ranks: Ranks):
        training, self.config = experiment.training, experiment.model
        if self.config.arch != "gpt":
            raise UserError(f"training.eval_tasks requires model.arch = gpt, not {self.config.arch}: leave it out")
        folder = None if training.eval_data is None else Path(training.eval_data)
        self.settings = Settings(data_dir=folder, batch=micro)
        self.out, self.ranks = out, ranks
        harness.load()
        self.tasks = choose(training.eval_tasks or "")
        made_with = tokenizer_of(experiment)
        if made_with is None:
            raise UserError("training.eval_tasks: the tokenizer of the corpus is not known: set data.tokenizer")
        self.text = our_text(made_with.name, self.config.vocab_size)

    def read(self) -> None:
        """Read the documents on rank 0 for all ranks. A collective."""

        def found() -> dict[str, Documents]:
            docs = read_documents(self.tasks, self.settings)
            validate_lengths(docs, self.tasks, self.text)
            return docs

        self.docs = self.ranks.on_first(found)

    def at(self, engine: Any, step: int) -> dict[str, float]:
        """Return the metrics of this step by their keys in metrics.jsonl. A collective."""
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
                    log=lambda _: None,
                    write=write_if_possible,
                )
        except DivergedError as error:  # on all ranks; the losses decide whether the run continues
            logger.warning("step %d: %s", step, error)
            return {}
        finally:
            engine.train()
        return {
            f"eval/{task}/{metric}": value
            for task, entry in result["tasks"].items()
            for metric, value in entry["metrics"].items()
            if metric not in ("tokens", "words")
        }

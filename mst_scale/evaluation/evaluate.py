"""Evaluates a model task by task; an evaluation that is killed loses one task at most.

Tasks are evaluated one after the other. Each finished one is written to `eval.json.unfinished`, at once and whole; when
all are done that becomes `eval.json`. The same command continues: a task is taken over if model, settings and documents
are the same (their digests say so). Results of another checkpoint or other settings that lie there are kept beside it,
in `eval.<key>.json`, where the same evaluation finds them again. `eval.json`:

    {"model", "parameters", "step", "digest", "tokenizer", "settings": {"context", "stride", "shots", "detokenised"},
     "tasks": {NAME: {"metrics": {…}, "documents": how many, "source", "digest", "seconds"}},
     "versions": {"mst_scale", "torch", "lm_eval"}}

A perplexity beyond all numbers is null there. While a model trains, its digest is null: nothing is taken over, and only
the newest result is kept (metrics.jsonl has them all).
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

from mst_scale.checkpoints import store
from mst_scale.comm import Ranks, logger
from mst_scale.errors import UserError
from mst_scale.evaluation import harness
from mst_scale.evaluation.models import Model, Text
from mst_scale.evaluation.scorer import Scorer
from mst_scale.evaluation.tasks import Documents, Task, documents

FILE = "eval.json"
Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    data_dir: Path | None = None
    stride: int | None = None  # None: half the context, as the strided recipe of transformers' documentation
    shots: int = 5
    batch: int = 8

    def stride_of(self, context: int) -> int:
        stride = max(1, context // 2) if self.stride is None else self.stride
        if not 1 <= stride <= context:
            raise UserError(f"--stride {stride}: it must lie between 1 and the model's context, {context}")
        return stride


def read_documents(tasks: Sequence[Task], settings: Settings) -> dict[str, Documents]:
    """Everything that can be wrong with the data is found before the first forward."""
    if settings.shots < 0:
        raise UserError(f"--shots {settings.shots}: it must be 0 or more")
    return {task.name: documents(task, settings.data_dir, settings.shots) for task in tasks}


def refuse_single_tokens(docs: dict[str, Documents], tasks: Sequence[Task], text: Text) -> None:
    """A text's first token is not scored, so it needs two; of a long one the beginning is looked at."""
    for task in tasks:
        for doc in docs[task.name].test if task.kind == "text" else ():
            if len(list(text.encode(doc["text"][:1000]))) < 2:
                raise UserError(f"{docs[task.name].source} is a text of one token: there is none to predict")


def evaluate(
    model: Model,
    text: Text,
    tasks: Sequence[Task],
    docs: dict[str, Documents],
    settings: Settings,
    *,
    out: Path | None = None,
    ranks: Ranks | None = None,
    say: Callable[[str], None] = logger.info,
) -> Result:
    """The result of all tasks, the same on every rank; rank 0 writes `out`."""
    first = ranks is None or ranks.first
    stride = settings.stride_of(model.context)
    result: Result = {
        "model": model.name,
        "parameters": model.parameters,
        "step": model.step,
        "digest": model.digest,
        "tokenizer": text.name,
        "settings": {"context": model.context, "stride": stride, "shots": settings.shots, "detokenised": False},
        "tasks": {},
        "versions": versions(),
    }
    before = _shared(ranks, lambda: {} if out is None else _finished(out, result))
    scorer = Scorer(
        model.logits,
        context=model.context,
        vocab_size=model.vocab_size,
        device=model.device,
        batch=settings.batch,
        ranks=ranks,
    )
    for task in tasks:
        found = docs[task.name]
        if task.name in before and before[task.name]["digest"] == found.digest:
            result["tasks"][task.name] = before[task.name]
            say(f"{task.name}: was evaluated before")
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
            "seconds": round(time.monotonic() - start, 2),
        }
        say(f"{task.name}: " + ", ".join(f"{key} {value:.4g}" for key, value in metrics.items()))
        if out is not None and first:
            store.write_atomically(partial_of(out), as_json(result, indent=2) + "\n")
    for name, entry in before.items():  # tasks of an earlier evaluation of this very model stay
        result["tasks"].setdefault(name, entry)
    if out is not None and first:
        keep_another(out, result, say)
        store.write_atomically(out, as_json(result, indent=2) + "\n")
        partial_of(out).unlink(missing_ok=True)
    return result


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".unfinished")


def versions() -> dict[str, str]:
    import mst_scale

    return {"mst_scale": mst_scale.__version__, "torch": torch.__version__, "lm_eval": metadata.version("lm_eval")}


def _finished(out: Path, wanted: Result) -> dict[str, Any]:
    """Tasks that are done already, of the same model under the same settings."""
    tasks: dict[str, Any] = {}
    if wanted["digest"] is None:
        return tasks
    for path in (kept_of(out, wanted), out, partial_of(out)):
        found = _read(path)
        if found is not None and _key(found) == _key(wanted):
            tasks.update(found["tasks"])
    return tasks


def keep_another(out: Path, result: Result, say: Callable[[str], None]) -> None:
    """What lies at `out`, and is of another model or other settings, is not lost when `result` takes its place."""
    found = _read(out)
    if found is None or _key(found) == _key(result) or found["digest"] is result["digest"] is None:
        return
    kept = kept_of(out, found)
    os.replace(out, kept)
    step, stride = found["step"], found["settings"].get("stride")
    say(f"the earlier results ({'' if step is None else f'step {step}, '}stride {stride}) are kept in {kept.name}")


def kept_of(out: Path, result: Result) -> Path:
    return out.with_name(f"{out.stem}.{hashlib.sha256(_key(result).encode()).hexdigest()[:8]}{out.suffix}")


def _key(result: Result) -> str:
    """What results must agree in to stand in one file."""
    return json.dumps([result[name] for name in ("digest", "step", "tokenizer", "settings")], sort_keys=True)


def _read(path: Path) -> Result | None:
    """The results in a file; None where it holds none of ours: it is then overwritten."""
    try:
        found = json.loads(path.read_text())
        _key(found)
        return dict(found) if isinstance(found["tasks"], dict) and isinstance(found["settings"], dict) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _shared(ranks: Ranks | None, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return read() if ranks is None else ranks.on_first(read)


def as_json(result: Result, indent: int | None = None) -> str:
    """JSON has no infinity: null, as in metrics.jsonl."""
    return json.dumps(json.loads(json.dumps(result), parse_constant=lambda _: None), indent=indent)

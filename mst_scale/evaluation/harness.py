"""Connects our models to lm-evaluation-harness and computes the metrics.

The harness makes the prompts, asks for log-likelihoods and adds up the metrics; `HarnessModel` answers through a
`Scorer`. Beside what the harness knows, answers carry how many tokens were scored and how many were hit, so that there
are figures per token beside those per word.

    text        token_perplexity = exp(-Σ log p / tokens),  word_perplexity = exp(-Σ log p / words), the words (between
                blanks) of the text as it stands;  windows of `context` tokens that move on by `stride`
    last word   acc: all its tokens are the most likely ones;  perplexity = exp(-mean log p(word)) over passages;
                token_acc, token_perplexity: the same over the tokens of all last words
    choice      acc: the answer with the higher log-likelihood is the right one
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mst_scale.errors import UserError
from mst_scale.evaluation.scorer import Score, Scorer, Window, windows
from mst_scale.evaluation.tasks import Doc, Documents, Task

Encode = Callable[[str], Iterable[int]]
SEED = 1234  # of the draw of examples for prompts


def evaluate_task(
    task: Task, docs: Documents, scorer: Scorer, encode: Encode, end_of_text: int | None, *, stride: int, shots: int
) -> dict[str, float]:
    """The metrics of one task."""
    harness = load()
    model = _model_class(harness)(scorer, encode, end_of_text, stride)
    built = _built(harness, task, docs)
    if task.kind == "choice":
        built.set_config(key="num_fewshot", value=shots)
        built.set_fewshot_seed(seed=SEED)
    found = harness["evaluate"](model, {task.name: built}, bootstrap_iters=0, log_samples=False)
    results = found["results"][task.name]
    return {key.split(",")[0]: float(value) for key, value in results.items() if key.endswith(",none")
            and "stderr" not in key}  # fmt: skip


def load() -> dict[str, Any]:
    """The parts of the harness that are used; it takes seconds to import."""
    try:
        from lm_eval.api import task as task_module
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.evaluator import evaluate
    except ImportError:
        raise UserError("evaluation needs lm-evaluation-harness: pip install 'mst_scale[eval]'") from None
    task_module.tqdm = lambda iterable, **_: iterable  # a bar for making prompts, which takes no time
    for name in ("lm_eval", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return {"TemplateLM": TemplateLM, "ConfigurableTask": ConfigurableTask, "evaluate": evaluate}


# --- the model's side ---


class Answer(tuple[float, bool]):
    """(log-likelihood, is it the most likely continuation), as the harness wants it, and the score behind it."""

    score: Score


class Rolling(float):
    """A text's log-likelihood, and the score behind it."""

    score: Score


def _model_class(harness: dict[str, Any]) -> type:
    base: Any = harness["TemplateLM"]

    class HarnessModel(base):
        def __init__(self, scorer: Scorer, encode: Encode, end_of_text: int | None, stride: int):
            super().__init__()
            self.scorer, self.encode, self.end_of_text, self.stride = scorer, encode, end_of_text, stride

        @property
        def eot_token_id(self) -> int:
            if self.end_of_text is None:
                raise UserError("the tokenizer has no end of text, which begins a text without a context")
            return self.end_of_text

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return [int(i) for i in self.encode(string)]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[Answer]:
            answers: list[Answer] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
            return answers

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[Answer]:
            work = []
            for (_, text), context, continuation in requests:
                if len(continuation) > self.scorer.context:
                    raise UserError(f"an answer of {len(continuation)} tokens does not fit the context: {text[:40]!r}")
                ids = [*context, *continuation][-self.scorer.context - 1 :]  # what is too long loses its beginning
                work.append(Window(ids, len(continuation)))
            answers = []
            for score in self.scorer.score(work):
                answer = Answer((score.log, score.hits == score.tokens))
                answer.score = score
                answers.append(answer)
            return answers

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[Rolling]:
            """Each text on its own. Its first token is not scored: nothing stands before it."""
            cut = [windows(self.tok_encode(request.args[0]), self.scorer.context, self.stride) for request in requests]
            scores = iter(self.scorer.score([window for windows_ in cut for window in windows_]))
            found = []
            for windows_ in cut:
                total = sum((next(scores) for _ in windows_), Score(0.0, 0, 0))
                rolling = Rolling(total.log)
                rolling.score = total
                found.append(rolling)
            return found

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            raise NotImplementedError("no task of ours generates text")

    return HarnessModel


# --- the tasks' side ---


def _built(harness: dict[str, Any], task: Task, docs: Documents) -> Any:
    from datasets import Dataset

    parts = {"test": Dataset.from_list(docs.test)}
    if docs.train:
        parts["train"] = Dataset.from_list(docs.train)
    config: dict[str, Any] = {
        "task": task.name,
        "custom_dataset": lambda **_: parts,
        "test_split": "test",
        **({"training_split": "train", "fewshot_split": "train"} if docs.train else {}),
        **_FORMS[task.kind](task),
        "metadata": {},
    }
    return harness["ConfigurableTask"](config=config)


def _last_word(task: Task) -> dict[str, Any]:
    def process(doc: Doc, results: Any) -> dict[str, Any]:
        score = results[0].score
        return {"acc": float(results[0][1]), "perplexity": score.log, "token_acc": score, "token_perplexity": score}

    return {
        "output_type": "loglikelihood",
        "doc_to_text": lambda doc: _split(doc)[0],
        "doc_to_target": lambda doc: " " + _split(doc)[1],
        "process_results": process,
        "metric_list": [
            _metric("acc", _mean, True),
            _metric("perplexity", lambda logs: _exp(-_mean(logs)), False),
            _metric("token_acc", lambda scores: sum(s.hits for s in scores) / sum(s.tokens for s in scores), True),
            _metric("token_perplexity", _per_token, False),
        ],
    }


def _split(doc: Doc) -> tuple[str, str]:
    """A passage before its last word, and that word."""
    before, _, word = doc["text"].strip().rpartition(" ")
    return before, word


def _text(task: Task) -> dict[str, Any]:
    def process(doc: Doc, results: Any) -> dict[str, Any]:
        score = results[0].score
        words = len(re.findall(r"\S+", doc["text"]))
        weighed = (score.log, words)
        return {"token_perplexity": score, "word_perplexity": weighed, "tokens": score.tokens, "words": words}

    return {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": lambda doc: doc["text"],
        "process_results": process,
        "metric_list": [
            _metric("token_perplexity", _per_token, False),
            _metric("word_perplexity", _per_word, False),
            _metric("tokens", sum, True),
            _metric("words", sum, True),
        ],
    }


def _choice(task: Task) -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "doc_to_text": lambda doc: task.prompt.format(**doc),
        "doc_to_target": lambda doc: doc["label"],
        "doc_to_choice": list(task.choices),
        "metric_list": [_metric("acc", _mean, True)],
    }


_FORMS = {"last word": _last_word, "text": _text, "choice": _choice}


def _metric(name: str, aggregation: Callable[[Any], float], higher_is_better: bool) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _per_token(scores: Sequence[Score]) -> float:
    return _exp(-math.fsum(score.log for score in scores) / sum(score.tokens for score in scores))


def _per_word(pairs: Sequence[tuple[float, int]]) -> float:
    return _exp(-math.fsum(log for log, _ in pairs) / sum(words for _, words in pairs))


def _exp(value: float) -> float:
    """exp(x), or infinity above 709, where float64 overflows: a model that is sure of a wrong answer."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf

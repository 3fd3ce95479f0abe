"""Scores texts with our models and lets lm-evaluation-harness compute the metrics of a task.

The harness makes the prompts, asks for log-likelihoods and aggregates the metrics; `HarnessModel` answers through a
`Scorer`. In addition to what the harness knows, answers carry how many tokens were scored and how many were the most
likely ones, so that there are metrics per token as well as per word.

    text        token_perplexity = exp(-Σ log p / tokens),  word_perplexity = exp(-Σ log p / words), with the words
                (between blanks) of the text as it stands
    last word   acc: all its tokens are the most likely ones;  perplexity = exp(-mean log p(word)) over passages;
                token_acc, token_perplexity: the same over the tokens of all last words
    choice      acc: the answer with the higher log-likelihood is the right one

The scorer's work is cut into windows: token ids that the model reads, and how many of the last ones are scored. Windows
are sorted by length and dealt in batches to the ranks in turn; every rank runs the same number of forward passes (under
ZeRO-3 each is a collective), and all ranks get all scores. A long text is read in windows of the model's context that
move on by `stride`: each token is scored once, and the first ones of a window only serve as context. Larger strides are
cheaper and give less context; stride = context gives none.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from mst_scale.comm import Ranks
from mst_scale.errors import DivergedError, UserError
from mst_scale.evaluation.tasks import Doc, Documents, Task

Encode = Callable[[str], Iterable[int]]
SEED = 1234  # of the draw of examples for prompts


@dataclass(frozen=True)
class Window:
    """`ids[-scored - 1 : -1]` predict `ids[-scored:]`."""

    ids: Sequence[int]
    scored: int


@dataclass(frozen=True)
class Score:
    """Sum of log-probabilities (natural), tokens, and how many of them were the most likely ones."""

    log: float
    tokens: int
    hits: int

    def __add__(self, other: Score) -> Score:
        return Score(self.log + other.log, self.tokens + other.tokens, self.hits + other.hits)


def windows(ids: Sequence[int], context: int, stride: int) -> list[Window]:
    """Cut `ids` into windows that score every token but the first once."""
    found = []
    done = 0  # the last position that is scored
    begin = 0
    while done < len(ids) - 1:
        end = min(begin + context, len(ids) - 1)  # the window reads ids[begin:end] and predicts up to ids[end]
        found.append(Window(ids[begin : end + 1], end - done))
        done, begin = end, begin + stride
    return found


@dataclass(frozen=True)
class Scorer:
    """Computes log-probabilities; `logits` maps (batch, length) int64 ids to (batch, length, at least vocab_size)."""

    logits: Callable[[torch.Tensor], torch.Tensor]
    context: int
    vocab_size: int
    device: torch.device
    batch: int
    ranks: Ranks | None

    @torch.no_grad()
    def score(self, work: Sequence[Window]) -> list[Score]:
        """Return one score per window, in their order and the same on every rank. A collective.

        Raises:
            DivergedError: on every rank, if a score is not a number.
        """
        rank, world = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.world_size)
        order = sorted(range(len(work)), key=lambda i: (-len(work[i].ids), i))
        batches = [order[k : k + self.batch] for k in range(0, len(order), self.batch)]
        mine: dict[int, Score] = {}
        for start in range(0, len(batches), world):
            turn = min(start + rank, len(batches) - 1)  # a rank without a batch left repeats one
            scores = self._forward([work[i] for i in batches[turn]])
            if start + rank < len(batches):
                mine.update(zip(batches[turn], scores, strict=True))
        shares = [mine] if self.ranks is None else self.ranks.all(mine)
        found = {i: score for share in shares for i, score in share.items()}
        if any(math.isnan(score.log) for score in found.values()):  # on all ranks
            raise DivergedError("the model computes NaN instead of logits: take a checkpoint from before it diverged")
        return [found[i] for i in range(len(work))]

    def _forward(self, work: Sequence[Window]) -> list[Score]:
        longest = max(len(window.ids) for window in work) - 1
        ids = torch.zeros(len(work), longest, dtype=torch.long)
        for row, window in enumerate(work):  # padding follows the text, where causal attention does not see it
            ids[row, : len(window.ids) - 1] = torch.tensor(window.ids[:-1])
        logits = self.logits(ids.to(self.device))
        scores = []
        for row, window in enumerate(work):
            end = len(window.ids) - 1
            z = logits[row, end - window.scored : end, : self.vocab_size].float()
            targets = torch.tensor(window.ids[end + 1 - window.scored :], device=z.device)
            log = z.gather(1, targets[:, None]).squeeze(1) - z.logsumexp(-1)
            hits = int((z.argmax(-1) == targets).sum())
            scores.append(Score(float(log.double().sum()), window.scored, hits))
        return scores


# What the harness asks for ------------------------------------------------------------------------------------------


def evaluate_task(
    task: Task, docs: Documents, scorer: Scorer, encode: Encode, end_of_text: int | None, *, stride: int, shots: int
) -> dict[str, float]:
    """Return the metrics of one task. A collective: every rank calls it."""
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
    """Import lm-evaluation-harness, which takes seconds, and return the parts that are used.

    Raises:
        UserError: if it is not installed.
    """
    try:
        from lm_eval.api import task as task_module
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.evaluator import evaluate
    except ImportError:
        raise UserError("evaluation needs lm-evaluation-harness: pip install 'mst_scale[eval]'") from None
    task_module.tqdm = lambda iterable, **_: iterable  # its progress bar for making prompts, which takes no time
    for name in ("lm_eval", "lm-eval"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return {"TemplateLM": TemplateLM, "ConfigurableTask": ConfigurableTask, "evaluate": evaluate}


class _Answer(tuple[float, bool]):
    """(log-likelihood, whether it is the most likely continuation), as the harness wants it, and its score."""

    def __new__(cls, score: Score) -> _Answer:
        return super().__new__(cls, (score.log, score.hits == score.tokens))

    def __init__(self, score: Score):
        self.score = score


class _Rolling(float):
    """A text's log-likelihood, and its score."""

    def __new__(cls, score: Score) -> _Rolling:
        return super().__new__(cls, score.log)

    def __init__(self, score: Score):
        self.score = score


def _model_class(harness: dict[str, Any]) -> type:
    base: Any = harness["TemplateLM"]

    class HarnessModel(base):
        def __init__(self, scorer: Scorer, encode: Encode, end_of_text: int | None, stride: int):
            super().__init__()
            self.scorer, self.encode, self.end_of_text, self.stride = scorer, encode, end_of_text, stride

        @property
        def eot_token_id(self) -> int:
            if self.end_of_text is None:
                raise UserError("the tokenizer has no end of text, with which a text without a context must begin")
            return self.end_of_text

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return [int(i) for i in self.encode(string)]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[_Answer]:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[_Answer]:
            work = []
            for (_, text), context, continuation in requests:
                if len(continuation) > self.scorer.context:
                    raise UserError(f"an answer of {len(continuation)} tokens does not fit the context: {text[:40]!r}")
                whole = [*context, *continuation]
                ids = whole[-self.scorer.context - 1 :]  # a text that is too long is truncated at its beginning
                work.append(Window(ids, len(continuation)))
            return [_Answer(score) for score in self.scorer.score(work)]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[_Rolling]:
            """Score each text separately. Its first token is not scored, because it has no context."""
            cut = [windows(self.tok_encode(request.args[0]), self.scorer.context, self.stride) for request in requests]
            scores = iter(self.scorer.score([window for windows_ in cut for window in windows_]))
            return [_Rolling(sum((next(scores) for _ in windows_), Score(0.0, 0, 0))) for windows_ in cut]

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
            raise NotImplementedError("no task generates text")

    return HarnessModel


# The tasks ----------------------------------------------------------------------------------------------------------


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
            _metric("acc", fmean, True),
            _metric("perplexity", lambda logs: _exp(-fmean(logs)), False),
            _metric("token_acc", lambda scores: sum(s.hits for s in scores) / sum(s.tokens for s in scores), True),
            _metric("token_perplexity", _per_token, False),
        ],
    }


def _split(doc: Doc) -> tuple[str, str]:
    """Return a passage before its last word, and that word."""
    before, word = re.fullmatch(r"(.*)\s(\S+)", doc["text"].strip(), re.DOTALL).groups()  # type: ignore[union-attr]
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
        "metric_list": [_metric("acc", fmean, True)],
    }


_FORMS = {"last word": _last_word, "text": _text, "choice": _choice}


def _metric(name: str, aggregation: Callable[[Any], float], higher_is_better: bool) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}


def _per_token(scores: Sequence[Score]) -> float:
    return _exp(-math.fsum(score.log for score in scores) / sum(score.tokens for score in scores))


def _per_word(pairs: Sequence[tuple[float, int]]) -> float:
    return _exp(-math.fsum(log for log, _ in pairs) / sum(words for _, words in pairs))


def _exp(value: float) -> float:
    """Return exp(x), or infinity where float64 overflows (if a model is certain of a wrong answer)."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf

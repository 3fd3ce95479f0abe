"""Contains the paper's results, and formats a model's results next to them.

The results are of GPT-2 small on OpenWebText, mean of 4 seeds (Dense to MST), and of OpenAI's checkpoint (in the
appendix, without few-shot tasks). The paper does not say how its figures were computed. For OpenAI's checkpoint, its
WikiText-2 perplexity is lower and its LAMBADA accuracy higher than in the GPT-2 paper, which is per word. We therefore
assume that the figures are per token, with overlapping windows; our figures per word are in a separate row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# column → (task, factor, metric per token, metric per word)
COLUMNS = {
    "LAMBADA acc": ("lambada", 100, "token_acc", "acc"),
    "LAMBADA ppl": ("lambada", 1, "token_perplexity", "perplexity"),
    "WikiText2": ("wikitext2", 1, "token_perplexity", "word_perplexity"),
    "PTB": ("ptb", 1, "token_perplexity", "word_perplexity"),
    "WikiText103": ("wikitext103", 1, "token_perplexity", "word_perplexity"),
    "1BW": ("1bw", 1, "token_perplexity", "word_perplexity"),
    "RTE": ("rte", 100, "acc", None),
    "MRPC": ("mrpc", 100, "acc", None),
}
PAPER: dict[str, tuple[float | None, ...]] = {
    "Dense": (60.74, 13.22, 34.89, 34.06, 36.29, 44.16, 52.98, 71.26),
    "Tiny": (53.29, 31.91, 58.00, 58.71, 60.78, 71.96, 55.87, 71.63),
    "SS-80": (50.59, 54.77, 83.98, 75.98, 88.00, 99.44, 50.00, 68.50),
    "RigL-80": (55.75, 25.81, 43.00, 48.14, 44.82, 62.31, 48.83, 67.22),
    "MST": (60.54, 13.67, 33.33, 34.64, 34.95, 45.90, 52.62, 70.96),
    "OpenAI GPT-2": (60.43, 12.04, 25.19, 30.46, 26.38, 43.39, None, None),
}
CONTEXT = 1024
VOCABULARY = range(50_257, 50_305)  # GPT-2's ids, and a padded vocabulary
SIZES = (124_318_464, 30_308_736)  # GPT-2 small without biases and norms, and the paper's Tiny: 12·n·d² + (V + 1024)·d
NEAR = 0.02  # relative; allows for biases, norms and the padding of a vocabulary


def comparable(context: int, vocab_size: int, parameters: int) -> bool:
    """Return whether a model has the context, the vocabulary and the size of one in the paper's table.

    Perplexities per token depend on the vocabulary, and all metrics depend on context and size, so the paper's rows
    cannot be compared with other models.
    """
    sized = any(abs(parameters / size - 1) <= NEAR for size in SIZES)
    return context == CONTEXT and vocab_size in VOCABULARY and sized


def rows(
    tasks: dict[str, Any], name: str = "this model", paper: Mapping[str, tuple[float | None, ...]] = PAPER
) -> dict[str, list[float | None]]:
    """Return the paper's rows and ours by name, given the tasks of an eval.json; missing values are None."""
    token: list[float | None] = []
    word: list[float | None] = []
    for task, factor, *both in COLUMNS.values():
        metrics = tasks.get(task, {}).get("metrics", {})
        for row, metric in zip((token, word), both, strict=True):
            value = metrics.get(metric)
            row.append(None if value is None else factor * value)
    ours = {f"{name}, per token": token}
    if any(value is not None for value in word):
        ours[f"{name}, per word"] = word
    return {**{key: list(values) for key, values in paper.items()}, **ours}


def table(tasks: dict[str, Any], name: str = "this model", *, with_paper: bool = True) -> str:
    """Format aligned columns, with the paper's rows above ours if `with_paper`; – marks a missing value."""
    found = rows(tasks, name, PAPER if with_paper else {})
    keep = [i for i in range(len(COLUMNS)) if any(row[i] is not None for key, row in found.items() if key not in PAPER)]
    lines = [["", *(column for i, column in enumerate(COLUMNS) if i in keep)]]
    lines += [[key, *(_cell(row[i]) for i in keep)] for key, row in found.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 1e5 else f"{value:.3g}"

"""Writes the model card of an exported model, as the Hugging Face hub shows it.

The card describes how the model was trained, its losses, the FLOPs that sparsity saved, and how to load it. All figures
come from the files of the run; missing figures are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_scale.config import Experiment
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.run_logging.metrics import last_rows

if TYPE_CHECKING:
    from mst_scale.hugging_face.sources import TransformersSource

LOADING = """\
```python
from transformers import {loader}

model = {loader}.from_pretrained("PATH_OF_THIS_FOLDER")
```"""
ATTACHING = """\
With mst_scale, the model uses the attention pattern that it was trained with:

```python
from mst_scale.hybrid_sparse_attention import Pattern, attach

attach(model, Pattern("{kind}", {stride}))
```"""


def of_ours(
    experiment: Experiment, run: Path | None, exported: dict[str, Any], pattern: Pattern, tokenizer_note: str
) -> str:
    """Return the model card of our GPT or BERT that was trained with this attention pattern."""
    model, method = experiment.model, str(experiment.mst.method)
    shape = f"{model.n_layer} layers, {model.n_head} heads, width {model.n_embd}, context {model.seq_length}"
    rows = [("model", f"{shape}, vocabulary {model.vocab_size:,}"), ("method", method)]
    notes = []
    if model.causal:
        tag, loader, task = "gpt2", "AutoModelForCausalLM", "text-generation"
        architecture = "GPT-2"
        if pattern.kind != "dense":
            notes.append(ATTACHING.format(kind=pattern.kind, stride=pattern.stride))
        if exported["pruning"].get("pattern"):
            notes.append("GPT-2's files hold matrices as (inputs, outputs): groups of inputs run down their columns.")
    else:
        tag, loader, task = "bert", "AutoModelForMaskedLM", "fill-mask"
        architecture = "BERT"
        notes.append(f"[MASK] is that of the tokenizer, or id {model.vocab_size - 1} if it has none.")
    biases = "" if model.bias else " The model has no biases: they are 0."
    accounting = (
        f"The architecture is {architecture}. FLOPs are counted as in the paper, and compared with the same steps of\n"
        f"dense training.{biases}"
    )
    title = f"{model.preset or model.arch.upper()}, trained with mst_scale ({method})"
    rows += _trained(experiment, run, exported, pattern)
    text = [accounting, LOADING.format(loader=loader), *notes]
    return _card([f"pipeline_tag: {task}", f"tags: [mst_scale, {tag}]"], title, rows, text, tokenizer_note)


def of_transformers(source: TransformersSource, exported: dict[str, Any], tokenizer_note: str) -> str:
    """Return the model card of a transformers model; a run.json may describe how it was trained."""
    pattern, kind = source.pattern, type(source.skeleton).__name__
    rows = [("model", f"{kind}, {exported['parameters']:,} parameters"), ("method", source.method)]
    rows += _trained(source.experiment, source.run, exported, pattern)
    accounting = "FLOPs are counted as in the paper, and compared with the same steps of dense training."
    text = [accounting, LOADING.format(loader=kind)]
    if pattern.kind != "dense":
        text.append(ATTACHING.format(kind=pattern.kind, stride=pattern.stride))
    title = f"{kind}, trained with mst_scale ({source.method})"
    return _card([f"tags: [mst_scale, {source.config['model_type']}]"], title, rows, text, tokenizer_note)


def _card(front: list[str], title: str, rows: list[tuple[str, str]], text: list[str], tokenizer_note: str) -> str:
    front = ["---", "library_name: transformers", *front, "---"]
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    note = [f"This folder has {tokenizer_note}."] if tokenizer_note else []
    return "\n\n".join(["\n".join(front), f"# {title}", "\n".join(table), *text, *note]) + "\n"


def _trained(
    experiment: Experiment | None, run: Path | None, exported: dict[str, Any], pattern: Pattern
) -> list[tuple[str, str]]:
    """Return the rows that do not depend on the architecture."""
    step, matrices, losses = exported["step"], exported["matrices"], exported.get("losses")
    last, validated = ({}, {}) if run is None else last_rows(run / "metrics.jsonl", step)
    of = "" if experiment is None else f" of {experiment.training.steps:,}"
    rows = {
        "steps": None if step is None else f"{step:,}{of}",
        "tokens": f"{last['tokens']:,}" if last else None,
        "attention": None if pattern.kind == "dense" else (
            f"trained {pattern.kind}, stride {pattern.stride}; dense in transformers, which increases the loss"
        ),
        "training loss": None if last.get("loss") is None else f"{last['loss']:.4f}",
        "validation loss": f"{validated['val_loss']:.4f} (step {validated['step']:,})" if validated else None,
        "FLOPs": _flops(experiment, last) if last.get("flops") else None,
        "zeros": f"{exported['zeros'] / matrices:.2%} of the {matrices:,} weights that may be sparse" if matrices
        else None,
        "units that no gradient reaches (weights of zero)": exported.get("dead_units"),
        "pruned after training": exported.get("pruned"),
        "validation loss before and after pruning": f"{losses['before']:.4f}, {losses['after']:.4f}" if losses
        else None,
    }  # fmt: skip
    return [(name, value) for name, value in rows.items() if value]


def _flops(experiment: Experiment | None, row: dict[str, Any]) -> str:
    """Describe the FLOPs up to a row of the metrics, compared with those of as many dense steps."""
    spent, dense = row["flops"], row["flops_dense"]
    if experiment is not None and experiment.mst.growth:
        return f"{spent:.3g}, including those before its first step; the same number of dense steps takes {dense:.3g}"
    return f"{spent:.3g}, {dense / spent:.2f} times fewer than dense"

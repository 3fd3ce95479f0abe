"""Writes the model card of an exported model, as the Hugging Face hub shows it.

The card describes how the model was trained, its losses, the FLOPs that sparsity saved, and how to load it. All figures
come from the files of the run; missing figures are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_scale.config import Experiment
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.run_logging.metrics import read

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
    table: list[tuple[str, str]] = []
    step = exported["step"]
    last: dict[str, Any] = {}
    validated: dict[str, Any] = {}
    if run is not None and (run / "metrics.jsonl").is_file():
        for row in read(run / "metrics.jsonl"):
            if step is None or row["step"] <= step:
                last, validated = row, row if row.get("val_loss") is not None else validated
    if step is not None:
        of = "" if experiment is None else f" of {experiment.training.steps:,}"
        table.append(("steps", f"{step:,}{of}"))
    if last:
        table.append(("tokens", f"{last['tokens']:,}"))
    if pattern.kind != "dense":
        trained = f"{pattern.kind}, stride {pattern.stride}"
        table.append(("attention", f"trained {trained}; dense in transformers, which increases the loss"))
    if last.get("loss") is not None:
        table.append(("training loss", f"{last['loss']:.4f}"))
    if validated:
        table.append(("validation loss", f"{validated['val_loss']:.4f} (step {validated['step']:,})"))
    if last.get("flops"):
        spent, dense = last["flops"], last["flops_dense"]
        grown = f"including those before its first step; the same number of dense steps takes {dense:.3g}"
        fewer = (
            grown if experiment is not None and experiment.mst.growth else f"{dense / spent:.2f} times fewer than dense"
        )
        table.append(("FLOPs", f"{spent:.3g}, {fewer}"))
    if exported["matrices"]:
        zeros = (
            f"{exported['zeros'] / exported['matrices']:.2%} of the {exported['matrices']:,} weights that may be sparse"
        )
        table.append(("zeros", zeros))
    if exported.get("dead_units"):
        table.append(("units that no gradient reaches (weights of zero)", exported["dead_units"]))
    if exported.get("pruned"):
        table.append(("pruned after training", exported["pruned"]))
    if exported.get("losses"):
        before, after = exported["losses"]["before"], exported["losses"]["after"]
        table.append(("validation loss before and after pruning", f"{before:.4f}, {after:.4f}"))
    return table

"""Opens the weights of one of our models, one tensor at a time, whatever form they are stored in.

a run or a checkpoint        the fp32 masters in DeepSpeed's files, and the masks
a compact file               `layout`
a folder of transformers     a GPT-2, as `mst export` writes it
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mst_scale.checkpoints import finding, mask_files, model_config
from mst_scale.compact_files.layout import CompactFile, is_compact, open_compact
from mst_scale.config import ModelConfig
from mst_scale.data.tokenizer import TrainedWith, trained_with
from mst_scale.errors import UserError
from mst_scale.hugging_face import sources, start_from
from mst_scale.hugging_face.sources import Source, find_transformers, open_source, tokenizer_of
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.models import shapes_of

MODEL_KEYS = (
    "arch", "n_layer", "n_head", "n_embd", "d_ff", "seq_length", "vocab_size", "vocab_multiple", "bias", "tied_head",
)  # fmt: skip


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a model, and what is known of its training.

    Attributes:
        path: What the user named.
        names: The model's parameters, by our names.
        read: Reads one of them.
        tokenizer: That of the corpus; None if nothing names one.
        pattern: The attention pattern that it was trained with.
        compact: The compact file, if they come from one.
        masks: Names of the parameters that have a mask; `mask` reads it, as bool.
    """

    path: Path
    config: ModelConfig
    names: tuple[str, ...]
    read: Callable[[str], torch.Tensor]
    step: int | None
    method: str | None
    tokenizer: TrainedWith | None
    pattern: Pattern
    compact: CompactFile | None = None
    masks: frozenset[str] = frozenset()
    mask: Callable[[str], torch.Tensor] | None = None

    def about(self) -> dict[str, Any]:
        """Return what a compact file says of the training."""
        text = self.tokenizer
        about: dict[str, Any] = {"step": self.step, "method": self.method}
        about |= {"tokenizer": text and text.name, "tokenizer_identity": text and text.identity}
        return about if self.pattern.kind == "dense" else {**about, "attention": asdict(self.pattern)}


def model_block(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of the `model` block that a file needs to describe the model."""
    whole = asdict(config)
    return {key: whole[key] for key in MODEL_KEYS}


def open_weights(path: Path, config: Path | None = None, *, causal: bool = True) -> ModelWeights:
    """Open the weights that a path means.

    Args:
        path: A run, a checkpoint, a compact file or its folder, or a GPT-2 of transformers.
        config: The experiment, if no config.json is next to the checkpoint.
        causal: Whether the caller needs a model that predicts the next token, which a BERT does not.

    Raises:
        UserError: if there is no such model, or it is not one of ours.
        Damaged: if a file of a checkpoint was cut short.
    """
    exported = is_compact(path) or (
        model_config.is_transformers(path / "config.json") and finding.of_other_loops(path) is None
    )
    if exported and config is not None:
        raise UserError(f"{path} holds its own config, so another one has no effect: leave out --config {config}")
    if is_compact(path):
        found = _of_compact(path)
    elif path.is_file():
        raise UserError(f"{path} is not a compact file of mst_scale: name one, or the folder of a run or a checkpoint")
    elif not path.exists():
        raise UserError(f"there is no {path}: name a run, a checkpoint, or what mst export has written")
    elif exported:
        found = _of_gpt2(path, causal=causal)
    elif (other := find_transformers(path, config)) is not None:
        _check_gpt2(path, json.loads(other[1].read_text()), causal=causal)
        raise UserError(f"{path} holds a GPT-2 of transformers: write it as a folder with mst export {path} OUT first")
    else:
        found = _of_source(path, open_source(path, config, causal=causal))
    if causal and not found.config.causal:
        raise UserError(f"{path} is a BERT: it fills in masked tokens, and predicts no next token")
    return found


def load_model(weights: ModelWeights) -> torch.nn.Module:
    """Load the whole model in float32, with the attention pattern that it was trained with."""
    return sources.load_model(weights.config, weights.pattern, weights.read)


def _of_source(path: Path, source: Source) -> ModelWeights:
    names = tuple(shapes_of(source.experiment.model))
    masks: frozenset[str] = frozenset()
    read_mask = None
    if mask_files.are_expected(source.checkpoint) and (source.checkpoint / mask_files.FOLDER).is_dir():
        found = mask_files.read_all(source.checkpoint)
        masks, read_mask = frozenset(found.head["names"]), found.whole
    return ModelWeights(
        path, source.experiment.model, names, source.weights.read, source.step, source.experiment.mst.method,
        tokenizer_of(source.experiment, source.run), source.pattern, masks=masks & set(names), mask=read_mask,
    )  # fmt: skip


def _of_compact(path: Path) -> ModelWeights:
    file = open_compact(path)
    config = ModelConfig(**file.model)
    if shapes_of(config) != file.all_shapes():  # the digest does not cover names
        raise UserError(f"{file.path} is damaged (a name or a shape differs): export the run again, or copy it again")
    return ModelWeights(
        path, config, tuple(file.names), file.read, file.about["step"], file.about["method"],
        _tokenizer(file.about), _pattern(file.about), compact=file,
    )  # fmt: skip


def _check_gpt2(path: Path, config: dict[str, Any], *, causal: bool) -> None:
    if config["model_type"] == "bert" and not causal:
        raise UserError(
            f"{path} is a BERT of transformers: a compact file of a BERT is written from its run or checkpoint"
        )
    if config["model_type"] == "bert":
        raise UserError(f"{path} is a BERT: it fills in masked tokens, and predicts no next token")
    if config["model_type"] != "gpt2":
        raise UserError(
            f"{path} is a {config['model_type']} of transformers, and this command computes GPTs of mst_scale and "
            "GPT-2: use generate() of transformers"
        )


def _of_gpt2(path: Path, *, causal: bool) -> ModelWeights:
    raw = json.loads((path / "config.json").read_text())
    _check_gpt2(path, raw, causal=causal)
    keys = {key: value for key, value in start_from.model_keys(path).items() if value is not None}
    about = raw.get("mst_scale") or {}
    config = ModelConfig(**{"vocab_multiple": 1, **keys})
    state = start_from.read(path, config)
    return ModelWeights(
        path, config, tuple(state), state.__getitem__, about.get("step"), about.get("method"),
        _tokenizer(about), _pattern(about),
    )  # fmt: skip


def _tokenizer(about: dict[str, Any]) -> TrainedWith | None:
    return trained_with(about["tokenizer"], about.get("tokenizer_identity")) if about.get("tokenizer") else None


def _pattern(about: dict[str, Any]) -> Pattern:
    return Pattern(**about["attention"]) if about.get("attention") else Pattern("dense")

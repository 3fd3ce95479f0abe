"""Reads a checkpoint of a transformers model, as Trainer, Accelerate or a loop of your own has saved it.

The architecture is that of the configuration in the checkpoint or beside it (`checkpoints.model_config`), the weights
are the fp32 masters of DeepSpeed's files, whichever ZeRO stage and number of ranks have saved them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mst_scale.checkpoints import mask_files, model_config, store
from mst_scale.checkpoints.multiplied import multiplied_weights_of
from mst_scale.comm import Damaged
from mst_scale.config import Experiment, load
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, attach
from mst_scale.runs import run_file
from mst_scale.zero_shards.weight_files import Weights, untrained_of

TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
PIECE = 1 << 20  # values at a time: 4 MiB


@dataclass(frozen=True)
class TransformersSource:
    """A checkpoint, the configuration of its model, and where its weights lie."""

    checkpoint: Path
    config_file: Path
    config: dict[str, Any]
    run: Path | None
    """The folder with the run's run.json and metrics.jsonl; None where it was not recorded."""
    experiment: Experiment | None
    """What run.json says of the training; None where there is none."""
    step: int
    weights: Weights
    untrained: dict[str, torch.Tensor]
    """Frozen parameters and buffers, among others."""
    targets: frozenset[str]
    """Names of the parameters with masks."""

    @cached_property
    def skeleton(self) -> Any:
        """The model without its weights; no memory is taken for them."""
        import transformers

        config = self._transformers_config()
        named = (self.config.get("architectures") or [None])[0]
        kind = getattr(transformers, str(named), None)
        with torch.device("meta"):
            if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
                return kind(config)
            return transformers.AutoModelForCausalLM.from_config(config)

    def _transformers_config(self) -> Any:
        import transformers

        try:
            return transformers.AutoConfig.for_model(**{k: v for k, v in self.config.items() if k != "mst_scale"})
        except Exception as error:  # transformers raises each of its own kind
            what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{self.config_file}: transformers cannot read it ({what})") from None

    @property
    def method(self) -> str:
        stated = self._about.get("method")
        return str(stated or (self.experiment.mst.method if self.experiment else None) or "dense")

    @property
    def pattern(self) -> Pattern:
        """Its attention, as this checkpoint was trained."""
        if self._about:
            return Pattern(**self._about["attention"]) if "attention" in self._about else Pattern("dense")
        return Pattern("dense") if self.experiment is None else self.experiment.attention_schedule.pattern_at(self.step)

    @property
    def _about(self) -> dict[str, Any]:
        """What the checkpoint's own file says of the training."""
        return dict(self.config.get("mst_scale") or {})

    def beside(self, name: str) -> Path | None:
        """A file of the model that lies beside its configuration or its checkpoint."""
        folders = (self.config_file.parent, self.checkpoint.parent)
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    @property
    def tokenizer(self) -> Path | None:
        """The file of its tokenizer; None where there is none."""
        return next((found for name in TOKENIZERS if (found := self.beside(name)) is not None), None)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor of the exported model: tied weights once, and buffers that are saved."""
        skeleton = self.skeleton
        found = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
        saved = skeleton.state_dict().keys()
        found |= {name: tuple(buffer.shape) for name, buffer in skeleton.named_buffers() if name in saved}
        return found

    def check(self) -> None:
        """Raise a UserError where files and configuration are not of one model."""
        for name, shape in self.shapes().items():
            there = self.weights.shapes.get(name)
            if there is None and name in self.untrained:
                there = tuple(self.untrained[name].shape)
                if not self.untrained[name].is_floating_point():
                    raise UserError(f"{self.checkpoint}: {name} is a buffer of integers, which cannot be written")
            if there != shape:
                what = "is missing" if there is None else f"has shape {there}, not {shape}"
                raise UserError(f"{self.checkpoint}: {name} {what}: {self.config_file} describes another model")

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The values of a tensor in order."""
        if name not in self.weights.shapes:
            yield self.untrained[name].float().reshape(-1)
            return
        numel = math.prod(self.weights.shapes[name])
        yield from self.weights.spans(name, 0, numel, PIECE)

    def model(self) -> Any:
        """The model in memory, in float32, with the attention that it was trained with."""
        model = type(self.skeleton)(self._transformers_config()).float().eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name in self.shapes():
                    tensor.copy_(torch.cat(list(self.pieces(name))).view(tensor.shape))
        if self.pattern.kind != "dense" and (reason := attach(model, self.pattern)):
            raise UserError(
                f"{self.checkpoint} was trained with {self.pattern} attention, and here it stays dense: {reason}"
            )
        return model


def open_transformers(checkpoint: Path, config_file: Path) -> TransformersSource:
    """The checkpoint of a transformers model with this configuration; what does not fit is a UserError."""
    if store.head(checkpoint) is not None and (faults := store.damage(checkpoint)):
        raise Damaged(f"{checkpoint} is damaged: {faults[0]}")
    weights = multiplied_weights_of(checkpoint)
    state, untrained = untrained_of(checkpoint)
    masks = mask_files.read(mask_files.file_of(checkpoint, 0))[0] if (checkpoint / mask_files.FOLDER).is_dir() else {}
    run = next((folder for folder in checkpoint.parents if (folder / "run.json").is_file()), None)
    source = TransformersSource(
        checkpoint=checkpoint,
        config_file=config_file,
        config=json.loads(config_file.read_text()),
        run=run,
        experiment=None if run is None else _experiment(run),
        step=int(masks.get("step", state.get("global_steps", 0))),
        weights=weights,
        untrained=untrained,
        targets=frozenset(masks.get("names", ())),
    )
    source.check()
    return source


def _experiment(run: Path) -> Experiment | None:
    """What run.json says of the training; None where this version cannot read it."""
    config = run_file.read(run / "run.json").get("config")
    try:
        return load(config) if isinstance(config, dict) else None
    except (ValueError, TypeError):
        return None


def find(path: Path, config: Path | None) -> tuple[Path, Path] | None:
    """The checkpoint that `path` means and its transformers configuration; None where its model is not of transformers.

    `config`: a file that is named instead.
    """
    checkpoint = store.locate(path)
    found = config or model_config.config_of(checkpoint)
    return (checkpoint, found) if found is not None and model_config.is_transformers(found) else None

"""Opens checkpoints of our GPT and BERT, and of models of transformers, for export and evaluation.

A transformers model was saved by Trainer, Accelerate or a custom training loop. Its architecture is given by the
configuration in the checkpoint or next to it (`checkpoints.model_config`). All weights are the fp32 master weights of
DeepSpeed's files, for any ZeRO stage and number of ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mst_scale.checkpoints import finding, manifests, mask_files, model_config
from mst_scale.checkpoints.multiplied import multiplied_weights_of
from mst_scale.comm import logger
from mst_scale.config import Experiment, ModelConfig, load, load_of_run
from mst_scale.data.corpus import META, identity, read_meta
from mst_scale.data.recipe import is_code
from mst_scale.data.tokenizer import TrainedWith, chosen, is_missing, trained_with
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, attach, set_pattern
from mst_scale.models import build, shapes_of
from mst_scale.run_logging import run_file
from mst_scale.zero_shards.weight_files import Weights, untrained_of

TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
ADAPTERS = "adapter_config.json"  # which PEFT writes next to the adapters
PIECE = 1 << 20  # number of values that are copied at once: 4 MiB


def import_transformers(what: str) -> Any:
    """Return the package transformers, which `what` needs.

    Raises:
        UserError: if it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"{what} needs transformers ({error}): pip install transformers") from None
    return transformers


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class if there is none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@dataclass(frozen=True)
class Source:
    """A checkpoint of our GPT or BERT, its experiment, and its weights."""

    checkpoint: Path
    run: Path | None
    experiment: Experiment
    step: int | None
    weights: Weights

    def skeleton(self) -> torch.nn.Module:
        """Build the model without memory for its weights."""
        with torch.device("meta"):
            return build(self.experiment.model)

    def targets(self) -> dict[str, torch.nn.Parameter]:
        """Return the matrices that may be sparse, by our names."""
        return choose_targets(self.skeleton(), self.experiment.mst.targets)

    @property
    def pattern(self) -> Pattern:
        """The attention pattern with which the run evaluated this checkpoint: that of its next step."""
        if self.step is None or self.experiment.mst.method is None:
            return Pattern("dense")
        return self.experiment.attention_schedule.pattern_at(self.step).within(self.experiment.model.seq_length)

    def model(self) -> torch.nn.Module:
        """Load the model in float32, with the attention pattern that it was trained with."""
        return load_model(self.experiment.model, self.pattern, self.weights.read)


def load_model(config: ModelConfig, pattern: Pattern, read: Callable[[str], torch.Tensor]) -> torch.nn.Module:
    """Build our model of a config in float32, with this attention pattern and the weights that `read` returns."""
    model = build(config).eval()
    set_pattern(model, pattern)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name))
    return model


def open_source(path: Path, config: Path | None = None, *, causal: bool = True) -> Source:
    """Open a checkpoint, or the latest complete one of a run.

    Args:
        path: The folder of a run or of a checkpoint.
        config: The experiment, if no config.json is next to the checkpoint.
        causal: Whether the caller needs a model that predicts the next token, which a BERT does not.

    Raises:
        UserError: if it is not a checkpoint of one of our models.
        Damaged: if a file is truncated.
    """
    checkpoint = finding.locate(path)
    if checkpoint == path:  # otherwise it was checked when it was found
        manifests.check(checkpoint)
    beside = config is None
    if config is None:
        config = next(
            (p / "config.json" for p in model_config.folders_above(checkpoint) if (p / "config.json").is_file()), None
        )
        if config is None and (checkpoint.parent / ADAPTERS).is_file():
            raise UserError(
                f"{checkpoint} holds adapters of PEFT, without their base model: merge them with "
                "mst_scale.merge_adapters, and save the merged model with save_pretrained"
            )
        if config is None:
            raise UserError(
                f"there is no config.json next to {checkpoint}: pass the experiment, or the config.json of its "
                "transformers model, with --config FILE"
            )
    experiment = load_of_run(config) if beside else load(config)
    if causal and not experiment.model.causal:
        raise UserError(f"{path} is a BERT, which predicts masked tokens, not the next token")
    weights = multiplied_weights_of(checkpoint)
    for name, shape in shapes_of(experiment.model).items():
        found = weights.shapes.get(name)
        if found != shape:
            problem = "is missing" if found is None else f"has shape {found}, not {shape}"
            raise UserError(f"{checkpoint}: {name} {problem}: the model differs from the one in {config}")
    step = (manifests.head(checkpoint) or _masks_head(checkpoint)).get("step")
    return Source(checkpoint, config.parent if config.name == "config.json" else None, experiment, step, weights)


def _masks_head(checkpoint: Path) -> dict[str, Any]:
    """Return the header of the masks of a checkpoint without a manifest (from a custom loop); empty if it has none."""
    path = mask_files.file_of(checkpoint, 0)
    return mask_files.read(path)[0] if path.is_file() else {}


def names_no_text(experiment: Experiment) -> bool:
    """Return whether the config has no corpus."""
    return experiment.data.dir is None and experiment.data.source is None


def corpus_of(experiment: Experiment, run: Path | None = None) -> Path | None:
    """Return the folder of the run's corpus; None if it is not there, or holds another one now.

    A relative path refers to the folder in which the run was started, or else to the current one.

    Raises:
        UserError: if the config has no corpus.
    """
    data = experiment.data
    if names_no_text(experiment):
        raise UserError("the config has no corpus to measure the loss on: set data.dir to a folder of mst data")
    stated = Path(data.dir or f"corpora/{data.source}")
    starts = [] if run is None else run_file.read(run / "run.json").get("starts", [])
    places = [Path(start["folder"]) / stated for start in reversed(starts) if "folder" in start]
    known = starts[-1].get("corpus") if starts else None
    found = [folder for folder in dict.fromkeys([*places, stated]) if folder.is_dir()]
    for folder in found:
        if known is None or _holds(folder, known):
            return folder
    if found:
        logger.warning("%s is not the corpus that the run in %s was trained on: it is not used", found[0], run)
    return None


def _holds(folder: Path, corpus: str) -> bool:
    try:
        return identity(folder) == corpus
    except (OSError, UserError):  # it is damaged, or no corpus
        return False


def tokenizer_of(experiment: Experiment, run: Path | None = None) -> TrainedWith | None:
    """Return the tokenizer of the corpus of a run in this folder; None if it is not known."""
    data = experiment.data
    if names_no_text(experiment):
        return None if data.tokenizer is None else trained_with(data.tokenizer)
    folder = corpus_of(experiment, run)
    if folder is not None and (folder / META).is_file():
        meta = read_meta(folder)
        before = trained_with(str(meta["tokenizer"]), meta["recipe"].get("tokenizer"))
        moved = data.tokenizer if is_missing(before.name) else None  # the config may have the new path of its file
        return chosen(moved, before, str(folder))
    if data.source is None and data.tokenizer is None:
        return None
    return trained_with(data.tokenizer or ("byte" if data.source is not None and is_code(data.source) else "gpt2"))


# Models of transformers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransformersSource:
    """A checkpoint of a transformers model, the configuration of the model, and its weights."""

    checkpoint: Path
    config_file: Path
    config: dict[str, Any]
    run: Path | None  # the folder with the run's run.json and metrics.jsonl; None if it was not recorded
    experiment: Experiment | None  # the training config in run.json
    step: int
    weights: Weights
    untrained: dict[str, torch.Tensor]  # frozen parameters and buffers, among others
    targets: frozenset[str]  # names of the parameters with masks

    @cached_property
    def skeleton(self) -> Any:
        """The model, without memory for its weights."""
        transformers = import_transformers(f"the model in {self.checkpoint}")
        config = self._transformers_config()
        named = (self.config.get("architectures") or [None])[0]
        kind = getattr(transformers, str(named), None)
        with torch.device("meta"):
            if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
                return kind(config)
            return transformers.AutoModelForCausalLM.from_config(config)

    def _transformers_config(self) -> Any:
        transformers = import_transformers(f"the model in {self.checkpoint}")
        try:
            return transformers.AutoConfig.for_model(**{k: v for k, v in self.config.items() if k != "mst_scale"})
        except Exception as error:  # transformers raises errors of many classes
            raise UserError(f"{self.config_file}: transformers cannot read it ({first_line(error)})") from None

    @property
    def method(self) -> str:
        """The training method, as the checkpoint or run.json names it."""
        stated = self._about.get("method")
        return str(stated or (self.experiment.mst.method if self.experiment else None) or "dense")

    @property
    def pattern(self) -> Pattern:
        """The attention pattern with which the run evaluated this checkpoint: that of its next step."""
        found = Pattern("dense")
        if self._about:
            found = Pattern(**self._about.get("attention", {}))
        elif self.experiment is not None:
            found = self.experiment.attention_schedule.pattern_at(self.step)
        context = self.config.get("max_position_embeddings", self.config.get("n_positions"))
        return found.within(context) if isinstance(context, int) else found

    @cached_property
    def _about(self) -> dict[str, Any]:
        """The block `mst_scale` of the checkpoint's own configuration, or else of the one that was passed."""
        own = self.checkpoint / model_config.NAME
        config = json.loads(own.read_text()) if own.is_file() else self.config
        return dict(config.get("mst_scale") or {})

    def beside(self, name: str) -> Path | None:
        """Find a file of this name next to the model's configuration or its checkpoint."""
        folders = (self.config_file.parent, self.checkpoint.parent)
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    @property
    def tokenizer(self) -> Path | None:
        """The file of its tokenizer, if there is one."""
        return next((found for name in TOKENIZERS if (found := self.beside(name)) is not None), None)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of the exported model: tied weights once, and buffers that are saved."""
        skeleton = self.skeleton
        found = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
        saved = skeleton.state_dict().keys()
        found |= {name: tuple(buffer.shape) for name, buffer in skeleton.named_buffers() if name in saved}
        return found

    def check(self) -> None:
        """Raise UserError if the files and the configuration do not belong to the same model."""
        for name, shape in self.shapes().items():
            there = self.weights.shapes.get(name)
            if there is None and name in self.untrained:
                there = tuple(self.untrained[name].shape)
                if not self.untrained[name].is_floating_point():
                    raise UserError(f"{self.checkpoint}: {name} is a buffer of integers, which cannot be written")
            if there != shape:
                problem = "is missing" if there is None else f"has shape {there}, not {shape}"
                raise UserError(f"{self.checkpoint}: {name} {problem}: {self.config_file} describes another model")

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the values of a tensor in order."""
        if name not in self.weights.shapes:
            yield self.untrained[name].float().reshape(-1)
            return
        numel = math.prod(self.weights.shapes[name])
        yield from self.weights.spans(name, 0, numel, PIECE)

    def model(self) -> Any:
        """Load the model in float32, with the attention pattern that it was trained with."""
        model = type(self.skeleton)(self._transformers_config()).float().eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name in self.shapes():
                    tensor.copy_(torch.cat(list(self.pieces(name))).view(tensor.shape))
        if self.pattern.kind != "dense" and (reason := attach(model, self.pattern)):
            raise UserError(
                f"{self.checkpoint} was trained with {self.pattern} attention, but here it stays dense: {reason}"
            )
        return model


def open_transformers(checkpoint: Path, config_file: Path) -> TransformersSource:
    """Open a checkpoint of the transformers model with this configuration.

    Raises:
        UserError: if the checkpoint is of another model.
        Damaged: if a file is truncated.
    """
    manifests.check(checkpoint)
    weights = multiplied_weights_of(checkpoint)
    state, untrained = untrained_of(checkpoint)
    masks = mask_files.read(mask_files.file_of(checkpoint, 0))[0] if (checkpoint / mask_files.FOLDER).is_dir() else {}
    run = next((folder for folder in model_config.folders_above(checkpoint) if (folder / "run.json").is_file()), None)
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
    """Return the experiment in run.json; None if this version cannot read it."""
    config = run_file.read(run / "run.json").get("config")
    try:
        return load(config) if isinstance(config, dict) else None
    except (ValueError, TypeError):
        return None


def find_transformers(path: Path, config: Path | None) -> tuple[Path, Path] | None:
    """Find the checkpoint of a run or checkpoint folder, and the configuration of its transformers model.

    Args:
        path: The folder.
        config: The configuration, if it is not next to the checkpoint.

    Returns:
        The checkpoint and the configuration; None if it is not a transformers model.
    """
    checkpoint = finding.locate(path)
    found = config or model_config.config_of(checkpoint)
    return (checkpoint, found) if found is not None and model_config.is_transformers(found) else None

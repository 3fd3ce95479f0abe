"""Opens the model that a name means, and the tokenizer that belongs to it:

a run's folder or a checkpoint     our GPT, or the transformers model that Trainer, Accelerate or a loop of your own has
                                   trained; its fp32 weights are read from the checkpoint
a folder with transformers' config.json, for instance of `mst export`
a name on the Hugging Face hub     `gpt2` is OpenAI's checkpoint
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mst_scale.checkpoints import model_config, store
from mst_scale.data.tokenizer import chosen, is_missing, load_tokenizer, trained_with
from mst_scale.distributed import logger
from mst_scale.errors import UserError
from mst_scale.hugging_face.export import open_source, tokenizer_of
from mst_scale.hugging_face.transformers_source import TransformersSource, find, open_transformers
from mst_scale.hybrid_sparse_attention import Pattern, attach

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Model:
    """What an evaluation needs to know of a model."""

    name: str
    step: int | None
    folder: Path | None
    """Where its results belong: the run's folder or the model's."""
    digest: str | None
    """Of the files that the model was read from, to tell its results from those of others; None while it trains."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    context: int
    vocab_size: int
    device: torch.device
    parameters: int


@dataclass(frozen=True)
class Text:
    """A tokenizer, of ours or of transformers."""

    name: str
    encode: Callable[[str], Iterable[int]]
    end_of_text: int | None


def open_model(
    name: str, tokenizer: str | None, device: torch.device, config: Path | None = None
) -> tuple[Model, Text]:
    """The model and its tokenizer; what is no model, and a tokenizer that does not fit, are refused in one line.

    `config`: of a checkpoint of ours that lies apart from its run.
    """
    path = Path(name)
    if is_transformers(path) and not (path / "latest").is_file():  # of Trainer's checkpoint-N the fp32 masters are read
        return _transformers(name, path, tokenizer, device)
    if on_hub(name):
        return _transformers(name, None, tokenizer, device)
    return _ours(path, tokenizer, device, config)


def on_hub(name: str) -> bool:
    """Whether a model is one of the hub, if any: nothing here is called so. What is spelt like a path must be here."""
    if Path(name).exists():
        return False
    if name.startswith(".") or not HUB_NAME.fullmatch(name):
        raise UserError(f"there is no {name}: give a run's folder, a checkpoint, or a model of transformers")
    return True


def is_transformers(folder: Path) -> bool:
    """Whether a folder's config.json is one of transformers."""
    return model_config.is_transformers(folder / "config.json")


def our_text(name: str, vocab_size: int) -> Text:
    found = load_tokenizer(name)
    if found.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {name!r} has {found.vocab_size} ids, but the model only {vocab_size}: name the one that it was "
            "trained with (--tokenizer)"
        )
    return Text(name, found.encode, found.end_of_text)


def _ours(path: Path, tokenizer: str | None, device: torch.device, experiment: Path | None) -> tuple[Model, Text]:
    if not path.is_dir():
        raise UserError(f"{path} is a file: give a run's folder, a checkpoint, or a model's folder")
    try:
        store.locate(path)
    except UserError as error:
        raise UserError(f"{error}; nor is it a model of transformers (no config.json with a model_type)") from None
    if (found := find(path, experiment)) is not None:
        return _trained_with_transformers(path, open_transformers(*found), tokenizer, device)
    source = open_source(path, experiment)
    named = chosen(tokenizer, tokenizer_of(source.experiment), str(path))
    if named is None:
        raise UserError(f"{path} does not say which tokenizer made its corpus: name it with --tokenizer")
    if is_missing(named.name):
        raise UserError(f"{path}: its tokenizer {named.name} is not there any more: name it where it is (--tokenizer)")
    config = source.experiment.model
    text = our_text(named.name, config.vocab_size)
    manifest = source.checkpoint / store.MANIFEST
    digest = store.file_digest(manifest) if manifest.is_file() else str(source.checkpoint.resolve())
    model = source.model().to(device)
    # a checkpoint elsewhere, with a config of its own, keeps its results itself
    folder = source.run if source.run is not None else source.checkpoint
    size = config.vocab_size
    return Model(str(path), source.step, folder, digest, model, config.seq_length, size, device, _count(model)), text


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _trained_with_transformers(
    path: Path, source: TransformersSource, tokenizer: str | None, device: torch.device
) -> tuple[Model, Text]:
    """A model of transformers, its weights read from a checkpoint of DeepSpeed."""
    model, config = source.model().to(device), source.skeleton.config
    if model.get_output_embeddings() is None:
        raise UserError(f"{path} is a {type(model).__name__}, which predicts no next token")
    beside = source.checkpoint if source.tokenizer is None else source.tokenizer.parent
    text = _text_of(str(beside), tokenizer, {}, config.vocab_size)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(ids).logits
        return result

    _refuse_a_look_ahead(str(path), logits, device)
    manifest = source.checkpoint / store.MANIFEST
    digest = store.file_digest(manifest) if manifest.is_file() else str(source.checkpoint.resolve())
    folder = source.checkpoint if source.run is None else source.run
    context = _context_of(str(path), config)
    size = config.vocab_size
    return Model(str(path), source.step, folder, digest, logits, context, size, device, _count(model)), text


def _context_of(name: str, config: Any) -> int:
    context = getattr(config, "n_positions", None) or getattr(config, "max_position_embeddings", None)
    if not context:
        raise UserError(f"{name}: its config.json does not say how long a text may be (max_position_embeddings)")
    return int(context)


def _transformers(name: str, folder: Path | None, tokenizer: str | None, device: torch.device) -> tuple[Model, Text]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    about: dict[str, Any] = {}
    if folder is not None:
        about = json.loads((folder / "config.json").read_text()).get("mst_scale", {})
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval().to(device)
    except Exception as error:  # transformers raises each of its own kind
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if folder is None:
            raise OSError(
                f"model {name!r} is no folder here, and cannot be had from the hub ({type(error).__name__}: {what})"
            ) from None
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise  # the machine's failure, not the folder's content
        raise UserError(f"{name} is no causal language model that transformers can load: {what}") from None
    if trained := about.get("attention"):
        pattern = Pattern(**trained)
        if reason := attach(model, pattern):
            raise UserError(f"{name} was trained with {pattern} attention, and here it stays dense: {reason}")
        logger.info("%s attends as it was trained: %s", name, pattern)
    config = model.config
    context = _context_of(name, config)
    text = _text_of(name, tokenizer, about, config.vocab_size)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(ids).logits
        return result

    _refuse_a_look_ahead(name, logits, device)
    digest = _digest(folder) if folder is not None else f"{name}@{getattr(config, '_commit_hash', None)}"
    step, size = about.get("step"), config.vocab_size
    return Model(name, step, folder, digest, logits, context, size, device, _count(model)), text


def _text_of(name: str, tokenizer: str | None, about: dict[str, Any], vocab_size: int) -> Text:
    """The tokenizer asked for, or that of the export (`about`), or, where that is not available, the files'."""
    before = trained_with(about["tokenizer"], about.get("tokenizer_identity")) if about.get("tokenizer") else None
    named = chosen(tokenizer, before, name)
    if named is not None and (tokenizer is not None or not is_missing(named.name)):
        try:
            return our_text(named.name, vocab_size)
        except OSError:  # its vocabulary cannot be downloaded
            if tokenizer is not None:
                raise
    text = _their_text(name, vocab_size)
    if named is not None:
        logger.info("tokenizer %s is not at hand: using the files in %s", named.name, name)
    return text


def _their_text(name: str, vocab_size: int) -> Text:
    """The tokenizer that transformers finds beside the model."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(name)
        empty = not found("a", add_special_tokens=False)["input_ids"]  # what it makes where files are missing
        why = "it makes no tokens"
    except Exception as error:  # transformers raises each of its own kind
        empty, why = True, type(error).__name__
    if empty:
        raise UserError(f"{name} has no tokenizer that transformers can load ({why}): name one (--tokenizer)")
    if len(found) > vocab_size:
        raise UserError(f"the tokenizer of {name} has {len(found)} ids, but the model only {vocab_size}")

    def encode(string: str) -> Iterable[int]:
        ids: list[int] = found(string, add_special_tokens=False)["input_ids"]
        return ids

    return Text(f"of {name}", encode, found.eos_token_id)


@torch.no_grad()
def _refuse_a_look_ahead(name: str, logits: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """A BERT is loaded as a language model too, and would see the very tokens that it is to predict."""
    first = logits(torch.tensor([[0, 1], [0, 2]], device=device))[:, 0].float()
    if (first[0] - first[1]).abs().max() > 1e-4 * first.abs().max():  # rounding is far below, a second token far above
        raise UserError(f"{name} sees the tokens behind a place too (as a BERT does), and predicts no next token")


def _digest(folder: Path) -> str:
    """A digest of names, sizes and times of a model's files; their content may be gigabytes."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin") or p.name == "config.json")
    facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

"""Opens a model by name, with its tokenizer.

A name is one of:

the folder of a run or a checkpoint   our GPT, or the transformers model that Trainer, Accelerate or a custom loop has
                                      trained; its fp32 weights are read from the checkpoint
a compact file, or its folder         our GPT, from `mst export --compact`
a folder with transformers' config.json, such as the output of `mst export`
a name on the Hugging Face hub        `gpt2` is OpenAI's checkpoint
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mst_scale.checkpoint_folders import identity_of
from mst_scale.checkpoints import finding, model_config
from mst_scale.comm import logger
from mst_scale.compact_files.layout import file_of, is_compact
from mst_scale.compact_files.weights import load_model, open_weights
from mst_scale.data.source_files import HUB_NAME
from mst_scale.data.tokenizer import chosen, is_missing, load_tokenizer, trained_with
from mst_scale.errors import UserError
from mst_scale.files import file_digest
from mst_scale.hugging_face.sources import (
    Source,
    TransformersSource,
    find_transformers,
    first_line,
    open_source,
    open_transformers,
    tokenizer_of,
)
from mst_scale.hybrid_sparse_attention import Pattern, attach

Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A model to evaluate.

    Attributes:
        folder: The folder for its results: that of the run or of the model.
        digest: The digest of the files of the model, which identifies its results; None during training.
    """

    name: str
    step: int | None
    folder: Path | None
    digest: str | None
    logits: Logits
    context: int
    vocab_size: int
    device: torch.device
    parameters: int


@dataclass(frozen=True)
class Text:
    """A tokenizer, ours or of transformers."""

    name: str
    encode: Callable[[str], Iterable[int]]
    end_of_text: int | None


def open_model(
    name: str, tokenizer: str | None, device: torch.device, config: Path | None = None
) -> tuple[Model, Text]:
    """Open a model on a device, and its tokenizer, or `tokenizer` instead of its own.

    `config` is the experiment, if it is not next to our checkpoint.

    Raises:
        UserError: if there is no such model, it does not predict the next token, or the tokenizer does not fit.
        OSError: if the hub cannot be reached.
    """
    path = Path(name)
    compact = is_compact(path)
    # of a checkpoint the fp32 masters are read
    exported = model_config.is_transformers(path / "config.json") and finding.of_other_loops(path) is None
    if config is not None and (compact or exported or on_hub(name)):
        raise UserError(f"{name} holds its own config, so another one has no effect: leave out --config {config}")
    if compact:
        return _compact(path, tokenizer, device)
    if exported or on_hub(name):
        return _pretrained(name, path if exported else None, tokenizer, device)
    if not path.is_dir():
        raise UserError(f"{path} is a file: give a run's folder, a checkpoint, or a model's folder")
    try:
        finding.locate(path)
    except UserError as error:
        raise UserError(f"{error}, and it is not a transformers model (no config.json with a model_type)") from None
    if (found := find_transformers(path, config)) is not None:
        return _trained_with_transformers(path, open_transformers(*found), tokenizer, device)
    return _ours(path, open_source(path, config), tokenizer, device)


def on_hub(name: str) -> bool:
    """Return whether a name refers to a model on the hub, because there is no such path.

    Raises:
        UserError: if the name looks like a path that does not exist.
    """
    if Path(name).exists():
        return False
    below = len(Path(name).parts) > 1 and Path(name).parent.is_dir()  # a path with a mistake
    if below or name.startswith(".") or not HUB_NAME.fullmatch(name):
        raise UserError(f"there is no {name}: give a run's folder, a checkpoint, or a model of transformers")
    return True


def our_text(name: str, vocab_size: int) -> Text:
    """Load one of our tokenizers; raise UserError if it has more ids than the model."""
    found = load_tokenizer(name)
    if found.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {name!r} has {found.vocab_size} ids, but the model only {vocab_size}: use --tokenizer with the "
            "one that it was trained with"
        )
    return Text(name, found.encode, found.end_of_text)


def _ours(path: Path, source: Source, tokenizer: str | None, device: torch.device) -> tuple[Model, Text]:
    named = chosen(tokenizer, tokenizer_of(source.experiment, source.run), str(path))
    if named is None:
        raise UserError(f"the tokenizer of {path} is not known: name it with --tokenizer")
    if is_missing(named.name):
        raise UserError(f"{path}: its tokenizer {named.name} is missing: give its new path with --tokenizer")
    config = source.experiment.model
    text = our_text(named.name, config.vocab_size)
    model = source.model().to(device)
    return _of_checkpoint(path, source, model, (model, config.seq_length, config.vocab_size)), text


def _compact(path: Path, tokenizer: str | None, device: torch.device) -> tuple[Model, Text]:
    weights = open_weights(path)
    named = chosen(tokenizer, weights.tokenizer, str(path))
    config, file = weights.config, file_of(path)
    beside = tokenizer is None and (file.parent / "tokenizer.json").is_file()
    if named is None or is_missing(named.name):
        if not beside:
            raise UserError(f"{path} does not name a tokenizer that is here: name it with --tokenizer")
        text = _their_text(str(file.parent), config.vocab_size)
    else:
        try:
            text = our_text(named.name, config.vocab_size)
        except OSError:  # the hub cannot be reached
            if not beside:
                raise
            text = _their_text(str(file.parent), config.vocab_size)
    model = load_model(weights).to(device)
    folder, digest = file.parent, file_digest(file)
    context, size = config.seq_length, config.vocab_size
    return Model(str(path), weights.step, folder, digest, model, context, size, device, _count(model)), text


def _trained_with_transformers(
    path: Path, source: TransformersSource, tokenizer: str | None, device: torch.device
) -> tuple[Model, Text]:
    model, config = source.model().to(device), source.skeleton.config
    if model.get_output_embeddings() is None:
        raise UserError(f"{path} is a {type(model).__name__}, which does not predict the next token")
    folder = source.checkpoint if source.tokenizer is None else source.tokenizer.parent
    text = _text_of(str(folder), tokenizer, {}, config.vocab_size)
    logits = _causal_logits(str(path), model, device)
    context = _context_of(str(path), config)
    return _of_checkpoint(path, source, model, (logits, context, config.vocab_size)), text


def _of_checkpoint(
    path: Path, source: Source | TransformersSource, model: torch.nn.Module, computes: tuple[Logits, int, int]
) -> Model:
    logits, context, vocab_size = computes
    device = next(model.parameters()).device
    digest = identity_of(source.checkpoint)
    # results of a checkpoint that is not in a run's folder are kept with the checkpoint
    folder = source.checkpoint if source.run is None else source.run
    return Model(str(path), source.step, folder, digest, logits, context, vocab_size, device, _count(model))


def _pretrained(name: str, folder: Path | None, tokenizer: str | None, device: torch.device) -> tuple[Model, Text]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    about: dict[str, Any] = {}
    if folder is not None:
        about = json.loads((folder / "config.json").read_text()).get("mst_scale", {})
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval().to(device)
    except Exception as error:
        if folder is None:
            raise OSError(
                f"model {name!r} is not a folder, and cannot be downloaded from the hub ({type(error).__name__}: "
                f"{first_line(error)})"
            ) from None
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise  # the machine failed; the content of the folder is not the cause
        raise UserError(
            f"{name} is not a causal language model that transformers can load: {first_line(error)}"
        ) from None
    if trained := about.get("attention"):
        pattern = Pattern(**trained)
        if reason := attach(model, pattern):
            raise UserError(f"{name} was trained with {pattern} attention, which cannot be applied here: {reason}")
        logger.info("%s uses the attention pattern that it was trained with: %s", name, pattern)
    size, context = model.config.vocab_size, _context_of(name, model.config)
    text = _text_of(name, tokenizer, about, size)
    logits = _causal_logits(name, model, device)
    digest = _digest(folder) if folder is not None else f"{name}@{getattr(model.config, '_commit_hash', None)}"
    return Model(name, about.get("step"), folder, digest, logits, context, size, device, _count(model)), text


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _context_of(name: str, config: Any) -> int:
    context = getattr(config, "n_positions", None) or getattr(config, "max_position_embeddings", None)
    if not context:
        raise UserError(f"{name}: its config.json has no context length (max_position_embeddings)")
    return int(context)


@torch.no_grad()
def _causal_logits(name: str, model: Any, device: torch.device) -> Logits:
    """Return a function that computes the logits of a transformers model.

    Raises:
        UserError: if attention is not causal (as in BERT), because the model would see the tokens to predict.
    """

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model(ids).logits

    first = logits(torch.tensor([[0, 1], [0, 2]], device=device))[:, 0].float()
    if (first[0] - first[1]).abs().max() > 1e-4 * first.abs().max():  # rounding is far below, a second token far above
        raise UserError(f"{name} attends to later tokens, as BERT does, so it does not predict the next token")
    return logits


def _text_of(name: str, tokenizer: str | None, about: dict[str, Any], vocab_size: int) -> Text:
    """Return the requested tokenizer, or that of the export (`about`), or if it is not available, that of the files."""
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
        logger.info("tokenizer %s is not available: using the files in %s", named.name, name)
    return text


def _their_text(name: str, vocab_size: int) -> Text:
    """Return the tokenizer that transformers finds next to the model."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(name)
        # without its files, a tokenizer may produce no tokens
        problem = "" if found("a", add_special_tokens=False)["input_ids"] else "it produces no tokens"
    except Exception as error:
        problem = type(error).__name__
    if problem:
        raise UserError(f"{name} has no tokenizer that transformers can load ({problem}): name one (--tokenizer)")
    if len(found) > vocab_size:
        raise UserError(f"the tokenizer of {name} has {len(found)} ids, but the model only {vocab_size}")

    def encode(string: str) -> Iterable[int]:
        return found(string, add_special_tokens=False)["input_ids"]

    return Text(f"of {name}", encode, found.eos_token_id)


def _digest(folder: Path) -> str:
    """Return a digest of names, sizes and times of a model's files; their content may be gigabytes."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin") or p.name == "config.json")
    facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

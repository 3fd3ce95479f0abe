"""Writes a checkpoint as a Hugging Face folder that everybody can load.

The folder holds `config.json`, `model.safetensors`, tokenizer files where the tokenizer is known, and a model
card with the run's figures. Our GPT is GPT-2's architecture, so `AutoModelForCausalLM.from_pretrained` computes the
same logits (of a BERT `AutoModelForMaskedLM`); what it lacks (biases) is zero there, and rows that pad the vocabulary
are left out. Attention is dense.

Weights are the fp32 masters. They are read, transposed and written one after the other: memory holds one matrix, never
the model. Zeros stay zeros. With a request for pruning (mst_scale/pruning) the model is loaded: to be pruned, and to
measure what that costs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mst_scale.checkpoints import mask_files, store
from mst_scale.checkpoints.multiplied import multiplied_weights_of
from mst_scale.comm import Damaged, logger
from mst_scale.config import Experiment, ModelConfig, load
from mst_scale.data.corpus import META, read_meta
from mst_scale.data.recipe import is_code
from mst_scale.data.sampler import Sampler, open_sampler
from mst_scale.data.tokenizer import TrainedWith, chosen, is_missing, same_ids, trained_with, write_tokenizer
from mst_scale.dead_units import format_counts
from mst_scale.dead_units.units import LineFlags, find_units
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import UserError
from mst_scale.hugging_face import bert_names, gpt2_names, model_card
from mst_scale.hugging_face.bert_names import VOCABULARY
from mst_scale.hugging_face.export_transformers import write_folder
from mst_scale.hugging_face.gpt2_names import Entry
from mst_scale.hugging_face.safetensors_stream import DTYPES, write_model
from mst_scale.hugging_face.transformers_source import TransformersSource, find, open_transformers
from mst_scale.hybrid_sparse_attention import Pattern, set_pattern
from mst_scale.models import build
from mst_scale.pruning import Request, prune_model, requested
from mst_scale.pruning.calibration import batches, open_calibration
from mst_scale.pruning.way import Amount
from mst_scale.runs import run_file
from mst_scale.shard import Shard
from mst_scale.zero_shards.weight_files import Weights

PIECE = 1 << 20  # values at a time of what is copied as it stands: 4 MiB
VALIDATION_BATCH = 8


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    out: Path
    step: int | None
    parameters: int
    zeros: int
    """Weights that are exactly 0 among the matrices that are sparse, or may be."""
    matrices: int
    """All weights of those matrices."""
    files: list[str]
    bytes: int
    """The size of those files, which zeros do not make smaller."""
    tokenizer: str | None
    """The tokenizer whose files were written."""
    dead_units: dict[str, list[int]] = field(default_factory=dict)
    """[dead, all] units by kind: those whose weights are all zero."""
    losses: dict[str, float] = field(default_factory=dict)
    """With pruning: validation loss "before" and "after"."""
    pruning: dict[str, Any] = field(default_factory=dict)
    """With pruning: how much, how, by which text, and the names of matrices that were left as they are."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checkpoint": str(self.checkpoint), "out": str(self.out)}


def export(
    path: Path,
    out: Path,
    *,
    prune: float | None = None,
    how: str | None = None,
    pattern: str | None = None,
    calibration: str | None = None,
    calibration_sequences: int | None = None,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
    tokenizer: str | None = None,
    config: Path | None = None,
) -> Exported:
    """Write the Hugging Face folder `out` from a checkpoint, or from a run's newest whole one. A transformers model
    that Trainer, Accelerate or a loop of your own has trained keeps its architecture.

    `prune`, `how`, `pattern` and the two of calibration are what `mst_scale.pruning.requested` takes.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    request = requested(how, prune, pattern, calibration, calibration_sequences)
    if out.exists():
        raise UserError(f"{out} exists: choose another OUT")
    if (found := find(path, config)) is not None:
        if request is not None:
            raise UserError(
                f"{path} is a model of transformers ({found[1]}), and --prune and --pattern take models of "
                "mst_scale.pretrain: export it without them"
            )
        return _of_transformers(open_transformers(*found), out, dtype, shard_bytes, tokenizer)
    source = open_source(path, config, causal=False)
    experiment = source.experiment
    text = chosen(tokenizer, tokenizer_of(experiment), str(path))
    name, identity = (None, None) if text is None else (text.name, text.identity)
    plan = None if request is None else _Plan.of(source, request)
    with _draft_of(out) as draft:
        end_of_text, tokenizer_note = write_tokenizer(draft, name, experiment.model.vocab_size)
        pruned = _Pruned() if plan is None else _prune(source, plan)
        writer = _Writer(source, pruned.matrices)
        files = write_model(draft, writer.shapes, writer, dtype, shard_bytes)
        raw = _names(experiment.model).hugging_face_config(experiment.model, end_of_text)
        about = {
            "step": source.step,
            "tokenizer": name,
            "tokenizer_identity": identity,
            "bias": experiment.model.bias,
            "method": experiment.mst.method,
            **({"pruned": pruned.about} if pruned.about else {}),
            **({"attention": asdict(source.pattern)} if source.pattern.kind != "dense" else {}),
        }
        _write_json(draft / "config.json", {**raw, "dtype": dtype, "mst_scale": about})
        done = Exported(
            checkpoint=source.checkpoint,
            out=out,
            step=source.step,
            parameters=sum(math.prod(shape) for shape in writer.shapes.values()),
            zeros=writer.zeros,
            matrices=writer.counted,
            files=[file.name for file in files],
            bytes=sum(file.stat().st_size for file in files),
            tokenizer=None if tokenizer_note else name,
            dead_units={kind: list(counts) for kind, counts in writer.lines.tally().items()},
            losses=pruned.losses,
            pruning=pruned.about,
        )
        told = {**done.to_dict(), "dead_units": format_counts(done.dead_units), "pruned": pruned.words}
        card = model_card.text(experiment, source.run, told, source.pattern, tokenizer_note)
        (draft / "README.md").write_text(card)
    if tokenizer_note:
        logger.warning("%s", tokenizer_note)
    if source.pattern.kind != "dense":
        logger.warning(
            "%s was trained with %s attention; transformers' model attends to everything, and loses by it: %s, or let "
            "attention turn dense before the end (mst.attention.dense_from)",
            source.checkpoint,
            source.pattern,
            "attach it as README.md there says" if experiment.model.causal else "use the checkpoint",
        )
    return done


@contextlib.contextmanager
def _draft_of(out: Path) -> Iterator[Path]:
    """A folder to write to; it becomes `out` at the end, and is removed where an error comes before."""
    draft = out.with_name(out.name + store.PARTIAL)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        os.rename(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _of_transformers(
    source: TransformersSource, out: Path, dtype: str, shard_bytes: int, tokenizer: str | None
) -> Exported:
    with _draft_of(out) as draft:
        found, note = write_folder(source, draft, dtype=dtype, shard_bytes=shard_bytes, tokenizer=tokenizer)
        size = sum(file.stat().st_size for file in draft.glob("*.safetensors"))
    if note:
        logger.warning("%s", note)
    if source.pattern.kind != "dense":
        logger.warning(
            "%s was trained with %s attention; transformers' model attends to everything, and loses by it: attach the "
            "pattern as README.md there says",
            source.checkpoint,
            source.pattern,
        )
    written = None if note else tokenizer or "the model's own"
    return Exported(source.checkpoint, out, source.step, tokenizer=written, bytes=size, **found)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


# --- what is exported ---


@dataclass(frozen=True)
class Source:
    """A checkpoint, the experiment that made it, and where its weights lie."""

    checkpoint: Path
    run: Path | None
    experiment: Experiment
    step: int | None
    weights: Weights

    def skeleton(self) -> torch.nn.Module:
        """The model without its weights; no memory is taken for them."""
        with torch.device("meta"):
            return build(self.experiment.model)

    def targets(self) -> dict[str, torch.nn.Parameter]:
        """The matrices that may be sparse, by our names."""
        return choose_targets(self.skeleton(), self.experiment.mst.targets)

    @property
    def pattern(self) -> Pattern:
        """Its attention, as this checkpoint was trained."""
        if self.step is None or self.experiment.mst.method is None:
            return Pattern("dense")
        return self.experiment.attention_schedule.pattern_at(self.step)

    def model(self) -> torch.nn.Module:
        """The model in memory, in float32, with the attention that it was trained with."""
        model = build(self.experiment.model).eval()
        set_pattern(model, self.pattern, "auto")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.weights.read(name))
        return model


def open_source(path: Path, config: Path | None = None, *, causal: bool = True) -> Source:
    """What a run's folder or a checkpoint holds; anything that is no model of ours is refused in one line.

    `causal`: and a BERT too, because the caller asks for the token that comes next.
    """
    checkpoint = store.locate(path)
    manifest = store.head(checkpoint)
    if manifest is not None and checkpoint == path and (faults := store.damage(checkpoint)):
        raise Damaged(f"{checkpoint} is damaged: {faults[0]}")
    if config is None:
        config = next((p / "config.json" for p in checkpoint.parents if (p / "config.json").is_file()), None)
        if config is None:
            raise UserError(
                f"there is no config.json beside {checkpoint}: name the experiment, or the config.json of its "
                "transformers model, with --config FILE"
            )
    experiment = load(config)
    if causal and not experiment.model.causal:
        raise UserError(f"{path} is a BERT: it fills in masked tokens, and predicts no next token")
    weights = multiplied_weights_of(checkpoint)
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in build(experiment.model).named_parameters()}
    for name, shape in wanted.items():
        found = weights.shapes.get(name)
        if found != shape:
            what = "is missing" if found is None else f"has shape {found}, not {shape}"
            raise UserError(f"{checkpoint}: {name} {what}: it is not the model that {config} describes")
    step = (manifest or _masks_head(checkpoint)).get("step")
    return Source(checkpoint, config.parent if config.name == "config.json" else None, experiment, step, weights)


def _masks_head(checkpoint: Path) -> dict[str, Any]:
    """What the masks say of a checkpoint without a manifest, of a loop of your own; empty where it has none."""
    path = mask_files.file_of(checkpoint, 0)
    return mask_files.read(path)[0] if path.is_file() else {}


def _corpus(experiment: Experiment, run: Path | None = None) -> str:
    """Return the folder of the run's corpus, which a relative path names from where the run was started."""
    data = experiment.data
    if _names_no_text(experiment):
        raise UserError("the config names no text to measure the loss on: give it data.dir, a folder of mst data")
    stated = Path(data.dir or f"corpora/{data.source}")
    starts = [] if run is None or stated.is_dir() else run_file.read(run / "run.json").get("starts", [])
    folders = (Path(start["folder"]) / stated for start in reversed(starts) if "folder" in start)
    return str(next((folder for folder in folders if folder.is_dir()), stated))


def tokenizer_of(experiment: Experiment) -> TrainedWith | None:
    """The tokenizer of the run's corpus; None where nothing names one."""
    data = experiment.data
    if data.dir is None and data.source is None:
        return None if data.tokenizer is None else trained_with(data.tokenizer)
    folder = Path(_corpus(experiment))
    if (folder / META).is_file():
        meta = read_meta(folder)
        before = trained_with(str(meta["tokenizer"]), meta["recipe"].get("tokenizer"))
        moved = data.tokenizer if is_missing(before.name) else None  # the config may say where its file lies now
        return chosen(moved, before, str(folder))
    if data.source is None and data.tokenizer is None:
        return None  # it names a folder that is not there
    return trained_with(data.tokenizer or ("byte" if data.source is not None and is_code(data.source) else "gpt2"))


def _names(model: ModelConfig) -> ModuleType:
    """Which tensor is which in Hugging Face's model of this architecture."""
    return gpt2_names if model.causal else bert_names


class _Writer:
    """The tensors of the exported model, each made from ours when it is asked for."""

    def __init__(self, source: Source, pruned: Mapping[str, torch.Tensor]):
        """`pruned`: matrices that are not as the checkpoint has them."""
        self.weights, self.model, self.pruned = source.weights, source.experiment.model, pruned
        self.targets = source.targets().keys()
        self.lines = LineFlags(find_units(source.skeleton())[0], source.weights.shapes)
        self.table = {entry.theirs: entry for entry in _names(self.model).entries(self.model)}
        self.shapes = {name: self._shape(entry) for name, entry in self.table.items()}
        self.zeros = self.counted = 0

    def __call__(self, name: str) -> Iterator[torch.Tensor]:
        entry, shape = self.table[name], self.shapes[name]
        for piece in self._pieces(entry, math.prod(shape)):
            if entry.ours in self.targets:
                self.counted += piece.numel()
                self.zeros += int((piece == 0).sum())
            yield piece

    def _pieces(self, entry: Entry, numel: int) -> Iterator[torch.Tensor]:
        if entry.ours not in self.weights.shapes:  # a bias that the model does not have
            yield torch.zeros(numel)
        elif entry.ours in self.pruned or entry.transposed:
            matrix = self.pruned[entry.ours] if entry.ours in self.pruned else self.weights.read(entry.ours)
            self.lines.look(Shard.whole(entry.ours, matrix.shape), matrix.view(-1))
            if entry.transposed:
                rows = max(1, PIECE // matrix.shape[0])
                yield from (columns.t() for columns in matrix.split(rows, dim=1))
            else:
                yield matrix.view(-1)[entry.part * numel :][:numel]
        else:
            start = entry.part * numel
            for piece in self.weights.spans(entry.ours, start, numel, PIECE):
                shape = self.weights.shapes[entry.ours]
                self.lines.look(Shard.of_range(entry.ours, shape, start, piece.numel()), piece)
                start += piece.numel()
                yield piece

    def _shape(self, entry: Entry) -> tuple[int, ...]:
        if entry.ours in VOCABULARY:
            return (self.model.vocab_size, *self.weights.shapes.get(entry.ours, ())[1:])
        if entry.ours not in self.weights.shapes:
            rows, *rest = self.weights.shapes[entry.ours.removesuffix("bias") + "weight"][:1]
        else:
            rows, *rest = self.weights.shapes[entry.ours]
        shape = (rows // entry.parts, *rest)
        return shape[::-1] if entry.transposed else shape


# --- pruning ---


@dataclass(frozen=True)
class _Plan:
    """How a source is to be pruned; what does not fit is refused here, before anything is written."""

    request: Request
    amounts: dict[str, Amount]
    corpus: str
    """The folder of the calibration."""
    calibration: Sampler | None
    validation: Sampler

    @classmethod
    def of(cls, source: Source, request: Request) -> _Plan:
        experiment = source.experiment
        shapes = {name: tuple(p.shape) for name, p in source.targets().items()}
        amounts = request.amounts(shapes, experiment.mst.sparsity.distribution)
        own = None if request.calibration and _names_no_text(experiment) else _corpus(experiment, source.run)
        corpus = request.calibration or str(own)
        calibration = open_calibration(corpus, experiment.model, request.sequences) if request.looks else None
        if request.calibration is not None:
            _refuse_other_ids(Path(corpus), experiment)
            if own is None or not Path(own).is_dir():
                logger.warning("the run's own corpus %s is not here: the loss is measured on %s", own or "", corpus)
                own = corpus
        validation = open_sampler(str(own), "val", experiment.model, experiment.eval_seed)
        return cls(request, amounts, corpus, calibration, validation)


def _names_no_text(experiment: Experiment) -> bool:
    return experiment.data.dir is None and experiment.data.source is None


def _refuse_other_ids(corpus: Path, experiment: Experiment) -> None:
    """A calibration corpus of another tokenizer means nothing to the model."""
    ours = tokenizer_of(experiment)
    if ours is None or not (corpus / META).is_file():
        return
    meta = read_meta(corpus)
    theirs = trained_with(str(meta["tokenizer"]), meta["recipe"].get("tokenizer"))
    if not same_ids(ours.identity, theirs.identity):
        raise UserError(
            f"--calibration {corpus} was made with tokenizer {theirs.name!r}, and the model was trained with "
            f"{ours.name!r}: make a corpus with that one"
        )


@dataclass(frozen=True)
class _Pruned:
    """What pruning gave; without it nothing."""

    matrices: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    words: str = ""


def _prune(source: Source, plan: _Plan) -> _Pruned:
    """Prune the model in memory, with its validation loss before and after."""
    experiment, request, sampler = source.experiment, plan.request, plan.validation
    seen = [] if plan.calibration is None else batches(plan.calibration, request.sequences)
    model = source.model()
    before = validation_loss(model, sampler, experiment)
    left = prune_model(model, request.way, plan.amounts, seen)
    losses = {"before": before, "after": validation_loss(model, sampler, experiment)}
    matrices = {name: p.detach() for name, p in model.named_parameters() if name in plan.amounts and name not in left}
    words = request.in_words(plan.corpus, left, experiment.mst.sparsity.distribution)
    return _Pruned(matrices, losses, request.about(plan.corpus, left), words)


@torch.no_grad()
def validation_loss(model: torch.nn.Module, sampler: Sampler, experiment: Experiment) -> float:
    """Mean loss over the sequences that training evaluates on."""
    count, total = experiment.training.eval_sequences, 0.0
    for start in range(0, count, VALIDATION_BATCH):
        positions = range(start, min(start + VALIDATION_BATCH, count))
        total += float(model(*sampler.batch(0, positions))) * len(positions)
    return total / count

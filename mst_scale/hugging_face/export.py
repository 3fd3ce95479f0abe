"""Writes a checkpoint as a Hugging Face folder: `config.json`, `model.safetensors`, tokenizer files and a model card.

Our GPT has GPT-2's architecture and our BERT that of BERT, so `from_pretrained` computes the same logits; biases that
our model does not have are written as zeros, rows that pad the vocabulary are left out, and attention is dense. A
transformers model keeps its architecture, configuration and tokenizer.

The weights are the fp32 master weights. They are read, transposed and written one after the other, so that only one
matrix is in memory. Zeros stay zeros; if the run trained whole channels, inactive neurons are left out (`narrow`). With
a pruning request (mst_scale/pruning), the model is loaded to prune it and to measure its loss before and after.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mst_scale.comm import logger
from mst_scale.config import Experiment
from mst_scale.data.corpus import META, read_meta
from mst_scale.data.sampler import Sampler, open_sampler
from mst_scale.data.tokenizer import chosen, same_ids, trained_with, write_tokenizer
from mst_scale.dead_units import format_counts
from mst_scale.dead_units.units import LineFlags, find_units
from mst_scale.errors import UserError
from mst_scale.files import draft_of
from mst_scale.hugging_face import model_card
from mst_scale.hugging_face.model_files import DTYPES, TOKENIZER_FILES, Shape, write_json, write_model
from mst_scale.hugging_face.names import VOCABULARY, Entry, entries, hugging_face_config
from mst_scale.hugging_face.narrow import NEURONS, Neurons, find_neurons
from mst_scale.hugging_face.sources import (
    PIECE,
    Source,
    TransformersSource,
    corpus_of,
    find_transformers,
    names_no_text,
    open_source,
    open_transformers,
    tokenizer_of,
)
from mst_scale.pruning import Request, prune_model, requested
from mst_scale.pruning.network import calibration_batches, open_calibration
from mst_scale.shard import Shard

VALIDATION_BATCH = 8
OTHER_COMPANIONS = ("generation_config.json",)
"""Files next to a model that do not belong to its tokenizer."""


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        zeros: Number of weights that are exactly 0 in the matrices that are or may become sparse.
        matrices: Number of all weights of these matrices.
        files: The files with weights.
        bytes: Their size; zeros take as much space as other weights.
        tokenizer: The tokenizer whose files were written.
        dead_units: [dead, all] units by kind; all weights of a dead unit are zero.
        losses: With pruning, the validation loss "before" and "after", if the run's corpus is there.
        pruning: With pruning, its settings, and the names of matrices that were not pruned.
        narrow: With neurons left out, "n_inner", the number "before", those "kept" by each layer, and the weights that
            are "padding" to the widest layer.
        added_biases: How many of the parameters are biases that the model does not have: transformers' format has
            them, and they are 0.
    """

    checkpoint: Path
    out: Path
    step: int | None
    parameters: int
    zeros: int
    matrices: int
    files: list[str]
    bytes: int
    tokenizer: str | None
    dead_units: dict[str, list[int]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    pruning: dict[str, Any] = field(default_factory=dict)
    narrow: dict[str, Any] = field(default_factory=dict)
    added_biases: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {**asdict(self), "checkpoint": str(self.checkpoint), "out": str(self.out)}


def export(
    path: Path,
    out: Path,
    *,
    prune: float | None = None,
    method: str | None = None,
    pattern: str | None = None,
    calibration: str | None = None,
    calibration_sequences: int | None = None,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
    tokenizer: str | None = None,
    config: Path | None = None,
) -> Exported:
    """Write the Hugging Face folder `out` from a checkpoint, or from the latest complete one of a run.

    Args:
        path: The folder of a run or of a checkpoint.
        out: The folder to write; it must not exist.
        prune: The fraction of weights to set to zero, see `mst_scale.pruning.requested`.
        method: The pruning method.
        pattern: N:M, instead of `prune`.
        calibration: The calibration corpus.
        calibration_sequences: The number of its sequences.
        dtype: "float32", "bfloat16" or "float16".
        shard_bytes: The largest size of a file of weights.
        tokenizer: A tokenizer to use instead of the corpus's or the model's own.
        config: The experiment, or the transformers configuration, of a checkpoint that is not next to it.

    Raises:
        UserError: if an argument is wrong, or the checkpoint cannot be exported.
        Damaged: if a file of the checkpoint was cut short.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    request = requested(method, prune, pattern, calibration, calibration_sequences)
    if out.exists():
        raise UserError(f"{out} already exists: choose another OUT")
    if (found := find_transformers(path, config)) is not None:
        if request is not None:
            raise UserError(
                f"{path} is a transformers model ({found[1]}), and --prune and --pattern only support models of "
                "mst_scale.pretrain: export it without them"
            )
        return _export_transformers(open_transformers(*found), out, dtype, shard_bytes, tokenizer)
    source = open_source(path, config, causal=False)
    experiment = source.experiment
    text = chosen(tokenizer, tokenizer_of(experiment, source.run), str(path))
    name, identity = (None, None) if text is None else (text.name, text.identity)
    plan = None if request is None else _Plan(source, request)
    with draft_of(out) as draft:
        end_of_text, tokenizer_note = write_tokenizer(draft, name, experiment.model.vocab_size)
        pruned = _Pruned() if plan is None else plan.carry_out()
        tensors = _Tensors(source, pruned.matrices)
        if experiment.mst.topology.granularity == "channel":
            tensors.leave_out_neurons()
        files = write_model(draft, tensors.shapes, tensors, dtype, shard_bytes)
        about = {
            "step": source.step,
            "tokenizer": name,
            "tokenizer_identity": identity,
            "bias": experiment.model.bias,
            "method": experiment.mst.method,
            **({"pruned": pruned.about} if pruned.about else {}),
            **({"attention": asdict(source.pattern)} if source.pattern.kind != "dense" else {}),
        }
        raw = hugging_face_config(tensors.model, end_of_text)
        write_json(draft / "config.json", {**raw, "dtype": dtype, "mst_scale": about})
        done = Exported(
            checkpoint=source.checkpoint,
            out=out,
            step=source.step,
            parameters=sum(math.prod(shape) for shape in tensors.shapes.values()),
            added_biases=tensors.added_biases,
            zeros=tensors.zeros,
            matrices=tensors.counted,
            files=[file.name for file in files],
            bytes=sum(file.stat().st_size for file in files),
            tokenizer=None if tokenizer_note else name,
            dead_units={kind: list(counts) for kind, counts in tensors.lines.tally().items()},
            losses=pruned.losses,
            pruning=pruned.about,
            narrow={} if tensors.neurons is None else tensors.neurons.describe(experiment.model.n_embd),
        )
        figures = {**done.to_dict(), "dead_units": format_counts(done.dead_units), "pruned": pruned.description}
        card = model_card.of_ours(experiment, source.run, figures, source.pattern, tokenizer_note)
        (draft / "README.md").write_text(card)
    _warn(source, tokenizer_note, "attach the pattern" if experiment.model.causal else "use the checkpoint")
    return done


def _export_transformers(
    source: TransformersSource, out: Path, dtype: str, shard_bytes: int, tokenizer: str | None
) -> Exported:
    """Export a transformers model; its config.json gets a block `mst_scale` (step, method, attention pattern)."""
    note = ""
    zeros = counted = 0

    def pieces(name: str) -> Iterator[torch.Tensor]:
        nonlocal zeros, counted
        for piece in source.pieces(name):
            if name in source.targets:
                zeros, counted = zeros + int((piece == 0).sum()), counted + piece.numel()
            yield piece

    with draft_of(out) as draft:
        if tokenizer is not None:
            note = write_tokenizer(draft, tokenizer, int(source.config.get("vocab_size", 0)))[1]
        for name in (*OTHER_COMPANIONS, *(TOKENIZER_FILES if tokenizer is None else ())):  # not those of two
            if not (draft / name).exists() and (found := source.beside(name)) is not None:
                shutil.copy2(found, draft / name)
        if tokenizer is None and source.tokenizer is None:
            note = (
                f"no tokenizer files: there are none in {source.checkpoint.parent}; save the tokenizer there "
                "(tokenizer.save_pretrained), or name one with --tokenizer"
            )
        files = write_model(draft, source.shapes(), pieces, dtype, shard_bytes)
        about: dict[str, Any] = {"step": source.step, "method": source.method, "tokenizer": tokenizer}
        if source.pattern.kind != "dense":
            about["attention"] = asdict(source.pattern)
        architectures = [type(source.skeleton).__name__]
        own = {**source.config, "dtype": dtype, "architectures": architectures, "mst_scale": about}
        write_json(draft / "config.json", own)
        done = Exported(
            checkpoint=source.checkpoint,
            out=out,
            step=source.step,
            parameters=sum(p.numel() for p in source.skeleton.parameters()),
            zeros=zeros,
            matrices=counted,
            files=[file.name for file in files],
            bytes=sum(file.stat().st_size for file in files),
            tokenizer=None if note else tokenizer or "the model's own",
        )
        (draft / "README.md").write_text(model_card.of_transformers(source, done.to_dict(), note))
    _warn(source, note, "attach the pattern")
    return done


def _warn(source: Source | TransformersSource, tokenizer_note: str, advice: str) -> None:
    if tokenizer_note:
        logger.warning("%s", tokenizer_note)
    if source.pattern.kind != "dense":
        logger.warning(
            "%s was trained with %s attention, but attention in transformers is dense, which increases the loss: "
            "%s as its README.md describes, or train with dense attention at the end (mst.attention.dense_from)",
            source.checkpoint,
            source.pattern,
            advice,
        )


# Weights ------------------------------------------------------------------------------------------------------------


class _Tensors:
    """The tensors of the exported model, converted from ours on demand.

    `pruned` are matrices that replace those of the checkpoint. While tensors are read, this counts the weights and
    zeros of the matrices that may be sparse, and the dead units.
    """

    def __init__(self, source: Source, pruned: Mapping[str, torch.Tensor]):
        self.weights, self.model, self.pruned = source.weights, source.experiment.model, pruned
        self.targets = source.targets().keys()
        self.lines = LineFlags(find_units(source.skeleton())[0], source.weights.shapes)
        self.table = {entry.theirs: entry for entry in entries(self.model)}
        self.neurons: Neurons | None = None
        self.shapes = {name: self._shape(entry) for name, entry in self.table.items()}
        self.zeros = self.counted = 0

    def leave_out_neurons(self) -> None:
        """Make the MLPs as narrow as their active neurons allow."""
        neurons = find_neurons(self.model, self._matrix)
        if neurons.width < neurons.before:
            self.neurons, self.model = neurons, replace(self.model, d_ff=neurons.width)
            self.shapes = {name: self._shape(entry) for name, entry in self.table.items()}

    @property
    def added_biases(self) -> int:
        """The number of biases that the model does not have and the exported one does."""
        return sum(
            math.prod(self.shapes[name]) for name, entry in self.table.items() if entry.ours not in self.weights.shapes
        )

    def _matrix(self, name: str) -> torch.Tensor:
        return self.pruned[name] if name in self.pruned else self.weights.read(name)

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
        elif entry.ours in self.pruned or entry.transposed or self._is_narrow(entry.ours):
            matrix = self._matrix(entry.ours)
            self.lines.add(Shard.whole(entry.ours, matrix.shape), matrix.view(-1))
            if self.neurons is not None:
                matrix = self.neurons.cut(entry.ours, matrix)
            if entry.transposed:
                rows = max(1, PIECE // matrix.shape[0])
                yield from (columns.t() for columns in matrix.split(rows, dim=1))
            else:
                yield matrix.view(-1)[entry.part * numel :][:numel]
        else:
            start = entry.part * numel
            for piece in self.weights.spans(entry.ours, start, numel, PIECE):
                shape = self.weights.shapes[entry.ours]
                self.lines.add(Shard.of_range(entry.ours, shape, start, piece.numel()), piece)
                start += piece.numel()
                yield piece

    def _is_narrow(self, name: str) -> bool:
        return self.neurons is not None and NEURONS.fullmatch(name) is not None

    def _shape(self, entry: Entry) -> Shape:
        if self._is_narrow(entry.ours):
            d, width = self.model.n_embd, self.model.ffw
            shapes = {"up.weight": (width, d), "up.bias": (width,), "down.weight": (d, width)}
            whole: Shape = next(shapes[kind] for kind in shapes if entry.ours.endswith(kind))
            return whole[::-1] if entry.transposed else whole
        if entry.ours in VOCABULARY:
            return (self.model.vocab_size, *self.weights.shapes.get(entry.ours, ())[1:])
        if entry.ours not in self.weights.shapes:
            rows, *rest = self.weights.shapes[entry.ours.removesuffix("bias") + "weight"][:1]
        else:
            rows, *rest = self.weights.shapes[entry.ours]
        shape = (rows // entry.parts, *rest)
        return shape[::-1] if entry.transposed else shape


# Pruning ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pruned:
    """The result of pruning: the pruned matrices, and its descriptions for config.json and the model card."""

    matrices: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    description: str = ""


class _Plan:
    """A plan to prune a source; all errors in the request are found when it is created, before anything is written."""

    def __init__(self, source: Source, request: Request):
        self.source, self.request, experiment = source, request, source.experiment
        shapes = {name: tuple(p.shape) for name, p in source.targets().items()}
        self.amounts = request.amounts(shapes, experiment.mst.sparsity.distribution)
        needs_own = request.needs_calibration and not request.calibration
        own = corpus_of(experiment, source.run) if needs_own or not names_no_text(experiment) else None
        if needs_own and own is None:
            stated = experiment.data.dir or experiment.data.source
            raise UserError(f"the corpus {stated} of {source.checkpoint} is missing: name one with --calibration")
        self.corpus = request.calibration or str(own)
        self.calibration: Sampler | None = None
        if request.needs_calibration:
            self.calibration = open_calibration(self.corpus, experiment.model, request.sequences)
        if request.calibration is not None:
            _check_same_tokenizer(Path(self.corpus), source)
            if own is None:
                logger.warning("the run's own corpus is missing: the loss is measured on %s", self.corpus)
                own = Path(self.corpus)
        self.validation: Sampler | None = None
        if own is not None:
            self.validation = open_sampler(str(own), "val", experiment.model, experiment.eval_seed)
        else:
            logger.warning("the run's corpus is missing: the loss before and after pruning is not measured")

    def carry_out(self) -> _Pruned:
        """Prune the model in memory, and measure its validation loss before and after."""
        request, experiment = self.request, self.source.experiment
        seen = [] if self.calibration is None else calibration_batches(self.calibration, request.sequences)
        model = self.source.model()
        losses = {}
        if self.validation is not None:
            losses["before"] = validation_loss(model, self.validation, experiment)
        left = prune_model(model, request.method, self.amounts, seen)
        if self.validation is not None:
            losses["after"] = validation_loss(model, self.validation, experiment)
        pruned = {name for name in self.amounts if name not in left}
        matrices = {name: p.detach() for name, p in model.named_parameters() if name in pruned}
        description = request.describe(self.corpus, left, experiment.mst.sparsity.distribution)
        return _Pruned(matrices, losses, request.about(self.corpus, left), description)


def _check_same_tokenizer(corpus: Path, source: Source) -> None:
    """Raise UserError if the calibration corpus was made with another tokenizer than the model's."""
    ours = tokenizer_of(source.experiment, source.run)
    if ours is None or not (corpus / META).is_file():
        return
    meta = read_meta(corpus)
    theirs = trained_with(str(meta["tokenizer"]), meta["recipe"].get("tokenizer"))
    if not same_ids(ours.identity, theirs.identity):
        raise UserError(
            f"--calibration {corpus} was made with tokenizer {theirs.name!r}, but the model was trained with "
            f"{ours.name!r}: prepare a corpus with the latter"
        )


@torch.no_grad()
def validation_loss(model: torch.nn.Module, sampler: Sampler, experiment: Experiment) -> float:
    """Return the mean loss over the sequences that training evaluates on."""
    count, total = experiment.training.eval_sequences, 0.0
    for start in range(0, count, VALIDATION_BATCH):
        positions = range(start, min(start + VALIDATION_BATCH, count))
        total += float(model(*sampler.batch(0, positions))) * len(positions)
    return total / count

"""Writes a checkpoint as a Hugging Face folder that everybody can load.

The folder holds `config.json`, `model.safetensors`, tokenizer files where the tokenizer is known, and a model
card with the run's figures. Our GPT is GPT-2's architecture, so `AutoModelForCausalLM.from_pretrained` computes the
same logits (of a BERT `AutoModelForMaskedLM`); what it lacks (biases) is zero there, and rows that pad the vocabulary
are left out. Attention is dense.

Weights are the fp32 masters. They are read, transposed and written one after the other: memory holds one matrix, never
the model. Zeros stay zeros. `prune` sets further weights to zero, by magnitude within each layer; only then is the
model loaded, to measure what that costs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mst_scale.checkpoints import store
from mst_scale.config import Experiment, ModelConfig, load
from mst_scale.data.corpus import META, read_meta
from mst_scale.data.masking import open_sampler
from mst_scale.data.sampler import Sampler
from mst_scale.data.tokenizer import TrainedWith, chosen, is_missing, trained_with
from mst_scale.data.tokenizer_files import write_tokenizer
from mst_scale.dead_units.kinds import in_words
from mst_scale.dead_units.lines import LineFlags
from mst_scale.dead_units.units import find_units
from mst_scale.distributed import Damaged, logger
from mst_scale.engine.targets import choose_targets
from mst_scale.hugging_face import bert_names, gpt2_names, model_card
from mst_scale.hugging_face.bert_names import VOCABULARY
from mst_scale.hugging_face.gpt2_names import Entry
from mst_scale.hugging_face.safetensors_stream import DTYPES, write_model
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.mixed_growing.evolve import Layer, sparsify
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.models import build
from mst_scale.shard import Shard
from mst_scale.zero_shards.weight_files import Weights, weights_of

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
    tokenizer: str | None
    """The tokenizer whose files were written."""
    dead_units: dict[str, list[int]] = field(default_factory=dict)
    """[dead, all] units by kind: those whose weights are all zero."""
    losses: dict[str, float] = field(default_factory=dict)
    """With pruning: validation loss "before" and "after"."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checkpoint": str(self.checkpoint), "out": str(self.out)}


def export(
    path: Path,
    out: Path,
    *,
    prune: float | None = None,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
    tokenizer: str | None = None,
    config: Path | None = None,
) -> Exported:
    """Write the Hugging Face folder `out` from a checkpoint, or from a run's newest whole one."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    if prune is not None and not 0 <= prune < 1:
        raise ValueError(f"--prune {prune}: give the share of weights that become zero, 0 ≤ S < 1")
    if out.exists():
        raise ValueError(f"{out} exists: choose another OUT")
    source = open_source(path, config, causal=False)
    experiment = source.experiment
    text = chosen(tokenizer, tokenizer_of(experiment), str(path))
    name, identity = (None, None) if text is None else (text.name, text.identity)
    shapes = {name: tuple(p.shape) for name, p in source.targets().items()}
    counts: dict[str, int] = {}
    if prune is not None:
        kept = active_counts(list(shapes.values()), prune, experiment.mst.sparsity.distribution)
        counts = dict(zip(shapes, kept, strict=True))
    draft = out.with_name(out.name + store.PARTIAL)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        end_of_text, tokenizer_note = write_tokenizer(draft, name, experiment.model.vocab_size)
        losses = _losses(source, counts) if prune is not None else {}
        writer = _Writer(source, counts, set(shapes))
        files = write_model(draft, writer.shapes, writer, dtype, shard_bytes)
        raw = _names(experiment.model).hugging_face_config(experiment.model, end_of_text)
        about = {
            "step": source.step,
            "tokenizer": name,
            "tokenizer_identity": identity,
            "bias": experiment.model.bias,
            "method": experiment.mst.method,
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
            tokenizer=None if tokenizer_note else name,
            dead_units={kind: list(counts) for kind, counts in writer.lines.tally().items()},
            losses=losses,
        )
        told = {**done.to_dict(), "dead_units": in_words(done.dead_units)}
        card = model_card.text(experiment, source.run, told, tokenizer_note)
        (draft / "README.md").write_text(card)
        os.rename(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    if tokenizer_note:
        logger.warning("%s", tokenizer_note)
    return done


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

    def model(self) -> torch.nn.Module:
        """The model in memory, in float32."""
        model = build(self.experiment.model).eval()
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
            raise ValueError(f"there is no config.json beside {checkpoint}: name the experiment with --config FILE")
    experiment = load(config)
    if causal and not experiment.model.causal:
        raise ValueError(f"{path} is a BERT: it fills in masked tokens, and predicts no next token")
    weights = weights_of(checkpoint)
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in build(experiment.model).named_parameters()}
    for name, shape in wanted.items():
        found = weights.shapes.get(name)
        if found != shape:
            what = "is missing" if found is None else f"has shape {found}, not {shape}"
            raise ValueError(f"{checkpoint}: {name} {what}: it is not the model that {config} describes")
    step = (manifest or {}).get("step")
    return Source(checkpoint, config.parent if config.name == "config.json" else None, experiment, step, weights)


def tokenizer_of(experiment: Experiment) -> TrainedWith | None:
    """The tokenizer of the run's corpus; None where nothing names one."""
    data = experiment.data
    folder = Path(data.dir or f"corpora/{data.source}")
    if (folder / META).is_file():
        meta = read_meta(folder)
        before = trained_with(str(meta["tokenizer"]), meta["recipe"].get("tokenizer"))
        moved = data.tokenizer if is_missing(before.name) else None  # the config may say where its file lies now
        return chosen(moved, before, str(folder))
    if data.source is None and data.tokenizer is None:
        return None
    return trained_with(data.tokenizer or ("byte" if data.source == "stdlib" else "gpt2"))


def _names(model: ModelConfig) -> ModuleType:
    """Which tensor is which in Hugging Face's model of this architecture."""
    return gpt2_names if model.causal else bert_names


class _Writer:
    """The tensors of the exported model, each made from ours when it is asked for."""

    def __init__(self, source: Source, counts: dict[str, int], targets: set[str]):
        self.weights, self.model, self.counts, self.targets = source.weights, source.experiment.model, counts, targets
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
        elif entry.ours in self.counts or entry.transposed:
            matrix = self.weights.read(entry.ours)
            if entry.ours in self.counts:
                keep_largest(matrix, self.counts[entry.ours])
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


def keep_largest(matrix: torch.Tensor, count: int) -> None:
    """Zero all but the `count` largest magnitudes; ties go to the lower flat index."""
    mask = LayerMask(Shard.whole("weight", matrix.shape), matrix.device)
    flat = matrix.detach().view(-1)
    sparsify([Layer(mask, count, flat)], how="magnitude", seed=0, exchange=Exchange())
    mask.retain_(flat)


def _losses(source: Source, counts: dict[str, int]) -> dict[str, float]:
    """The loss on the run's validation corpus before and after pruning; this needs the model in memory."""
    data = source.experiment.data
    folder = data.dir or f"corpora/{data.source}"
    sampler = open_sampler(folder, "val", source.experiment.model, source.experiment.training.seed)
    model = source.model()
    before = validation_loss(model, sampler, source.experiment)
    parameters = dict(model.named_parameters())
    for name, count in counts.items():
        keep_largest(parameters[name].data, count)
    return {"before": before, "after": validation_loss(model, sampler, source.experiment)}


@torch.no_grad()
def validation_loss(model: torch.nn.Module, sampler: Sampler, experiment: Experiment) -> float:
    """Mean loss over the sequences that training evaluates on."""
    count, total = experiment.training.eval_sequences, 0.0
    for start in range(0, count, VALIDATION_BATCH):
        positions = range(start, min(start + VALIDATION_BATCH, count))
        total += float(model(*sampler.batch(0, positions))) * len(positions)
    return total / count

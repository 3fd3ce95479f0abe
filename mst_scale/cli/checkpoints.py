"""Runs `mst inspect`, `masks`, `reshape` and `export`, which read a checkpoint or write it in another form."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_scale.cli import add_command, align, values_of
from mst_scale.cli.data import parse_bytes
from mst_scale.comm.parser import at_least, validate_new_folder
from mst_scale.dead_units import format_counts
from mst_scale.errors import UserError

if TYPE_CHECKING:
    from mst_scale.checkpoints.mask_report import Report


def add(subparsers: Any) -> None:
    """Add the four commands to the parser."""
    _add_inspect(subparsers)
    _add_masks(subparsers)
    _add_reshape(subparsers)
    _add_export(subparsers)


# --- mst inspect ---

INSPECT = """\
Print the step, phase and sparsity of a checkpoint, and the mask of every sparse parameter.

PATH is the folder of a checkpoint, or of a run, whose latest complete checkpoint is used. Folders written by Trainer,
Accelerate or engine.save_checkpoint work too. The sha256 of a mask does not depend on the number of ranks that saved it
or on the ZeRO stage. --json prints {"checkpoint", "step", "phase", "sparsity", "target_sparsity", "granularity",
"layers": [{"name", "shape", "active", "density", "ever_active", "sha256"} …], "dead_units": {kind: [dead, all]}} where
dead units (neurons of an MLP, channels of a head) are those that no gradient reaches, because their weights are zero. A
run that was trained without sparsity has phase "dense" and no layers.

examples:
  mst inspect runs/demo
  mst inspect runs/demo/checkpoints/step00000012 --json
"""


def _add_inspect(subparsers: Any) -> None:
    command = add_command(subparsers, "inspect", _inspect, "show the masks of a checkpoint", INSPECT)
    command.add_argument("path", metavar="PATH", type=Path, help="a checkpoint or a run")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _inspect(args: argparse.Namespace) -> int:
    from mst_scale.checkpoints.mask_report import inspect

    report = inspect(args.path)
    print(json.dumps(report.to_dict()) if args.json else _format_masks(report))
    return 0


def _format_masks(report: Report) -> str:
    head = f"{report.checkpoint}: step {report.step:,}, phase {report.phase}"
    if not report.layers:
        return f"{head}, trained without sparsity: no masks"
    counted = any(layer.ever_active is not None for layer in report.layers)
    rows = [["parameter", "shape", "active", "density", *(["ever active"] if counted else []), "sha256"]]
    for layer in report.layers:
        ever = "–" if layer.ever_active is None else f"{layer.ever_active:.2%}"
        shape = "×".join(map(str, layer.shape))
        numbers = [f"{layer.active:,}", f"{layer.density:.2%}", *([ever] if counted else [])]
        rows.append([layer.name, shape, *numbers, layer.sha256[:12]])
    sparsity = f"{report.sparsity:.2%} sparse (target {report.target_sparsity:.2%})"
    granularity = ", in whole channels" if report.granularity == "channel" else ""
    if isinstance(report.granularity, dict):
        side = report.granularity["block"]
        granularity = f", in blocks of {side} × {side}"
    dead = [f"dead units: {format_counts(report.dead_units)}"] if report.dead_units else []
    return "\n".join([f"{head}, {sparsity}{granularity}", *dead, "", *align(rows, left=(0, len(rows[0]) - 1))])


# --- mst masks ---

MASKS = """\
Write the masks of SOURCE to OUT, a safetensors file with one bool tensor per parameter, true where a weight is active.

SOURCE is a checkpoint or a run; a compact file; a transformers folder, whose zeros become the masks; or a mask file.
Parameters have the names of the model without PEFT's adapters.
--packed writes one bit per weight (uint8, in the order of numpy.packbits; the shapes are in the file's metadata).
A run uses such a file with "mst": {"method": "fixed", "masks": OUT}; notebooks read it with safetensors' load_file.
--json prints {"out", "matrices", "weights", "kept"}.

examples:
  mst masks runs/demo masks.safetensors
  mst masks pruned-llama masks.safetensors --packed
"""


def _add_masks(subparsers: Any) -> None:
    command = add_command(subparsers, "masks", _write_masks, "write masks for other tools, and for method fixed", MASKS)
    option = command.add_argument
    option(
        "source", metavar="SOURCE", type=Path, help="a checkpoint, a run, a compact file, a model folder or a mask file"
    )
    option("out", metavar="OUT", type=Path, help="file to write, NAME.safetensors")
    option("--packed", action="store_true", help="write one bit per weight")
    option("--json", action="store_true", help="print one JSON object")


def _write_masks(args: argparse.Namespace) -> int:
    from mst_scale.checkpoints import open_masks
    from mst_scale.compact_files import layout
    from mst_scale.engine.adapters import base_name

    if args.out.exists():
        raise UserError(f"{args.out} already exists: remove it, or choose another file")
    validate_new_folder("OUT", args.out.parent)
    if args.out.suffix in (".npz", ".npy", ".pt", ".pth", ".bin"):
        raise UserError(f"mst masks writes a safetensors file: name OUT {args.out.with_suffix('.safetensors')}")
    weights = kept = 0

    def counted(masks: open_masks.Named) -> Iterator[Any]:
        nonlocal weights, kept
        for name, mask in masks:
            weights, kept = weights + mask.numel(), kept + int(mask.sum())
            yield base_name(name), mask

    masks = layout.masks_of(args.source) if layout.is_compact(args.source) else open_masks.of_source(args.source)
    matrices = open_masks.write(args.out, counted(masks), args.packed)
    if not matrices:
        args.out.unlink()
        raise UserError(f"{args.source} has no masks: it was trained without sparsity, or none of its weights is 0")
    found = {"out": str(args.out), "matrices": matrices, "weights": weights, "kept": kept}
    print(json.dumps(found) if args.json else f"{args.out}: {matrices} matrices, {1 - kept / weights:.2%} sparse")
    return 0


# --- mst reshape ---

RESHAPE = """\
Copy a checkpoint into a form that any number of ranks and any ZeRO stage can load: DeepSpeed's universal layout, with
the masks. Weights, optimizer states, step and masks are bit-identical.

PATH is the folder of a checkpoint, or of a run, whose latest complete checkpoint is used. The copy is written to the
folder `universal` in the checkpoint, where `mst_scale.pretrain --out RUN` finds it, or to OUT, which becomes a run if
PATH is a run and a checkpoint if PATH is one. In a custom training loop, engine.load_checkpoint finds a copy in the
folder `universal` itself, and loads OUT if you name it: engine.load_checkpoint(FOLDER, tag=NAME), where FOLDER/NAME is
OUT. The copy takes 12 bytes per parameter. With --form compact, it takes 12 bytes per active weight and at most three
bits per weight for the masks, but DeepSpeed cannot load it without mst_scale. The form does not decide how the
continued run stores its weights, and can be changed back.

It contains the states of Adam and similar optimizers. With other optimizers, or with frozen parameters, call
mst_scale.warm_start(engine, CHECKPOINT) in your training loop: weights, masks and step continue, and the optimizer
starts with empty states.

examples:
  mst reshape runs/demo                             # then start runs/demo again on any number of ranks
  mst reshape runs/demo runs/demo-1-rank
  mst reshape out/global_step400 out/universal400 --json
  mst reshape runs/demo runs/demo-small --form compact      # to move a sparse checkpoint to another machine
"""


def _add_reshape(subparsers: Any) -> None:
    about = "convert a checkpoint for a different number of ranks or ZeRO stage"
    command = add_command(subparsers, "reshape", _reshape, about, RESHAPE)
    command.add_argument("path", metavar="PATH", type=Path, help="a checkpoint or a run")
    command.add_argument(
        "out", metavar="OUT", nargs="?", type=Path, help="destination (default: inside the checkpoint)"
    )
    command.add_argument(
        "--form", choices=("dense", "compact"), default="dense",
        help="what is stored of sparse matrices: all weights, or the active ones (default: dense)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _reshape(args: argparse.Namespace) -> int:
    _read_files_only()
    from mst_scale.checkpoints.reshape import reshape

    if args.out is not None:
        validate_new_folder("OUT", args.out)
    done = reshape(args.path, args.out, args.form)
    if args.json:
        print(json.dumps(done.to_dict()))
        return 0
    content = f"{done.parameters} parameters, {done.masks} masks, {done.bytes / 1e6:,.1f} MB"
    print(f"{done.universal}: {content}, {f'written in {done.seconds:.1f} s' if done.seconds else 'already existed'}")
    print("any number of ranks at any ZeRO stage can continue from it")
    return 0


def _read_files_only() -> None:
    """Keep DeepSpeed, which unpickling imports, from detecting a GPU and printing messages to stdout."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


# --- mst export ---

EXPORT = """\
Write a folder that transformers.AutoModelForCausalLM.from_pretrained loads: config.json, model.safetensors (in parts if
it is large), tokenizer files, and a model card with the run's figures.

CHECKPOINT is the folder of a run (its latest complete checkpoint) or of a checkpoint, of any ZeRO stage and number of
ranks, during or after sparse training. Folders of Trainer, Accelerate (save_state) and engine.save_checkpoint work too;
a transformers model keeps its architecture, configuration and tokenizer, and cannot be pruned.

Weights that are zero stay exactly zero. If the run was trained with whole channels (mst.topology.granularity), MLPs are
exported without the neurons that compute nothing, padded to the widest layer; the logits are equal up to rounding. The
weights are the fp32 master weights, and only one matrix at a time is held in memory.

--prune S sets weights to zero until the fraction S of the weights that may be sparse (mst.targets, distributed by
mst.sparsity.distribution) is zero, and reports the loss on the run's validation corpus before and after. This loads the
model into memory. Weights that training left at zero count as pruned. Zeros are stored like other weights, so a pruned
folder is as large as an unpruned one.

--method selects the weights that become zero:
  magnitude   the smallest in each layer (the default)
  wanda       in each row of a matrix, the fraction S with the smallest |weight| · norm of its input (arXiv 2306.11695)
  sparsegpt   in each block of 128 input columns, the fraction S whose removal is easiest to compensate; the remaining
              weights are updated accordingly (arXiv 2301.00774)
The last two record the inputs of layers on 128 sequences of the run's training corpus, or of --calibration, and prune
one block after the other. They skip a head that is the token embedding, because no linear layer multiplies by it. If
the run's corpus no longer exists, the loss is measured on the validation split of --calibration.

--pattern N:M keeps at most N of every M consecutive inputs of an output, with any of these methods.

--compact writes one compact file instead: model.safetensors with the nonzero weights and one bit per weight, and the
tokenizer files. `mst generate` and `mst eval` read it, and so do programs without mst_scale (docs/generation.md). Its
size is printed with that of the dense model. It is smaller only if the model is sparse: a run of method mst ends dense,
one of recipe mst-small stays sparse. CHECKPOINT may then also be a folder that `mst export` has written: prune first,
then compact.

Tokenizer files are written for `byte`, `gpt2` and .tiktoken rank files, if the vocabulary is available.

examples:
  mst export runs/demo exported/demo
  mst export runs/gpt2/checkpoints/step00100000 exported/ultra --dtype bfloat16
  mst export runs/trainer exported/llama          # Trainer's output folder: its latest checkpoint-N
  mst export runs/demo exported/demo-90 --prune 0.9 --json
  mst export runs/gpt2 exported/gpt2-half --prune 0.5 --method wanda
  mst export runs/small compact/small --compact   # runs/small: mst launch local demo --set recipe=mst-small
  mst export runs/gpt2 exported/gpt2-24 --pattern 2:4 --method sparsegpt --calibration corpora/openwebtext
"""
OF_EXPORT = ("dtype", "tokenizer", "config")
SHARD_BYTES = 5 * 10**9
OF_PRUNING = ("prune", "method", "pattern", "calibration", "calibration_sequences")


def _add_export(subparsers: Any) -> None:
    command = add_command(subparsers, "export", _export, "write a checkpoint as a Hugging Face model", EXPORT)
    option = command.add_argument
    option("checkpoint", metavar="CHECKPOINT", type=Path, help="a run or a checkpoint")
    option("out", metavar="OUT", type=Path, help="folder to write; it must not exist")
    option("--prune", type=float, metavar="S", help="prune to the sparsity S, and report the loss")
    option("--method", metavar="M", help="pruning method: magnitude (the default), wanda or sparsegpt")
    option("--pattern", metavar="N:M", help="prune to N of M consecutive inputs, as in 2:4, instead of --prune")
    option("--calibration", metavar="DIR", help="corpus for wanda and sparsegpt (default: the run's own)")
    option("--calibration-sequences", type=at_least(1), metavar="N", help="number of its sequences (default: 128)")
    option("--compact", action="store_true", help="write one compact file: nonzero weights and packed mask bits")
    option("--dtype", default="float32", metavar="T", help="float32 (the default), bfloat16 or float16")
    option("--shard-size", type=parse_bytes, metavar="N", help="maximum size of a weight file (default: 5G)")
    option("--tokenizer", metavar="NAME", help="byte, gpt2 or a .tiktoken file (default: that of the run's corpus)")
    option(
        "--config", metavar="FILE", type=Path, help="the experiment, if there is no config.json next to the checkpoint"
    )
    option("--json", action="store_true", help="print one JSON object")


def _export(args: argparse.Namespace) -> int:
    _read_files_only()
    from mst_scale.compact_files.layout import is_compact
    from mst_scale.hugging_face.export import export

    validate_new_folder("OUT", args.out)
    if is_compact(args.checkpoint):
        raise UserError(
            f"{args.checkpoint} is a compact file already: export the run that it was written from, or give it to "
            "mst generate or mst eval"
        )
    if args.compact:
        return _export_compact(args)
    done = export(
        args.checkpoint,
        args.out,
        shard_bytes=args.shard_size or SHARD_BYTES,
        **values_of(args, *OF_EXPORT, *OF_PRUNING),
    )
    if args.json:
        print(json.dumps(done.to_dict()))
        return 0
    step = "" if done.step is None else f", step {done.step:,}"
    share = f", {done.zeros / done.matrices:.2%} zeros in its sparse matrices" if done.matrices else ""
    size = f"{done.bytes / 1e6:,.1f} MB in {len(done.files)} file(s)"
    parameters = f"{done.parameters:,} parameters"
    if done.added_biases:
        own = done.parameters - done.added_biases
        parameters = f"{own:,} parameters ({done.parameters:,} with the biases of transformers' format, which are 0)"
    print(f"{done.out}: {parameters}, {size}{step}{share}")
    if done.narrow:
        fewest, most, before = min(done.narrow["kept"]), done.narrow["n_inner"], done.narrow["before"]
        print(f"MLPs have {most:,} of {before:,} neurons: the others compute nothing and are left out")
        if done.narrow["padding"]:
            print(
                f"layers keep {fewest:,} to {most:,} neurons, and all are padded to {most:,}, the one width of the "
                f"architecture: {done.narrow['padding']:,} zeros"
            )
    if done.zeros:
        print(f"the {done.zeros:,} zeros are stored like other weights and do not make the file smaller")
    if done.dead_units:
        print(f"dead units (all weights are zero): {format_counts(done.dead_units)}")
    print(f"tokenizer: {done.tokenizer or 'no files; the model card gives the reason'}")
    if left := done.pruning.get("left"):
        print(f"not pruned, because no linear layer multiplies by it: {', '.join(left)}")
    if done.losses:
        before, after = done.losses["before"], done.losses["after"]
        print(f"validation loss: {before:.4f} before pruning, {after:.4f} after ({after - before:+.4f})")
    return 0


def _export_compact(args: argparse.Namespace) -> int:
    from mst_scale.compact_files.export import export_compact

    if name := next((name for name in OF_PRUNING if getattr(args, name) is not None), None):
        raise UserError(
            f"--{name.replace('_', '-')} cannot be combined with --compact: export a pruned folder first, and then "
            "that folder with --compact"
        )
    if args.shard_size is not None:
        raise UserError("--compact writes one file: leave out --shard-size")
    done = export_compact(args.checkpoint, args.out, **values_of(args, *OF_EXPORT))
    if args.json:
        print(json.dumps(done.to_dict()))
        return 0
    step = "" if done.step is None else f", step {done.step:,}"
    share = done.bytes / done.dense_bytes
    print(f"{done.out}: {done.parameters:,} parameters, {done.nonzero:,} of them not zero{step}")
    print(f"{done.bytes / 1e6:,.1f} MB; {share:.0%} of the {done.dense_bytes / 1e6:,.1f} MB that the dense model takes")
    print(f"tokenizer: {done.tokenizer or 'no files; name it with --tokenizer'}")
    if not done.sparse_matrices:
        why = f" (method {done.method} at step {done.step:,})" if done.method and done.step is not None else ""
        print(
            f"this model has no zeros{why}: --compact saves nothing. Export a checkpoint of the sparse phase, train "
            "with a recipe that stays sparse (--set recipe=mst-small), or prune first (mst export --prune)"
        )
    return 0

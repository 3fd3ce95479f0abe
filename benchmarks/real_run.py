"""Trains GPT-2 small (124 M parameters) for real, with MST and dense, and compares loss, memory and time.

    mst bench real_run --text corpora/study/text.jsonl --out runs/real [--steps 1000] [--ranks 2] [--markdown]

    tokens   a byte-level BPE with GPT-2's number of tokens and its pattern is trained on the text (by the package
             tokenizers), and the text is tokenized with it by `mst data`
    runs     OUT/mst and OUT/dense: the same model, tokens, order of samples, seed and number of steps. The phases of
             `mst` are the paper's, and its sparse phase is trained with compact weights (`mst.compute.compact: auto`)

A run that was stopped continues with the same command. Text can be made by `python -m
mst_scale.benchmarks.studies.corpus`. Times are those of the steps as the metrics record them, with the middle half in
parentheses; what else the machine does at the time slows them. `state` is what a rank keeps of optimizer states, master
weights and gradients, `sent` what it sends per step. The runs are far too short to compare the quality of the models at
the end of a real training: the losses show that every phase trains a model of this size as the dense run does.
"""

from __future__ import annotations

import base64
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mst_scale.comm.parser import at_least
from mst_scale.data.tokenizer import byte_characters
from mst_scale.errors import UserError

from .machine import machine
from .page import Row, command_line, grid, parse, show, unmeasured
from .timing import middle_half

TOKENS = 50256  # and one for the end of a text: GPT-2's 50,257
METHODS = ("mst", "dense")


def train_tokenizer(text: Path, out: Path) -> None:
    """Train a byte-level BPE on a file of JSON lines, and write its ranks as tiktoken reads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    def texts() -> Iterator[str]:
        with text.open() as lines:
            for line in lines:
                yield json.loads(line)["text"]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    ids = tokenizer.get_vocab()
    if len(ids) != TOKENS:
        raise UserError(f"--text {text}: too little text for {TOKENS:,} tokens ({len(ids):,} were found)")
    byte_of = {letter: byte for byte, letter in enumerate(byte_characters())}
    lines = []
    for token, rank in sorted(ids.items(), key=lambda item: item[1]):
        lines.append(f"{base64.b64encode(bytes(byte_of[letter] for letter in token)).decode()} {rank}\n")
    draft = out.with_suffix(".partial")
    draft.write_text("".join(lines))
    draft.replace(out)


def config(method: str, corpus: Path, steps: int, ranks: int, length: int) -> dict[str, Any]:
    """Return the config of one of the runs."""
    return {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True, "fused": True,
            },
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "model": {"preset": "gpt2", "seq_length": length},
        "data": {"dir": str(corpus)},
        "training": {
            "steps": steps, "lr_schedule": "cosine", "warmup": 0.05, "min_lr": 6e-5, "seed": 1,
            "log_every": 5, "eval_every": steps // 10, "eval_sequences": 64, "save_every": steps // 20,
            "keep_checkpoints": 1,
        },
        "mst": {
            "method": method,
            "sparsity": {"max": 0.96, "warmup": 0.0714285714, "ultra": 0.7142857143, "restore": 0.0714285714},
            "topology": {"interval": 10, "update_fraction": 0.3, "random_ratio": 0.25},
            "attention": {"pattern": "dense"},
            "compute": {"compact": "auto"},
        } if method == "mst" else {"method": method},
    }  # fmt: skip


def prepare(text: Path, out: Path) -> Path:
    """Return the folder of the tokens, which is made if it does not exist."""
    out.mkdir(parents=True, exist_ok=True)
    ranks_file, corpus = out / "bpe.tiktoken", out / "corpus"
    if not ranks_file.exists():
        train_tokenizer(text, ranks_file)
    command = [sys.executable, "-m", "mst_scale", "data", str(text), "--tokenizer", str(ranks_file)]
    subprocess.run([*command, "--text-key", "text", "--out", str(corpus)], check=True)
    return corpus


def train(method: str, corpus: Path, out: Path, *, steps: int, ranks: int, length: int) -> None:
    """Train one of the runs to its end, or continue it."""
    path = out / f"{method}.json"
    path.write_text(json.dumps(config(method, corpus, steps, ranks, length), indent=2))
    command = [sys.executable, "-m", "mst_scale", "launch", "local", "--processes", str(ranks), str(path)]
    subprocess.run([*command, "--out", str(out / method)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def rows_of(out: Path) -> list[Row]:
    """Return a row for each run and phase, from the metrics of the runs."""
    found: list[Row] = []
    for method in METHODS:
        path = out / method / "metrics.jsonl"
        if not path.exists():
            continue
        logged = [json.loads(line) for line in path.read_text().splitlines()]
        for phase in dict.fromkeys(row["phase"] for row in logged):
            found.append(_row(method, phase, [row for row in logged if row["phase"] == phase]))
        found.append({**_row(method, "whole run", logged), "step_ms_range": None})
    return found


def _row(method: str, phase: str, logged: list[Row]) -> Row:
    times = [row["step_ms"] for row in logged]
    losses = [row["val_loss"] for row in logged if row.get("val_loss") is not None]
    return {
        "method": method,
        "phase": phase,
        "steps": f"{logged[0]['step']}–{logged[-1]['step']}",
        "loss": statistics.mean(row["loss"] for row in logged[-10:]),
        "val_loss": losses[-1] if losses else None,
        "step_ms": statistics.median(times) if phase != "whole run" else statistics.mean(times),
        "step_ms_range": middle_half(times) if len(times) > 1 else None,
        "state_mb": logged[-1]["state_bytes"] / 1e6,
        "sent_mb": logged[-1]["comm_bytes"] / 1e6,
        "memory_mb": max(row["peak_memory_bytes"] or 0 for row in logged) / 1e6,
        **unmeasured(None, "the runs are compared phase by phase"),
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    lines = []
    for row in rows:
        spread = "" if row["step_ms_range"] is None else " ({:,.0f}–{:,.0f})".format(*row["step_ms_range"])
        lines.append([
            row["method"], row["phase"], row["steps"], f"{row['loss']:.3f}",
            "" if row["val_loss"] is None else f"{row['val_loss']:.3f}", f"{row['step_ms']:,.0f}{spread}",
            f"{row['state_mb']:,.0f}", f"{row['sent_mb']:,.0f}", f"{row['memory_mb']:,.0f}",
        ])  # fmt: skip
    head = ["run", "phase", "steps", "loss", "validation", "step, ms", "state, MB", "sent, MB", "memory, MB"]
    return grid(head, lines)


def main(arguments: Sequence[str]) -> int:
    """Train what is missing, and print the results."""
    parser = command_line("mst bench real_run", __doc__)
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with a key text")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokens and the runs")
    parser.add_argument("--steps", type=at_least(20), default=1000, help="of each run (default: %(default)s)")
    parser.add_argument("--ranks", type=at_least(1), default=2, help="processes (default: %(default)s)")
    parser.add_argument("--length", type=at_least(2), default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="runs to train (default: both)")
    parser.add_argument("--table", action="store_true", help="train nothing; show what the runs have logged so far")
    options = parse(parser, arguments)
    if not options.table:
        corpus = prepare(options.text, options.out)
        for method in options.methods:
            train(method, corpus, options.out, steps=options.steps, ranks=options.ranks, length=options.length)
    files = f"--text {options.text} --out {options.out}"
    options.command = (
        f"mst bench real_run {files} --steps {options.steps} --ranks {options.ranks} --length {options.length}"
    )
    rows = rows_of(options.out)
    setting = {"model": "GPT-2 small, 124 M parameters", "dtype": "float32", "ZeRO stage": 1,
               "tokens per step": options.ranks * options.length}  # fmt: skip
    return show(options, rows, table(rows), machine(1), setting)

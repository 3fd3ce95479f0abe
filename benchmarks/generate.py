"""Compares decoding from sparse weights with decoding from dense ones.

    mst bench generate [--model small medium] [--batch 1 8] [--quick | --memory] [--json | --markdown]

This measures one more token for each sequence of a batch, after a prompt of 32 tokens, with a GPT-2 whose weights are
random and 80 or 96 % zero (every matrix and the embedding; the position embedding is dense). Baselines, in turns with
ours and in the same process: the same model dense, eager or with torch.compile, whichever is faster; `generate` of
transformers with the dense model; and a dense model of our own code that has about as many weights as ours has nonzero
ones. Times are milliseconds per step, medians over the steps of all rounds, with the middle half of them; with
--cpu-time they are processor time of one thread, which depends less on what else runs on the machine.

`weights` are the bytes of all weights in memory, including the positions of sparse ones, as a fraction of the dense
model's. With --memory, `resident` is what a process gains by loading the model from a compact file, as `mst generate`
does, and decoding with it; no times are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from mst_scale.comm.parser import at_least
from mst_scale.compact_files import layout
from mst_scale.compact_files.weights import model_block, open_weights
from mst_scale.config import MODELS, ModelConfig
from mst_scale.errors import UserError
from mst_scale.generation import sparse_matrix
from mst_scale.generation.decoder import Decoder, load_decoder
from mst_scale.generation.generate import TYPES
from mst_scale.generation.sparse_matrix import DenseMatrix, Matrix, SparseMatrix
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.mixed_growing import packed_bits
from mst_scale.models import shapes_of

from .machine import machine
from .page import Row, aside, command_line, grid, parse, show, unmeasured, with_range
from .timing import versus

PROMPT = 32  # tokens
SPARSITIES = (0.8, 0.96)
ASKED = {0.8: 2.5, 0.96: 6.0}  # times the tokens per second of the dense model, in a batch of 1
EAGER, COMPILED, THEIRS = "dense, eager", "dense, torch.compile", "transformers, generate"
SIZES = {"small": "gpt2", "medium": "gpt2-medium"}
Step = Callable[[], object]
Clock = Callable[[], float]


def config_of(size: str) -> ModelConfig:
    """Return the config of a size."""
    return ModelConfig(**MODELS[SIZES[size]])


def narrower(config: ModelConfig, weights: float) -> ModelConfig:
    """Return the same depth with the width at which a model has about as many weights; heads of 32."""
    widths = (
        replace(config, preset=None, n_embd=d, n_head=d // 32, d_ff=None) for d in range(32, config.n_embd + 1, 32)
    )
    return min(widths, key=lambda narrow: abs(narrow.weights - weights))


def build(config: ModelConfig, sparsity: float, dtype: torch.dtype) -> Decoder:
    """Return a model with random weights, sparse or (at 0) dense; zeros and values are drawn matrix by matrix."""
    generator = torch.Generator().manual_seed(0)
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, torch.Tensor] = {}
    for name, shape in shapes_of(config).items():
        if len(shape) == 1:
            vectors[name] = torch.ones(shape)
        elif sparsity == 0 or name == "wpe.weight":
            matrices[name] = DenseMatrix((0.02 * torch.randn(shape, generator=generator)).to(dtype))
        else:
            kept = torch.rand(shape, generator=generator) >= sparsity
            values = (0.02 * torch.randn(int(kept.sum()), generator=generator)).to(dtype)
            matrices[name] = SparseMatrix(values, packed_bits.pack(kept.view(-1)), (shape[0], shape[1]))
    return Decoder(config, matrices, vectors, Pattern("dense"))


# Sides: each returns a function that computes one more token of every sequence ----------------------------------------


def ours(decoder: Decoder, batch: int, room: int) -> Step:
    """Our decoder, whose matrices may be dense."""
    cache = decoder.new_cache(batch, room)
    token = decoder.logits(torch.randint(1000, (batch, PROMPT)), cache).argmax(-1)

    def step() -> None:
        nonlocal token
        token = decoder.logits(token, cache).argmax(-1)
        cache.length = min(cache.length, room - 1)

    return step


def compiled(decoder: Decoder, batch: int, room: int) -> Step:
    """The dense model with torch.compile: a block is one graph, with a cache of fixed size and a mask."""
    config = decoder.config
    heads, d = config.n_head, config.n_embd
    weight = {name: m.weight for name, m in decoder.matrices.items() if isinstance(m, DenseMatrix)}
    dtype = weight["wte.weight"].dtype

    def block(x: Any, at: Any, mask: Any, keys: Any, values: Any, *w: Any) -> Any:
        ln_1, qkv, proj, ln_2, up, down = w
        q, k, v = F.linear(F.layer_norm(x, (d,), ln_1), qkv).view(batch, 1, 3, heads, -1).transpose(1, 3).unbind(2)
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + F.linear(out.transpose(1, 2).reshape(batch, d), proj)
        return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (d,), ln_2), up), approximate="tanh"), down)

    fast = torch.compile(block)
    kinds = ("ln_1", "attention.qkv", "attention.proj", "ln_2", "mlp.up", "mlp.down")
    norm = {name: vector.to(dtype) for name, vector in decoder.vectors.items()}
    layers = [
        [{**weight, **norm}[f"blocks.{layer}.{kind}.weight"] for kind in kinds] for layer in range(config.n_layer)
    ]
    cache = [
        [torch.zeros(batch, heads, room, d // heads, dtype=dtype) for _ in range(2)] for _ in range(config.n_layer)
    ]
    positions, length = torch.arange(room), PROMPT
    token = torch.randint(1000, (batch,))

    @torch.inference_mode()
    def step() -> None:
        nonlocal token, length
        at = torch.tensor([length])
        x = weight["wte.weight"][token] + weight["wpe.weight"][at]
        mask = (positions <= at).view(1, 1, 1, room)
        for layer, (keys, values) in zip(layers, cache, strict=True):
            x = fast(x, at, mask, keys, values, *layer)
        token = F.linear(F.layer_norm(x, (d,), norm["ln_f.weight"]), weight["wte.weight"]).argmax(-1)
        length = min(length + 1, room - 1)

    return step


class Transformers:
    """GPT-2 of transformers with random weights, whose `generate` is timed as a whole."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel
        from transformers.utils import logging

        logging.set_verbosity_error()
        theirs = GPT2Config(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
        with torch.device("meta"):
            model = GPT2LMHeadModel(theirs)
        self.model = model.to_empty(device="cpu").to(dtype).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.02)
        self.model.tie_weights()

    def milliseconds(self, batch: int, clock: Clock, steps: int) -> list[float]:
        """Return the milliseconds of each new token but the first."""
        times: list[float] = []

        class EachStep:  # asked after every step of a batch; a streamer takes one sequence only
            def __call__(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
                times.append(clock())
                return torch.zeros(len(ids), dtype=torch.bool)

        from transformers import StoppingCriteriaList

        ids = torch.randint(1000, (batch, PROMPT))
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps + 1, min_new_tokens=steps + 1,
                do_sample=False, stopping_criteria=StoppingCriteriaList([EachStep()]), pad_token_id=0, eos_token_id=0,
            )  # fmt: skip
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


def in_turns(sides: dict[Any, Callable[[int], list[float]]], rounds: int, steps: int) -> dict[Any, list[float]]:
    """Return milliseconds per step of each side, in turns; the first round only warms up."""
    times: dict[Any, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, measure in sides.items():
            found = measure(steps if turn else 2)
            if turn:
                times[name] += found
    return times


def timed(step: Step, clock: Clock) -> Callable[[int], list[float]]:
    """Return a function that measures as many steps."""

    def measure(steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            start = clock()
            step()
            times.append(1e3 * (clock() - start))
        return times

    return measure


# Rows -----------------------------------------------------------------------------------------------------------------


def _room(options: Any) -> int:
    """Return the number of tokens of a sequence at the end of the last round."""
    return PROMPT + 1 + (options.rounds + 1) * int(options.steps)


def rows_of(size: str, dtype: str, options: Any) -> list[Row]:
    """Measure one model in one dtype: all sparsities and batches."""
    config, kind = config_of(size), TYPES[dtype]
    room = _room(options)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    dense, theirs = build(config, 0.0, kind), Transformers(config, kind)
    sparse = {s: build(config, s, kind) for s in options.sparsity}
    equal = {s: build(narrower(config, (1 - s) * config.weights), 0.0, kind) for s in options.sparsity}
    found: list[Row] = []
    for batch in options.batch:
        sides: dict[Any, Callable[[int], list[float]]] = {
            EAGER: timed(ours(dense, batch, room), clock),
            THEIRS: partial(theirs.milliseconds, batch, clock),
        }
        if not options.no_compile:
            sides[COMPILED] = timed(compiled(dense, batch, room), clock)
        for s in options.sparsity:
            sides["ours", s] = timed(ours(sparse[s], batch, room), clock)
            sides["equal", s] = timed(ours(equal[s], batch, room), clock)
        times = in_turns(sides, options.rounds, options.steps)
        fastest = min((EAGER, COMPILED), key=lambda name: statistics.median(times.get(name, [torch.inf])))
        for s in options.sparsity:
            mine = times["ours", s]
            about = {
                "model": size, "dtype": dtype, "batch": batch, "sparsity": s,
                "tokens_per_s": round(1e3 * batch / statistics.median(mine), 1),
                "weights": round(sparse[s].weight_bytes / dense.weight_bytes, 3),
            }  # fmt: skip
            for name in (name for name in sides if isinstance(name, str)):
                asked = ASKED.get(s) if name == fastest and batch == 1 else None
                found.append({**about, **versus(mine, name, times[name]), "asked": asked})
            name = f"dense, as many weights (width {equal[s].config.n_embd})"
            found.append({**about, **versus(mine, name, times["equal", s]), "asked": None})
    return found


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    head = [
        "model", "dtype", "batch", "sparsity", "ours ms (middle half)", "tokens/s", "baseline",
        "baseline ms (middle half)", "speed-up", "asked", "weights",
    ]  # fmt: skip
    lines = []
    for row in rows:
        lines.append([
            row["model"], row["dtype"], row["batch"], f"{row['sparsity']:.0%}", with_range(row, "ours", ".1f"),
            f"{row['tokens_per_s']:,.0f}", row["baseline"], with_range(row, "baseline", ".1f"),
            f"**{row['speedup']:.2f}**", row["asked"] or "", row["weights"],
        ])  # fmt: skip
    return grid(head, lines)


# Memory ---------------------------------------------------------------------------------------------------------------


def memory_rows(options: Any) -> list[Row]:
    """Measure the memory of each model in a process of its own."""
    found: list[Row] = []
    for size in options.model:
        for dtype in options.dtype:
            dense: Row = {}
            for sparsity in (0.0, *options.sparsity):
                about = {"model": size, "dtype": dtype, "sparsity": sparsity}
                with tempfile.TemporaryDirectory() as folder:
                    write_model(Path(folder) / layout.FILE, config_of(size), sparsity, TYPES[dtype])
                    command = [sys.executable, "-m", "mst_scale.benchmarks.generate", "--child", folder]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                measured = json.loads(done.stdout.splitlines()[-1])
                dense = dense or measured
                shares = {f"{name}_share": round(measured[name] / dense[name], 3) for name in measured}
                why = unmeasured("dense", "memory is compared, not times")
                found.append({**about, **measured, **shares, **why})
    return found


def child(folder: str) -> None:
    """Print what this process gains by loading a model and decoding a few tokens."""
    tiny = ModelConfig(n_layer=1, n_head=1, n_embd=32, seq_length=PROMPT + 8, vocab_size=1000)
    ours(build(tiny, 0.9, torch.float32), 1, PROMPT + 2)()  # what torch takes at first use
    before = psutil.Process().memory_info().rss
    decoder = load_decoder(open_weights(Path(folder)))
    step = ours(decoder, 1, PROMPT + 8)
    for _ in range(4):
        step()
    print(json.dumps({"weights": decoder.weight_bytes, "resident": psutil.Process().memory_info().rss - before}))


def write_model(path: Path, config: ModelConfig, sparsity: float, dtype: torch.dtype) -> None:
    """Write a compact file with random weights of which `sparsity` are zeros, but for the position embedding."""
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor, None]]:
        for name, shape in shapes_of(config).items():
            tensor = 0.02 * torch.randn(shape, generator=generator)
            if len(shape) == 2 and name != "wpe.weight":
                tensor[torch.rand(shape, generator=generator) < sparsity] = 0
            yield name, tensor.to(dtype), None

    layout.write(path, tensors(), model_block(config), {"step": None, "method": None, "tokenizer": None})


def memory_table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    head = ["model", "dtype", "sparsity", "weights MB", "of dense", "resident MB", "of dense"]
    lines = [
        [
            row["model"], row["dtype"], f"{row['sparsity']:.0%}", f"{row['weights'] / 1e6:,.1f}", row["weights_share"],
            f"{row['resident'] / 1e6:,.1f}", row["resident_share"],
        ]
        for row in rows
    ]  # fmt: skip
    return grid(head, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("mst bench generate", __doc__)
    parser.add_argument("--model", nargs="+", choices=SIZES, default=["small", "medium"])
    parser.add_argument("--dtype", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--batch", nargs="+", type=at_least(1), default=[1, 8], help="sequences at once")
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--rounds", type=at_least(1), default=4, help="turns of each side")
    parser.add_argument("--steps", type=at_least(2), default=10, help="tokens of a turn")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (default: torch's choice)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes a minute")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time of one thread, if others use the machine"
    )
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--quick", action="store_true", help="the small model in float32, without torch.compile")
    parser.add_argument("--child", metavar="DIR", help=argparse.SUPPRESS)  # a process whose memory is measured
    options = parse(parser, arguments)
    if options.child:
        child(options.child)
        return 0
    if options.quick:
        options.model, options.dtype, options.no_compile = ["small"], ["float32"], True
    if options.cpu_time:
        options.threads = 1
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if isinstance(reason := sparse_matrix.library(), str):
        raise UserError(f"the compiled kernel cannot be had: {reason}")
    longest, room = min(config_of(size).seq_length for size in options.model), _room(options)
    if not options.memory and room > longest:
        raise UserError(f"--rounds and --steps need {room:,} tokens, and the models have {longest:,}: reduce them")
    about = machine()
    if options.memory:
        rows = memory_rows(options)
        return show(options, rows, memory_table(rows), about)
    with aside():  # transformers imports DeepSpeed
        rows = [row for size in options.model for dtype in options.dtype for row in rows_of(size, dtype, options)]
    return show(options, rows, table(rows), about)


if __name__ == "__main__":
    raise SystemExit(main())

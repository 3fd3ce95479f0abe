"""Compares decoding from sparse weights with decoding from dense ones.

    mst bench generate [--model small medium] [--dtype float32 bfloat16] [--batch 1 8] [--quick] [--json | --markdown]

One more token for each sequence of a batch, after a prompt of 32 tokens, by a GPT-2 with random weights of which 80 or
96 % are zero (every matrix and the embedding; the position embedding is dense). Baselines, in turns with ours and in
the same process: the same model dense, eager or with torch.compile, whichever is faster; `generate` of transformers
with the dense model; and a dense model of our own code that has about as many weights as ours has nonzero ones. Times
are milliseconds per step, medians over the steps of all rounds, with the middle half of them.

`weights` are the bytes of all weights in memory, the places of sparse ones included, as a share of the dense model's.
`resident` is the memory that the process gains by building the model and decoding with it, measured in a process for
each model, as a share of what it gains with the dense model.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from mst_scale.comm.parser import Parser, at_least
from mst_scale.config import MODELS, ModelConfig
from mst_scale.errors import UserError
from mst_scale.generation import sparse_matrix
from mst_scale.generation.decoder import Decoder
from mst_scale.generation.sparse_matrix import DenseMatrix, Matrix, SparseMatrix
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.mixed_growing import packed_bits
from mst_scale.models import GPT

from .machine import machine
from .page import Row, grid, outputs, tell
from .timing import middle_half, versus

PROMPT = 32  # tokens
SPARSITIES = (0.8, 0.96)
ASKED = {0.8: 2.5, 0.96: 6.0}  # times the tokens per second of the dense model, in a batch of 1
ASKED_MEMORY = {0.8: 0.35}
SIZES = {"small": "gpt2", "medium": "gpt2-medium"}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Step = Callable[[], object]


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
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
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

    def milliseconds(self, batch: int, steps: int) -> list[float]:
        """Return the milliseconds of each new token but the first."""
        times: list[float] = []

        class EachStep:  # asked after every step of a batch; a streamer takes one sequence only
            def __call__(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
                times.append(time.perf_counter())
                return torch.zeros(len(ids), dtype=torch.bool)

        from transformers import StoppingCriteriaList

        ids = torch.randint(1000, (batch, PROMPT))
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps + 1, min_new_tokens=steps + 1,
                do_sample=False, stopping_criteria=StoppingCriteriaList([EachStep()]), pad_token_id=0, eos_token_id=0,
            )  # fmt: skip
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


def in_turns(sides: dict[str, Callable[[int], list[float]]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return milliseconds per step of each side, in turns; the first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, measure in sides.items():
            found = measure(steps if turn else 2)
            if turn:
                times[name] += found
    return times


def timed(step: Step) -> Callable[[int], list[float]]:
    """Return a function that measures as many steps."""

    def measure(steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    return measure


# Rows -----------------------------------------------------------------------------------------------------------------


def rows_of(size: str, dtype: str, options: Any, resident: dict[Any, float]) -> list[Row]:
    """Measure one model in one dtype: all sparsities and batches."""
    config, kind = config_of(size), TYPES[dtype]
    room = PROMPT + 1 + (options.rounds + 1) * options.steps
    dense = build(config, 0.0, kind)
    theirs = Transformers(config, kind)
    found: list[Row] = []
    for sparsity in options.sparsity:
        sparse = build(config, sparsity, kind)
        equal = build(narrower(config, (1 - sparsity) * config.weights), 0.0, kind)
        for batch in options.batch:
            sides = {
                "ours": timed(ours(sparse, batch, room)),
                "dense, eager": timed(ours(dense, batch, room)),
                "transformers, generate": partial(theirs.milliseconds, batch),
                f"dense, as many weights (width {equal.config.n_embd})": timed(ours(equal, batch, room)),
            }
            if not options.no_compile:
                sides["dense, torch.compile"] = timed(compiled(dense, batch, room))
            times = in_turns(sides, options.rounds, options.steps)
            shares = {
                "weights": round(sparse.weight_bytes / dense.weight_bytes, 3),
                "resident": resident.get((size, dtype, sparsity)),
            }
            about = {"model": size, "dtype": dtype, "batch": batch, "sparsity": sparsity, **shares}
            for name in list(sides)[1:]:
                found.append({**about, **versus(times["ours"], name, times[name], middle_half)})
                found[-1]["tokens_per_s"] = round(1e3 * batch / statistics.median(times["ours"]), 1)
    fastest(found)
    return found


def fastest(rows: list[Row]) -> None:
    """Mark the faster form of the dense model, which the goal is about."""
    cases: dict[Any, list[Row]] = {}
    for row in rows:
        if row["baseline"] in ("dense, eager", "dense, torch.compile"):
            cases.setdefault((row["sparsity"], row["batch"]), []).append(row)
    for (sparsity, batch), some in cases.items():
        if batch == 1:
            min(some, key=lambda row: row["baseline_ms"])["asked"] = ASKED.get(sparsity)


def measure_resident(options: Any) -> dict[Any, float]:
    """Return the memory of each sparse model as a share of the dense one's, each measured in its own process."""
    found: dict[Any, float] = {}
    for size in options.model:
        for dtype in options.dtype:
            gained = {}
            for sparsity in (0.0, *options.sparsity):
                words = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--child"]
                done = subprocess.run(
                    [*words, json.dumps([size, dtype, sparsity])], capture_output=True, text=True, check=True
                )
                gained[sparsity] = int(done.stdout.split()[-1])
                if sparsity:
                    found[size, dtype, sparsity] = round(gained[sparsity] / gained[0.0], 3)
    return found


def child(words: str) -> None:
    """Print the memory that this process gains by a model and a few tokens."""
    size, dtype, sparsity = json.loads(words)
    ours(build(config_of("small"), 0.99, TYPES[dtype]), 1, PROMPT + 2)()  # what torch itself takes at first use
    before = psutil.Process().memory_info().rss
    decoder = build(config_of(size), sparsity, TYPES[dtype])
    step = ours(decoder, 1, PROMPT + 8)
    for _ in range(4):
        step()
    print(psutil.Process().memory_info().rss - before)


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    head = [
        "model", "dtype", "batch", "sparsity", "ours ms (middle half)", "tokens/s", "baseline",
        "baseline ms (middle half)", "speed-up", "asked", "weights", "resident",
    ]  # fmt: skip
    lines = []
    for row in rows:
        mine, other = (f"{a:.1f} – {b:.1f}" for a, b in (row["ours_range"], row["baseline_range"]))
        lines.append([
            row["model"], row["dtype"], row["batch"], f"{row['sparsity']:.0%}", f"{row['ours_ms']:.1f} ({mine})",
            f"{row['tokens_per_s']:,.0f}", row["baseline"], f"{row['baseline_ms']:.1f} ({other})",
            f"**{row['speedup']:.2f}**", row.get("asked") or "", row["weights"],
            "" if row["resident"] is None else row["resident"],
        ])  # fmt: skip
    return grid(head, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its results."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--child"]:
        child(given[1])
        return 0
    parser = Parser(prog="mst bench generate", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", nargs="+", choices=SIZES, default=["small", "medium"])
    parser.add_argument("--dtype", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--batch", nargs="+", type=at_least(1), default=[1, 8], help="sequences at once")
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--rounds", type=at_least(1), default=4, help="turns of each side")
    parser.add_argument("--steps", type=at_least(2), default=10, help="tokens of a turn")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (default: torch's choice)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes a minute")
    parser.add_argument("--no-resident", action="store_true", help="leave out the memory of processes")
    parser.add_argument("--quick", action="store_true", help="the small model in float32, without these two")
    outputs(parser)
    options = parser.parse_args(given)
    if options.quick:
        options = copy.copy(options)
        options.model, options.dtype, options.no_compile, options.no_resident = ["small"], ["float32"], True, True
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if isinstance(reason := sparse_matrix.library(), str):
        raise UserError(f"the compiled kernel cannot be had: {reason}")
    about = machine()
    resident = {} if options.no_resident else measure_resident(options)
    rows = [row for size in options.model for dtype in options.dtype for row in rows_of(size, dtype, options, resident)]
    command = f"mst bench generate --model {' '.join(options.model)} --dtype {' '.join(options.dtype)}"
    command += f" --batch {' '.join(map(str, options.batch))} --rounds {options.rounds} --steps {options.steps}"
    command += f" --threads {about['threads']}{' --no-compile' * options.no_compile}"
    tell(options, rows, table(rows), about=about, doc=__doc__, command=command)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

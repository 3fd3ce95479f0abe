"""Measures how time, memory and network traffic of a training step follow the density.

    mst bench density [--stages 0 1 2 3] [--layers N] [--tokens N] [--rates 1 10] [--steps N] [--json | --markdown]
    mst bench density --stages 2 --rates 1           one ZeRO stage, one speed of the network

Three engines train GPT-2 small's widths on two ranks, in turns in the same processes: plain DeepSpeed ("dense"), masked
dense weights ("masked") and compact weights ("compact"), the last two at 96 % sparsity, tied head included. Each rank
runs in its own network namespace. The namespaces are joined by a link whose speed is limited to each of `--rates`
(Gbit/s; 0 is no limit), and the bytes "on the wire" are those that a rank's interface has sent and received in a step;
those "by the logger" are what DeepSpeed's comms_logger counts: the tensors that a rank passes to its collectives.
"tokens per s" are those of both ranks together. "optimizer" is the time of DeepSpeed's step without communication:
gradient norm, clipping, masking, update and casts. "states" are the optimizer's states and the weights that it updates,
"gradients" what a rank keeps for its update; "held" is how much the resident memory of a rank grows from before the
model is built to after its first step. "save" is the time of `engine.save_checkpoint` and the bytes of all files of the
checkpoint. All attention is dense. Sequences are short, so that the network and the optimizer matter as much as they do
with many ranks; a rank has one thread. Ranges are the middle half of the steps.

Linux, root and iproute2 are required, because the command creates network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from mst_scale.comm.parser import Parser, at_least
from mst_scale.errors import UserError

from . import memory
from .machine import machine
from .page import Row, aside, command_line, grid, parse, show, with_range
from .timing import seconds_of, versus
from .training import take_step

SIDES = ("dense", "masked", "compact")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29_400
INTERFACE = "mstbench"  # in each namespace


def config(side: str, stage: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the config of one engine."""
    sparse = {
        "method": "sparse",
        "sparsity": {"max": 0.96},
        "topology": {"interval": 1000, "check_every": 0},
        "targets": {"lm_head": True},
        "attention": {"pattern": "dense"},
        "compute": {"compact": "auto" if side == "compact" else "off"},
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "torch_adam": True, "fused": True}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "zero_optimization": {"stage": stage},
        "tensorboard": {"enabled": False},
        "training": {"steps": 10**6},
        "mst": {"method": "dense"} if side == "dense" else sparse,
    }


# --- one rank ---


def measure(stage: int, options: argparse.Namespace) -> dict[str, Row]:
    """Train with every engine in turns; return what a step of each takes on this rank."""
    import mst_scale
    from mst_scale.config import ModelConfig
    from mst_scale.models.gpt import GPT

    shape = ModelConfig(n_layer=options.layers, n_head=12, n_embd=768, seq_length=options.tokens, vocab_size=50257)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(shape.vocab_size, (1, options.tokens), generator=generator)
    engines: dict[str, Any] = {}
    found: dict[str, Row] = {}

    def build(side: str) -> Any:
        torch.manual_seed(0)
        engine = mst_scale.initialize(model=GPT(shape), config=config(side, stage, options))[0]
        take_step(engine, tokens)
        return engine

    for side in SIDES:
        engines[side], held = memory.held_by(partial(build, side), "cpu")
        states = memory.state_bytes(engines[side])
        found[side] = {"states": states, "held": held, "step_ms": [], "optimizer_ms": [], "wire": []}
    for _ in range(options.steps):
        for side, engine in engines.items():
            torch.distributed.barrier()
            sent = _interface_bytes()
            found[side]["step_ms"].append(1e3 * seconds_of(partial(take_step, engine, tokens)))
            torch.distributed.barrier()
            found[side]["wire"].append(_interface_bytes() - sent)
    for _ in range(options.steps):
        for side, engine in engines.items():
            ms, logged = _optimizer_ms(engine, tokens)
            found[side]["optimizer_ms"].append(ms)
            found[side]["logged"] = logged
    for side, engine in engines.items():
        engine.backward(engine(tokens, tokens))
        found[side]["gradients"] = memory.gradient_bytes(engine)
        engine.step()
        found[side]["save_s"], found[side]["saved"] = _save(engine)
    return found


def _optimizer_ms(engine: Any, tokens: torch.Tensor) -> tuple[float, int]:
    """Return the time of DeepSpeed's step without its collectives, and the bytes of all collectives of a step.

    They are measured in steps of their own.
    """
    from .stopwatch import Stopwatch

    watch = Stopwatch(torch.device("cpu"))
    with watch.running():
        engine.backward(engine(tokens, tokens))
        with watch.span("optimizer"):
            engine.step()
    return watch.parts["optimizer"], sum(collective.payload for collective in watch.collectives.values())


def _save(engine: Any) -> tuple[float, int]:
    """Return how long a checkpoint takes on all ranks together, and the bytes of its files (rank 0 counts)."""
    folder = Path(tempfile.gettempdir()) / f"mst-density-{os.environ['MASTER_PORT']}"
    torch.distributed.barrier()
    seconds = seconds_of(lambda: (engine.save_checkpoint(str(folder), tag="one"), torch.distributed.barrier()))
    size = sum(path.stat().st_size for path in (folder / "one").rglob("*") if path.is_file())
    torch.distributed.barrier()
    if engine.global_rank == 0:
        shutil.rmtree(folder)
    torch.distributed.barrier()
    return seconds, size


def _interface_bytes() -> int:
    """Return the bytes that all interfaces of this network namespace but the loopback have sent and received."""
    counts = psutil.net_io_counters(pernic=True, nowrap=False)
    return sum(count.bytes_recv + count.bytes_sent for name, count in counts.items() if name != "lo")


def rank(argv: Sequence[str]) -> int:
    """Run one rank; the first argument is the ZeRO stage, the second the file of the result."""
    stage, out, *rest = argv
    with aside():
        found = measure(int(stage), parser().parse_args(rest))
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))
    torch.distributed.barrier()
    return 0


# --- two ranks and the network between them ---


@contextlib.contextmanager
def network(gbits: float) -> Iterator[list[str]]:
    """Create two network namespaces that a link of this speed joins; yield their names, and remove them at the end."""
    names = [f"mst-bench-{os.getpid()}-{i}" for i in (0, 1)]
    ends = [f"{INTERFACE}{i}" for i in (0, 1)]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which removes them
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name, "name", INTERFACE)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if gbits:
                limit = ("rate", f"{gbits}gbit", "burst", "1mb", "latency", "20ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        signal.signal(signal.SIGTERM, before)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"`{' '.join(words)}` failed ({done.stderr.strip()}): network namespaces require root")


def two_ranks(stage: int, gbits: float, argv: Sequence[str]) -> dict[str, Row]:
    """Return what rank 0 has measured."""
    with network(gbits) as names, tempfile.TemporaryDirectory(prefix="mst-bench-") as folder:
        out = Path(folder) / "found.json"
        ranks = []
        for i, name in enumerate(names):
            command = ["ip", "netns", "exec", name, sys.executable, "-c", "import sys;"
                       "from mst_scale.benchmarks.density import rank; sys.exit(rank(sys.argv[1:]))"]  # fmt: skip
            place = {"RANK": str(i), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            meeting = {
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(PORT),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }
            log = open(Path(folder) / f"rank{i}.log", "w")  # noqa: SIM115 (closed with the process)
            ranks.append(
                subprocess.Popen(
                    [*command, str(stage), str(out), *argv],
                    env={**os.environ, **place, **meeting}, stdout=log, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        try:
            while None in (codes := [process.poll() for process in ranks]) and not any(codes):
                time.sleep(0.2)
        finally:
            for process in ranks:
                process.kill()
        if any(codes) or not out.exists():
            log_text = "".join((Path(folder) / f"rank{i}.log").read_text()[-2000:] for i in (0, 1))
            raise OSError(f"ranks of stage {stage} ended with {codes}: {log_text}")
        return dict(json.loads(out.read_text()))


# --- the table ---


def rows_of(stage: int, gbits: float, tokens: int, found: dict[str, Row]) -> list[Row]:
    """Return a row for each sparse side, compared with plain DeepSpeed."""
    rows = []
    for side in SIDES[1:]:
        sides = {"ours": found[side], "baseline": found["dense"]}
        ours, theirs = (of["step_ms"] for of in sides.values())
        row = {"stage": stage, "gbits": gbits, "what": side, **versus(ours, "plain DeepSpeed", theirs, digits=1)}
        for who, times in (("ours", ours), ("baseline", theirs)):
            row[f"{who}_tokens_per_s"] = round(2e3 * tokens / statistics.median(times), 1)
        for who, of in sides.items():
            row[f"{who}_optimizer_ms"] = round(statistics.median(of["optimizer_ms"]), 1)
            row |= {f"{who}_{what}": of[what] for what in ("states", "held", "gradients", "logged", "saved", "save_s")}
            row[f"{who}_wire"] = round(statistics.median(of["wire"]))
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table of Markdown."""
    head = [
        "ZeRO", "Gbit/s", "weights", "step, ms (middle half)", "plain DeepSpeed, ms", "speed-up",
        "tokens per s", "optimizer, ms", "on the wire, MB", "by the logger, MB", "states, MB", "gradients, MB",
        "held, MB", "save, s", "save, MB",
    ]  # fmt: skip
    lines = [
        [
            row["stage"], row["gbits"] or "no limit", row["what"],
            with_range(row, "ours"), with_range(row, "baseline"),
            f"**{row['speedup']:.2f}**",
            f"{row['ours_tokens_per_s']:,.1f} / {row['baseline_tokens_per_s']:,.1f}",
            f"{row['ours_optimizer_ms']:,} / {row['baseline_optimizer_ms']:,}",
            *(_mb(row, what) for what in ("wire", "logged", "states", "gradients", "held")),
            f"{row['ours_save_s']:.1f} / {row['baseline_save_s']:.1f}",
            _mb(row, "saved"),
        ]
        for row in rows
    ]  # fmt: skip
    return grid(head, lines)


def _mb(row: Row, what: str) -> str:
    ours, theirs = row[f"ours_{what}"], row[f"baseline_{what}"]
    if ours is None or theirs is None:
        return "not measured"
    return f"{ours / 1e6:,.1f} / {theirs / 1e6:,.1f} ({ours / theirs:.3f})"


def parser() -> Parser:
    """Return the parser of the options."""
    made = command_line("mst bench density", __doc__, "print the page benchmarks/results/density.md")
    made.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4), help="ZeRO stages")
    made.add_argument("--layers", type=at_least(1), default=12, help="blocks of the model (default: 12)")
    made.add_argument("--tokens", type=at_least(2), default=64, help="length of a sequence, one per rank (default: 64)")
    made.add_argument("--rates", type=float, nargs="+", default=[0.0, 10.0, 1.0], help="Gbit/s; 0 is no limit")
    made.add_argument("--steps", type=at_least(1), default=5, help="measured steps of each engine (default: 5)")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its results."""
    options = parse(parser(), arguments)
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        raise UserError("mst bench density creates network namespaces: run it as root, with iproute2 installed")
    kept = [f"--{name}={getattr(options, name)}" for name in ("layers", "tokens", "steps", "dtype")]
    rows: list[Row] = []
    for stage in options.stages:
        for gbits in options.rates:
            rows += rows_of(stage, gbits, options.tokens, two_ranks(stage, gbits, kept))
            print(f"ZeRO-{stage} at {gbits or 'any'} Gbit/s is measured", file=sys.stderr, flush=True)
    setting = {
        "model": f"GPT-2 small's widths, {options.layers} layers", "dtype": options.dtype,
        "tokens per rank": options.tokens, "sparsity": "96 %",
    }  # fmt: skip
    return show(options, rows, table(rows), machine(), setting)

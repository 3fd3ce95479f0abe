"""Runs `mst_scale.pretrain` on the ranks of the pool, and reads what tests compare afterwards."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from pathlib import Path

import torch

from mst_scale import comm
from mst_scale.config import compact
from mst_scale.pretrain import start
from tests.support import tiny_run
from tests.support.messages import logged

MST = {
    "method": "mst",
    "sparsity": {"max": 0.8},
    "topology": {"interval": 2, "check_every": 3},
    "attention": {"pattern": "strided", "stride": 8},
}
# compact storage from the first step to the last
COMPACT = {
    "mst": {
        "method": "rigl",
        "sparsity": {"max": 0.8},
        "topology": {"interval": 3},
        "targets": {"lm_head": True},
        "compute": {"backend": "dense", "compact": "auto"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}
TIMES = ("seconds", "tokens_per_s", "step_ms", "save_s", "peak_memory_bytes", "state_bytes", "comm_bytes")


class Exited(BaseException):
    """Stands for os._exit: the process would be gone."""


def attempt(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """Run `pretrain` in this process: (exit code, what it wrote to stderr). No launcher is there to end a rank."""
    comm.exits.LINGER = 0.0
    stderr, leave, mine = io.StringIO(), os._exit, os.getpid()

    def gone(code: int) -> None:
        if os.getpid() != mine:  # a forked worker must not unwind our stack and tidy up our files
            leave(code)
        raise Exited(code)

    os._exit = gone  # type: ignore[assignment]
    warnings = logging.StreamHandler(stderr)  # what a run says of itself is not a complaint
    warnings.setLevel(logging.WARNING)
    if not logging.getLogger("mst_scale").handlers:  # `logged_attempt` listens already
        logging.getLogger("mst_scale").addHandler(warnings)
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            start.main(argv)
        code = 0
    except Exited as exited:
        code = exited.args[0]
    except SystemExit as exited:
        code = exited.code or 0
    finally:
        os._exit = leave
        logging.getLogger("mst_scale").removeHandler(warnings)
    return code, stderr.getvalue()


def logged_attempt(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """`attempt`, with what our logger says."""
    with logged(logging.NOTSET) as said:
        code, text = attempt(rank, world, argv)
    return code, "\n".join([text, *said])


def short_stretches() -> None:
    """From now on, a sparse phase of ten steps is long enough for compact storage in this process."""
    compact.LEAST_STEPS = 10


def compact_attempt(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """`logged_attempt` with `short_stretches`."""
    least = compact.LEAST_STEPS
    short_stretches()
    try:
        return logged_attempt(rank, world, argv)
    finally:
        compact.LEAST_STEPS = least


def arguments(folder: Path, out: str = "out", *more: str, **blocks) -> list[str]:
    """Training waits for saves unless they are what a test is about: a writer takes 2 s to import torch."""
    training = blocks.get("training", {})
    if "memory_every" not in training:
        blocks["training"] = {"async_save": False, **training}
    return ["--deepspeed_config", str(tiny_run.config(folder, **blocks)), "--out", str(folder / out), *more]


def without_times(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def differing(one: Path, other: Path, tag: str = "step00000012") -> list[str]:
    """The tensors of two runs' checkpoints that are not equal bit for bit."""
    ours, theirs = weights(one, tag), weights(other, tag)
    assert ours.keys() == theirs.keys() and len(ours) > 5
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def assert_same_run(one: Path, other: Path, tag: str = "step00000012") -> None:
    """Rows, and every tensor of a checkpoint, are equal bit for bit."""
    assert without_times(tiny_run.rows(one)) == without_times(tiny_run.rows(other))
    assert differing(one, other, tag) == []


def weights(out: Path, tag: str) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint's files, optimizer states and masks included."""
    found = {}
    for path in sorted((out / "checkpoints" / tag).rglob("*.pt")):
        collect(torch.load(path, weights_only=False), path.name, found)
    for path in sorted((out / "checkpoints" / tag).rglob("*.safetensors")):
        found[path.name] = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return found


def collect(value, path: str, found: dict) -> None:
    if torch.is_tensor(value):
        found[path] = value
    elif isinstance(value, dict):
        for key, inner in value.items():
            collect(inner, f"{path}/{key}", found)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            collect(inner, f"{path}/{index}", found)

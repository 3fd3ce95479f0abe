"""Kills, stops and starts a run at random, and checks that it ends as if nothing had happened.

    python -m tests.support.chaos --faults 20 --seed 1 --out benchmarks/results/chaos.md
    python -m tests.support.chaos --cases 4:1:tensor=2 --out more.md      # 2 ranks share a layer, 2 the batch

Each fault strikes at a random moment: a rank, or all, killed (SIGKILL); a rank frozen for a while (SIGSTOP, SIGCONT);
a rank asked to stop (SIGTERM or SIGUSR1); a kill while a checkpoint is being written; the newest checkpoint damaged
while the run is down. After each one that ends the run it is started again. On the CPU, in float32, with the same
number of ranks, the final weights, optimizer states, masks and logged rows must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mst_scale.comm import ParallelDims
from mst_scale.config.parallel import KEYS
from tests.support import forked, tiny_run

SAVE_EVERY = 7
CASES = "2:1,3:2,2:3,4:1,4:1:tensor=2,4:1:pipeline=2"
FAULTS = ("kill a rank", "kill all", "kill during a save", "freeze a rank", "ask to stop", "damage the newest")
TIMES = ("seconds", "tokens_per_s", "step_ms", "save_s", "peak_memory_bytes", "state_bytes", "comm_bytes")
MST = {
    "method": "mst",
    "sparsity": {"max": 0.8},
    "topology": {"interval": 2, "check_every": 5},
    "attention": {"pattern": "strided", "stride": 8},
}


@dataclass
class Story:
    """What was done to a run."""

    faults: list[str] = field(default_factory=list)
    starts: int = 0
    longest_end: float = 0.0  # seconds between a fault and the end of the last rank
    ended: bool = False  # the last fault is over


@dataclass(frozen=True)
class Case:
    world: int
    stage: int
    faults: int
    seed: int
    sizes: ParallelDims = field(default_factory=ParallelDims)

    @property
    def steps(self) -> int:
        return 40 + 5 * self.faults

    @property
    def held_at(self) -> int:
        """Here a run waits for its last fault, however fast the machine is."""
        return self.steps - SAVE_EVERY

    @property
    def cut(self) -> str:
        return self.sizes.describe() if self.sizes.model > 1 else ""

    def __str__(self) -> str:
        return f"{self.world} ranks{self.cut and f' ({self.cut})'}, stage {self.stage}, {self.faults} faults"


def arguments(folder: Path, case: Case) -> list[str]:
    """Slowed down a little by evaluations, so that faults find different moments."""
    training = {"steps": case.steps, "save_every": SAVE_EVERY, "eval_every": 5, "eval_sequences": 8, "log_every": 1}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}}
    config = tiny_run.config(
        folder, training=training, optimizer=optimizer, mst=MST, zero_optimization={"stage": case.stage},
        train_batch_size=4 * case.world, model={"n_layer": case.sizes.pipeline},
    )  # fmt: skip
    cut = [f"--set={KEYS[what]}={size}" for what, size in asdict(case.sizes).items() if size > 1]
    return ["--deepspeed_config", str(config), "--out", str(folder / "out"), *cut]


def undisturbed(folder: Path, case: Case) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    codes = forked.end(forked.start(case.world, arguments(folder, case), folder / "logs"), 300)
    assert codes == [0] * case.world, (codes, said(folder))
    return folder / "out"


def disturbed(folder: Path, case: Case) -> Story:
    """Until the faults are used up, then to the end."""
    folder.mkdir(parents=True, exist_ok=True)
    chance, story = random.Random(case.seed), Story()
    argv, out, held = arguments(folder, case), folder / "out", folder / "held"
    while True:
        story.starts += 1
        held.touch()
        processes = forked.start(
            case.world, argv, folder / "logs", functools.partial(forked.hold, case.held_at, str(held))
        )
        while len(story.faults) < case.faults and strike(chance, processes, out, case, story):
            pass
        held.unlink()
        left_alone, began = len(story.faults) == case.faults and story.ended, time.monotonic()
        codes = forked.end(processes, 300 if left_alone else 60)
        assert None not in codes, f"a rank hung after {story.faults[-1:]}: {said(folder)}"
        if codes == [0] * case.world and steps_done(out) == case.steps:
            assert len(story.faults) == case.faults, "the run was over before the last fault"
            return story
        if not left_alone:
            story.longest_end = max(story.longest_end, time.monotonic() - began)
        story.ended = len(story.faults) == case.faults
        assert story.starts <= case.faults + 1, said(folder)


def strike(chance: random.Random, processes: list[Any], out: Path, case: Case, story: Story) -> bool:
    """One fault, at a random moment; whether the run lives on."""
    fault, rank = chance.choice(FAULTS), chance.randrange(len(processes))
    here, steps, delay = steps_done(out), chance.randrange(1, 5), chance.uniform(0.0, 0.15)
    if case.held_at - here < 2 * SAVE_EVERY:  # at once: it is held soon
        fault = "kill all"
    elif fault == "kill during a save":
        delay = chance.uniform(0.0, 0.01)
        wait_for(lambda: steps_done(out) > here, processes)  # it has swept what earlier kills left behind
        wait_for(lambda: any((out / "checkpoints").glob("*.partial")) or steps_done(out) >= case.held_at, processes)
    else:
        wait_for(lambda: steps_done(out) >= here + steps, processes)
    time.sleep(delay)
    assert any(process.exitcode is None for process in processes), "it has ended by itself"
    story.faults.append(f"{fault} (rank {rank}, step {steps_done(out)})")
    if fault == "freeze a rank":
        send(processes[rank], signal.SIGSTOP)
        time.sleep(chance.uniform(0.1, 1.0))
        send(processes[rank], signal.SIGCONT)
        return True
    if fault == "ask to stop":
        send(processes[rank], chance.choice((signal.SIGTERM, signal.SIGUSR1)))
        return False
    victims = processes if fault in ("kill all", "damage the newest") else [processes[rank]]
    for victim in victims:
        send(victim, signal.SIGKILL)
    if fault == "damage the newest":
        for victim in victims:
            victim.join()
        damage(chance, out)
    return False


def damage(chance: random.Random, out: Path) -> None:
    """Flip a bit of a file of the newest checkpoint, if another one is left."""
    found = sorted(path for path in (out / "checkpoints").glob("step*") if not path.name.endswith(".partial"))
    if len(found) < 2:
        return
    victim = chance.choice(sorted(path for path in found[-1].rglob("*") if path.is_file() and path.stat().st_size))
    data = bytearray(victim.read_bytes())
    data[chance.randrange(len(data))] ^= 1
    victim.write_bytes(data)


def send(process: Any, signum: int) -> None:
    if process.exitcode is None:
        os.kill(process.pid, signum)


def wait_for(moment: Any, processes: list[Any]) -> None:
    deadline = time.monotonic() + 120
    while not moment() and any(process.exitcode is None for process in processes):
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.001)


def steps_done(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def said(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted((folder / "logs").glob("rank*")))


def differences(one: Path, other: Path) -> list[str]:
    """Rows, and every tensor of the last checkpoint, that are not equal bit for bit."""
    found = [f"row {a['step']}" for a, b in zip(rows(one), rows(other), strict=True) if a != b]
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    return found + [name for name in ours if not torch.equal(ours[name], theirs[name])]


def rows(out: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in tiny_run.rows(out)]


def tensors(out: Path) -> dict[str, torch.Tensor]:
    folder, found = out / "checkpoints" / (out / "checkpoints" / "latest").read_text(), {}

    def collect(value: Any, name: str) -> None:
        if torch.is_tensor(value):
            found[name] = value
        elif isinstance(value, dict | list | tuple):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                collect(inner, f"{name}/{key}")

    for path in sorted(folder.rglob("*.pt")):
        collect(torch.load(path, weights_only=False), path.name)
    for path in sorted(folder.rglob("*.safetensors")):
        found[path.name] = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return found


def case_of(words: str, faults: int, seed: int) -> Case:
    """`ranks:ZeRO stage`, and what is cut: `4:1:tensor=2`, `8:1:tensor=2:pipeline=2`."""
    world, stage, *cuts = words.split(":")
    sizes = {what: int(size) for what, size in (cut.split("=") for cut in cuts)}
    return Case(int(world), int(stage), faults, seed + int(world), ParallelDims(**sizes))


def as_a_row(case: Case) -> str:
    """Both runs of a case, as a line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        one = undisturbed(Path(folder, "peace"), case)
        story = disturbed(Path(folder, "chaos"), case)
        apart = differences(one, Path(folder, "chaos", "out"))
    kinds = Counter(fault.split(" (")[0] for fault in story.faults)
    cells = [
        case.world, case.cut or "–", case.stage, case.steps,
        len(story.faults), story.starts, f"{story.longest_end:.1f} s",
        "yes" if not apart else f"no: {', '.join(apart[:3])}",
        ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())),
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", default=CASES, help="ranks:ZeRO stage[:what is cut=over how many …], …")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from benchmarks.machine import machine

    lines = [
        "# Chaos: runs that are killed, frozen, stopped and damaged at random",
        "",
        f"`python -m tests.support.chaos --faults {args.faults} --seed {args.seed} --cases {args.cases} "
        f"--out {args.out}`",
        "",
        f"A tiny GPT with MST, float32 on CPU ranks, a checkpoint every {SAVE_EVERY} steps;",
        ", ".join(f"{key} {value}" for key, value in machine(threads=1).items()) + ".",
        "Equal bit for bit to a run left in peace: logged rows, weights, optimizer states and masks of the last",
        "checkpoint. Ranks that share no model share the batch.",
        "",
        "| ranks | share the model | ZeRO stage | steps | faults | starts | longest end after a fault | equal "
        "| what happened |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for words in args.cases.split(","):
        lines.append(as_a_row(case_of(words, args.faults, args.seed)))
        print(lines[-1], flush=True)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Strikes a run with faults at random moments, and checks that it ends as if nothing had happened.

    python -m tests.support.chaos --faults 20 --rounds 5 --seed 1 --out benchmarks/results/chaos.md

Each fault strikes at a random moment; checkpoints are written in the background:

    kill a rank, kill all, kill during a save     SIGKILL
    freeze a rank                                 SIGSTOP, and SIGCONT after a while
    slow a rank                                   the same many times in a row
    ask to stop                                   SIGTERM or SIGUSR1
    slow disk, full disk                          for the processes that write checkpoints, over more than one save
    clock jumps                                   time.time() of a rank, by up to a day in either direction
    damage the newest                             one bit of a file of the newest checkpoint, after all are killed
    damage run.json, tear the metrics             half of run.json, half a line in metrics.jsonl, after all are killed

After each one that ends the run it is started again. On the CPU, in float32, with the same number of ranks, the final
weights, optimizer states, masks and logged rows must be equal bit for bit. Results are added to FILE.jsonl next to the
page; the same command continues from there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import struct
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mst_scale.benchmarks.goodput_parts import disk

from mst_scale.comm import ParallelDims
from mst_scale.config.parallel import KEYS
from tests.support import forked, tiny_run
from tests.support.whole_runs import differing, without_times

SAVE_EVERY = 7
CASES = "2:1,3:2,2:3,4:1,2:2:method=dense,4:1:tensor=2,4:1:pipeline=2"
COMPACT = "2:1:method=compact,2:3:method=compact,4:2:method=compact"
DISKS = ("slow disk", "full disk")
AFTER_A_KILL = ("damage the newest", "damage run.json", "tear the metrics")
FAULTS = (
    "kill a rank", "kill all", "kill during a save", "freeze a rank", "slow a rank", "ask to stop", *DISKS,
    "clock jumps", *AFTER_A_KILL,
)  # fmt: skip
RATE = 100_000.0  # bytes per second of a slow disk
MST = {
    "method": "mst",
    "sparsity": {"max": 0.8},
    "topology": {"interval": 2, "check_every": 5},
    "attention": {"pattern": "strided", "stride": 8},
}
METHODS: dict[str, dict[str, Any]] = {
    "mst": MST,
    "compact": {**MST, "compute": {"compact": "auto"}},  # storage changes twice in the run
    "dense": {"method": "dense"},
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
    method: str = "mst"

    @property
    def steps(self) -> int:
        return 40 + 5 * self.faults + (60 if self.method == "compact" else 0)  # a phase of at least 50 steps

    @property
    def held_at(self) -> int:
        """Here a run waits for its last fault, however fast the machine is."""
        return self.steps - SAVE_EVERY

    @property
    def planned(self) -> list[str]:
        """The kinds of faults, in the order in which they strike: all kinds once before one comes again."""
        chance, kinds = random.Random(self.seed), []
        while len(kinds) < self.faults:
            kinds += chance.sample(FAULTS, len(FAULTS))
        return kinds[: self.faults]

    @property
    def cut(self) -> str:
        return self.sizes.describe() if self.sizes.model > 1 else ""

    def __str__(self) -> str:
        cut = self.cut and f" ({self.cut})"
        return f"{self.world} ranks{cut}, stage {self.stage}, {self.method}, {self.faults} faults"


def arguments(folder: Path, case: Case) -> list[str]:
    """Slowed down a little by evaluations, so that faults find different moments."""
    training = {"steps": case.steps, "save_every": SAVE_EVERY, "eval_every": 5, "eval_sequences": 8, "log_every": 1}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}}
    config = tiny_run.config(
        folder, training=training, optimizer=optimizer, mst=METHODS[case.method],
        zero_optimization={"stage": case.stage}, train_batch_size=4 * case.world,
        model={"n_layer": case.sizes.pipeline},
    )  # fmt: skip
    cut = [f"--set={KEYS[what]}={size}" for what, size in asdict(case.sizes).items() if size > 1]
    return ["--deepspeed_config", str(config), "--out", str(folder / "out"), *cut]


def undisturbed(folder: Path, case: Case) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    argv = [*arguments(folder, case), "--set", "training.async_save=false"]  # its files are the same
    codes = forked.end(forked.start(case.world, argv, folder / "logs"), 300)
    assert codes == [0] * case.world, (codes, said(folder))
    return folder / "out"


def disturbed(folder: Path, case: Case) -> Story:
    """Until the faults are used up, then to the end."""
    folder.mkdir(parents=True, exist_ok=True)
    chance, story = random.Random(case.seed), Story()
    argv, out, held, control = arguments(folder, case), folder / "out", folder / "held", folder / "control"
    control.mkdir()
    set_clock(control, 0.0)
    # the processes that write checkpoints are started with this library; ranks are forked, without it
    faulty = disk.environment(out / "checkpoints", control, RATE)
    before = functools.partial(prepare, case.held_at, str(held), str(control))
    while True:
        story.starts += 1
        held.touch()
        processes = forked.start(case.world, argv, folder / "logs", before, **faulty)
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


def prepare(step: int, held: str, control: str) -> None:
    """In each rank before it starts: hold it at a step, and let its clock follow a file."""
    forked.hold(step, held)
    real = time.time

    def jumping() -> float:
        with open(f"{control}/clock", "rb") as file:
            return float(real() + struct.unpack("d", file.read(8))[0])

    time.time = jumping


def set_clock(control: Path, seconds: float) -> None:
    draft = control / "clock.new"
    draft.write_bytes(struct.pack("d", seconds))
    os.replace(draft, control / "clock")


def strike(chance: random.Random, processes: list[Any], out: Path, case: Case, story: Story) -> bool:
    """One fault, at a random moment; whether the run lives on."""
    fault, rank = case.planned[len(story.faults)], chance.randrange(len(processes))
    here, steps, delay = steps_done(out), chance.randrange(1, 5), chance.uniform(0.0, 0.15)
    if case.held_at - here < 2 * SAVE_EVERY + 2:  # at once: it is held soon
        fault = fault if fault in AFTER_A_KILL else "kill all"
    elif fault == "kill during a save":
        delay = chance.uniform(0.0, 0.01)
        wait_for(lambda: steps_done(out) > here, processes)  # it has swept what earlier kills left behind
        wait_for(lambda: any((out / "checkpoints").glob("*.partial")) or steps_done(out) >= case.held_at, processes)
    else:
        wait_for(lambda: steps_done(out) >= here + steps, processes)
    time.sleep(delay)
    assert any(process.exitcode is None for process in processes), "it has ended by itself"
    story.faults.append(f"{fault} (rank {rank}, step {steps_done(out)})")
    control = out.parent / "control"
    if fault in ("freeze a rank", "slow a rank"):
        pause, times = (chance.uniform(0.1, 1.0), 1) if fault == "freeze a rank" else (0.02, 30)
        for _ in range(times):
            send(processes[rank], signal.SIGSTOP)
            time.sleep(pause)
            send(processes[rank], signal.SIGCONT)
            time.sleep(0.01)
        return True
    if fault in DISKS:
        until = steps_done(out) + SAVE_EVERY + 1
        (control / fault.split()[0]).touch()
        wait_for(lambda: steps_done(out) >= until, processes)
        (control / fault.split()[0]).unlink()
        return True
    if fault == "clock jumps":
        set_clock(control, chance.uniform(-86_400, 86_400))
        return True
    if fault == "ask to stop":
        send(processes[rank], chance.choice((signal.SIGTERM, signal.SIGUSR1)))
        return False
    everyone = fault == "kill all" or fault in AFTER_A_KILL
    victims = processes if everyone else [processes[rank]]
    for victim in victims:
        send(victim, signal.SIGKILL)
    if fault in AFTER_A_KILL:
        for victim in victims:
            victim.join()
        damage(fault, chance, out)
    return False


def damage(fault: str, chance: random.Random, out: Path) -> None:
    """Damage a file of a run that is down."""
    if fault == "damage run.json":
        os.truncate(out / "run.json", (out / "run.json").stat().st_size // 2)
    elif fault == "tear the metrics":
        with (out / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 1, "lo')
    else:
        flip_a_bit(chance, out)


def flip_a_bit(chance: random.Random, out: Path) -> None:
    """Flip a bit of a file of the newest checkpoint, if another one is left."""
    found = sorted(path for path in (out / "checkpoints").glob("step*") if path.suffix not in (".partial", ".aside"))
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


def said(folder: Path, characters: int = 2000) -> str:
    return "\n".join(path.read_text()[-characters:] for path in sorted((folder / "logs").glob("rank*")))


def differences(one: Path, other: Path) -> list[str]:
    """Rows, and every tensor of the last checkpoint, that are not equal bit for bit."""
    pairs = zip(*(without_times(tiny_run.rows(out)) for out in (one, other)), strict=True)
    found = [f"row {mine['step']}" for mine, theirs in pairs if mine != theirs]
    return found + differing(one, other, (one / "checkpoints" / "latest").read_text())


def case_of(words: str, faults: int, seed: int) -> Case:
    """`ranks:ZeRO stage`, the name of METHODS, what is cut: `2:2:method=dense`, `8:1:tensor=2:pipeline=2`."""
    world, stage, *more = words.split(":")
    named = dict(each.split("=") for each in more)
    method = named.pop("method", "mst")
    sizes = ParallelDims(**{what: int(size) for what, size in named.items()})
    return Case(int(world), int(stage), faults, seed + int(world), sizes, method)


def outcome(case: Case) -> dict[str, Any]:
    """Both runs of a case, as a line of the book."""
    with tempfile.TemporaryDirectory() as folder:
        one = undisturbed(Path(folder, "peace"), case)
        story = disturbed(Path(folder, "chaos"), case)
        apart = differences(one, Path(folder, "chaos", "out"))
    kinds = Counter(fault.split(" (")[0] for fault in story.faults)
    return {
        "ranks": case.world, "cut": case.cut, "stage": case.stage, "method": case.method, "seed": case.seed,
        "faults": len(story.faults), "starts": story.starts, "longest_end": story.longest_end, "apart": apart,
        "kinds": dict(kinds),
    }  # fmt: skip


def page(rows: list[dict[str, Any]], command: str) -> str:
    """The results so far."""
    from benchmarks.machine import machine

    total, kinds = sum(row["faults"] for row in rows), Counter[str]()
    for row in rows:
        kinds.update(row["kinds"])
    apart = sum(bool(row["apart"]) for row in rows)
    lines = [
        "# Chaos: runs that are struck by faults at random moments", "", f"`{command}`", "",
        f"**{total} faults in {len(rows)} runs; {apart} runs differ from an undisturbed one.** Equal means bit for",
        "bit: logged rows, weights, optimizer states and masks of the last checkpoint. A tiny GPT, a checkpoint",
        f"every {SAVE_EVERY} steps, written in the background, float32;",
        ", ".join(f"{key} {value}" for key, value in machine(threads=1).items()) + "; other programs ran too.",
        "Ranks that share no model share the batch. Longest end: the time from a fault until the last rank ends.",
        "",
        "| ranks | share the model | ZeRO stage | method | runs | faults | starts | longest end | equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["ranks"], row["cut"] or "–", row["stage"], row["method"]), []).append(row)
    for key, of in sorted(groups.items(), key=str):
        differ = [name for row in of for name in row["apart"]]
        cells = [
            *key, len(of), sum(row["faults"] for row in of), sum(row["starts"] for row in of),
            f"{max(row['longest_end'] for row in of):.1f} s", f"no: {', '.join(differ[:3])}" if differ else "yes",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| fault | times |", "|---|---|", *(f"| {kind} | {kinds[kind]} |" for kind in FAULTS)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="per run")
    parser.add_argument("--rounds", type=int, default=1, help="how often all cases run, each time with other moments")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--cases",
        default=f"{CASES},{COMPACT}",
        help="ranks:ZeRO stage[:method=dense|compact][:what is cut=over how many …], …",
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    book = args.out.with_suffix(".jsonl")
    rows = [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []
    command = (
        f"python -m tests.support.chaos --faults {args.faults} --rounds {args.rounds} --seed {args.seed} "
        f"--cases {args.cases} --out {args.out}"
    )
    for turn in range(args.rounds):
        for words in args.cases.split(","):
            case = case_of(words, args.faults, args.seed + 100 * turn)
            known = ("ranks", case.world), ("cut", case.cut), ("stage", case.stage), ("method", case.method)
            if any(all(row[key] == value for key, value in (*known, ("seed", case.seed))) for row in rows):
                continue
            rows.append(outcome(case))
            with book.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            args.out.write_text(page(rows, command))
            print(f"{case}: {'differs' if rows[-1]['apart'] else 'equal'}", flush=True)


if __name__ == "__main__":
    main()

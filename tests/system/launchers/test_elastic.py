"""Runs whose number of ranks changes: by `mst launch local --elastic`, and under torchrun's elastic agents."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from mst_scale.benchmarks.goodput_parts.broken_weight import disturb_after_import

from mst_scale.run_logging.run_file import CORRUPTED
from tests.support import pool, tiny_run
from tests.support.launched import PATIENCE, config, finish, launch, rank_processes, story, wait_for_checkpoint
from tests.support.whole_runs import attempt

pytestmark = pytest.mark.full

MST = {
    "method": "mst", "sparsity": {"max": 0.8, "warmup": 20, "ultra": 100, "restore": 60}, "topology": {"interval": 10},
}  # fmt: skip


def starts(out: Path) -> list[dict]:
    with contextlib.suppress(FileNotFoundError, ValueError):  # it is replaced as a whole
        return story(out)["starts"]
    return []


def steps_done(out: Path) -> int:
    try:
        return int(json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, IndexError, ValueError):
        return 0


def wait_for_training(out: Path, child: subprocess.Popen, count: int) -> dict:
    """Until the start with this number has taken a step; that start."""
    deadline = time.monotonic() + PATIENCE
    while not (len(found := starts(out)) == count and steps_done(out) > found[-1]["from_step"]):
        assert child.poll() is None, f"start {count} has ended: {child.stdout and child.stdout.read()[-3000:]}"
        assert time.monotonic() < deadline, f"start {count} does not train: {found}"
        time.sleep(0.05)
    return found[-1]


# --- mst launch local ---


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[2, 1, 4, 2], [2, *[1, 3, 2, 4, 2] * 4]])
def test_changes_end_like_an_undisturbed_run(tmp_path, numbers):
    """1 to 4 ranks, masks and all: every step is taken once, on the same batch, at the same rate and sparsity.

    Runs on 1, 2 and 4 ranks differ by the order in which gradients are added; the changing one differs no more.
    """
    changes = len(numbers) - 1
    steps = 180 + 20 * changes
    blocks = {"mst": MST, "train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}
    made = config(tmp_path, steps=steps, **blocks)
    raw = json.loads(made.read_text())
    raw["training"]["log_every"] = 1
    made.write_text(json.dumps(raw))
    out = tmp_path / "out"
    out.mkdir()
    (out / "ranks").write_text(f"{numbers[0]}\n")
    child = launch("local.sh", "--elastic", "1:4", str(made), "--out", str(out), cwd=tmp_path)
    for count, number in enumerate(numbers, start=1):
        assert wait_for_training(out, child, count)["ranks"] == number
        if count < len(numbers):
            (out / "ranks").write_text(f"{numbers[count]}\n")
            for pid in rank_processes(out).values():  # they take no more steps until they are asked to leave
                os.kill(pid, signal.SIGSTOP)
    text = finish(child)
    ended = starts(out)
    assert [start["ranks"] for start in ended] == numbers and text.count("the number of ranks changes") == changes
    assert [start["how"] for start in ended] == ["asked to stop"] * changes + ["finished"]
    assert [start["from_step"] for start in ended[1:]] == [start["last_step"] for start in ended[:-1]]
    assert {start["batch"]["sequences"] for start in ended} == {24}
    rows = {"elastic": tiny_run.rows(out)}
    for number in (1, 2, 4):
        argv = ["--deepspeed_config", str(made), "--out", str(tmp_path / f"{number}"), "--elastic"]
        assert [code for code, _ in pool.run(attempt, number, argv)] == [0] * number
        rows[str(number)] = tiny_run.rows(tmp_path / f"{number}")
    assert [row["step"] for row in rows["elastic"]] == list(range(1, steps + 1))
    for mine, theirs in zip(rows["elastic"], rows["2"], strict=True):
        for key in ("lr", "sparsity", "target_sparsity", "phase", "tokens", "flops"):
            assert mine.get(key) == theirs.get(key), (key, mine["step"])

    def apart(one: str, other: str) -> float:
        return max(abs(a["loss"] - b["loss"]) for a, b in zip(rows[one], rows[other], strict=True))

    by_order = max(apart(one, other) for one, other in itertools.combinations(["1", "2", "4"], 2))
    assert apart("elastic", "2") <= 3 * by_order < 1e-4, "of losses that fall from 4.1 to 2.6"
    pauses = pauses_of(out)
    assert len(pauses) == changes
    print(
        f"pauses: median {sorted(pauses)[len(pauses) // 2]:.1f} s, longest {max(pauses):.1f} s; by order {by_order:.1e}"
    )


def pauses_of(out: Path) -> list[float]:
    """Seconds from the save of each start to the moment at which the next one is ready for its first step."""
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [
        after["time"] - before["time"]
        for before, after in itertools.pairwise(events)
        if before["event"] == "asked to stop" and after["event"] == "started"
    ]


def test_a_rank_that_fails_again_is_left_out(tmp_path):
    """Rank 1 of two is killed in two starts, and the run goes on with one."""
    out, made = tmp_path / "out", config(tmp_path)
    child = launch("local.sh", "--elastic", "1:2", str(made), "--out", str(out), cwd=tmp_path)
    for count in (1, 2):
        assert wait_for_training(out, child, count)["ranks"] == 2
        wait_for_checkpoint(out, child)
        os.kill(rank_processes(out)[1], signal.SIGKILL)
    assert wait_for_training(out, child, 3)["ranks"] == 1
    child.send_signal(signal.SIGTERM)
    assert "place 1 has failed 2 times in a row" in finish(child)
    assert starts(out)[-1]["how"] == "asked to stop"


# what Python imports at its start: in rank 1, a bit flips after every eighth step
FLIPS = """
def disturb(module):
    import torch
    from mst_scale import zero_shards
    run, inner = module.Run, module.Run.advance
    def advance(self):
        inner(self)
        if self.step % 8 == 0 and os.environ["RANK"] == "1":
            value = next(v.tensor for v in zero_shards.held_values(self.engine) if "exp_avg of" in v.name)
            value.data.view(-1).view(torch.uint8)[9] ^= 8
    run.advance = advance
"""


@pytest.mark.slow
def test_a_place_that_computes_wrong_values_again_is_left_out(tmp_path):
    """Verification names rank 1 of two in two starts, and the run finishes with one."""
    out, site = tmp_path / "out", tmp_path / "site"
    site.mkdir()
    disturb_after_import(site, "mst_scale.pretrain.training_loop", FLIPS)
    made = config(tmp_path, steps=12)
    words = ["--elastic", "1:2", str(made), "--out", str(out)]
    for key, value in {"verify_every": 4, "save_every": 4, "keep_checkpoints": 3}.items():
        words += ["--set", f"training.{key}={value}"]
    path = os.pathsep.join([str(site), str(tiny_run.ROOT)])
    text = finish(launch("local.sh", *words, cwd=tmp_path, PYTHONPATH=path))
    assert "place 1 has failed 2 times in a row" in text
    assert [(start["ranks"], start["how"]) for start in starts(out)] == [(2, CORRUPTED)] * 2 + [(1, "finished")]


# --- torchrun ---

# torch 2.13: a node that comes would wait for the address of a store that the first agent does not tell it
AGENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def agent(name: str, made: Path, out: Path, port: int) -> subprocess.Popen[bytes]:
    command = [
        "torchrun", "--nnodes", "1:2", "--nproc_per_node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d",
        "--rdzv-id", "a run", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1",
        "-m", "mst_scale.pretrain", "--deepspeed_config", str(made), "--out", str(out), "--elastic",
        "--resume", "never",
    ]  # fmt: skip
    log = out.with_name(f"agent-{name}.log").open("w")
    return subprocess.Popen(command, env=tiny_run.environment(**AGENT), stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_agents_come_and_go(tmp_path):
    """A second agent comes, ends in order, comes again, and is killed with its rank. No saved step is lost."""
    out, made, port = tmp_path / "out", config(tmp_path, mst=MST), tiny_run.free_port()
    first = agent("0", made, out, port)
    others: list[subprocess.Popen[bytes]] = []
    try:
        assert wait_for_training(out, first, 1)["ranks"] == 1
        others.append(agent("1", made, out, port))
        assert wait_for_training(out, first, 2)["ranks"] == 2
        others[-1].send_signal(signal.SIGTERM)
        assert wait_for_training(out, first, 3)["ranks"] == 1
        others.append(agent("2", made, out, port))
        assert wait_for_training(out, first, 4)["ranks"] == 2
        before = rank_processes(out)
        others[-1].kill()
        assert wait_for_training(out, first, 5)["ranks"] == 1
        assert len(rank_processes(out)) == 1 and not set(rank_processes(out).values()) & set(before.values())
        first.send_signal(signal.SIGTERM)
        first.wait(PATIENCE)
    finally:
        for each in (first, *others):
            each.kill()
            each.wait()
    ended = starts(out)
    log = out.with_name("agent-0.log").read_text()
    assert [start.get("how") for start in ended] == [*["asked to stop"] * 3, None, "asked to stop"], log[-3000:]
    for before, after in itertools.pairwise(ended):
        assert after["from_step"] == before.get("last_step", after["from_step"])
    assert [row["step"] for row in tiny_run.rows(out)] == list(range(10, ended[-1]["last_step"] + 1, 10))


@pytest.mark.parametrize("variables", [{}, AGENT])
def test_ranks_that_cannot_share_the_batch_wait_and_end_with_the_run(tmp_path, variables):
    made = config(tmp_path, steps=20)
    child = subprocess.run(
        [
            "torchrun", "--standalone", "--nproc_per_node", "3", "-m", "mst_scale.pretrain",
            "--deepspeed_config", str(made), "--out", str(tmp_path / "out"), "--elastic",
        ],
        env=tiny_run.environment(**variables), text=True, capture_output=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    assert "2 of 3 ranks train" in child.stderr + child.stdout
    (start,) = starts(tmp_path / "out")
    assert start["ranks"] == 2 and start["how"] == "finished"

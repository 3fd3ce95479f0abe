"""The training run as a user starts it: three launchers, resume bit for bit after kills, signals, what is written."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from mst_scale.checkpoints import store
from mst_scale.config import load
from mst_scale.flops.ledger import forecast
from tests.support import forked, pool, tiny_run
from tests.support.whole_runs import MST, arguments, assert_same_run, attempt, logged_attempt, without_times

CONTRACT = [
    "step", "tokens", "loss", "lr", "grad_norm", "phase", "target_sparsity", "sparsity", "flops", "flops_dense",
    "tokens_per_s", "step_ms",
]  # fmt: skip


LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_accelerators", "2", "--master_port", "{port}", "--module", "mst_scale.pretrain"],
    "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", "{port}", "-m", "mst_scale.pretrain"],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "python", "-m", "mst_scale.pretrain"],
}


@pytest.mark.parametrize(
    "launcher", [pytest.param(one, marks=pytest.mark.full) if one == "mpirun" else one for one in LAUNCHERS]
)
def test_each_launcher_trains_on_two_processes(tmp_path, launcher):
    command = [word.format(port=tiny_run.free_port()) for word in LAUNCHERS[launcher]]
    child = subprocess.run(
        [*command, *arguments(tmp_path, "out", "--steps", "3")],
        env=tiny_run.environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert [row["step"] for row in tiny_run.rows(tmp_path / "out")] == [1, 2, 3]
    shards = list((tmp_path / "out" / "checkpoints" / "step00000003").glob("*optim_states.pt"))
    assert len(shards) == 2, "two ranks took part"
    assert "validation loss" in child.stdout and "tokens/s" in child.stdout and "ETA" in child.stdout
    said = [line for line in child.stdout.splitlines() if line.startswith("start")]
    parts = ["torch and DeepSpeed", f"corpus {tmp_path / 'corpus'}", "model and engine (", "first step"]
    assert len(said) == 5 and all(line.startswith(f"starting: {part}") for line, part in zip(said, parts, strict=False))
    assert re.match(r"started in \d+ s: torch and DeepSpeed \d+ s", said[-1])
    assert not {"\r", "\x1b"} & {*child.stdout, *child.stderr}, "no terminal reads it"


@pytest.mark.full
def test_a_config_that_names_a_source_runs_in_a_fresh_folder(tmp_path):
    """As the README says it, but smaller: the corpus is made by one rank while the other waits."""
    demo = tiny_run.ROOT / "ds_configs" / "demo.json"
    argv = [
        "--deepspeed_config", str(demo), "--out", str(tmp_path / "x"), "--steps", "30",
        "--set", f"data.dir={tmp_path / 'corpus'}", "--set", "data.max_bytes=1000000",
        "--set", "model.n_layer=1", "--set", "training.eval_sequences=8",
    ]  # fmt: skip
    processes = forked.start(2, argv, tmp_path / "logs")
    assert forked.end(processes, 180) == [0, 0], (tmp_path / "logs" / "rank0").read_text()
    assert (tmp_path / "corpus" / "meta.json").exists()
    assert [row["step"] for row in tiny_run.rows(tmp_path / "x")][-1] == 30


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3]
)
def test_the_files_of_a_run(tmp_path, stage):
    blocks = {
        "zero_optimization": {"stage": stage},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "tb")},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv")},
    }
    assert pool.run(attempt, 2, arguments(tmp_path, mst=MST, **blocks)) == [(0, "")] * 2
    out = tmp_path / "out"
    rows = tiny_run.rows(out)
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert [key for key in CONTRACT if key not in row] == []
        assert row["grad_norm"] > 0 and row["tokens"] == row["step"] * 8 * tiny_run.CONTEXT
    assert [row["step"] for row in rows if "val_loss" in row] == [6, 12]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1, "it learns"
    assert {row["phase"] for row in rows} >= {"ultra", "dense"}
    assert rows[-1]["flops"] < rows[-1]["flops_dense"]
    spent = forecast(load(tmp_path / "config.json"))
    assert all(a["seconds"] < b["seconds"] for a, b in pairwise(rows)), "wall-clock"
    assert rows[-1]["flops"] == pytest.approx(12 * 8 * spent.mean["paper"].total, rel=1e-12), "as it was foreseen"
    assert rows[-1]["flops_causal"] == pytest.approx(12 * 8 * spent.mean["causal"].total, rel=1e-12)
    assert rows[-1]["flops_dense_causal"] == pytest.approx(12 * 8 * spent.dense["causal"].total, rel=1e-12)
    assert rows[-1]["reduction"] == pytest.approx(spent.reduction())
    assert {(r["attention"], r["attention_stride"]) for r in rows} == {("strided", 8), ("dense", 1)}, (
        "the pattern's change shows"
    )
    assert [row["dead_units"] for row in rows] == [sum(c["dead"] for c in row["units"].values()) for row in rows]
    assert {kind: c["all"] for kind, c in rows[0]["units"].items()} == {"mlp": 64, "value": 16, "query_key": 16}
    layers = [row["layers"] for row in rows if "layers" in row]
    assert len(layers) >= 3 and set(layers[0]) == {
        "wte.weight", "blocks.0.attention.qkv.weight", "blocks.0.attention.proj.weight",
        "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight",
    }  # fmt: skip
    moved = [v for row in layers for v in row.values() if v["ever_active"] is not None]
    assert len(moved) > 10
    assert all(0 <= v["churn"] <= 1 and v["density"] <= v["ever_active"] <= 1 for v in moved)
    assert any(v["pruned"] and v["grown"] for row in layers for v in row.values())
    resolved = json.loads((out / "config.json").read_text())
    assert resolved["mst"]["sparsity"]["max"] == 0.8 and resolved["training"]["steps"] == 12
    names = sorted(path.name for path in (out / "checkpoints").iterdir() if path.is_dir())
    assert names == ["step00000008", "step00000012"], "two are kept"
    assert (out / "checkpoints" / "latest").read_text() == "step00000012"
    assert list((tmp_path / "tb").rglob("events.out.tfevents*"))
    shown = {path.stem: path for path in (tmp_path / "csv").rglob("*.csv")}
    assert {"mst_dead_units", "mst_dead_units_mlp", "mst_dead_units_value"} <= shown.keys()
    assert {"mst_loss", "mst_sparsity", "mst_flops", "mst_flops_causal", "mst_reduction"} <= shown.keys()
    *_, last = shown["mst_flops_dense"].read_text().split(",")
    assert float(last) == pytest.approx(rows[-1]["flops_dense"], rel=1e-6), "the dense equivalent"


def test_the_losses_do_not_depend_on_how_many_processes_share_the_batch(tmp_path):
    """1 process × 4 micro-batches, 2 × 2 and 4 × 1 see the same samples; sums differ in order only (float32)."""
    losses = {}
    for world in (1, 2, 4):
        argv = arguments(tmp_path, f"out{world}", "--steps", "4")
        assert all(code == 0 for code, _ in pool.run(attempt, world, argv))
        losses[world] = [(row["loss"], row.get("val_loss")) for row in tiny_run.rows(tmp_path / f"out{world}")]
    for world in (2, 4):
        for (loss, val), (expected, expected_val) in zip(losses[world], losses[1], strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)  # float32 eps 1e-7, through 4 Adam steps
            assert (val is None) == (expected_val is None)
            assert val is None or val == pytest.approx(expected_val, rel=1e-5)


@pytest.mark.parametrize(("key", "batch"), [("train_batch_size", 4), ("train_micro_batch_size_per_gpu", 8)])
def test_an_automatic_batch_follows_from_the_other_keys(tmp_path, key, batch):
    """The micro-batch is 2 on 2 ranks, or the global batch is 8."""
    assert pool.run(attempt, 2, arguments(tmp_path, "out", "--steps", "2", "--set", f"{key}=auto")) == [(0, "")] * 2
    (start,) = json.loads((tmp_path / "out" / "run.json").read_text())["starts"]
    assert start["batch"] == {"sequences": batch, "micro": batch // 2, "accumulation": 1}


def logged(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pool.run(attempt, 2, arguments(folder, mst=MST)) == [(0, "")] * 2
    return folder / "out"


def hold_in_save(started: str) -> None:
    """The first save stands still when DeepSpeed has written its files."""

    def write(*words) -> None:
        inner(*words)
        Path(started).touch()
        time.sleep(600)

    inner, store._write = store._write, write


def test_killed_at_several_moments_and_resumed_bit_for_bit(tmp_path, undisturbed):
    argv, out, held, saving = (
        arguments(tmp_path, mst=MST),
        tmp_path / "out",
        tmp_path / "held",
        tmp_path / "saving",
    )
    held.touch()
    moments = {
        "before the first checkpoint": (functools.partial(forked.hold, 3, str(held)), lambda: logged(out) == 3),
        "during a save": (functools.partial(hold_in_save, str(saving)), saving.exists),
        "between two checkpoints": (functools.partial(forked.hold, 7, str(held)), lambda: logged(out) == 7),
    }
    for name, (before, moment) in moments.items():
        processes = forked.start(2, argv, tmp_path / "logs", before)
        tiny_run.wait_for(moment, processes)
        half = list((out / "checkpoints").glob("step00000004.partial/*optim_states.pt"))
        for process in processes:
            process.kill()
        forked.end(processes, 60)
        assert bool(half) == (name == "during a save")
    # a torn last line, as a kill within a write leaves it
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')
    assert forked.end(forked.start(2, argv, tmp_path / "logs"), 180) == [0, 0]
    assert_same_run(out, undisturbed)
    assert not list((out / "checkpoints").glob("*.partial")), "leftovers of killed saves are swept"


def test_topology_steps_before_a_save_are_in_the_next_row(tmp_path):
    """Rows at 5, 10 and 12, topology steps at even ones, a checkpoint at 8: its row of 10 knows of steps 6 and 8."""
    argv, out = arguments(tmp_path, mst=MST, training={"log_every": 5, "eval_every": 0}), tmp_path / "out"
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    before = without_times(tiny_run.rows(out))
    assert [row["step"] for row in before] == [5, 10, 12]
    shutil.rmtree(out / "checkpoints" / "step00000012")
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    assert without_times(tiny_run.rows(out)) == before


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path, undisturbed, caplog):
    shutil.copytree(undisturbed, tmp_path / "out")
    newest = tmp_path / "out" / "checkpoints" / "step00000012"
    victim = sorted(newest.glob("*optim_states.pt"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    results = pool.run(logged_attempt, 2, arguments(tmp_path, mst=MST))
    assert [code for code, _ in results] == [0, 0]
    text = "".join(text for _, text in results)
    assert "step00000012 is damaged" in text and victim.name in text
    assert_same_run(tmp_path / "out", undisturbed)


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.full) for one in (signal.SIGUSR1, signal.SIGINT))]
)
def test_a_signal_to_one_rank_saves_on_all_and_exits_0(tmp_path, signum):
    argv = arguments(tmp_path, "out", "--steps", "5000", training={"save_every": 0, "eval_every": 0})
    out = tmp_path / "out"
    processes = forked.start(2, argv, tmp_path / "logs")
    tiny_run.wait_for(lambda: logged(out) >= 3, processes)
    os.kill(processes[1].pid, signum)
    assert forked.end(processes, 60) == [0, 0]
    assert "asked to stop" in (tmp_path / "logs" / "rank0").read_text()
    (tag,) = [path.name for path in (out / "checkpoints").iterdir() if path.is_dir()]
    assert int(tag.removeprefix("step")) == tiny_run.rows(out)[-1]["step"]


def stopped_at_5(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """Rank 1 gets the signal while step 5 is on its way."""
    from mst_scale.pretrain import training_loop

    def advance(run):
        if rank == 1 and run.step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        inner(run)

    inner, training_loop.Run.advance = training_loop.Run.advance, advance
    try:
        return attempt(rank, world, argv)
    finally:
        training_loop.Run.advance = inner


def test_a_run_that_was_asked_to_stop_resumes_bit_for_bit(tmp_path, undisturbed):
    argv, out = arguments(tmp_path, mst=MST), tmp_path / "out"
    assert [code for code, _ in pool.run(stopped_at_5, 2, argv)] == [0, 0]
    assert tiny_run.rows(out)[-1]["step"] == 5 and (out / "checkpoints" / "step00000005").is_dir()
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    assert_same_run(out, undisturbed)
    rows = tiny_run.rows(out)
    for before, row in pairwise(rows):
        of_a_step = row["tokens_per_s"] * row["step_ms"] / 1000
        assert of_a_step == pytest.approx((row["tokens"] - before["tokens"]) / (row["step"] - before["step"]))


def preparing(rank: int) -> None:
    """The corpus takes a minute."""
    from mst_scale.pretrain import prepare

    def long(*_, **__):
        print("the corpus is prepared", flush=True)
        time.sleep(60)

    prepare._prepare_corpus = long


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_ends_a_run_at_once(tmp_path, signum):
    processes = forked.start(1, arguments(tmp_path, "out"), tmp_path / "logs", functools.partial(preparing, 0))
    log = tmp_path / "logs" / "rank0"
    tiny_run.wait_for(lambda: log.exists() and "the corpus is prepared" in log.read_text(), processes)
    os.kill(processes[0].pid, signum)
    assert forked.end(processes, 10) == [-signum]


def test_a_finished_run_that_is_started_again_changes_nothing(tmp_path, undisturbed):
    shutil.copytree(undisturbed, tmp_path / "out")
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    assert pool.run(attempt, 2, arguments(tmp_path, mst=MST)) == [(0, "")] * 2
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before


def test_more_steps_continue_a_finished_run(tmp_path, undisturbed):
    shutil.copytree(undisturbed, tmp_path / "out")
    argv = arguments(tmp_path, "out", "--steps", "14", mst={"method": "dense"})
    results = pool.run(attempt, 2, argv)
    assert [code for code, _ in results] == [0, 0], results
    assert [row["step"] for row in tiny_run.rows(tmp_path / "out")][-2:] == [13, 14]


def test_another_schedule_is_rejected_on_resume(tmp_path, undisturbed):
    """Phases are shares of the run: twice the steps would take a network that is dense again back to sparse."""
    shutil.copytree(undisturbed, tmp_path / "out")
    results = pool.run(attempt, 2, arguments(tmp_path, "out", "--steps", "24", mst=MST))
    assert [code for code, _ in results] == [2, 2]
    assert sum("set mst.sparsity" in text for _, text in results) == 1


def test_a_damaged_checkpoint_named_by_hand_is_rejected(tmp_path, undisturbed):
    shutil.copytree(undisturbed, tmp_path / "out")
    victim = next((tmp_path / "out" / "checkpoints" / "step00000008").glob("*model_states.pt"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    results = pool.run(attempt, 2, arguments(tmp_path, "out", "--resume", "step00000008", mst=MST))
    assert [code for code, _ in results] == [1, 1]
    assert sum(victim.name in text for _, text in results) == 1


def again(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """`attempt`, as a launcher starts it after a failure."""
    os.environ["MST_RESTART"] = "1"
    try:
        return attempt(rank, world, argv)
    finally:
        del os.environ["MST_RESTART"]


@pytest.mark.parametrize("how", ["never", "step00000008"])
def test_a_restart_continues_the_run_of_its_command(tmp_path, undisturbed, how):
    """`--resume` speaks of the first start: a second one neither refuses the run nor sets it back again."""
    if how != "never":
        shutil.copytree(undisturbed, tmp_path / "out")
    argv = arguments(tmp_path, "out", "--resume", how, mst=MST)
    (tmp_path / "out").mkdir(exist_ok=True)
    foreign = {"starts": [{"ranks": 2, "command": ["another"]}]}
    (tmp_path / "out" / "run.json").write_text(json.dumps(foreign))
    assert pool.run(again, 2, argv) == [(0, "")] * 2, "it died before it began: what it was told still holds"
    assert pool.run(again, 2, argv) == [(0, "")] * 2
    starts = json.loads((tmp_path / "out" / "run.json").read_text())["starts"][1:]
    assert [start["from_step"] for start in starts] == [0 if how == "never" else 8, 12]
    assert without_times(tiny_run.rows(tmp_path / "out")) == without_times(tiny_run.rows(undisturbed))
    assert not list((tmp_path / "out" / "checkpoints").glob("*.aside"))


@pytest.mark.full
def test_dropout_resumes_bit_for_bit(tmp_path):
    """Dropout's generator is seeded by (seed, step, micro-batch), so a resumed run draws what it would have drawn."""
    block = {"model": {"dropout": 0.2}}
    assert pool.run(attempt, 2, arguments(tmp_path, "whole", "--steps", "6", **block)) == [(0, "")] * 2
    argv = arguments(tmp_path, "parts", **block)
    tag = ["--set", "training.warmup=2"]
    assert pool.run(attempt, 2, [*argv, *tag, "--steps", "6"]) == [(0, "")] * 2
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step00000006")
    assert pool.run(attempt, 2, [*argv, *tag, "--steps", "6"]) == [(0, "")] * 2
    assert without_times(tiny_run.rows(tmp_path / "parts")) == without_times(tiny_run.rows(tmp_path / "whole"))


def test_dense_short_spends_the_flops_of_the_run_it_is_like(tmp_path, undisturbed):
    argv = arguments(tmp_path, "out", "--method", "dense-short", "--match-flops", str(undisturbed))
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    rows, like = tiny_run.rows(tmp_path / "out"), tiny_run.rows(undisturbed)[-1]
    last = rows[-1]
    step = last["flops"] / last["step"]
    assert abs(last["flops"] - like["flops"]) <= step / 2 and last["step"] < like["step"]
    assert last["reduction"] == 1.0 and {row["phase"] for row in rows} == {"dense"}
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["training"]["steps"] == last["step"] and saved["mst"]["like"] == str(undisturbed)
    results = pool.run(attempt, 2, [*argv, "--steps", "5"])
    assert [code for code, _ in results] == [2, 2] and any("leave out --steps" in text for _, text in results)
    # a batch that is stated for each rank is that of the ranks it began on, as is the run's length
    argv += ["--set", "train_batch_size=auto", "--set", "gradient_accumulation_steps=2"]
    ((code, text),) = pool.run(logged_attempt, 1, argv)
    again = json.loads((tmp_path / "out" / "config.json").read_text())
    assert code == 0 and again["training"]["steps"] == last["step"], text


def test_help_shows_how_it_is_started():
    child = subprocess.run(
        [sys.executable, "-m", "mst_scale.pretrain", "--help"],
        env=tiny_run.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "deepspeed --num_accelerators 2 --module mst_scale.pretrain" in child.stdout


def test_weight_decay_is_for_matrices_alone():
    from mst_scale.config import load
    from mst_scale.models.gpt import GPT
    from mst_scale.pretrain.building import parameter_groups

    shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_length": 8, "vocab_size": 10, "vocab_multiple": 1}
    experiment = load({"model": {**shape, "bias": True}})
    model = GPT(experiment.model)
    decayed, others = parameter_groups(model, experiment)
    assert "weight_decay" not in decayed and others["weight_decay"] == 0.0
    names = {id(p): name for name, p in model.named_parameters()}
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    for parameter in others["params"]:
        assert names[id(parameter)].endswith("bias") or ".ln_" in "." + names[id(parameter)]
    for parameter in decayed["params"]:
        assert parameter.dim() == 2


def test_operators_see_the_run(tmp_path):
    script = tmp_path / "note.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write(sys.argv[2] + '\\n')")
    health, seen = tmp_path / "health.prom", tmp_path / "seen"
    argv = arguments(tmp_path, "out", "--health", str(health), "--on-event", f"{sys.executable} {script} {seen}")
    assert pool.run(attempt, 1, [*argv, "--stop-at", "6"]) == [(0, "")]
    assert "mst_step{" in health.read_text() and "mst_last_save_step{" in health.read_text()
    assert pool.run(attempt, 1, argv) == [(0, "")]
    assert 'state="finished"' in health.read_text() and "mst_restarts{" in health.read_text()
    events = [json.loads(line)["event"] for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert events == ["started", "stopped where --stop-at says", "started", "finished"]
    assert {json.loads(line)["event"] for line in seen.read_text().splitlines()} >= {"started"}


def test_a_run_that_has_passed_its_last_step_loads_nothing(tmp_path):
    """A job of an earlier phase, which may have too few ranks for this checkpoint, is started again."""
    argv = arguments(tmp_path, "out")
    assert pool.run(attempt, 2, [*argv, "--stop-at", "6"])[0][0] == 0
    ((code, said),) = pool.run(logged_attempt, 1, [*argv, "--stop-at", "4"])
    assert code == 0 and "at step 6, so --stop-at 4 trains nothing" in said and "continuing" not in said
    starts = json.loads((tmp_path / "out" / "run.json").read_text())["starts"]
    assert [(start["how"], start["last_step"]) for start in starts] == [("stopped where --stop-at says", 6)] * 2
    ((code, said),) = pool.run(logged_attempt, 1, [*argv, "--stop-at", "1000"])
    assert code == 0 and "--stop-at 1000 is after the last step, " in said


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for options, name in (
        (["--on-event", "no-such-program"], "--on-event"),
        (["--health", str(tmp_path / "file" / "x")], "--health"),
    ):
        ((code, said),) = pool.run(attempt, 1, arguments(tmp_path, "out", *options))
        assert code == 2 and said.count("\n") == 1 and name in said

"""Every file of ds_configs/: it loads, it can run, and it trains two real steps with its model shrunk."""

import functools
import json
from pathlib import Path

import pytest

from mst_scale.config import load
from mst_scale.config.check import check
from mst_scale.config.deepspeed import batch_shape
from mst_scale.config.parallel import sizes_of
from mst_scale.config.presets import ready_configs
from mst_scale.flops.ledger import forecast, uncounted_flops
from mst_scale.plan.answer import Plan, plan
from mst_scale.plan.gpus import machine
from mst_scale.plan.setting import setting_of
from tests.support import pool, tiny_run
from tests.support.whole_runs import attempt

pytestmark = pytest.mark.full

FOLDER = tiny_run.ROOT / "ds_configs"
NAMES = sorted(ready_configs())
GPT2_BATCH = 12 * 40  # the paper's
GPT3_TOKENS = {"gpt3_1.3b": 1e6, "gpt3_2.7b": 1e6, "gpt3_6.7b": 2e6, "gpt3_13b": 2e6, "gpt3_175b": 3.2e6}

GPUS = {
    "gpt2_small": 8, "gpt2_small_32k": 8, "gpt2_medium": 8, "gpt2_large": 8, "gpt2_xl": 16, "gpt3_1.3b": 32,
    "gpt3_2.7b": 32, "gpt3_6.7b": 64, "gpt3_13b": 128, "gpt3_175b": 512, "bert_base": 8, "demo": 2,
}  # fmt: skip

MEMORY = 6  # the column of GB a GPU

SHRUNK = {
    "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 16, "model.seq_length": 32, "model.vocab_size": 65,
    "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1,
    "training.steps": 2, "training.warmup": 1, "training.eval_sequences": 2, "training.log_every": 1,
    "mst.attention.stride": 8,
}  # fmt: skip


def shrunk(name: str, folder: Path) -> list[str]:
    argv = ["--deepspeed_config", str(FOLDER / f"{name}.json"), "--out", str(folder / "out")]
    argv += ["--data", str(tiny_run.corpus(folder / "corpus"))]
    return argv + [word for key, value in SHRUNK.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def test_every_model_has_its_file():
    wanted = {"gpt2_small", "gpt2_small_32k", "gpt2_medium", "gpt2_large", "gpt2_xl", "bert_base", "demo"}
    assert wanted | GPT3_TOKENS.keys() <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_can_run(name):
    experiment = load(FOLDER / f"{name}.json")
    check(experiment)
    schedule = experiment.schedule
    assert schedule.max_sparsity == experiment.mst.sparsity.max
    assert [phase.name for phase in schedule.phases] == ["warmup", "ultra", "restore", "dense"]
    if name == "demo":
        baseline = experiment.training.baseline  # of equal FLOPs, or the demo's last table would compare nothing
        sequences = experiment.training.steps * 16
        spent = sequences * forecast(experiment).mean["paper"].total + uncounted_flops(experiment, sequences)
        assert baseline.flops == pytest.approx(spent, rel=1e-3)
        return
    # the paper's shares of its 140,000 steps, in whole steps
    assert [phase.start * 14 for phase in schedule.phases] == [n * experiment.training.steps for n in (0, 1, 11, 12)]
    assert experiment.mst.sparsity.max == 0.96 and experiment.mst.targets.lm_head
    if name == "gpt2_small_32k":
        assert experiment.model.seq_length == 32768 and experiment.model.activation_checkpointing
        assert 32768 * experiment.deepspeed["train_batch_size"] == pytest.approx(1024 * GPT2_BATCH, rel=0.07)
    elif name.startswith("gpt2"):
        assert experiment.deepspeed["train_batch_size"] == GPT2_BATCH
    if name == "bert_base":
        assert experiment.model.arch == "bert" and experiment.model.padded_vocab == 30528
        assert experiment.deepspeed["train_batch_size"] == 256
        assert 256 * 512 * experiment.training.steps == pytest.approx(131e9, rel=0.03), "BERT's million steps"
        assert experiment.mst.attention.stride * 4 == experiment.model.seq_length, "as in the paper"
    if name in GPT3_TOKENS:
        tokens = experiment.deepspeed["train_batch_size"] * experiment.model.seq_length
        assert tokens == pytest.approx(GPT3_TOKENS[name], rel=0.05)
        assert tokens * experiment.training.steps == pytest.approx(300e9, rel=0.05), "GPT-3's 300 billion tokens"


@functools.cache
def planned_for(name: str) -> Plan:
    return plan(load(FOLDER / f"{name}.json"), GPUS[name], machine("a100-80gb", GPUS[name]))


def row(path: Path) -> str:
    """The file's row in the table of ds_configs/README.md."""
    experiment, gpus, planned = load(path), GPUS[path.stem], planned_for(path.stem)
    batch, micro, accumulation = batch_shape(experiment.deepspeed, sizes_of(experiment.deepspeed).data(gpus))
    expected, training = forecast(experiment), experiment.training
    zero = experiment.deepspeed["zero_optimization"]["stage"]
    cells = [
        f"`{path.stem}`", f"{planned.parameters / 1e9:.2f}", gpus, zero, f"{micro} × {accumulation}",
        "yes" if experiment.model.activation_checkpointing else "no", f"{planned.memory.needed / 1e9:.1f}",
        f"{batch * experiment.model.seq_length:,}", f"{training.steps:,}",
        f"{expected.reduction('paper'):.2f}", f"{expected.reduction('causal'):.2f}",
        f"{forecast(experiment, dense_head=True).reduction('paper'):.2f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_planned_and_shown_in_the_table(name):
    """The plan fits, and the README's row is what comes out of it; its memory may be off by a refined plan's 2 %."""
    found = planned_for(name)
    assert found.memory.fits(found.machine.gpu)
    lines = (FOLDER / "README.md").read_text().splitlines()
    (shown,) = [line.split(" | ") for line in lines if line.startswith(f"| `{name}` |")]
    now = row(FOLDER / f"{name}.json").split(" | ")
    assert float(shown[MEMORY]) == pytest.approx(float(now[MEMORY]), rel=0.02)
    assert shown[:MEMORY] + shown[MEMORY + 1 :] == now[:MEMORY] + now[MEMORY + 1 :]


# the one runs on CPUs, the other recomputes so that it fits smaller cards too
OF_THEIR_OWN = {"demo", "gpt2_small_32k"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_THEIR_OWN])
def test_it_is_what_mst_plan_recommends_on_its_nodes(name):
    """Who shares the model, ZeRO, offload, micro-batch and recomputation; in full nodes of 8."""
    experiment, best = load(FOLDER / f"{name}.json"), planned_for(name).recommended.setting
    assert GPUS[name] % 8 == 0 and best == setting_of(experiment, GPUS[name])
    assert best.sizes == sizes_of(experiment.deepspeed)


def test_the_readmes_commands_for_other_clusters():
    """On twice the nodes 175B's batch is too small for data parallelism alone; on slower networks it is still close."""
    experiment = load(FOLDER / "gpt3_175b.json")
    assert plan(experiment, 1024, machine("a100-80gb", 1024)).recommended.setting.tensor == 2
    slow = plan(experiment, 512, machine("a100-80gb", 512, network=400)).recommended
    assert slow.setting == setting_of(experiment, 512)
    assert slow.seconds.total < 1.01 * planned_for("gpt3_175b").seconds.total
    slower = plan(experiment, 512, machine("a100-80gb", 512, network=200))
    piped = next(choice for choice in slower.layouts if choice.setting.pipeline == 8)
    assert piped.dense_step < 0.85 * slower.recommended.dense_step and piped.run_step > slower.recommended.run_step
    assert slower.recommended.setting == setting_of(experiment, 512)


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_with_the_model_shrunk(name, tmp_path):
    """Its own ZeRO stage, precision, accumulation dtype and buckets, on two CPU processes."""
    assert pool.run(attempt, 2, shrunk(name, tmp_path)) == [(0, "")] * 2
    rows = tiny_run.rows(tmp_path / "out")
    assert [row["step"] for row in rows] == [1, 2] and rows[-1]["sparsity"] > 0.5
    resolved, file = (json.loads(p.read_text()) for p in (tmp_path / "out" / "config.json", FOLDER / f"{name}.json"))
    for block in ("zero_optimization", "bf16", "data_types"):
        assert resolved.get(block) == file.get(block)

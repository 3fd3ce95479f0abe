"""Wrong use of the integrations costs one line on one rank, and what is not meant to be sparse stays DeepSpeed's."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import mst_scale
from tests.ranks.integrations.test_trainer import arguments
from tests.support import pool, tiny_run
from tests.support.integrated import Words, deepspeed_config, model, opened
from tests.support.toys import toy, toy_batch

pytestmark = pytest.mark.full

PLAIN = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
SPARSE = {**PLAIN, "training": {"steps": 8}, "mst": {"method": "rigl"}}


def said(call):
    """The mistake that a call is refused for."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def rejections(rank, world, folder):
    import deepspeed
    from transformers import Trainer, TrainingArguments

    found = {}
    with opened():
        found["again"] = said(mst_scale.integrate)
        found["again, otherwise"] = said(lambda: mst_scale.integrate(steps=7))
        first = deepspeed.initialize(model=toy(), config=SPARSE)[0]
        found["two models"] = said(lambda: deepspeed.initialize(model=toy(), config=SPARSE))
        second = deepspeed.initialize(model=first.module, config=SPARSE)[0]
        found["the same model"] = type(second.mst).__name__
        second.backward(second(*toy_batch(0, rank)))
        second.step()
        found["one after the other"] = said(lambda: deepspeed.initialize(model=toy(), config=SPARSE))
    with opened():
        norms = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.LayerNorm(8))
        found["no matrices"] = said(lambda: deepspeed.initialize(model=norms, config=SPARSE))
        scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
        two = {**SPARSE, "scheduler": scheduler, "training": {"steps": 8, "lr_schedule": "wsd"}}
        found["two schedules"] = said(lambda: deepspeed.initialize(model=toy(), config=two))
        no_length = {**SPARSE, "training": {"steps": "auto"}}
        found["no length"] = said(lambda: deepspeed.initialize(model=toy(), config=no_length))
        found["mst of a wrong kind"] = said(lambda: deepspeed.initialize(model=toy(), config={**SPARSE, "mst": "rigl"}))
        number = {**SPARSE, "training": 100}
        found["training of a wrong kind"] = said(lambda: deepspeed.initialize(model=toy(), config=number))
    with opened(steps=0):
        found["no steps"] = said(lambda: deepspeed.initialize(model=toy(), config=no_length))
    with opened():
        args = TrainingArguments("/tmp/none", report_to="none", use_cpu=True)
        found["no DeepSpeed"] = said(lambda: Trainer(model(), args, train_dataset=Words()).train())
    with opened():
        for where in ("checkpoint-5", "checkpoint-9"):
            os.makedirs(f"{folder}/{rank}/{where}")
        args = arguments(f"{folder}/{rank}", deepspeed_config(2))
        trainer = Trainer(model("gpt2"), args, train_dataset=Words())
        found["nothing complete"] = said(lambda: trainer.train(resume_from_checkpoint=True))
        found["incomplete"] = said(lambda: trainer.train(resume_from_checkpoint=f"{folder}/{rank}/checkpoint-9"))
        Path(f"{folder}/{rank}/checkpoint-9/trainer_state.json").write_text("{}")  # as with save_only_model
        found["the model alone"] = said(lambda: trainer.train(resume_from_checkpoint=f"{folder}/{rank}/checkpoint-9"))
    return found


EXPECTED = {
    "again": None,
    "again, otherwise": "call it once",
    "two models": "integrate() supports one sparse model",
    "the same model": "SparseTraining",
    "one after the other": None,
    "no matrices": "no matrix that can become sparse",
    "two schedules": "two schedules of the learning rate",
    "no length": "training.steps is missing",
    "mst of a wrong kind": "mst must be an object",
    "no steps": "training.steps must be an integer from 1",
    "training of a wrong kind": "training must be an object",
    "nothing complete": "no checkpoint in",
    "incomplete": "checkpoint-9 is not complete",
    "the model alone": "checkpoint-9 has the model alone, without optimizer states (save_only_model)",
    "no DeepSpeed": "runs without DeepSpeed",
}


def test_bad_use_is_one_line(tmp_path):
    (found,) = pool.run(rejections, 1, str(tmp_path))
    assert found.keys() == EXPECTED.keys()
    for name, words in EXPECTED.items():
        assert (found[name] is None) if words is None else (words in str(found[name])), (name, found[name])
        assert "\n" not in str(found[name])


def with_comments(rank, world, folder):
    """Of a config file that only DeepSpeed's reader accepts."""
    import deepspeed

    path = Path(folder) / "ds.json"
    path.write_text("\ufeff# sparse\n" + json.dumps(SPARSE)[:-1] + ",}")
    with opened():
        return deepspeed.initialize(model=toy(), config=str(path))[0].mst.method


def test_a_config_file_is_read_as_deepspeed_reads_it(tmp_path):
    assert pool.run(with_comments, 1, str(tmp_path)) == ["rigl"]


def lengths(rank, world):
    """The number of steps by whoever knows it."""
    import deepspeed

    open_config = {**SPARSE, "training": {"steps": "auto"}}
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 30}}
    found = []
    for given, config in [
        ({"steps": 20}, open_config),
        ({}, {**open_config, "scheduler": scheduler}),
        ({"steps": 20}, SPARSE),
        ({"mst": {"method": "rigl"}, "steps": 9}, PLAIN),
        ({"mst": {"method": "rigl"}, "steps": 9}, {**PLAIN, "recipe": "mst-best"}),
    ]:
        with opened(**given):
            engine = deepspeed.initialize(model=toy(), config=config)[0]
            found.append((engine.mst.method, engine.mst.schedule.total_steps))
    with opened():  # the config by its place
        engine = deepspeed.initialize(None, toy(), None, None, None, None, 29500, None, None, None, SPARSE)[0]
        found.append((engine.mst.method, engine.mst.schedule.total_steps))
    return found


def test_the_length_is_that_of_whoever_knows_it():
    expected = [("rigl", 20), ("rigl", 30), ("rigl", 8), ("rigl", 9), ("mst", 9), ("rigl", 8)]
    assert pool.run(lengths, 1) == [expected]


def stays_deepspeeds(rank, world):
    """Engines without the block, or without an optimizer, are what they are without us."""
    import deepspeed

    losses = []
    for integrated in (False, True):
        torch.manual_seed(1)
        with opened() if integrated else torch.enable_grad():
            engine = deepspeed.initialize(model=toy(), config=PLAIN)[0]
            for step in range(3):
                loss = engine(*toy_batch(step, rank))
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            looks = hasattr(engine, "mst")
            if integrated:
                no_training = {key: value for key, value in SPARSE.items() if key != "optimizer"}
                looks |= hasattr(deepspeed.initialize(model=toy(), config=no_training)[0], "mst")
    return losses[:3] == losses[3:], looks


def test_configs_without_sparsity_are_left_to_deepspeed():
    assert pool.run(stays_deepspeeds, 1) == [(True, False)]


def past_the_engine(rank, world):
    engine, optimizer, *_ = mst_scale.initialize(model=toy(), config={**SPARSE, "zero_optimization": {"stage": 1}})
    engine.backward(engine(*toy_batch(0, rank)))
    return said(optimizer.step)


def test_an_optimizer_that_steps_past_the_engine_is_rejected():
    assert "call engine.step()" in pool.run(past_the_engine, 1)[0]


def ranks_alone(rank, world, folder):
    """Accelerate as it is on a CPU: each rank takes itself for the only one; mpirun tells it of no others."""
    from accelerate.state import PartialState
    from transformers import Trainer

    with opened():
        seen, place = PartialState._prepare_backend, os.environ.pop("LOCAL_RANK")
        PartialState._prepare_backend = lambda *_: (None, None)
        try:
            args = arguments(folder, deepspeed_config(1))
            return said(lambda: Trainer(model(), args, train_dataset=Words()).train())
        finally:
            PartialState._prepare_backend = seen
            os.environ["LOCAL_RANK"] = place


@pytest.mark.parametrize("world", [2])
def test_ranks_that_accelerate_does_not_see_are_rejected(tmp_path, world):
    for words in pool.run(ranks_alone, world, str(tmp_path)):
        assert "2 ranks were started and Accelerate counts 1" in words


def script(body, call="mst_scale.integrate()", **more):
    program = f"import mst_scale, deepspeed, torch\n{call}\n" + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", program], env=tiny_run.environment(**more), capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        "from accelerate import Accelerator, DeepSpeedPlugin\n"
        "Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={config}))",
        "from transformers import TrainingArguments\nTrainingArguments('out', deepspeed={config}, report_to='none')",
    ],
    ids=["accelerate", "trainer"],
)
def test_several_cpu_processes_are_rejected_before_they_deadlock(tmp_path, body):
    """One of two processes, as a launcher starts it; the other never comes."""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = script(body.format(config=SPARSE | {"zero_optimization": {"stage": 0}}), **launched)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("mst_scale: "))
    assert "2 processes were started on CPUs" in line


def test_a_mistake_in_a_script_is_one_line_and_an_unused_integration_is_warned_of():
    config = str(SPARSE | {"mst": {"method": "rigl", "sparsity": {"max": 7}}})
    call = f"deepspeed.initialize(model=torch.nn.Linear(4, 4), config={config})"
    # torch puts a hook of its own before ours where its process group is made after integrate()
    for before in ("", "deepspeed.init_distributed('gloo')\n"):
        done = script(before + call)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        (line,) = (line for line in done.stderr.splitlines() if "mst.sparsity" in line)
        assert line.startswith("mst_scale: ") and done.stderr.count("mst_scale: ") == 1
    done = script("", call="mst_scale.integrate(mst='rigl')")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "is the mst block" in done.stderr
    done = script("print('nothing')")
    assert done.returncode == 0 and "integrate() was called, but no engine" in done.stderr

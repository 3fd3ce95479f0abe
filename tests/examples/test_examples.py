"""Each example runs as its first lines say, and does what it is there to show."""

import re
import subprocess
import sys

import pytest

from tests.support import pool, tiny_run

EXAMPLES = tiny_run.ROOT / "examples"


def run(name, *words, ranks=1):
    launcher = [sys.executable]
    if ranks > 1:
        launcher = ["deepspeed", "--log_level", "error", "--num_accelerators", str(ranks), "--master_port"]
        launcher.append(str(tiny_run.free_port()))
    command = [*launcher, str(EXAMPLES / name), *words]
    environment = tiny_run.environment(MASTER_PORT=str(tiny_run.free_port()))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(text):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


def test_own_loop():
    text = run("own_loop.py", "--steps", "100", ranks=2)
    assert "90% sparse" in text and "step 100:" in text and "dense, 0% sparse" in text
    assert losses(text)[-1] < losses(text)[0] / 2


def test_transformers_model(tmp_path):
    text = run("transformers_model.py", "--steps", "20", "--out", str(tmp_path / "out"))
    assert "96% sparse" in text and re.search(r"back at .*global_step10.*: step 10, 96% sparse", text)


def test_growth_policy():
    text = run("growth_policy.py")
    assert "80% sparse" in text and losses(text)[-1] < losses(text)[0]


def test_lora():
    text = run("lora.py", "--steps", "40")
    assert "before: 50.0% of the base is 0" in text and "after: 50.0% of the merged weights are 0" in text
    before, *_, last, merged = losses(text)
    assert "50.0% sparse" in text and last < merged < before, "masks cost a part of what the adapters have learned"


def test_every_example_has_a_test():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


def test_a_policy_of_a_known_name_is_refused():
    from mst_scale.mixed_growing.policies import POLICIES, Policy, register

    assert register(POLICIES["rigl"]) is POLICIES["rigl"]
    with pytest.raises(ValueError, match="there is a policy 'rigl' already"):
        register(Policy("rigl", random_share=0.5))


def test_trainer(tmp_path):
    out = str(tmp_path / "out")
    config = str(EXAMPLES / "ds_trainer.json")
    options = "--max_steps 20 --logging_steps 5 --learning_rate 1e-2 --report_to tensorboard --disable_tqdm true"
    text = run("trainer.py", "--deepspeed", config, "--output_dir", out, *options.split())
    assert "'mst/sparsity': '0.8'" in text and "ultra, sparsity" in text and "evaluation loss" in text
    written = b"".join(path.read_bytes() for path in tmp_path.glob("out/runs/*/events*"))
    for number in ("sparsity", "phase", "flops_saved", "flops_reduction"):
        assert f"train/mst/{number}".encode() in written, number
    assert (tmp_path / "out" / "metrics.jsonl").is_file() and losses(text)[-1] < 5


def test_accelerate_loop(tmp_path):
    text = run("accelerate_loop.py", "--out", str(tmp_path / "out"))
    assert "sparsity 80% of 80%" in text and "0% sparse at the end" in text
    assert losses(text)[-1] < losses(text)[0] / 2 and (tmp_path / "out" / "run.json").is_file()


def of_lightning(rank, world, name, folder):
    """On the stand-in for a GPU that the strategies ask for."""
    import importlib

    from tests.doors.opened import closing
    from tests.support.lightning_on_cpu import accelerator

    sys.path.insert(0, str(EXAMPLES))
    if name == "lightning_module":
        from lightning.pytorch.accelerators import CUDAAccelerator
    else:
        from lightning.fabric.accelerators import CUDAAccelerator
    example, gpu = importlib.import_module(name), accelerator(CUDAAccelerator)
    with closing():
        if name == "lightning_module":
            trainer = example.fit(folder, accelerator=gpu, devices=1)
            loss, mst = float(trainer.callback_metrics["loss"]), trainer.strategy.model.mst
        else:
            recording, loss = example.train(folder, accelerator=gpu, devices=1)
            mst = recording.mst
        return loss, mst.schedule.total_steps, mst.schedule.max_sparsity, mst.changed_at


def test_lightning_module(tmp_path):
    ((loss, steps, sparsest, changed_at),) = pool.run(of_lightning, 1, "lightning_module", str(tmp_path))
    assert loss < 0.5 and (steps, sparsest) == (60, 0.8) and changed_at > 40


def test_fabric_loop(tmp_path):
    ((loss, steps, sparsest, changed_at),) = pool.run(of_lightning, 1, "fabric_loop", str(tmp_path))
    assert loss < 0.6 and (steps, sparsest) == (60, 0.8) and changed_at > 40

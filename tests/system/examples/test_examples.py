"""Every command line that an example recommends runs as it is written, and shows what it is there to show."""

import ast
import contextlib
import re
import socket
import subprocess
import sys

import pytest

from mst_scale.errors import UserError
from tests.support import pool, tiny_run

pytestmark = pytest.mark.full

EXAMPLES = tiny_run.ROOT / "examples"


def documented(name):
    """The command lines in an example's docstring, each with whether it needs GPUs (its comment says so)."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    starts = ("python ", "deepspeed ", "accelerate ", "TORCH_", "torchrun ", "mst ")
    lines = [line.strip().partition("#") for line in text.splitlines() if line.strip().startswith(starts)]
    return [(command.strip(), "GPU" in comment) for command, _, comment in lines]


def run(name, tmp_path):
    """Run what the docstring recommends on a CPU, line by line in a folder of its own; return what each line prints."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    on_cpu = [command for command, needs_gpus in documented(name) if not needs_gpus]
    printed = []
    for command in on_cpu:
        # a launcher's own default port may be taken by another test
        port = tiny_run.free_port()
        prelude = (
            f'deepspeed() {{ command deepspeed --master_port {port} "$@"; }}; mst() {{ python -m mst_scale "$@"; }}'
        )
        words = ["bash", "-ec", f"{prelude}; {command}"]
        done = subprocess.run(
            words, env=tiny_run.environment(), cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
        printed.append(done.stdout)
    return printed


def losses(text):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


def test_own_loop(tmp_path):
    for text in run("own_loop", tmp_path):
        assert "90% sparse" in text and "step 100:" in text and "dense, 0% sparse" in text
        assert losses(text)[-1] < losses(text)[0] / 2


@pytest.mark.slow
def test_safe_training(tmp_path):
    undisturbed, killed = run("safe_training", tmp_path)
    assert "continuing" not in undisturbed and re.search(r"continuing from step (10|20|30)\n", killed)
    assert losses(killed)[-1] == losses(undisturbed)[-1] < losses(undisturbed)[0] / 2 and "step 60:" in killed


@pytest.mark.slow
def test_transformers_model(tmp_path):
    for text in run("transformers_model", tmp_path):
        assert "96% sparse" in text and re.search(r"back at .*global_step20.*: step 20, 96% sparse", text)


def test_growth_policy(tmp_path):
    (text,) = run("growth_policy", tmp_path)
    assert "80% sparse" in text and losses(text)[-1] < losses(text)[0]


@pytest.mark.slow
def test_lora(tmp_path):
    own, trainer = run("lora", tmp_path)
    for text in (own, trainer):
        assert "before: 50.0% of the base is 0" in text and "after: 50.0% of the merged weights are 0" in text
        before, *_, merged = losses(text)
        unmerged = float(re.findall(r"unmerged (\d+\.\d+)", text)[0])
        assert unmerged < merged < before, "masks cost a part of what the adapters have learned"
    assert "50.0% sparse" in own


def test_every_example_has_a_test_and_its_command():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names <= tested
    for name in names:
        assert documented(name), f"{name} recommends no command"
        assert any(not gpus for _, gpus in documented(name)) or name in ("fabric_loop", "lightning_module")


def test_a_policy_of_a_known_name_is_rejected():
    from mst_scale.mixed_growing.policies import POLICIES, Policy, register

    assert register(POLICIES["rigl"]) is POLICIES["rigl"]
    with pytest.raises(UserError, match="'rigl'"):
        register(Policy("rigl", random_share=0.5))


@pytest.mark.slow
def test_trainer(tmp_path):
    text, report = run("trainer", tmp_path)
    out = tmp_path / "runs" / "trainer"
    assert "'mst/sparsity': '0.8'" in text and "evaluation loss" in text
    assert (out / "metrics.jsonl").is_file() and losses(text)[-1] < 5
    assert "report" in report


@pytest.mark.slow
def test_options_of_trainer_are_passed_on(tmp_path):
    out, config = tmp_path / "out", EXAMPLES / "ds_trainer.json"
    options = "--max_steps 20 --logging_steps 5 --learning_rate 1e-2 --report_to tensorboard --disable_tqdm true"
    words = [sys.executable, str(EXAMPLES / "trainer.py"), "--deepspeed", str(config), "--output_dir", str(out)]
    done = subprocess.run([*words, *options.split()], env=tiny_run.environment(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    written = b"".join(path.read_bytes() for path in out.glob("runs/*/events*"))
    for number in ("sparsity", "phase", "flops_saved", "flops_reduction"):
        assert f"train/mst/{number}".encode() in written, number


@pytest.mark.slow
def test_accelerate_loop(tmp_path):
    (text,) = run("accelerate_loop", tmp_path)
    assert "sparsity 80%" in text and "0% sparse at the end" in text
    assert losses(text)[-1] < losses(text)[0] / 2 and (tmp_path / "runs" / "accelerate" / "run.json").is_file()


@pytest.mark.slow
def test_a_second_script_on_one_machine_starts_while_deepspeeds_port_is_taken(tmp_path):
    """A script that no launcher has started chooses a free port; DeepSpeed alone would always take 29500."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else has it already
            taken.bind(("", 29500))
            taken.listen()
        run("growth_policy", tmp_path)


def of_lightning(rank, world, name, folder):
    """On the stand-in for a GPU that the strategies ask for."""
    import importlib

    from tests.support.integrated import closing
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

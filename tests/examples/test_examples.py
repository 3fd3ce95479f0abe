"""Each example runs as its first lines say, and does what it is there to show."""

import re
import subprocess
import sys

import pytest

from tests.support import tiny_run

EXAMPLES = tiny_run.ROOT / "examples"


def run(name, *words, ranks=1):
    launcher = [sys.executable]
    if ranks > 1:
        launcher = ["deepspeed", "--log_level", "error", "--num_accelerators", str(ranks), "--master_port"]
        launcher.append(str(tiny_run.free_port()))
    command = [*launcher, str(EXAMPLES / name), *words]
    done = subprocess.run(command, env=tiny_run.environment(), capture_output=True, text=True, timeout=300, check=False)
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


def test_every_example_has_a_test():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


def test_a_policy_of_a_known_name_is_refused():
    from mst_scale.mixed_growing.policies import POLICIES, Policy, register

    assert register(POLICIES["rigl"]) is POLICIES["rigl"]
    with pytest.raises(ValueError, match="there is a policy 'rigl' already"):
        register(Policy("rigl", random_share=0.5))

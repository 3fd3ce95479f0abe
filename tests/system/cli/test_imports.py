"""What a command imports, which is most of its time: nothing that it does not need."""

import json
import subprocess
import sys

from tests.ranks.checkpoints.test_mask_files import whole
from tests.ranks.checkpoints.test_mask_report import sealed
from tests.support import tiny_run

HEAVY = ("numpy", "torch", "torch._dynamo", "deepspeed", "transformers", "matplotlib", "triton")
PROGRAM = """
import contextlib, io, json, sys
from mst_scale import cli
found = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(words)
        except SystemExit:
            pass
    found[" ".join(words[:1])] = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
import mst_scale.pretrain.start
found["pretrain"] = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
import mst_scale.pretrain.engines
found["training"] = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print(json.dumps(found))
"""


def imported(*commands: list[str]) -> dict[str, list[str]]:
    """What is there after each of these commands, given to one process in turn."""
    words = [sys.executable, "-c", PROGRAM, json.dumps(commands), json.dumps(HEAVY)]
    child = subprocess.run(words, env=tiny_run.environment(), capture_output=True, text=True, check=True)
    return json.loads(child.stdout)


def test_the_imports_of_each_command(tmp_path):
    folder = str(sealed(tmp_path / "step00000040", whole(1)))
    light = imported(
        ["--version"],
        ["--help"],
        ["flops", "--config", "gpt2_small"],
        ["plan", "--config", "gpt2_small", "--gpus", "1"],
    )
    assert light.pop("training") == ["numpy", "torch", "deepspeed"], "no compiler, which takes as long as torch"
    assert light == {name: [] for name in ("--version", "--help", "flops", "plan", "pretrain")}
    read = imported(["report", str(tmp_path / "nowhere")], ["inspect", folder])
    assert read["report"] == ["numpy", "matplotlib"]
    assert read["inspect"] == ["numpy", "torch", "matplotlib"], "matplotlib is the report's"

"""Two runs on one machine do not meet at one port, and a port that is taken costs one line."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from mst_scale.comm.launch import LOWEST_PORT, OF_DEEPSPEED, complete_environment
from tests.support import tiny_run

SCRIPT = """
import os, deepspeed, torch
import mst_scale
{call}
torch.distributed.barrier()
line = f"met {os.environ['MASTER_PORT']} {torch.distributed.get_world_size()}\\n"
os.write(1, line.encode())  # in one piece: the ranks share the pipe, and print writes the end of a line on its own
"""
OWN = "deepspeed.init_distributed()"
ENGINE = """
adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam,
          "training": {"steps": 9}, "mst": {"method": "mst"}}
mst_scale.initialize(model=torch.nn.Linear(8, 8), config=config)
"""


@contextlib.contextmanager
def taken_port(port=int(OF_DEEPSPEED)):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else has it already
            taken.bind(("", port))
            taken.listen()
        yield taken.getsockname()[1]


def ended(folder, words, call, **environment):
    (folder / "script.py").write_text(SCRIPT.replace("{call}", call))
    command = [*words, str(folder / "script.py")]
    return subprocess.run(
        command, env=tiny_run.environment(**environment), capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "ranks"),
    [([sys.executable], 1), (["deepspeed", "--num_accelerators", "2", "--no_local_rank"], 2)],
    ids=["python", "deepspeed"],
)
@pytest.mark.parametrize("call", [OWN, ENGINE], ids=["init_distributed", "initialize"])
def test_a_second_run_meets_while_deepspeeds_port_is_taken(tmp_path, words, ranks, call):
    with taken_port():
        child = ended(tmp_path, words, call)
    met = [line.split() for line in child.stdout.splitlines() if line.startswith("met")]
    assert child.returncode == 0 and len(met) == ranks, child.stderr[-3000:]
    assert len({port for _, port, _ in met}) == 1 and met[0][1] != OF_DEEPSPEED
    assert {world for _, _, world in met} == {str(ranks)}


def test_a_stated_port_that_is_taken_costs_one_line(tmp_path):
    with taken_port(0) as port:
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        child = ended(tmp_path, [sys.executable], OWN, MASTER_PORT=str(port), **variables)
    ours = [line for line in child.stderr.splitlines() if line.startswith("mst_scale: ")]
    assert child.returncode == 1 and "Traceback" not in child.stderr
    assert len(ours) == 1 and str(port) in ours[0] and "--master_port" in ours[0]


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"MASTER_PORT": OF_DEEPSPEED, "CROSS_SIZE": "1"}, False),
        ({"MASTER_PORT": "29501", "CROSS_SIZE": "1"}, True),  # stated
        ({"MASTER_PORT": OF_DEEPSPEED, "CROSS_SIZE": "2"}, True),  # another machine has another launcher
        ({"MASTER_PORT": OF_DEEPSPEED}, True),  # torchrun's store listens there already
    ],
)
def test_only_deepspeeds_default_on_one_machine_is_replaced(monkeypatch, variables, kept):
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**launched, **variables}.items():
        monkeypatch.setenv(name, value)
    complete_environment()
    port = os.environ["MASTER_PORT"]
    assert (port == variables["MASTER_PORT"]) == kept
    assert kept or LOWEST_PORT <= int(port) < 65536
    complete_environment()
    assert os.environ["MASTER_PORT"] == port

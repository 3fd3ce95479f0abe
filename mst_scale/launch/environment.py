"""Gives ranks their environment: launchers/cluster.sh, and what depends on the machine.

Variables that the user has set always win. Some of them have to be carried to other nodes by name.
"""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from mst_scale.config.presets import shipped_folder
from mst_scale.errors import UserError

SCRIPTS = shipped_folder("launchers")
ROOT = SCRIPTS.parent  # the clone, or the package where it is installed
# What hostfile and mpi carry to the other nodes, with what cluster.sh has set.
CARRIED = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME", "DEEPSPEED_TIMEOUT", "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER", "TORCH_EXTENSIONS_DIR", "DS_ACCELERATOR", "LD_PRELOAD", "TIKTOKEN_CACHE_DIR",
    "DATA_GYM_CACHE_DIR", "CXX",
    "MST_LAUNCHER", "MST_RESTART", "MST_RESIZED", "MST_START", "MST_TRACEBACK", "MST_PROGRESS",
)  # fmt: skip
CARRIED_PREFIXES = (
    "NCCL_", "FI_", "UCX_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "MST_SCALE_", "HF_", "WANDB_", "COMET_",
)  # fmt: skip
SECRET = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY")  # would be seen in the command lines of ssh
OF_THE_SHELL = ("_", "PWD", "OLDPWD", "SHLVL")


def find_python() -> None:
    """Let `python`, `deepspeed` and this package be found by the processes that are started."""
    given, own = os.environ.get("PATH", os.defpath), Path(sys.executable).parent
    found = shutil.which("python", path=given)
    if not found or Path(found).parent != own:
        os.environ["PATH"] = f"{own}{os.pathsep}{given}"
    modules = os.environ.get("PYTHONPATH", "")
    if (ROOT / "mst_scale").is_dir() and str(ROOT) not in modules.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{modules}" if modules else str(ROOT)
    if Path(sys.prefix) == ROOT / ".venv":
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".venv" / "torch_extensions"))


def load_cluster_settings() -> None:
    """Take the variables that launchers/cluster.sh sets, and raise the limits of this process.

    Raises:
        UserError: There is no bash, or the file, which users may edit, fails.
    """
    script = SCRIPTS / "cluster.sh"
    if shutil.which("bash") is None:
        raise UserError(f"{script} needs bash, which is not installed here")
    shell = subprocess.run(
        ["bash", "-c", 'source "$1" >&2 && env -0', "bash", str(script)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    if shell.returncode != 0:
        raise UserError(f"{script} failed with exit code {shell.returncode}: fix the error that it printed above")
    variables = dict(line.split("=", 1) for line in os.fsdecode(shell.stdout).split("\0") if "=" in line)
    given = {name: value for name, value in variables.items() if name not in OF_THE_SHELL}
    _set_by_cluster.update(name for name, value in given.items() if os.environ.get(name) != value)
    os.environ.update(given)
    _set_limits()


_set_by_cluster: set[str] = set()


def _set_limits() -> None:
    """Rank 0 holds a connection for each rank (1024 is the usual limit); core dumps of 80 GB processes are useless."""
    core = os.environ.get("MST_CORE_LIMIT", "0")  # kB, or "unlimited"
    size = int(core) * 1024 if core.isdecimal() else resource.RLIM_INFINITY
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for kind, limits in ((resource.RLIMIT_NOFILE, (files, files)), (resource.RLIMIT_CORE, (size, size))):
        try:
            resource.setrlimit(kind, limits)
        except (OSError, ValueError):
            continue  # not ours to raise


def carried_variables() -> dict[str, str]:
    """Return the variables that ranks on other nodes must have too, as far as they are set."""
    chosen = (name for name in os.environ if name.startswith(CARRIED_PREFIXES) or name in _set_by_cluster)
    more = sorted(name for name in chosen if not SECRET.search(name))
    return {name: os.environ[name] for name in dict.fromkeys((*CARRIED, *more)) if name in os.environ}


def shown_variables() -> dict[str, str]:
    """Return those that a dry run shows: what the launchers have set."""
    return {name: value for name, value in carried_variables().items() if name not in ("PATH", "LD_LIBRARY_PATH")}


def gpus() -> list[str]:
    """Return the names of the GPUs that this machine lets us use, without importing torch, which takes seconds.

    They are those of CUDA_VISIBLE_DEVICES up to the first that does not exist, or the numbers of all that nvidia-smi
    lists.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30).stdout
        there = dict(re.findall(r"^GPU (\d+): .*\(UUID: (\S+)\)", listed, re.MULTILINE))
    except (OSError, subprocess.TimeoutExpired):  # some containers have GPUs without this program
        there = None
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [name.strip() for name in visible.split(",")]  # CUDA ignores what follows an invalid one, such as -1
        known = tuple((there or {}).values())

        def is_there(name: str) -> bool:
            missing = there is not None and name not in there and not any(uuid.startswith(name) for uuid in known)
            return bool(name) and not name.startswith("-") and (not missing or name.startswith("MIG"))

        return list(itertools.takewhile(is_there, names))
    if there is None:
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return list(there)


def default_processes() -> int:
    """Return one process for each GPU of this machine, or two on the CPU."""
    return len(gpus()) or 2


def use_cpu_without_gpus(processes: int) -> None:
    """Where there is no GPU, let this many processes share the machine's cores."""
    if not gpus():
        set_default("DS_ACCELERATOR", "cpu")
        set_default("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))


def set_default(name: str, value: str) -> None:
    """Set a variable that is not set, or empty."""
    os.environ[name] = os.environ.get(name) or value

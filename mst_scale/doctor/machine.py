"""Checks one machine: installed versions, memory, disk space, and locks of killed builds.

Each program and library has a check of its own, so that a broken one hides none of the others. Supported ranges come
from the package's metadata and from zero_shards, tested versions from constraints.txt, which only a clone has.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mst_scale import compiled
from mst_scale.compiled import build_locks, cache_folder
from mst_scale.doctor.findings import Finding, look, ok, run_each, skip, wrong
from mst_scale.machine import installed

PACKAGE = Path(__file__).parents[1]  # mst_scale; pydantic, which mst_scale.config needs, may be what is broken

CGROUP = Path("/sys/fs/cgroup")
MB, GB = 1_000_000, 1_000_000_000
FULL = 100 * MB  # with less free, a disk is full
CACHE = 1 * GB  # DeepSpeed's operators for a GPU take some hundred MB
CHECKPOINT = 5 * GB  # three of GPT-2 small with Adam
SHARED = 256 * MB  # DeepSpeed's buffers between ranks on the CPU take 69 MB per rank
MEMORY, LITTLE_MEMORY = 1 * GB, 4 * GB  # importing torch and DeepSpeed takes half of the first


def device() -> str:
    """Return "cuda" or "cpu", as DeepSpeed chooses it: DS_ACCELERATOR takes precedence over the hardware."""
    import torch

    return "cuda" if os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and torch.cuda.is_available() else "cpu"


def local_gpu() -> int:
    """Return the number of this rank's GPU."""
    import torch

    return int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()


# --- versions ---


def check_versions() -> list[Finding]:
    """Compare what is installed with what is supported (setup.py) and tested (constraints.txt)."""
    return run_each(
        {
            "Python": lambda: ok("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            "torch": lambda: check_package("torch", "torch"),
            "DeepSpeed": lambda: check_package("DeepSpeed", "deepspeed"),
            "Triton": _triton,
            "apex": _apex,
            "GPU": _gpu,
            "nvcc": _nvcc,
            "C++ compiler": check_compiler,
            "ninja": _ninja,
        }
    )


def check_package(label: str, name: str) -> Finding:
    """Check a library that training needs."""
    version, supported = installed(name), _supported().get(name, SpecifierSet())
    fix = f"pip install '{name}{supported}'"
    if version is None:
        return wrong(label, "is not installed", fix)
    if not supported.contains(version, prereleases=True):
        return wrong(label, f"{version} is not supported: {name}{supported} is", fix)
    if (reason := import_error(name)) is not None:
        return wrong(label, f"{version} cannot be imported: {reason}", f"{fix}, or install what is missing")
    tested = _tested().get(name)
    if tested and Version(version).release[:2] > Version(tested).release[:2]:
        return look(label, f"{version} is newer than the tested {tested}", f"pip install {name}=={tested}")
    if tested and Version(version).public == tested:
        return ok(label, version)
    return ok(label, f"{version}, supported" + (f"; tested with {tested}" if tested else ""))


def _triton() -> Finding:
    if device() == "cuda":
        return check_package("Triton", "triton")
    return skip("Triton", "is not needed: the kernels that use it run on GPUs")


def _apex() -> Finding:
    if importlib.util.find_spec("apex") is None:
        return skip("apex", "is not installed: torch's LayerNorm is used")
    if (reason := import_error("apex.normalization")) is not None:
        return look("apex", f"has no LayerNorm that can be imported: {reason}", "build it for this torch, or remove it")
    return ok("apex", "is installed: LayerNorm is fused")


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        message = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
        if device() == "cpu":
            return look("GPU", f"{message}, but DS_ACCELERATOR=cpu selects the CPU", "unset DS_ACCELERATOR")
        return ok("GPU", message)
    if Path("/proc/driver/nvidia/version").exists():
        fix = "install torch's CUDA build and a driver that is new enough for it, and check CUDA_VISIBLE_DEVICES"
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return look("GPU", f"NVIDIA's driver is installed, but torch, {built}, finds no GPU", fix)
    return skip("GPU", "no NVIDIA driver: training runs on the CPU")


def _nvcc() -> Finding:
    if device() == "cpu":
        return skip("nvcc", "is not needed: no GPU is used")
    import torch

    cuda = torch.version.cuda or "none"
    places = [f"{os.environ.get('CUDA_HOME', '')}/bin", os.environ.get("PATH", "")]
    program = shutil.which("nvcc", path=os.pathsep.join(places))
    if program is None:
        fix = f"install CUDA's toolkit {cuda} and set CUDA_HOME"
        return look("nvcc", "is not installed: DeepSpeed cannot build its operators for GPUs (fused Adam)", fix)
    release = re.search(r"release (\d+)\.(\d+)", _output(program, "--version"))
    if release and release[1] != cuda.split(".")[0]:
        message = f"{release[1]}.{release[2]}, but torch is built for CUDA {cuda}: DeepSpeed does not build with it"
        return look("nvcc", message, f"set CUDA_HOME to a toolkit {cuda}")
    return ok("nvcc", program)


def check_compiler() -> Finding:
    """Check the C++ compiler."""
    program = compiled.compiler()
    if program is None:
        return look(
            "C++ compiler",
            "none found ($CXX, g++, clang++, c++): CPU kernels and DeepSpeed's operators cannot be built",
            "install g++, or share the caches of a machine that has it and the same processor",
        )
    return ok("C++ compiler", _output(*program, "--version").splitlines()[0])


def _ninja() -> Finding:
    if (program := shutil.which("ninja")) is None:
        fix = "activate the environment that has it, or pip install ninja"
        return look("ninja", "is not on PATH: DeepSpeed's operators cannot be built", fix)
    return ok("ninja", f"{_output(program, '--version').strip()} ({program})")


def import_error(name: str) -> str | None:
    """Import a module; return its error on one line, or None."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _supported() -> dict[str, SpecifierSet]:
    """Return supported versions by package, as setup.py has them."""
    lines: list[str] = []
    with contextlib.suppress(metadata.PackageNotFoundError):  # a clone that is not installed
        lines = metadata.requires("mst_scale") or []
    found = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    try:
        from mst_scale.zero_shards.start import OLDEST_TORCH, SUPPORTED_DEEPSPEED
    except ImportError:
        return found  # DeepSpeed is missing, which its own check reports
    first, below = SUPPORTED_DEEPSPEED
    return {**found, "torch": SpecifierSet(f">={OLDEST_TORCH}"), "deepspeed": SpecifierSet(f">={first},<{below}")}


def _tested() -> dict[str, str]:
    """Return the versions that the tests ran with, by package; {} in an installed wheel."""
    path = PACKAGE.parent / "constraints.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {pin.name: next(iter(pin.specifier)).version for pin in pins if not pin.marker or pin.marker.evaluate()}


# --- memory, disk and locks ---


def check_room() -> list[Finding]:
    """Check whether a run would run out of memory or disk space."""
    cache = "set MST_SCALE_CACHE to"
    operators = build_locks.extensions_folder()
    checks = {
        "memory": _memory,
        "disk, this folder": lambda: _disk("disk, this folder", Path.cwd(), CHECKPOINT, "work in"),
        "disk, kernels": lambda: _disk("disk, kernels", cache_folder(), CACHE, cache),
        "disk, DeepSpeed": lambda: _disk("disk, DeepSpeed", operators, CACHE, "set TORCH_EXTENSIONS_DIR to"),
        "shared memory": _shared_memory,
    }
    if device() == "cuda":
        checks["GPU memory"] = _gpu_memory
    return run_each(checks)


def _memory() -> Finding:
    free, total = free_memory()
    fix = "end other processes, or ask for more; `mst plan` estimates what a model needs"
    return _room("memory", free, f"of {_size(total)}", fix, least=MEMORY, enough=LITTLE_MEMORY)


def free_memory() -> tuple[int, int]:
    """Return (free, total) bytes of this machine, or of the part of it that this process may use."""
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for folder in _control_groups():
        try:
            most, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        except (OSError, ValueError):  # no such file, or no limit
            continue
        if most < total:
            free, total = min(free, max(0, most - used + _droppable(folder))), most
    return free, total


def _droppable(folder: Path) -> int:
    """Return how much of a control group's memory holds files that were read and can be dropped."""
    try:
        counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(counted["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _control_groups() -> list[Path]:
    """Return the folders of the control groups (v2) of this process, the outermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    parts = Path(own).parts
    return [CGROUP.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _gpu_memory() -> Finding:
    import torch

    free, total = torch.cuda.mem_get_info(local_gpu())
    return _room(
        "GPU memory", free, f"of {_size(total)}", "nvidia-smi lists the processes that use it", enough=total // 2
    )


def _disk(name: str, place: Path, least: int, elsewhere: str) -> Finding:
    """Check the folder, or the one that it would be created in."""
    existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    if not existing.is_dir():
        return wrong(name, f"{existing} is not a folder", f"{elsewhere} a folder")
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return wrong(name, f"{existing} cannot be written", f"{elsewhere} a folder that you can write")
    return _room(
        name, free, f"for {place}", f"free some space, or {elsewhere} a folder with more", least=FULL, enough=least
    )


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    return _room("shared memory", free, "in /dev/shm", "containers: docker run --shm-size=8g", enough=SHARED)


def _room(name: str, free: int, of: str, fix: str, *, least: int = 0, enough: int) -> Finding:
    message = f"{_size(free)} free {of}"
    if free < least:
        return wrong(name, f"{message}: too little", fix, free=free)
    if free < enough:
        return look(name, f"{message}: little", fix, free=free)
    return ok(name, message, free=free)


def _size(size: int) -> str:
    return f"{size / GB:,.1f} GB" if size >= GB else f"{size / MB:,.0f} MB"


def locks() -> Finding:
    """Remove stale locks of killed builds, as at the start of every run."""
    folder, name = build_locks.extensions_folder(), "build locks"
    stale = {lock: build_locks.stale(lock) for lock in build_locks.locks(folder)}
    removed = [lock for lock, known in stale.items() if known]
    for lock in removed:
        lock.unlink(missing_ok=True)
    if removed:
        message = (
            f"removed {', '.join(map(str, removed))}, left by a killed build: every start would have waited for it"
        )
        return look(name, message, "nothing to do")
    for lock, known in stale.items():
        if known is None:
            message = f"{lock} is held: a build is running, or was killed just now"
            return look(name, message, "wait for that build; if there is none, remove the lock")
    return ok(name, f"none is stale in {folder}")

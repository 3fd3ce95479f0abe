"""Checks one machine: installed versions, memory, disk space, and locks of killed builds.

Each program and library has a check of its own, so that a broken one hides none of the others. Supported ranges come
from the package's metadata and from zero_shards, tested versions from constraints.txt, which only a clone has.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mst_scale import compiled, shipped
from mst_scale.compiled import build_locks, cache_folder
from mst_scale.doctor.findings import Finding, look, ok, run_each, skip, wrong

DRIVER, CGROUP = Path("/proc/driver/nvidia/version"), Path("/sys/fs/cgroup")
MB, GB = 1_000_000, 1_000_000_000
FULL = 100 * MB  # with less free, a disk is full
CACHE = 1 * GB  # DeepSpeed's operators for a GPU take some hundred MB
CHECKPOINT = 5 * GB  # three of GPT-2 small with Adam
SHARED = 256 * MB  # DeepSpeed's buffers between ranks on the CPU take 69 MB per rank
MEMORY, LITTLE_MEMORY = 1 * GB, 4 * GB  # importing torch and DeepSpeed takes half of the first


def device() -> str:
    """Return "cuda" or "cpu", as DeepSpeed chooses it: DS_ACCELERATOR takes precedence over the hardware."""
    import torch

    asked = os.environ.get("DS_ACCELERATOR", "cuda")
    return "cuda" if asked == "cuda" and torch.cuda.is_available() else "cpu"


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
            "GPU driver": _driver,
            "nvcc": _nvcc,
            "C++ compiler": check_compiler,
            "ninja": _ninja,
        }
    )


def check_package(label: str, name: str) -> Finding:
    """Check a library that training needs."""
    version, wanted = installed(name), _supported().get(name, SpecifierSet())
    fix = f"pip install '{name}{wanted}'"
    if version is None:
        return wrong(label, "is not installed", fix)
    if not wanted.contains(version, prereleases=True):
        return wrong(label, f"{version} is not supported: {name}{wanted} is", fix, version=version)
    if (reason := import_error(name)) is not None:
        return wrong(label, f"{version} cannot be imported: {reason}", f"{fix}, or install what it misses")
    best = _tested().get(name)
    if best is None:
        return ok(label, f"{version}, supported ({name}{wanted})", version=version)
    if Version(version).release[:2] > Version(best).release[:2]:
        return look(label, f"{version} is newer than the tested {best}", f"pip install {name}=={best}", version=version)
    said = version if Version(version).public == best else f"{version}, supported; tested with {best}"
    return ok(label, said, version=version, tested=best)


def _triton() -> Finding:
    version = installed("triton")
    if device() == "cuda":
        return check_package("Triton", "triton")
    if version is None:
        return skip("Triton", "is not installed, and not needed: the kernels that use it run on GPUs")
    return ok("Triton", f"{version}, for GPUs", version=version)


def _apex() -> Finding:
    if importlib.util.find_spec("apex") is None:
        return skip("apex", "is not installed: LayerNorm is torch's")
    if (reason := import_error("apex.normalization")) is not None:
        return look("apex", f"has no LayerNorm that can be imported: {reason}", "build it for this torch, or remove it")
    return ok("apex", "is installed: LayerNorm is fused")


def _driver() -> Finding:
    import torch

    known = re.search(r"Kernel Module\D*(\d[\d.]*)", DRIVER.read_text()) if DRIVER.exists() else None
    version = known[1] if known else None
    if not torch.cuda.is_available():
        if version is None:
            return skip("GPU driver", "no NVIDIA driver: the CPU computes")
        built = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        fix = "install torch's CUDA build and a driver that is new enough for it, and check CUDA_VISIBLE_DEVICES"
        return look("GPU driver", f"{version} is installed, but torch, {built}, finds no GPU", fix)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    said = f"{version or 'installed'}, CUDA {torch.version.cuda}: {len(names)} × {names[0]}"
    if device() == "cpu":
        return look("GPU driver", f"{said}, but DS_ACCELERATOR=cpu selects the CPU", "unset DS_ACCELERATOR")
    return ok("GPU driver", said, gpus=names)


def _nvcc() -> Finding:
    if device() == "cpu":
        return skip("nvcc", "is not needed: no GPU is used")
    import torch

    places = [f"{os.environ.get('CUDA_HOME', '')}/bin", os.environ.get("PATH", "")]
    program, cuda = shutil.which("nvcc", path=os.pathsep.join(places)), torch.version.cuda or "none"
    if program is None:
        fix = f"install CUDA's toolkit {cuda} and set CUDA_HOME"
        return look("nvcc", "is not installed: DeepSpeed cannot build its operators for GPUs (fused Adam)", fix)
    release = re.search(r"release (\d+)\.(\d+)", _output(program, "--version"))
    version = f"{release[1]}.{release[2]}" if release else "of an unknown version"
    if release and release[1] != cuda.split(".")[0]:
        said = f"{version}, but torch is built for CUDA {cuda}: DeepSpeed refuses to build with it"
        return look("nvcc", said, f"set CUDA_HOME to a toolkit {cuda}")
    return ok("nvcc", f"{version} ({program})", version=version)


def check_compiler() -> Finding:
    """Check the C++ compiler."""
    program = compiled.compiler()
    if program is None:
        return look(
            "C++ compiler",
            "none found ($CXX, g++, clang++, c++): CPU kernels and DeepSpeed's operators cannot be built",
            "install g++, or share the caches of a machine that has it and the same processor",
        )
    return ok("C++ compiler", _output(*program, "--version").splitlines()[0], program=program)


def _ninja() -> Finding:
    program = shutil.which("ninja")
    if program is None:
        here = "; it is installed, but not on PATH" if installed("ninja") else ""
        fix = "activate the environment that has it, or pip install ninja"
        return look("ninja", f"torch finds none: DeepSpeed's operators cannot be built{here}", fix)
    return ok("ninja", f"{_output(program, '--version').strip()} ({program})")


def installed(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
    """Supported versions by package, as setup.py has them."""
    try:
        lines = metadata.requires("mst_scale") or []
    except metadata.PackageNotFoundError:
        lines = []  # a clone that is not installed
    found = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    try:
        from mst_scale.zero_shards.versions import OLDEST_TORCH, SUPPORTED_DEEPSPEED
    except ImportError:
        return found  # DeepSpeed is missing, which its own check reports
    first, below = SUPPORTED_DEEPSPEED
    return {**found, "torch": SpecifierSet(f">={OLDEST_TORCH}"), "deepspeed": SpecifierSet(f">={first},<{below}")}


def _tested() -> dict[str, str]:
    """The versions that the tests ran with, by package; {} in an installed wheel."""
    path = shipped.PACKAGE.parent / "constraints.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    here = {key: str(value) for key, value in default_environment().items()}
    return {
        pin.name: next(iter(pin.specifier)).version for pin in pins if pin.marker is None or pin.marker.evaluate(here)
    }


# --- memory, disk and locks ---


def check_room() -> list[Finding]:
    """Check whether a run would run out of memory or disk space."""
    operators = build_locks.extensions_folder()
    checks = {
        "memory": _memory,
        "disk, this folder": lambda: _disk("disk, this folder", Path.cwd(), CHECKPOINT, "work in"),
        "disk, kernels": lambda: _disk("disk, kernels", cache_folder(), CACHE, "set MST_SCALE_CACHE to"),
        "disk, DeepSpeed": lambda: _disk("disk, DeepSpeed", operators, CACHE, "set TORCH_EXTENSIONS_DIR to"),
        "shared memory": _shared_memory,
    }
    if device() == "cuda":
        checks["GPU memory"] = _gpu_memory
    return run_each(checks)


def locks() -> Finding:
    """Remove stale locks of killed builds, as at the start of every run."""
    folder, name = build_locks.extensions_folder(), "build locks"
    verdicts = {lock: build_locks.stale(lock) for lock in build_locks.locks(folder)}
    gone = [lock for lock, verdict in verdicts.items() if verdict]
    for lock in gone:
        lock.unlink(missing_ok=True)
    if gone:
        said = f"removed {', '.join(map(str, gone))}, left by a killed build: every start would have waited for it"
        return look(
            name, said, "nothing to do: it is removed, as at the start of every run", removed=list(map(str, gone))
        )
    young = [lock for lock, verdict in verdicts.items() if verdict is None]
    if young:
        fix = "wait for that build; if there is none, remove the lock"
        return look(name, f"{young[0]} is held: a build is running, or was killed just now", fix)
    return ok(name, f"none is stale in {folder}")


def _memory() -> Finding:
    free, total = free_memory()
    said = f"{_size(free)} free of {_size(total)}"
    if free < MEMORY:
        fix = "end other processes, or ask for more"
        return wrong("memory", f"{said}: too little for torch and DeepSpeed", fix, free=free, total=total)
    if free < LITTLE_MEMORY:
        fix = "`mst plan` estimates what a model needs"
        return look("memory", f"{said}: enough for small models only", fix, free=free, total=total)
    return ok("memory", said, free=free, total=total)


def free_memory() -> tuple[int, int]:
    """Return (free, total) bytes of this machine, or of the part of it that this process may use."""
    lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    known = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    free, total = known["MemAvailable"], known["MemTotal"]
    try:
        most, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no such file, or no limit
        return free, total
    return (min(free, max(0, most - used)), most) if most < total else (free, total)


def _gpu_memory() -> Finding:
    import torch

    free, total = torch.cuda.mem_get_info(local_gpu())
    said = f"{_size(free)} free of {_size(total)}"
    if free < total // 2:
        fix = "nvidia-smi lists its processes"
        return look("GPU memory", f"{said}: another process uses it", fix, free=free, total=total)
    return ok("GPU memory", said, free=free, total=total)


def _disk(name: str, place: Path, least: int, elsewhere: str) -> Finding:
    """Check the folder, or the one that it would be created in."""
    there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    said = f"{_size(free)} free for {place}"
    fix = f"free some space, or {elsewhere} a folder with more"
    if not os.access(there, os.W_OK):
        return wrong(name, f"{there} cannot be written", f"{elsewhere} a folder that you can write", free=free)
    if free < FULL:
        return wrong(name, f"{said}: full", fix, free=free)
    return look(name, f"{said}: little", fix, free=free) if free < least else ok(name, said, free=free)


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    said = f"{_size(free)} free in /dev/shm"
    if free < SHARED:
        fix = "containers: docker run --shm-size=8g"
        return look("shared memory", f"{said}: too little for several ranks or loaders", fix, free=free)
    return ok("shared memory", said, free=free)


def _size(size: int) -> str:
    return f"{size / GB:,.1f} GB" if size >= GB else f"{size / MB:,.0f} MB"

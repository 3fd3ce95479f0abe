"""Compares what is installed with what is supported (setup.py) and tested (constraints.txt).

Each program and library for itself, so that one that is broken hides none of the others. Ranges come from the
package's metadata and from zero_shards, tested versions from constraints.txt, which is in a clone only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mst_scale import compiled, shipped
from mst_scale.doctor.finding import Finding, each, look, ok, skip, wrong

DRIVER = Path("/proc/driver/nvidia/version")


def found() -> list[Finding]:
    checks: dict[str, Callable[[], Finding]] = {
        "Python": python,
        "torch": lambda: of_package("torch", "torch"),
        "DeepSpeed": lambda: of_package("DeepSpeed", "deepspeed"),
        "Triton": triton,
        "apex": apex,
        "GPU driver": driver,
        "nvcc": nvcc,
        "C++ compiler": compiler,
        "ninja": ninja,
    }
    return each(checks)


def python() -> Finding:
    return ok("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def of_package(label: str, name: str) -> Finding:
    """A library that nothing trains without."""
    version, wanted = installed(name), ranges().get(name, SpecifierSet())
    cure = f"pip install '{name}{wanted}'"
    if version is None:
        return wrong(label, "is not installed", cure)
    if not wanted.contains(version, prereleases=True):
        return wrong(label, f"{version} is not supported: {name}{wanted} is", cure, version=version)
    if (reason := import_error(name)) is not None:
        return wrong(label, f"{version} cannot be imported: {reason}", f"{cure}, or mend what it misses")
    best = tested().get(name)
    if best is None:
        return ok(label, f"{version}, supported ({name}{wanted})", version=version)
    if Version(version).release[:2] > Version(best).release[:2]:
        return look(label, f"{version} is newer than the tested {best}", f"pip install {name}=={best}", version=version)
    said = version if Version(version).public == best else f"{version}, supported; tested with {best}"
    return ok(label, said, version=version, tested=best)


def triton() -> Finding:
    version = installed("triton")
    if device() == "cuda":
        return of_package("Triton", "triton")
    if version is None:
        return skip("Triton", "is not installed, and not needed: the kernels that want it run on GPUs")
    return ok("Triton", f"{version}, for GPUs", version=version)


def apex() -> Finding:
    if importlib.util.find_spec("apex") is None:
        return skip("apex", "is not installed: LayerNorm is torch's")
    if (reason := import_error("apex.normalization")) is not None:
        return look("apex", f"has no LayerNorm that can be imported: {reason}", "build it for this torch, or remove it")
    return ok("apex", "is here: LayerNorm is fused")


def driver() -> Finding:
    import torch

    known = re.search(r"Kernel Module\D*(\d[\d.]*)", DRIVER.read_text()) if DRIVER.exists() else None
    version = known[1] if known else None
    if not torch.cuda.is_available():
        if version is None:
            return skip("GPU driver", "no NVIDIA driver: the CPU computes")
        built = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        return look(
            "GPU driver",
            f"{version} is here and torch, {built}, sees no GPU",
            "install torch's CUDA build, a driver that is new enough for it, and look at CUDA_VISIBLE_DEVICES",
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    said = f"{version or 'here'}, CUDA {torch.version.cuda}: {len(names)} × {names[0]}"
    if device() == "cpu":
        return look("GPU driver", f"{said}, and DS_ACCELERATOR=cpu keeps to the CPU", "unset DS_ACCELERATOR")
    return ok("GPU driver", said, gpus=names)


def nvcc() -> Finding:
    program = shutil.which(
        "nvcc", path=f"{os.environ.get('CUDA_HOME', '')}/bin{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if device() == "cpu":
        return skip("nvcc", "is not needed: no GPU is used")
    import torch

    cuda = torch.version.cuda or "none"
    if program is None:
        cure = f"install CUDA's toolkit {cuda} and set CUDA_HOME"
        return look("nvcc", "is not here: DeepSpeed cannot build its operators for GPUs (fused Adam)", cure)
    release = re.search(r"release (\d+)\.(\d+)", output(program, "--version"))
    version = f"{release[1]}.{release[2]}" if release else "of an unknown version"
    if release and release[1] != cuda.split(".")[0]:
        cure = f"set CUDA_HOME to a toolkit {cuda}"
        return look("nvcc", f"{version}, and torch is built for CUDA {cuda}: DeepSpeed refuses to build with it", cure)
    return ok("nvcc", f"{version} ({program})", version=version)


def compiler() -> Finding:
    program = compiled.compiler()
    if program is None:
        return look(
            "C++ compiler",
            "there is none ($CXX, g++, clang++, c++): CPU kernels and DeepSpeed's operators cannot be built",
            "install g++, or share the caches of a machine with this processor that has it",
        )
    first = output(*program, "--version").splitlines()[0]
    return ok("C++ compiler", first, program=program)


def ninja() -> Finding:
    program = shutil.which("ninja")
    if program is None:
        here = "; it is installed, but not on PATH" if installed("ninja") else ""
        cure = "activate the environment that has it, or pip install ninja"
        return look("ninja", f"torch finds none: DeepSpeed's operators cannot be built{here}", cure)
    return ok("ninja", f"{output(program, '--version').strip()} ({program})")


# --- what there is ---


def device() -> str:
    """Return "cuda" or "cpu", as DeepSpeed chooses it: DS_ACCELERATOR goes before what is there."""
    import torch

    asked = os.environ.get("DS_ACCELERATOR", "cuda")
    return "cuda" if asked == "cuda" and torch.cuda.is_available() else "cpu"


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def import_error(name: str) -> str | None:
    """What importing it meets, on one line."""
    try:
        importlib.import_module(name)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


# --- what there should be ---


def ranges() -> dict[str, SpecifierSet]:
    """Supported versions by package, as setup.py has them."""
    try:
        lines = metadata.requires("mst_scale") or []
    except metadata.PackageNotFoundError:
        lines = []  # a clone that is not installed
    found = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    try:
        from mst_scale.zero_shards.versions import OLDEST_TORCH, SUPPORTED_DEEPSPEED
    except ImportError:
        return found  # of DeepSpeed, which has a line of its own
    first, below = SUPPORTED_DEEPSPEED
    return {**found, "torch": SpecifierSet(f">={OLDEST_TORCH}"), "deepspeed": SpecifierSet(f">={first},<{below}")}


def tested() -> dict[str, str]:
    """The versions the tests ran with, by package; {} where a wheel is installed."""
    path = shipped.PACKAGE.parent / "constraints.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    here = {key: str(value) for key, value in default_environment().items()}
    return {
        pin.name: next(iter(pin.specifier)).version for pin in pins if pin.marker is None or pin.marker.evaluate(here)
    }

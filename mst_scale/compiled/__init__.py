"""How does a compiled CPU kernel get built and loaded?

a folder of *.h and kernel.cpp, and simd.h beside this file  →  one shared library, compiled at first use for this very
CPU (AVX-512, AVX2 or whatever it has)  →  ctypes.

The sources need a C++17 compiler and OpenMP but no torch headers, so a build takes seconds and its result does not
depend on the torch version. It lands in a cache folder under a name that holds a digest of sources, flags, compiler and
what `-march=native` means here; it is written under another name and renamed when whole, so a build that dies half way
leaves nothing that could be loaded. One process builds, the others of the same machine wait for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SHARED = Path(__file__).parent
FLAGS = ["-O3", "-std=c++17", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
log = logging.getLogger("mst_scale")


def cache_folder() -> Path:
    """$MST_SCALE_CACHE, else mst_scale in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("MST_SCALE_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mst_scale"


def compiler() -> str | None:
    """$CXX, else the first of g++, clang++, c++ on the path."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def build(name: str, sources: Path, folder: Path, flags: Sequence[str] = ()) -> Path:
    """The library `name` of `sources` in `folder`, compiled if it is not there yet.

    RuntimeError says why it cannot be had. `flags` come last, so that "-mno-avx512f" takes AVX-512 away again.
    """
    program = compiler()
    if program is None:
        raise RuntimeError("no C++ compiler found ($CXX, g++, clang++ or c++)")
    flags = [*FLAGS, *flags]
    texts = [path.read_text() for place in (sources, SHARED) for path in sorted(place.glob("*.[hc]*"))]
    target = _command([program, *flags[2:], "-dM", "-E", "-x", "c++", os.devnull])
    version = _command([program, "--version"])
    digest = hashlib.sha256("\0".join([*flags, version, target, *texts]).encode())
    library = folder / f"{name}_{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel even if this process is killed
            if not library.exists():
                log.info("compiling the CPU kernel %s with %s into %s (once)", name, program, folder)
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    whole = Path(scratch) / library.name
                    _command([program, *flags, f"-I{SHARED}", "-o", str(whole), str(sources / "kernel.cpp")])
                    os.replace(whole, library)
    except OSError as error:
        raise RuntimeError(f"the kernel cache {folder} is not writable ({error}): set MST_SCALE_CACHE") from error
    return library


def load(name: str, sources: Path) -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    try:
        # Symbols of OpenMP resolve to the runtime that torch has loaded globally, so both share one thread pool.
        return ctypes.CDLL(str(build(name, sources, cache_folder())))
    except (RuntimeError, OSError) as error:
        return str(error)


def _command(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise RuntimeError(f"{' '.join(arguments[:1])} failed: {reason.strip()}")
    return done.stdout

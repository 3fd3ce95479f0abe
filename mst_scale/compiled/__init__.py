"""Builds the compiled CPU kernels at first use and loads them.

a folder of *.h and kernel.cpp, and simd.h next to this file  →  one shared library, compiled at first use for exactly
this CPU (AVX-512, AVX2 or whatever it supports)  →  ctypes.

The sources need a C++17 compiler and OpenMP but no torch headers, so a build takes seconds and does not depend on the
version of torch. The library is put into a cache folder under a name with two digests: one of sources, flags and the
processor's instructions, one of the compiler and its meaning of `-march=native`. A machine without a compiler (a
compute node) uses what another machine with the same processor has built. A library is written under a temporary name,
loaded by a separate process, synced to disk and renamed, so that an interrupted build, or a compiler that reports
success without writing the whole file, leaves nothing behind. One process builds, and the others on the machine wait.

first_use     logs what is being compiled and for how long, including DeepSpeed's operators
build_locks   removes the locks of builds that were killed
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mst_scale.compiled import first_use
from mst_scale.machine import processor_entries

SHARED = Path(__file__).parent
FLAGS = ["-O3", "-std=c++17", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
FLAGS += ["-fvisibility=hidden"]  # otherwise a library would take template constants from one that is already loaded
log = logging.getLogger("mst_scale")


def cache_folder() -> Path:
    """Return $MST_SCALE_CACHE, or mst_scale in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("MST_SCALE_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mst_scale"


def compiler() -> list[str] | None:
    """Return the command in $CXX (such as "ccache g++"), or the first of g++, clang++ and c++ on the path."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named if shutil.which(named[0]) else None
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    return [found] if found else None


def build(
    name: str, sources: Path, folder: Path, flags: Sequence[str] = (), *, instead_of: os.stat_result | None = None
) -> Path:
    """Return the path of the library `name` in `folder`, compiled from `sources` if it is missing.

    Args:
        name: name of the library.
        sources: folder with kernel.cpp and its headers.
        folder: the cache folder.
        flags: flags that follow the usual ones; "-mno-avx512f" disables AVX-512, for example.
        instead_of: a library that cannot be loaded; if it is still there, it is compiled again.

    Raises:
        RuntimeError: if it cannot be compiled.
    """
    flags = [*FLAGS, *flags]
    texts = [path.read_text() for place in (sources, SHARED) for path in sorted(place.glob("*.[hc]*"))]
    stem = f"{name}_{_digest(*flags, _processor(), *texts)}"
    program = compiler()
    if program is None:
        if instead_of is None and (found := sorted(folder.glob(f"{stem}_*.so"))):
            return found[0]
        raise RuntimeError("no C++ compiler found ($CXX, g++, clang++ or c++)")
    target = _command([*program, *flags[2:], "-dM", "-E", "-x", "c++", os.devnull])
    library = folder / f"{stem}_{_digest(_command([*program, '--version']), target)}.so"

    def wanted() -> bool:
        return not library.exists() or (instead_of is not None and _same(library.stat(), instead_of))

    if not wanted():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with first_use.lock(folder / "build.lock", f"the CPU kernel {name}"):
            if wanted():
                what, about = f"compiling the CPU kernel {name}", f" with {shlex.join(program)} into {folder} (once)"
                with first_use.elapsed(what, about), tempfile.TemporaryDirectory(dir=folder) as scratch:
                    whole = Path(scratch) / library.name
                    _command([*program, *flags, f"-I{SHARED}", "-o", str(whole), str(sources / "kernel.cpp")])
                    # in a separate process, since loading a truncated library may crash
                    _command([sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(whole)])
                    with open(whole, "rb") as file:
                        os.fsync(file.fileno())
                    os.replace(whole, library)
    except OSError as error:
        raise RuntimeError(f"the kernel cache {folder} is not writable ({error}): set MST_SCALE_CACHE") from error
    return library


def load(name: str, sources: Path) -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    try:
        library = build(name, sources, cache_folder())
        try:
            # OpenMP symbols resolve to the runtime that torch has loaded globally, so both share one thread pool.
            return ctypes.CDLL(str(library))
        except OSError as error:
            log.warning("the CPU kernel %s cannot be loaded (%s): compiling it again", library, error)
            return ctypes.CDLL(str(build(name, sources, cache_folder(), instead_of=library.stat())))
    except (RuntimeError, OSError) as error:
        return str(error)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's instructions, which decide whether a library built elsewhere runs here."""
    known = processor_entries().get("flags") or processor_entries().get("Features", "")  # the second is ARM's
    return " ".join([platform.machine(), *sorted(known.split())])


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_ino, one.st_mtime_ns, one.st_size) == (other.st_ino, other.st_mtime_ns, other.st_size)


def _command(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line.lower()), done.stderr[-200:])
        raise RuntimeError(f"{arguments[0]} failed: {reason.strip() or f'exit code {done.returncode}'}")
    return done.stdout

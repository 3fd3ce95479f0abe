"""How does the compiled CPU kernel get built, loaded and called?

cpp_kernel/*.h, kernel.cpp  →  one shared library, compiled at first use for this very CPU  →  ctypes.

The sources need a C++17 compiler and OpenMP but no torch headers, so the build takes seconds and its result does not
depend on the torch version. It lands in a cache folder under a name that holds a digest of sources, flags, compiler and
what `-march=native` means here; it is written under another name and renamed when whole, so a build that dies half way
leaves nothing that could be loaded. One process builds, the others of the same machine wait for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from mst_scale.hybrid_sparse_attention.custom_op import empty_lse, empty_output, sparse_operator
from mst_scale.hybrid_sparse_attention.pattern import KINDS, Pattern

SOURCES = Path(__file__).parent / "cpp_kernel"
FLAGS = ["-O3", "-std=c++17", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # kernel.cpp's codes 0, 1, 2, 3
# From this many rows per residue class on, gathering the class beats its diagonals: it reads each row once per 64
# others instead of once per pair. Measured 64 wide at l = 32 … 256: equal at 32 rows, 1.2 to 1.4 times faster at 64.
REGROUP_FROM = 32
# Multiply-adds that are worth waking one more thread: about 20 µs of work.
PER_THREAD = 1 << 20
log = logging.getLogger("mst_scale")


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row"))]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        ("lse", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batches", "heads", "kv_heads", "length", "dim")),
        *((name, ctypes.c_int64) for name in ("dtype", "kind", "stride", "causal", "regroup", "threads")),
        ("scale", ctypes.c_double),
    ]


def cache_folder() -> Path:
    """$MST_SCALE_CACHE, else mst_scale in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("MST_SCALE_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mst_scale"


def compiler() -> str | None:
    """$CXX, else the first of g++, clang++, c++ on the path."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def build(folder: Path) -> Path:
    """The library in `folder`, compiled if it is not there yet. RuntimeError says why it cannot be had."""
    program = compiler()
    if program is None:
        raise RuntimeError("no C++ compiler found ($CXX, g++, clang++ or c++)")
    sources = sorted(SOURCES.iterdir())
    target = _command([program, "-march=native", "-fopenmp", "-dM", "-E", "-x", "c++", os.devnull])
    version = _command([program, "--version"])
    digest = hashlib.sha256("\0".join([*FLAGS, version, target, *(s.read_text() for s in sources)]).encode())
    library = folder / f"sparse_attention_{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel even if this process is killed
            if not library.exists():
                log.info("compiling the CPU attention kernel with %s into %s (once)", program, folder)
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    whole = Path(scratch) / library.name
                    _command([program, *FLAGS, "-o", str(whole), str(SOURCES / "kernel.cpp")])
                    os.replace(whole, library)
    except OSError as error:
        raise RuntimeError(f"the kernel cache {folder} is not writable ({error}): set MST_SCALE_CACHE") from error
    return library


def _command(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise RuntimeError(f"{' '.join(arguments[:1])} failed: {reason.strip()}")
    return done.stdout


@functools.cache
def library() -> ctypes.CDLL | str:
    """The loaded library, or the reason why there is none. Tried once per process."""
    try:
        # Symbols of OpenMP resolve to the runtime that torch has loaded globally, so both share one thread pool.
        loaded = ctypes.CDLL(str(build(cache_folder())))
    except (RuntimeError, OSError) as error:
        return str(error)
    for function in (loaded.hsa_forward, loaded.hsa_backward):
        function.argtypes, function.restype = [ctypes.POINTER(_Call)], ctypes.c_int
    return loaded


def why_not(device: str, dtype: torch.dtype) -> str | None:
    """Why this kernel cannot run, or None when it can (it is compiled now if it never was)."""
    if device != "cpu":
        return f"it runs on CPU tensors, not {device}"
    if dtype not in DTYPES:
        return f"it does not take {dtype}"
    loaded = library()
    return loaded if isinstance(loaded, str) else None


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _call(
    function: str, pattern: Pattern, causal: bool, scale: float, lse: torch.Tensor, **tensors: torch.Tensor
) -> None:
    loaded = library()
    assert isinstance(loaded, ctypes.CDLL), loaded
    q, k = tensors["q"], tensors["k"]
    if q.numel() == 0:
        return
    length = q.shape[2]
    work = q.shape[0] * q.shape[1] * q.shape[3] * pattern.pairs(length, causal)
    call = _Call(
        **{name: _Tensor(x.data_ptr(), *x.stride()[:3]) for name, x in tensors.items()},
        lse=lse.data_ptr(),
        batches=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        length=length,
        dim=q.shape[3],
        dtype=DTYPES.index(q.dtype),
        kind=KINDS.index(pattern.kind),
        stride=min(pattern.stride, length),
        causal=causal,
        regroup=pattern.kind == "strided" and length >= REGROUP_FROM * pattern.stride,
        threads=max(1, min(torch.get_num_threads(), work // PER_THREAD)),
        scale=scale,
    )
    status = getattr(loaded, function)(ctypes.byref(call))
    assert status == 0, f"{function} returned {status}"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = map(_rows_contiguous, (q, k, v))
    out, lse = empty_output(q), empty_lse(q)
    _call("hsa_forward", pattern, causal, scale, lse, q=q, k=k, v=v, out=out)
    return out, lse


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dout: torch.Tensor,
    pattern: Pattern,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, out, dout = map(_rows_contiguous, (q, k, v, out, dout))
    dq, dk, dv = empty_output(q), empty_output(k), empty_output(v)
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    _call("hsa_backward", pattern, causal, scale, lse.contiguous(), **tensors)
    return dq, dk, dv


attention_cpp = sparse_operator("sparse_attention_cpp", forward, backward)

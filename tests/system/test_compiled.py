"""C++ kernels built at first use: whatever the compiler, the disk or another process does, what is loaded is whole."""

import fcntl
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from mst_scale import compiled
from mst_scale.compiled import build_locks, first_use
from tests.support.forked import context


@pytest.fixture
def toy_kernel(monkeypatch, tmp_path):
    """Sources of one function, and a cache for what they become."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "kernel.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setenv("MST_SCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "FLAGS", ["-O0", "-std=c++17", "-march=native", "-fPIC", "-shared"])
    return sources


def test_a_build_that_fails_half_way_leaves_nothing_behind(toy_kernel, monkeypatch, tmp_path):
    """A compiler that writes half a file and dies; then a working one, with the same cache."""
    broken = tmp_path / "broken-compiler"
    broken.write_text(
        '#!/bin/sh\nfor a; do [ "$previous" = -o ] && echo half > "$a" && echo "error: out of disk" >&2 && exit 1; '
        "previous=$a; done\nexit 0\n"
    )
    broken.chmod(0o755)
    cache = tmp_path / "cache"
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(RuntimeError, match="out of disk"):
        compiled.build("toy", toy_kernel, cache)
    assert [p.name for p in cache.iterdir()] == ["build.lock"]
    monkeypatch.delenv("CXX")
    built = compiled.build("toy", toy_kernel, cache)
    assert sorted(p.name for p in cache.iterdir()) == ["build.lock", built.name]
    assert compiled.build("toy", toy_kernel, cache) == built, "found, not built again"


def test_a_compiler_that_only_pretends_to_succeed_leaves_no_files(toy_kernel, monkeypatch, tmp_path):
    liar = tmp_path / "liar"
    liar.write_text('#!/bin/sh\nfor a; do [ "$previous" = -o ] && echo half > "$a"; previous=$a; done\nexit 0\n')
    liar.chmod(0o755)
    monkeypatch.setenv("CXX", str(liar))
    said = compiled.load("toy", toy_kernel)
    assert "failed: OSError" in said and "file too short" in said
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["build.lock"]
    monkeypatch.delenv("CXX")
    assert compiled.load("toy", toy_kernel).answer() == 42


def test_a_library_that_the_disk_has_lost_is_built_once_more(toy_kernel, tmp_path, caplog):
    built = compiled.build("toy", toy_kernel, tmp_path / "cache")
    built.write_bytes(b"half")
    with caplog.at_level(logging.INFO, logger="mst_scale"):
        assert compiled.load("toy", toy_kernel).answer() == 42
        assert compiled.load("toy", toy_kernel).answer() == 42
    assert sum("again" in r.message for r in caplog.records) == 1
    seen = built.stat()
    other = compiled.build("toy", toy_kernel, tmp_path / "cache", instead_of=seen)
    assert other == built and built.stat().st_mtime_ns != seen.st_mtime_ns
    again = compiled.build("toy", toy_kernel, tmp_path / "cache", instead_of=seen)
    assert again == built and built.stat().st_ino == other.stat().st_ino, "another process has done it already"


def test_a_node_without_a_compiler_takes_what_a_like_one_has_built(toy_kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"{shutil.which('env')} g++")
    built = compiled.build("toy", toy_kernel, tmp_path / "cache")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiled.load("toy", toy_kernel).answer() == 42
    monkeypatch.setattr(compiled, "_processor", lambda: "another one")
    assert "no C++ compiler" in compiled.load("toy", toy_kernel)
    monkeypatch.undo()
    assert built.exists()


def test_a_cache_that_cannot_be_written_is_explained(toy_kernel, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(RuntimeError, match="MST_SCALE_CACHE"):
        compiled.build("toy", toy_kernel, blocker / "cache")


def builds(folder, log, slow):
    """An extension of torch, with a stand-in for the compiler that takes `slow` seconds."""
    from torch.utils import cpp_extension

    def load(name):
        target = Path(cpp_extension._get_build_directory(name, verbose=False)) / f"{name}.so"
        if not target.exists():
            time.sleep(slow)
            target.touch()
            with open(log, "a") as file:
                file.write("compiled\n")
        return name

    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    torchs, cpp_extension.load = cpp_extension.load, load
    try:
        with first_use.announced():
            assert cpp_extension.load(name="fused_adam") == "fused_adam"
        assert cpp_extension.load is load, "as it was"
    finally:
        cpp_extension.load = torchs


def test_what_is_compiled_at_first_use_is_said_with_its_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(first_use, "SAY_EVERY", 0.1)
    log = tmp_path / "log"
    with caplog.at_level(logging.INFO, logger="mst_scale"):
        builds(str(tmp_path), log, 0.35)
        builds(str(tmp_path), log, 0.35)
    said = [record.getMessage() for record in caplog.records]
    assert log.read_text() == "compiled\n"
    assert said[0].startswith("compiling DeepSpeed's fused Adam into") and "torch_adam" in said[0]
    assert any("s so far" in line for line in said[1:-1]) and "done in 0." in said[-1]


def test_a_lock_that_a_killed_process_left_beside_a_built_operator_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(build_locks, "_on_network", lambda path: False)
    builds(str(tmp_path), tmp_path / "log", 0)
    (built,) = tmp_path.glob("**/fused_adam.so")
    lock = built.with_name("lock")
    lock.touch()
    os.utime(lock, (0, 0))
    builds(str(tmp_path), tmp_path / "log", 0)
    assert not lock.exists() and (tmp_path / "log").read_text() == "compiled\n"


def test_processes_that_start_together_compile_once(tmp_path):
    log = tmp_path / "log"
    children = [context.Process(target=builds, args=(str(tmp_path), str(log), 0.5)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0] and log.read_text() == "compiled\n"


def test_waiting_for_another_process_to_build_is_logged(tmp_path, caplog):
    path = tmp_path / "build.lock"
    with open(path, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.3, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        with caplog.at_level(logging.INFO, logger="mst_scale"), first_use.lock(path, "the kernel"):
            pass
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("another process, which is compiling the kernel" in line for line in said)

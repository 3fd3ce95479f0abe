"""C++ kernels built at first use: whatever the compiler, the disk or another process does, what is loaded is whole."""

import logging
import shutil

import pytest

from mst_scale import compiled


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


def test_a_compiler_that_only_says_it_is_done_leaves_nothing_behind(toy_kernel, monkeypatch, tmp_path):
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
    assert sum("once more" in r.message for r in caplog.records) == 1
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

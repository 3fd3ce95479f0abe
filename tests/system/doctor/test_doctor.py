"""`mst doctor` on one rank and on two: a healthy machine, and every ill that it has to find."""

import contextlib
import io
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mst_scale import compiled
from mst_scale.compiled import build_locks
from mst_scale.doctor import examine, full, machine, ranks
from mst_scale.doctor.findings import LOOK, OK, SKIP, WRONG, Finding, Report, merge, ok, wrong
from mst_scale.hybrid_sparse_attention import cpp
from tests.support import forked, pool, tiny_run

QUICK = {
    "build locks", "ranks meet", "Python", "torch", "DeepSpeed", "Triton", "apex", "GPU", "nvcc", "C++ compiler",
    "ninja", "memory", "disk, this folder", "disk, kernels", "disk, DeepSpeed", "shared memory", "ranks",
    "random numbers", "threads", "devices",
}  # fmt: skip
HERE = QUICK | {
    "attention, cpp", "attention, triton", "linear, compiled", "linear, blocks", "linear, 2:4",
    "training, ZeRO 0", "training, ZeRO 1", "training, ZeRO 3", "auto, attention", "auto, linear",
}  # fmt: skip
ALONE = HERE | {"collectives"}
BETWEEN = {"same software", "clocks", "small all-reduce", "all-gather"}
TOGETHER = HERE | BETWEEN


def examined(rank, world, ill=None, as_json=True, everything=True):
    """(nothing is wrong, what was printed) of a rank; `ill(rank)` comes first."""
    levels = {name: logging.getLogger(name).level for name in ("mst_scale", "DeepSpeed")}
    with contextlib.ExitStack() as undone:
        for owner, name, value in ill(rank) if ill else ():
            undone.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        out = undone.enter_context(contextlib.redirect_stdout(io.StringIO()))
        fine, _ = examine.run(as_json, everything)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    return fine, out.getvalue()


def found(said: str) -> dict[str, dict]:
    return {finding["name"]: finding for finding in json.loads(said)}


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


# --- a healthy machine ---


def test_a_lock_that_cannot_be_removed_is_wrong(tmp_path):
    (tmp_path / "operator" / "lock").mkdir(parents=True)
    os.utime(tmp_path / "operator" / "lock", (0, 0))
    report = tmp_path / "unfit"
    child = subprocess.run(
        [sys.executable, "-m", "mst_scale", "doctor", "--json"],
        env=tiny_run.environment(TORCH_EXTENSIONS_DIR=str(tmp_path), MST_UNFIT=str(report)),
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 1 and found(child.stdout)["build locks"]["verdict"] == WRONG and report.exists()


def test_one_process_on_a_healthy_machine_as_it_is_typed(tmp_path):
    """A process of its own: its exit code, and nothing but JSON on stdout."""
    words = [sys.executable, "-m", "mst_scale", "doctor", "--full", "--json"]
    child = subprocess.run(words, env=tiny_run.environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    findings = found(child.stdout)
    assert set(findings) == ALONE and not [one for one in findings.values() if one["verdict"] == WRONG]
    assert all(set(one) == {"name", "verdict", "message", "fix", "numbers"} for one in findings.values())
    assert findings["collectives"]["verdict"] == SKIP and "nothing to measure" in findings["collectives"]["message"]
    assert findings["attention, cpp"]["numbers"]["float32"] <= 2e-6
    assert all("CUDA" in findings[name]["message"] for name in ("attention, triton", "linear, blocks"))
    assert findings["auto, attention"]["numbers"]["chosen"] == "cpp"


def test_the_quick_check_compiles_nothing_and_takes_seconds(tmp_path):
    """With empty caches, as on a new machine, in processor time, which other processes do not lengthen."""
    caches = {"MST_SCALE_CACHE": str(tmp_path / "kernels"), "TORCH_EXTENSIONS_DIR": str(tmp_path / "operators")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "mst_scale", "doctor", "--json"]
    child = subprocess.run(
        words, env=tiny_run.environment(**caches), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert child.returncode == 0, child.stdout + child.stderr
    assert set(found(child.stdout)) == QUICK | {"collectives"}
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("*.o"))
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


def test_the_quick_check_of_two_ranks():
    (fine, said), (too, silence) = pool.run(examined, 2, None, True, False)
    assert fine and too and silence == "" and set(found(said)) == QUICK | BETWEEN


@pytest.mark.full
def test_two_ranks_on_a_healthy_machine():
    (fine, said), (too, silence) = pool.run(examined, 2)
    findings = found(said)
    assert fine and too and silence == "" and set(findings) == TOGETHER
    assert findings["small all-reduce"]["numbers"]["ms"] > 0 and findings["all-gather"]["numbers"]["gb_per_s"] > 0
    assert "the same masks on 2 ranks" in findings["training, ZeRO 3"]["message"]
    assert findings["same software"]["verdict"] == findings["random numbers"]["verdict"] == OK


# --- the ills of one machine ---


def test_a_kernel_that_computes_wrongly_is_named(monkeypatch):
    inner = cpp.attention_cpp
    monkeypatch.setattr(cpp, "attention_cpp", lambda *x, **how: inner(*x, **how) * (1 + 1e-4))
    finding = full.check_attention("cpp", "cpu")
    assert finding.verdict == WRONG and "in float32 is off by" in finding.message and "blocked" in finding.fix
    monkeypatch.setattr(cpp, "attention_cpp", lambda *x, **how: inner(*x, **how) * float("nan"))
    finding = full.check_attention("cpp", "cpu")
    assert finding.verdict == WRONG, "what is not a number is no small error"


def test_a_linear_kernel_that_leaves_gradients_where_masked_is_named(monkeypatch):
    def leaks(self, x, weight, bias, dense_gradient):
        from mst_scale.sparse_linear.definition import definition

        return definition(x, weight, full.single_weights(), bias, dense_gradient=True)

    monkeypatch.setattr(full.cpu.CompiledIndex, "linear", leaks)
    finding = full.check_compiled_linear()
    assert finding.verdict == WRONG and "dW" in finding.message


def test_a_missing_compiler_is_found_and_what_it_costs(monkeypatch):
    monkeypatch.setattr(compiled, "compiler", lambda: None)
    finding = machine.check_compiler()
    assert finding.verdict == LOOK and "install g++" in finding.fix
    monkeypatch.setattr(cpp, "library", lambda: "no C++ compiler found")
    finding = full.check_attention("cpp", "cpu")
    assert finding.verdict == LOOK and "no C++ compiler found" in finding.message


@pytest.mark.parametrize(
    ("name", "version", "verdict", "said"),
    [
        ("deepspeed", "0.18.4", WRONG, "0.18.4 is not supported: deepspeed<0.20,>=0.19 is"),
        ("torch", "2.7.1", WRONG, "2.7.1 is not supported"),
        ("torch", None, WRONG, "is not installed"),
        ("torch", "2.99.0", LOOK, "2.99.0 is newer than the tested"),
        ("torch", "2.8.0+cu128", OK, "2.8.0+cu128, supported; tested with"),
    ],
)
def test_unsupported_versions_are_found(monkeypatch, name, version, verdict, said):
    inner = machine.installed
    monkeypatch.setattr(machine, "installed", lambda asked: version if asked == name else inner(asked))
    finding = machine.check_package(name, name)
    assert finding.verdict == verdict and finding.message.startswith(said)
    assert verdict == OK or finding.fix.startswith("pip install")


def test_a_library_that_cannot_be_imported_is_found(monkeypatch):
    monkeypatch.setattr(machine, "import_error", lambda name: "ImportError: libcudart.so.12")
    finding = machine.check_package("torch", "torch")
    assert finding.verdict == WRONG and "libcudart" in finding.message


@pytest.mark.parametrize("error", [OSError("libcudart.so.12: no such file"), ValueError("libcublas.so was not found")])
def test_a_torch_that_cannot_be_loaded_does_not_hide_the_other_checks(monkeypatch, capsys, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(examine, "_checks", broken)
    assert examine.run(True, False) == (False, None)
    findings = found(capsys.readouterr().out)
    assert str(error) in findings["mst_scale"]["message"] and "Python" in findings


def test_a_stale_lock_is_removed_and_told_and_a_young_one_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr(build_locks, "extensions_folder", lambda: tmp_path)
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert machine.locks().verdict == LOOK and lock.exists()
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - 10_000,) * 2)
    finding = machine.locks()
    assert finding.verdict == LOOK and str(lock) in finding.message and not lock.exists()
    assert machine.locks().verdict == OK


def test_a_full_disk_and_little_memory_are_found(monkeypatch, tmp_path):
    disk = SimpleNamespace(free=5_000_000, used=0, total=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: disk)
    monkeypatch.setattr(machine, "free_memory", lambda: (300_000_000, 8_000_000_000))
    found = verdicts(machine.check_room())
    assert found["disk, this folder"] == found["disk, kernels"] == found["memory"] == WRONG
    assert found["shared memory"] == LOOK
    disk.free = 2_000_000_000
    assert verdicts(machine.check_room())["disk, this folder"] == LOOK


def test_a_file_in_place_of_a_folder_is_wrong(monkeypatch, tmp_path):
    """Nothing can be built there, however much space its disk has."""
    place = tmp_path / "file"
    place.write_text("")
    monkeypatch.setenv("MST_SCALE_CACHE", str(place))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(place / "inside"))
    found = {finding.name: finding for finding in machine.check_room()}
    for name in ("disk, kernels", "disk, DeepSpeed"):
        assert found[name].verdict == WRONG and f"{place} is not a folder" in found[name].message


def test_memory_of_a_container_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("4000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.free_memory() == (3_000_000, 4_000_000)
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 500000\n")
    assert machine.free_memory() == (3_500_000, 4_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory()[1] > 4_000_000
    monkeypatch.setattr(machine, "_control_groups", lambda: [tmp_path, tmp_path / "job"])
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.max").write_text("2000000\n")
    (tmp_path / "job" / "memory.current").write_text("1500000\n")
    assert machine.free_memory() == (500_000, 2_000_000), "a job's own limit counts"


def test_a_check_that_raises_or_never_ends_does_not_stop_the_others():
    def breaks(_):
        raise RuntimeError("it is\nbroken")

    todo = [
        examine.Check("first", breaks),
        examine.Check("second", lambda _: time.sleep(60) or [], seconds=0.3),
        examine.Check("third", lambda _: [ok("third", "fine")]),
    ]
    findings: list[Finding] = []
    assert not examine.examine(None, todo, findings.extend)
    assert verdicts(findings) == {"first": WRONG, "second": WRONG, "third": OK}
    assert findings[0].message == "RuntimeError: it is broken" and "not finished after" in findings[1].message


def test_ranks_that_cannot_meet_are_told_and_the_rest_is_looked_at(monkeypatch):
    def alone():
        raise OSError("cannot meet the other ranks")

    group, finding = examine.meet(alone)
    assert group is None and finding.verdict == WRONG and "cannot meet" in finding.message
    together = examine.Check("together", lambda group: group.rank, together=True)
    told: list[Finding] = []
    todo = [together, examine.Check("here", lambda _: [ok("here", "fine")])]
    assert examine.examine(None, todo, told.extend) and verdicts(told) == {"here": OK}


# --- lines ---


def test_lines_are_plain_where_nobody_looks_and_coloured_on_a_terminal(monkeypatch):
    out = io.StringIO()
    report = Report(out, as_json=False)
    report.add([wrong("torch", "is not installed", "pip install torch"), ok("ninja", "1.13")])
    report.end(3)
    torch, ninja, _, last = out.getvalue().splitlines()
    assert torch == "wrong torch                is not installed → pip install torch"
    assert ninja.startswith("ok    ninja") and last == "1 ok, 0 to look at, 1 wrong; 3 s"
    monkeypatch.setenv("MST_PROGRESS", "live")
    assert Report(out, as_json=False).line(ok("ninja", "1.13")).startswith("\x1b[32mok")


def test_the_worst_of_all_ranks_is_told_with_its_ranks():
    fine, bad = ok("disk", "much"), wrong("disk", "full", "make room")
    told = merge([[fine], [bad], [fine], [bad]], ["a", "a", "b", "b"])
    assert [one.message for one in told] == ["ranks 1, 3 (a, b): full"] and told[0].numbers["ranks"] == [1, 3]
    assert merge([[fine], [fine]], ["a", "b"]) == [fine] and merge([[bad], [bad]], ["a", "b"]) == [bad]


# --- ranks that disagree ---


def test_a_rank_with_other_software_clock_threads_or_device_is_named():
    one = ranks.Facts("a", {"torch": "2.13.0", "sources": "new"}, ranks.KNOWN_HASH, 1, (0, 1, 2, 3), "CPU", ("bf16",))
    two = replace(one, host="b")
    assert ranks.compare_software([one, two]).verdict == ranks.check_threads([one, two]).verdict == OK
    other = ranks.compare_software([one, replace(two, software={"torch": "2.9.0", "sources": "new"})])
    assert other.verdict == WRONG and "rank 1 (b): torch 2.9.0, and rank 0 torch 2.13.0" in other.message
    older = replace(two, software={"torch": "2.13.0", "sources": "old"})
    assert "sources old" in ranks.compare_software([one, older]).message
    late = ranks.compare_clocks([0.0, 7.5], [one, two])
    assert late.verdict == LOOK and late.message.startswith("7.5 s apart")
    assert ranks.check_threads([one, replace(two, threads=8)]).verdict == LOOK
    crowded = [replace(one, threads=4), replace(one, threads=4)]
    assert ranks.check_threads(crowded).verdict == LOOK
    pinned = [replace(one, cores=(core,)) for core in range(3)]
    assert ranks.check_threads(pinned).verdict == OK, "each has a core of its own"
    assert ranks.compare_devices([one, replace(two, types=())]).verdict == WRONG
    assert ranks.compare_devices([replace(one, device="H100"), two]).verdict == WRONG
    assert ranks.compare_devices([replace(one, device="H100"), replace(two, device="A100")]).verdict == LOOK
    assert ranks.check_hashes([one, replace(two, hash=1)]).verdict == WRONG


def ills(rank):
    """Of rank 1: another torch, a clock that is late, a full disk, a kernel that is wrong, a check that raises."""
    if rank == 0:
        return []
    inner, attention, real = ranks.installed, cpp.attention_cpp, time.time

    def breaks():
        raise RuntimeError("choices are broken")

    return [
        (ranks, "installed", lambda name: "2.9.0" if name == "torch" else inner(name)),
        (ranks, "time", SimpleNamespace(time=lambda: real() - 3600, perf_counter=time.perf_counter)),
        (machine, "shutil", SimpleNamespace(disk_usage=lambda place: SimpleNamespace(free=0), which=shutil.which)),
        (cpp, "attention_cpp", lambda *x, **how: attention(*x, **how) + 1),
        (full, "check_choices", breaks),
    ]


def test_what_is_wrong_on_rank_1_alone_is_told_by_rank_0():
    (fine, said), (too, _) = pool.run(examined, 2, ills)
    findings = found(said)
    assert not fine and not too, "both end with 1"
    bad = {name: one["message"] for name, one in findings.items() if one["verdict"] == WRONG}
    assert set(bad) >= {"same software", "disk, this folder", "attention, cpp", "choices"}
    assert all("rank 1 (" in bad[name] for name in bad) and findings["clocks"]["verdict"] == LOOK
    assert "choices are broken" in bad["choices"] and findings["training, ZeRO 1"]["verdict"] == OK


def fails_between_collectives() -> None:
    """A rank of its own: rank 1 has an error in the middle of training, rank 0 waits for it there."""
    inner, examine.GRACE = full.train_step, 1.0

    def step(engine, number, group):
        if os.environ["RANK"] == "1" and number == 1:
            raise RuntimeError("this GPU has fallen off the bus")
        return inner(engine, number, group)

    full.train_step = step
    examine.leave(*examine.run(True, full=True))


def test_a_rank_that_fails_between_collectives_ends_as_a_finding_and_nobody_hangs(tmp_path):
    began = time.monotonic()
    ranks = forked.start_ranks(2, fails_between_collectives, (), tmp_path)
    assert forked.end(ranks, 300) == [1, 1], time.monotonic() - began
    (said,) = [line for line in (tmp_path / "rank0").read_text().splitlines() if line.startswith("[{")]
    findings = found(said)
    assert "fallen off the bus" in findings["training, ZeRO 0"]["message"]
    assert findings["training, ZeRO 0"]["message"].startswith("rank 1 (")
    assert findings["training, ZeRO 3"]["verdict"] == LOOK and "not checked" in findings["training, ZeRO 3"]["message"]
    assert findings["auto, attention"]["verdict"] == OK, "the others go on"


# --- tuning ---


def test_tune_runs_the_benchmark_and_says_where_it_wrote(monkeypatch, tmp_path):
    from mst_scale.benchmarks import linear
    from mst_scale.sparse_linear import crossovers

    monkeypatch.setenv("MST_SCALE_CACHE", str(tmp_path))
    row = {"backend": "cpu", "dtype": "float32", "threads": 1, "shape": [8, 8], "sparsity": 0.5}
    asked = []
    monkeypatch.setattr(linear, "main", lambda words: (asked.append(words), crossovers.keep([row])))
    (finding,) = full.tune(None)
    assert asked == [["--tune"]] and str(Path(tmp_path) / "crossover.json") in finding.message
    crossovers.table.cache_clear()


def test_tune_lets_attention_choose_its_tiles_by_using_it(monkeypatch):

    used = []
    monkeypatch.setattr(full, "HEADS_AND_LENGTHS", ((64, 96), (128, 80)))
    monkeypatch.setattr(
        full, "sparse_attention", lambda q, k, v, pattern: used.append((q.shape[-1], pattern)) or q + k + v
    )
    assert "Triton's cache" in full.tune_attention("cpu").message
    assert [(size, pattern.stride) for size, pattern in used] == [(64, 256), (128, 256)]

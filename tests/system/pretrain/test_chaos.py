"""A run that is struck by faults of all kinds at random moments ends as one without faults."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mst_scale.benchmarks.goodput_parts import disk

from mst_scale.checkpoints import finding, manifests
from tests.support import chaos, forked, tiny_run
from tests.support.chaos import Case, case_of

pytestmark = pytest.mark.full

# 30 faults, in which each kind occurs
FIXED = [case_of(words, 5, seed=seed) for words, seed in (
    ("2:1", 2), ("2:2:method=dense", 3), ("2:3", 4), ("3:2", 5), ("4:1:tensor=2", 6), ("2:1:pipeline=2", 7),
)]  # fmt: skip
OFTEN = ("2 ranks, stage 1, mst, 5 faults", "2 ranks, stage 3, mst, 5 faults")


def test_the_fixed_faults_are_thirty_of_all_kinds():
    kinds = [kind for case in FIXED for kind in case.planned]
    assert len(kinds) == 30 and set(kinds) == set(chaos.FAULTS)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=[] if str(case) in OFTEN else [pytest.mark.slow]) for case in FIXED),
        pytest.param(case_of("2:2:method=compact", 6, seed=8), marks=pytest.mark.slow),
        *(
            pytest.param(case_of(words, 20, seed=1), marks=pytest.mark.slow)
            for words in f"{chaos.CASES},{chaos.COMPACT}".split(",")
        ),
    ],
    ids=str,
)
def test_the_end_is_the_same(case, tmp_path):
    peace = chaos.undisturbed(tmp_path / "peace", case)
    story = chaos.disturbed(tmp_path / "chaos", case)
    assert len(story.faults) == case.faults and story.longest_end < 60
    assert chaos.differences(peace, tmp_path / "chaos" / "out") == [], story.faults


CASE = Case(world=2, stage=1, faults=10, seed=1)  # 90 steps; each kill after a rename leaves a newer checkpoint


@pytest.fixture(scope="module")
def peace(tmp_path_factory) -> Path:
    return chaos.undisturbed(tmp_path_factory.mktemp("peace"), CASE)


def of_one_writer(rank: int) -> None:
    """Only this rank's process that writes checkpoints meets the boundary."""
    if os.environ["RANK"] != str(rank):
        os.environ.pop("FAULTY_BOUNDARY", None)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_is_killed_once_at_every_boundary_of_a_file(tmp_path, peace, rank):
    """Before each file that is begun, and before and after each rename, until a save has no more of them."""
    folder, control = tmp_path / "run", tmp_path / "control"
    control.mkdir()
    argv, out = chaos.arguments(folder, CASE), folder / "out"
    faulty = disk.environment(out / "checkpoints", control, 1e9)
    killed = 0
    while True:
        before = newest_step(out)
        more = {**faulty, "FAULTY_BOUNDARY": str(killed + 1)}
        processes = forked.start(2, argv, folder / "logs", functools.partial(of_one_writer, rank), **more)
        codes = forked.end(processes, 120)
        assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 1, chaos.said(folder)
        tags = finding.list_tags(out / "checkpoints")
        assert all(manifests.damage(out / "checkpoints" / tag) == [] for tag in tags)
        if list((out / "checkpoints").glob(f"{finding.tag_of(before + 2 * chaos.SAVE_EVERY)}.*")):
            break  # it was the first boundary of the second save of this start
        killed += 1
    # rank 0: model, optimizer, masks, report, manifest, and renames to them; rank 1: optimizer, masks, report
    assert killed >= (10 if rank == 0 else 4)
    assert continued(folder)[0] == [0, 0]
    assert chaos.differences(peace, out) == []


def newest_step(out: Path) -> int:
    tags = finding.list_tags(out / "checkpoints") if (out / "checkpoints").exists() else []
    return int(tags[0].removeprefix("step")) if tags else 0


def continued(folder: Path) -> tuple[list[int | None], str]:
    shutil.rmtree(folder / "logs")
    codes = forked.end(forked.start(2, chaos.arguments(folder, CASE), folder / "logs"), 120)
    return codes, chaos.said(folder, 100_000)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that has stopped after 21 steps."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    folder.mkdir()
    argv = [*chaos.arguments(folder, CASE), "--stop-at", "21"]
    assert forked.end(forked.start(2, argv, folder / "logs"), 120) == [0, 0], chaos.said(folder)
    return folder


@pytest.mark.parametrize("what", ["masks", "run.json", "metrics", "corpus"])
def test_each_damaged_file_has_a_defined_outcome(tmp_path, stopped, peace, what):
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    out = folder / "out"
    rows = tiny_run.rows(out)
    if what == "masks":
        flip(next((out / "checkpoints" / "step00000021").rglob("*.safetensors")), -1)
    elif what == "run.json":
        os.truncate(out / "run.json", 100)
    elif what == "metrics":
        flip(out / "metrics.jsonl", 0)  # the first line is no longer JSON
    else:
        os.truncate(folder / "corpus" / "train.bin", 30_000)  # of 40,000 bytes
    codes, text = continued(folder)
    assert codes == [0, 0], text
    if what == "masks":
        assert "step00000021 is damaged" in text and "from step 14" in text
    elif what == "run.json":
        assert "a new one is begun" in text and (out / "run.json.damaged").stat().st_size == 100
        assert len(json.loads((out / "run.json").read_text())["starts"]) == 1
    elif what == "metrics":
        lines = (out / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == CASE.steps and json.loads(lines[1])["step"] == 2, "the other rows are kept"
    else:
        assert "resuming with changes: corpus" in text
    if what in ("masks", "run.json"):
        assert chaos.differences(peace, out) == []
    assert len(rows) == 21


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small /dev/shm in a namespace, as root")
def test_a_full_dev_shm_does_not_matter(tmp_path, peace):
    folder = tmp_path / "run"
    folder.mkdir()
    arguments = chaos.arguments(folder, CASE)
    arguments.remove("--deepspeed_config")
    launch = [sys.executable, "-m", "mst_scale", "launch", "local", "--processes", "2", "--restarts", "0", *arguments]
    small = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", small, "sh", *launch]
    done = subprocess.run(words, env=tiny_run.environment(), capture_output=True, text=True, timeout=200, check=False)
    if "unshare failed" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no namespaces here")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "saved" in done.stdout + done.stderr and "failed saves" not in done.stderr
    assert chaos.differences(peace, folder / "out") == []

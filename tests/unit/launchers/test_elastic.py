"""How many ranks, and which places, each start of an elastic run gets."""

import base64
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from mst_scale import launch
from mst_scale.config import load
from mst_scale.config.deepspeed import batch_shape
from mst_scale.errors import UserError
from mst_scale.launch import supervisor
from mst_scale.launch.elastic import RESIZED, Allowed, Places, allowed, keep_changing
from mst_scale.launch.restarts import CORRUPTED
from mst_scale.pretrain import elastic
from mst_scale.pretrain.batches import Share
from tests.support import tiny_run


def experiment(folder, **blocks):
    return load(tiny_run.config(folder, **{"train_batch_size": 12, **blocks}))


@pytest.fixture
def places(tmp_path):
    """Four GPUs of which one, two or four may be used."""
    return Places(Allowed("ranks", 1, 4, (1, 2, 4)), tmp_path / "ranks", "GPU", lambda: ["0", "1", "2", "3"])


# --- the numbers ---


@pytest.mark.parametrize(
    ("text", "blocks", "per_node", "numbers"),
    [
        ("1:4", {}, None, (1, 2, 3, 4)),
        ("4:8", {}, None, (4, 6)),
        ("2:2", {}, None, (2,)),
        ("1:8", {"tensor_parallel": {"autotp_size": 2}}, None, (2, 4, 6, 8)),
        ("1:8", {"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 3}, None, (2, 6)),
        ("1:6", {}, 2, (1, 2, 3, 6)),
        ("1:999999999", {}, None, (1, 2, 3, 4, 6, 12)),
        ("2:999999999", {"tensor_parallel": {"autotp_size": 2}}, 2, (2, 3, 4, 6, 12)),
        ("1:6", {}, 1, (1, 2, 3, 4, 6)),
    ],
)
def test_numbers_whose_replicas_share_the_batch(tmp_path, text, blocks, per_node, numbers):
    assert allowed(text, experiment(tmp_path, **blocks), per_node).numbers == numbers


@pytest.mark.parametrize(
    "text", ["4:2", "0:2", "0:0", "a:b", "2", "1:2:3", "1:", ":2", "-1:2", "1.5:2", "٣:4", "", "7:11"]
)
def test_a_range_that_cannot_be_used_is_one_line(tmp_path, text):
    with pytest.raises(UserError, match="--elastic") as raised:
        allowed(text, experiment(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("blocks", "key"),
    [
        ({"train_batch_size": "auto"}, "train_batch_size"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, "optimizer.type = Muon"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}, "optimizer.type = SGD"),
    ],
)
def test_a_run_that_cannot_change_its_ranks_says_why(tmp_path, blocks, key):
    raw = json.loads(tiny_run.config(tmp_path, **blocks).read_text())
    with pytest.raises(UserError, match=key):
        elastic.check_elastic(raw)


# --- the batch ---


@pytest.mark.parametrize("stated", [
    {},
    {"train_micro_batch_size_per_gpu": 4},
    {"gradient_accumulation_steps": 6},
    {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": 4},
])  # fmt: skip
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_every_number_of_ranks_reads_the_same_sequences_in_the_same_order(tmp_path, stated, world):
    """Whatever the micro-batch: micro-batches in the order of their numbers are the global batch."""
    whole = experiment(tmp_path, **stated)
    fitted = elastic.fit_batch(whole, world)
    total, micro, accumulation = batch_shape(fitted.deepspeed, world)
    assert total == 12 and micro <= (whole.deepspeed.get("train_micro_batch_size_per_gpu") or 12)
    positions = np.full(12, -1)
    for replica in range(world):
        share = Share(world, replica)
        for turn in range(accumulation):
            first = share.micro_batch(turn) * micro
            positions[first : first + micro] = np.arange(first, first + micro)
    assert positions.tolist() == list(range(12))


def test_ranks_that_are_too_many_are_left_out_under_torchrun(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.update(TORCHELASTIC_RUN_ID="x", MASTER_ADDR="h", MASTER_PORT="1", WORLD_SIZE="5", RANK="0")
    elastic.take_part(experiment(tmp_path))
    assert os.environ["WORLD_SIZE"] == "4" and os.environ[elastic.STORE] == "h 1 4"
    waited = []
    monkeypatch.setattr(elastic, "_wait_for_end", lambda: waited.append(True))
    os.environ.update(WORLD_SIZE="5", RANK="4")
    elastic.take_part(experiment(tmp_path))
    assert waited == [True]


def test_a_rank_that_nobody_asked_to_stop_is_started_again(monkeypatch):
    """Under torchrun: exit code 0 would mean that the run has finished."""
    monkeypatch.setattr(elastic, "SECONDS_TO_NOTICE", 0.1)
    monkeypatch.delenv(elastic.STORE, raising=False)
    for store, asked, code in (None, False, 0), ("host 1", True, 0), ("host 1", False, 1):
        if store is not None:
            monkeypatch.setenv(elastic.STORE, store)
        with pytest.raises(SystemExit) as raised:
            elastic.end_after_save(lambda asked=asked: asked)
        assert raised.value.code == code


# --- the places ---


def test_as_many_places_as_possible_are_taken(places, capsys):
    assert places.take() == ["0", "1", "2", "3"]
    places.names = lambda: ["0", "1", "2"]
    assert places.take() == ["0", "1"]
    assert "2 of 3 available ranks are used" in capsys.readouterr().err
    places.take()
    assert not capsys.readouterr().err, "it is said once"
    places.names = lambda: []
    with pytest.raises(UserError, match="at least 1"):
        places.take()


def test_the_file_changes_the_number_at_any_time(places, capsys):
    assert len(places.take()) == 4 and not places.changed(4)
    places.file.write_text("2\n")
    assert places.changed(4) and places.changing and len(places.take()) == 2 and not places.changed(2)
    places.file.write_text("3")  # of which two can be used
    assert not places.changed(2)
    places.file.unlink()
    assert places.changed(2) and len(places.take()) == 4
    assert "changes from 2 to 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"), [("", 2), ("two", 2), ("-1", 2), ("2.5", 2), ("0", 1), ("9", 4), ("1" * 40, 2)]
)
def test_a_file_with_anything_else_is_one_line(places, capsys, text, number):
    places.file.write_text("2")
    assert len(places.take()) == 2
    places.file.write_text(text)
    assert [places.changed(2) for _ in range(3)] == [number != 2, False, False]
    assert len(places.take()) == number
    assert capsys.readouterr().err.count(str(places.file)) == (1 if text else 0)


def test_a_place_that_fails_twice_in_a_row_is_left_out(places, capsys):
    used = places.take()
    places.failed([2], used)
    assert places.take() == used, "once may be chance"
    places.failed([1], used)
    assert places.take() == used, "these were two places"
    places.failed([1], used, soon=False)
    assert places.take() == used, "after hours it is another failure"
    places.failed([1, 1], used)
    assert places.take() == ["0", "2"] and "GPU 1 has failed 2 times in a row" in capsys.readouterr().err
    places.failed([1], ["0", "2"])
    places.failed([1], ["0", "2"])  # rank 1 is now on GPU 2
    assert places.take() == ["0", "3"]
    places.file.write_text("4")
    places.changed(2)
    assert places.take() == used, "a new number tries all of them again"


def test_failures_of_no_one_rank_leave_nothing_out(places):
    used = places.take()
    for ranks in ([], [0, 1], [7]):
        places.failed(ranks, used)
        places.failed(ranks, used)
    assert places.take() == used


def test_where_all_places_fail_all_are_tried_again(places):
    for _ in range(4):
        used = places.take()
        places.failed([0], used)
        places.failed([0], used)
    assert places.take() == ["0", "1", "2", "3"]


class Ended:
    """Stands for the supervisor of a launcher that nobody asks to stop."""

    def asked_to_stop(self) -> bool:
        return False


def test_a_change_starts_again_and_a_failure_does_not(places, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(RESIZED, None)
    starts = []

    def start(taken):
        starts.append((len(taken), os.environ.get(RESIZED)))
        if len(starts) == 1:
            places.file.write_text("1")
            assert places.changed(len(taken))
            open(os.environ["MST_STOPPED"], "w").close()
            return 0
        if len(starts) == 2:
            places.file.write_text("2")
            assert places.changed(len(taken))
            return 138  # the ranks were still starting
        with open(os.environ["MST_FAILED"], "w") as file:
            file.write("1\n")
        return 1

    assert keep_changing(Ended(), places, start) == 1
    assert starts == [(4, None), (1, "1"), (2, "2")]
    assert places._suspect == "1"


def test_a_place_with_wrong_values_in_two_starts_is_left_out_however_long_they_were(places, monkeypatch, capsys):
    monkeypatch.setenv("MST_HEALTHY", "0")

    def start(taken):
        with open(os.environ["MST_FAILED"], "w") as file:
            file.write("1\n")
        return CORRUPTED

    assert [keep_changing(Ended(), places, start) for _ in range(2)] == [CORRUPTED] * 2
    assert "1" not in places.take() and "GPU 1 has failed 2 times in a row" in capsys.readouterr().err


def test_a_run_that_finishes_while_its_ranks_are_to_change_is_finished(places):
    def start(taken):
        places.file.write_text("1")
        assert places.changed(len(taken))
        return 0

    assert keep_changing(Ended(), places, start) == 0


def test_ranks_are_asked_to_leave_once_their_number_changes(tmp_path):
    """A child that ends on SIGUSR1 alone, below a launcher that waits for it."""
    rank = [
        "import signal, sys, time",
        "signal.signal(signal.SIGUSR1, lambda *a: sys.exit(7))",
        "open('ready', 'w')",
        "time.sleep(60)",
    ]
    program = f"""
import os, signal, sys
from mst_scale.launch import supervisor
watched = supervisor.Supervisor(lambda pids, again: supervisor.send(pids, signal.SIGUSR1))
rank = {chr(10).join(rank)!r}
code = watched.run([sys.executable, "-c", rank], leave=lambda: os.path.exists("ready"))
print(code, watched.asked_to_stop())
"""
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=tiny_run.environment(MST_ASK_AGAIN="1"),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.stdout == "7 False\n", child.stderr


def test_the_others_are_asked_to_end_when_one_cannot_be_started():
    asked = []

    def ask(pids, again):
        asked.append(again)
        supervisor.send(pids, signal.SIGTERM)

    watched = supervisor.Supervisor(ask)
    assert watched.run(["sleep", "60"], ["/there/is/none"], patience=0.1) == 127 and asked == [False]


# --- what the launchers refuse ---


@pytest.mark.parametrize(
    "words",
    [
        ["local", "--elastic", "4:2"],
        ["local", "--elastic", "0:2"],
        ["local", "--elastic", "many"],
        ["local", "--elastic", "5:7"],
        ["local", "--elastic", "1:2", "--processes", "2"],
        ["local", "--ranks-from", "file"],
        ["slurm", "--elastic", "4:2"],
        ["slurm", "--elastic", "1:2", "--nodes", "2"],
        ["slurm", "--elastic", "1:2", "--nodes-by-phase", "dense=1"],
        ["slurm", "--elastic", "3:3"],
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, words):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    made = tiny_run.config(tmp_path)
    assert launch.main([*words, "--dry-run", str(made), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1 and said.err.startswith("mst_scale: ")
    assert "--elastic" in said.err


def test_a_dry_run_shows_the_largest_number(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", {**os.environ, "DS_ACCELERATOR": "cpu"})
    made = str(tiny_run.config(tmp_path, train_batch_size=12))
    assert launch.main(["local", "--elastic", "1:5", "--dry-run", made, "--out", str(tmp_path / "out")]) == 0
    shown, said = capsys.readouterr()
    assert said.splitlines()[-1].startswith("4 processes on the CPU, ")
    (world,) = re.findall("--world_info=(\\S+)", shown)
    assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": ["0", "1", "2", "3"]} and " --elastic" in shown
    slurm = ["slurm", "--elastic", "2:5", "--gpus-per-node", "0", "--ranks-per-node", "2", "--dry-run", made]
    assert launch.main(slurm) == 0
    shown, said = capsys.readouterr()
    assert said == "mst_scale: the job asks for at most 3 nodes, because more cannot share the global batch\n"
    submitted, started = shown.splitlines()
    assert " --nodes=2-3 --mincpus=2 " in submitted and " --no-kill " in submitted and "MST_ELASTIC=2:5" in submitted
    assert " --ntasks=6 " in started and " --elastic" in started

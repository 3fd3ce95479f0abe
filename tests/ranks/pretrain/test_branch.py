"""A decay that branches off another run's checkpoint is bit for bit the run whose decay was planned so."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, attempt, differing, without_times

STEADY = {"lr_schedule": "wsd", "decay": 0, "steps": 12, "warmup": 0.2}  # two steps of 12
# DeepSpeed's own Adam on the CPU may round otherwise after a load
EXACT = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
IN_STEPS = {
    **MST,
    "sparsity": {"max": 0.8, "warmup": 2, "ultra": 3, "restore": 2, "stages": 2},
    "attention": {"pattern": "strided", "stride": 8, "dense_from": 6},
}


def run(folder: Path, out: str, *more: str, **blocks) -> tuple[int, str]:
    blocks = {"optimizer": EXACT, "training": STEADY, "mst": {"method": "dense"}, **blocks}
    return pool.run(attempt, 1, arguments(folder, out, *more, **blocks))[0]


def planned(steps: int, decay: int) -> list[str]:
    return ["--steps", str(steps), "--set", "training.warmup=2", "--set", f"training.decay={decay}"]


@pytest.mark.parametrize("method", [pytest.param("dense", marks=pytest.mark.full), "mst"])
def test_a_branch_is_the_run_that_was_planned_so(tmp_path, method):
    mst = IN_STEPS if method == "mst" else {"method": "dense"}
    assert run(tmp_path, "trunk", mst=mst) == (0, "")
    trunk, short, out = tmp_path / "trunk", tmp_path / "planned", tmp_path / "branch"
    assert run(tmp_path, "planned", *planned(14, 6), mst=mst) == (0, "")
    command = ["--branch-decay-from", f"{trunk}:step00000008", "--steps", "10"]
    assert run(tmp_path, "branch", *command, mst=mst) == (0, "")
    assert [row["step"] for row in tiny_run.rows(out)] == [9, 10]
    shutil.rmtree(out)
    command[-1] = "14"
    assert run(tmp_path, "branch", *command, mst=mst) == (0, "")
    theirs = [row for row in without_times(tiny_run.rows(short)) if row["step"] > 8]
    assert without_times(tiny_run.rows(out)) == theirs, "losses, rates, sparsities and FLOPs since the first step"
    assert differing(out, short, "step00000014") == []
    start = json.loads((out / "run.json").read_text())["starts"][0]
    assert start["from_step"] == 8 and start["checkpoint"] == str(trunk / "checkpoints" / "step00000008")

    # a branch goes on from its own checkpoint, also where its trunk is gone
    shutil.rmtree(out / "checkpoints" / "step00000014")
    shutil.rmtree(trunk)
    assert run(tmp_path, "branch", *command, mst=mst) == (0, "")
    assert differing(out, short, "step00000014") == []


@pytest.mark.parametrize("in_background", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_branch_that_starts_again_is_the_same_although_its_trunk_has_gone_on(tmp_path, in_background):
    """Its first start ends where it branches off, with a checkpoint of that step."""
    trunk, out = tmp_path / "trunk", tmp_path / "branch"
    train = functools.partial(run, training={**STEADY, "async_save": in_background})
    assert train(tmp_path, "trunk", "--stop-at", "6") == (0, "")
    command = ["--branch-decay-from", str(trunk), "--steps", "14"]
    assert train(tmp_path, "branch", *command, "--stop-at", "6") == (0, "")
    assert (out / "checkpoints" / "step00000006").is_dir()
    assert train(tmp_path, "whole", *command) == (0, "")
    assert train(tmp_path, "trunk") == (0, "")
    assert train(tmp_path, "branch", *command) == (0, "")
    assert without_times(tiny_run.rows(out)) == without_times(tiny_run.rows(tmp_path / "whole"))


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trunk")
    assert run(folder, "trunk") == (0, "")
    return folder / "trunk"


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        (["--set", "model.n_embd=32"], "model.n_embd"),
        (["--set", "optimizer.params.lr=0.5"], "optimizer.params.lr"),
        (["--set", "training.seed=5"], "training.seed"),
        (["--set", "train_batch_size=4"], "train_batch_size"),
        (["--method", "mst"], "mst."),
        (["--set", "training.lr_schedule=cosine"], "training.lr_schedule"),
        (["--set", "training.restart=0.5"], "training.restart"),
        (["--init", "gpt2"], "--init"),
        (["--steps", "8"], "--steps"),
        (["--branch-decay-from", "{trunk}:step7"], "step00000012, step00000008"),
        (["--branch-decay-from", "nowhere"], "nowhere/checkpoints"),
    ],
)
def test_changes_to_the_run_are_rejected_in_one_line(tmp_path, trunk, more, reported):
    shutil.copytree(trunk.parent / "corpus", tmp_path / "corpus")
    words = ["--branch-decay-from", f"{trunk}:step00000008", "--set", f"data.dir={trunk.parent / 'corpus'}"]
    code, text = run(tmp_path, "out", *words, "--steps", "14", *(word.format(trunk=trunk) for word in more))
    (error,) = (line for line in text.splitlines() if line.startswith("mst_scale: "))
    assert code == 2 and reported in error, text
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_checkpoint_after_the_decay_began_is_rejected(tmp_path):
    assert run(tmp_path, "trunk", training={**STEADY, "decay": 6, "save_every": 8}) == (0, "")
    code, text = run(tmp_path, "out", "--branch-decay-from", str(tmp_path / "trunk") + ":step00000008", "--steps", "20")
    assert code == 2 and "2 to 6" in text and "training.decay" in text


def test_shares_of_the_run_are_rejected_for_sparse_training(tmp_path):
    assert run(tmp_path, "trunk", mst=MST) == (0, "")
    words = ["--branch-decay-from", f"{tmp_path / 'trunk'}:step00000008", "--steps", "20"]
    code, text = run(tmp_path, "out", *words, mst=MST)
    assert code == 2 and "set mst.sparsity" in text and text.count("\n") <= 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("mst", "tag", "from_step"),
    [
        # dense weights, but the trunk's attention is dense from step 6 on and the planned run's from step 10
        ({"method": "dense", "attention": {"pattern": "strided", "stride": 8, "dense_from": 0.5}}, 8, 6),
        # the planned run has a topology step right after the branch, and the trunk has none at its end
        (
            {
                "method": "sparse",
                "sparsity": {"max": 0.8},
                "topology": {"interval": 12, "update_schedule": "constant"},
                "attention": {"pattern": "dense"},
            },
            11,
            12,
        ),
    ],
)
def test_attention_and_the_next_step_must_be_the_same_too(tmp_path, mst, tag, from_step):
    assert run(tmp_path, "trunk", mst=mst, training={**STEADY, "save_every": tag}) == (0, "")
    words = ["--branch-decay-from", f"{tmp_path / 'trunk'}:step{tag:08}", "--steps", "20"]
    code, text = run(tmp_path, "out", *words, mst=mst)
    assert code == 2 and f"from step {from_step} on" in text, text


@pytest.mark.full
def test_a_branch_that_is_given_another_length_decays_to_its_new_end(tmp_path):
    assert run(tmp_path, "trunk", "--stop-at", "6") == (0, "")
    command = ["--branch-decay-from", str(tmp_path / "trunk"), "--steps"]
    assert run(tmp_path, "branch", *command, "10", "--stop-at", "6") == (0, "")
    assert run(tmp_path, "branch", *command, "14") == (0, "")
    assert run(tmp_path, "whole", *command, "14") == (0, "")
    whole, branch = (without_times(tiny_run.rows(tmp_path / out)) for out in ("whole", "branch"))
    assert [row["step"] for row in whole] == list(range(7, 15)) and branch == whole
    code, reported = run(tmp_path, "branch", *command, "6")
    assert code == 2 and "decays from step 6 on: give more steps than 6" in reported


@pytest.mark.full
def test_a_damaged_checkpoint_of_the_trunk_is_named_with_the_others(tmp_path):
    assert run(tmp_path, "trunk", "--stop-at", "8") == (0, "")
    newest = tmp_path / "trunk" / "checkpoints" / "step00000008"
    file = next(path for path in newest.rglob("*.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    code, reported = run(tmp_path, "branch", "--branch-decay-from", str(tmp_path / "trunk"), "--steps", "14")
    assert code == 2 and "is damaged" in reported and "RUN:TAG (it has step00000004)" in reported

"""What fails in the middle of a run: weights that are NaN, a disk that is full, a folder that is removed."""

import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from mst_scale.checkpoints import store
from mst_scale.pretrain import training_loop
from mst_scale.pretrain.batches import MicroBatches
from tests.support import pool
from tests.support.whole_runs import MST, attempt, logged_attempt
from tests.system.pretrain.test_bad_input import arguments


@pytest.mark.parametrize("step", [2, 8], ids=["inactive weights", "scores"])
def test_weights_that_are_nan_are_divergence_said_once(tmp_path, step):
    """They are noticed when masked weights are counted after the first updates, and later by the topology step."""
    mst = {"method": "rigl", "sparsity": {"max": 0.5}, "topology": {"interval": 3}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    results = pool.run(poison_moments, 2, arguments(tmp_path, optimizer=optimizer, mst=mst), step)
    assert [code for code, _ in results] == [3, 3], results
    lines = [line for _, text in results for line in text.splitlines() if "NaN" in line]
    assert len(lines) == 1 and "optimizer.params.lr" in lines[0], results
    assert "Traceback" not in "".join(text for _, text in results)


def poison_moments(rank: int, world: int, argv: list[str], step: int) -> tuple[int, str]:
    """As a learning rate of 1e30 does; gradients that are not finite DeepSpeed leaves out."""
    inner = MicroBatches.update

    def update(self, at, number):
        if at == step and rank == 1:
            for state in self.engine.optimizer.optimizer.state.values():
                state["exp_avg"].fill_(np.nan)
        return inner(self, at, number)

    MicroBatches.update = update
    try:
        return attempt(rank, world, argv)
    finally:
        MicroBatches.update = inner


def test_without_eps_the_optimizer_is_named_and_not_the_learning_rate(tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 0.0, "torch_adam": True}}
    results = pool.run(attempt, 2, arguments(tmp_path, "--method", "rigl", optimizer=optimizer), seconds=120)
    assert [code for code, _ in results] == [2, 2], results
    assert "eps > 0" in results[0][1] and "optimizer.params.lr" not in results[0][1]


@pytest.mark.parametrize(("method", "limit"), [("dense", 4096), ("mst", 4096), ("mst", 64)])
def test_a_full_disk_while_saving_keeps_the_checkpoint_before(tmp_path, method, limit):
    """The kernel refuses to write on one rank (at 64 bytes the masks too); both end, and nothing half remains."""
    argv = arguments(tmp_path, "--steps", "8", "--method", method)
    results = pool.run(fill_up, 2, argv, str(tmp_path / "out"), limit)
    assert [code for code, _, _ in results] == [1, 1], results
    assert sum("cannot save a checkpoint" in text for _, text, _ in results) == 1, results
    assert results[0][2] == ["step00000004"], "the checkpoint of step 4 is whole, nothing half is left of step 8"


def fill_up(rank: int, world: int, argv: list[str], out: str, limit: int) -> tuple[int, str, list[str]]:
    """After the first checkpoint the kernel refuses files above the limit on rank 1 (RLIMIT_FSIZE: EFBIG)."""
    import resource

    inner, calls = store.save, []

    def save(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2 and rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return inner(*args, **kwargs)

    store.save = save
    try:
        code, text = attempt(rank, world, argv)
    finally:
        store.save = inner
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(path.name for path in (Path(out) / "checkpoints").iterdir() if path.is_dir())
    return code, text, left


def test_a_loss_that_stays_non_finite_stops_the_run_and_spares_the_checkpoint(tmp_path):
    """Rank 1's weights turn NaN after step 5: the next losses are NaN on one rank, both stop after 3 in a row."""
    argv = arguments(tmp_path, "--steps", "12", "--set", "training.stop_after_nonfinite=3")
    results = pool.run(poison, 2, argv, str(tmp_path / "out"))
    assert [code for code, _, _ in results] == [3, 3]
    texts = [text for _, text, _ in results if "not finite in 3 consecutive steps up to step 8" in text]
    assert len(texts) == 1 and "Traceback" not in texts[0], results
    assert results[0][2] == ["step00000004"], "step 8 was not saved"


def poison(rank: int, world: int, argv: list[str], out: str) -> tuple[int, str, list[str]]:
    inner = MicroBatches.update

    def update(self, step, number):
        if step == 5 and rank == 1:
            self.engine.module.ln_f.weight.data.fill_(np.nan)
        return inner(self, step, number)

    MicroBatches.update = update
    try:
        code, text = attempt(rank, world, argv)
    finally:
        MicroBatches.update = inner
    left = sorted(path.name for path in (Path(out) / "checkpoints").iterdir() if path.is_dir())
    return code, text, left


def test_a_run_that_is_asked_to_stop_waits_for_a_finite_loss(tmp_path):
    argv = arguments(tmp_path, "--steps", "12")
    results = pool.run(stopped_while_not_finite, 2, argv)
    assert [code for code, _ in results] == [0, 0], results
    tags = [path.name for path in (tmp_path / "out" / "checkpoints").iterdir() if path.is_dir()]
    assert "step00000006" not in tags and "step00000007" in tags


def stopped_while_not_finite(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """Rank 1 is asked to stop in step 6, whose loss it reports as NaN."""
    inner = MicroBatches.update

    def update(self, step, number):
        loss = inner(self, step, number)
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            loss = loss * math.nan
        return loss

    MicroBatches.update = update
    try:
        return attempt(rank, world, argv)
    finally:
        MicroBatches.update = inner


def test_a_run_whose_folder_is_removed_continues(tmp_path):
    """TensorBoard's thread fails in there, and DeepSpeed writes to it at each step."""
    events = {"enabled": True, "output_path": str(tmp_path / "out" / "tensorboard"), "job_name": ""}
    argv = arguments(tmp_path, tensorboard=events, training={"save_every": 8})
    results = pool.run(remove, 2, argv, str(tmp_path / "out"), seconds=120)
    assert [code for code, _ in results] == [0, 0], results
    assert "Traceback" not in "".join(text for _, text in results)
    assert (tmp_path / "out" / "checkpoints" / "step00000012").is_dir(), "what is saved later is there"


def remove(rank: int, world: int, argv: list[str], out: str) -> tuple[int, str]:
    inner = training_loop.Run.advance

    def advance(self):
        inner(self)
        if self.step == 2 and rank == 0:
            shutil.rmtree(out)

    training_loop.Run.advance = advance
    try:
        return attempt(rank, world, argv)
    finally:
        training_loop.Run.advance = inner


def test_a_run_with_skipped_updates_warns_that_it_ends_sparser_than_scheduled(tmp_path):
    """Gradients overflow while the loss is still a number: no mask goes any more."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    blocks = {"optimizer": optimizer, "gradient_clipping": 0.0, "mst": MST, "training": {"stop_after_nonfinite": 99}}
    code, text = pool.run(logged_attempt, 1, arguments(tmp_path, "--steps", "12", **blocks))[0]
    assert code == 0 and "of 12 updates were skipped" in text

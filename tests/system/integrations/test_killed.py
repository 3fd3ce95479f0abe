"""A Trainer that is killed continues from its last complete checkpoint, bit for bit."""

import json
import os
import signal

import pytest

from tests.support import forked


def rank_of_trainer(folder, kill_at, resume):
    from transformers import TrainerCallback

    from tests.ranks.integrations.test_trainer import flat, trained, whole_state
    from tests.support.integrated import opened

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    with opened():
        trainer, seen, masks = trained(
            folder, 2, "gpt2", resume=resume, callback=Kill(), save_strategy="steps", save_steps=4
        )
        state = whole_state(trainer)
        sums = [float(value.double().sum()) for value in flat(state)]
        found = {"masks": masks, "sums": sums, "losses": [loss for _, _, loss in seen]}
    rank = os.environ["RANK"]
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(found, file)
    os._exit(0)


def ends(folder, kill_at=0, resume=None):
    """Exit codes of the two ranks of a run."""
    arguments = (str(folder), kill_at, resume)
    return forked.end(forked.start_ranks(2, rank_of_trainer, arguments, folder / "logs"), 200)


@pytest.mark.full
def test_a_killed_trainer_resumes_bit_for_bit(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert ends(whole) == [0, 0]
    assert set(ends(killed, kill_at=7)) == {-signal.SIGKILL}
    assert not (killed / "rank0.json").exists() and (killed / "checkpoint-4").is_dir()
    interrupted = killed / "checkpoint-8" / "global_step8.partial"  # of a save that was killed
    interrupted.mkdir(parents=True)
    (interrupted.parent / "trainer_state.json").write_text((killed / "checkpoint-4/trainer_state.json").read_text())
    assert ends(killed, resume=True) == [0, 0]
    for rank in range(2):
        first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for folder in (whole, killed))
        assert first["sums"] == second["sums"]
        assert first["masks"][4:] == second["masks"] and first["losses"][8:] == second["losses"]

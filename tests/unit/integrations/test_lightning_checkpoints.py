"""Lightning removes an older checkpoint only when the newer one is complete."""

from types import SimpleNamespace

import pytest

from mst_scale.integrations.integrate import _keep_until_written


@pytest.mark.parametrize("fails", [False, True])
def test_an_older_checkpoint_waits_for_the_newer_one(fails, caplog):
    found = []

    def finish_save():
        found.append("written")
        if fails:
            raise OSError("the checkpoint of step 9 was not saved: no space")

    strategy = SimpleNamespace(remove_checkpoint=found.append)
    model = SimpleNamespace(_trainer=SimpleNamespace(strategy=strategy))
    engine = SimpleNamespace(mst=SimpleNamespace(saves=object(), finish_save=finish_save))
    _keep_until_written(model, engine)
    strategy.remove_checkpoint("step=6.ckpt")
    assert found == (["written"] if fails else ["written", "step=6.ckpt"])
    assert ("step=6.ckpt is kept" in caplog.text) == fails


def test_without_background_saves_nothing_changes():
    strategy = SimpleNamespace(remove_checkpoint=print)
    model = SimpleNamespace(_trainer=SimpleNamespace(strategy=strategy))
    _keep_until_written(model, SimpleNamespace(mst=SimpleNamespace(saves=None)))
    _keep_until_written(SimpleNamespace(), SimpleNamespace(mst=SimpleNamespace(saves=object())))
    assert strategy.remove_checkpoint is print

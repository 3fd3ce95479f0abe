"""Copies in memory that are skipped while a save is being written."""

from types import SimpleNamespace

from mst_scale.comm import logger
from mst_scale.pretrain import saving


def test_copies_are_skipped_while_a_save_is_written_and_the_first_time_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(saving.store, "describe", lambda *_, **about: about)
    monkeypatch.setattr(logger, "propagate", True)
    kept = []
    background = SimpleNamespace(pending=True, copies=object(), keep=lambda *_, step, **__: kept.append(step))
    saves = SimpleNamespace(
        finish=lambda wait: None, _background=background, _skips=False, engine=None, ranks=None, about={},
        _saves_dense=False,
    )  # fmt: skip
    with caplog.at_level("INFO", logger.name):
        for step in (4, 6):
            saving.Saves.copy(saves, step, {})
        assert not kept and caplog.text.count("is skipped, because the previous save is still being written") == 1
        background.pending = False
        saving.Saves.copy(saves, 8, {})
    assert kept == [8] and caplog.text.count("skipped, because") == 1

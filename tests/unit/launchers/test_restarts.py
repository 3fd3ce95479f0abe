"""How a run is started again after silent corruption."""

from types import SimpleNamespace

import pytest

from mst_scale.launch import restarts

SUPERVISOR = SimpleNamespace(asked_to_stop=lambda: False, pause=lambda seconds: None)


@pytest.mark.parametrize(
    ("codes", "ends", "words"), [([4, 0], 0, "verified"), ([1, 0], 0, "latest"), ([4, 4], 4, "after 1 restarts")]
)
def test_a_corrupted_run_is_started_again(monkeypatch, capsys, codes, ends, words):
    monkeypatch.setattr(restarts, "outcome", lambda code, out: "done" if code == 0 else "again")
    left = iter(codes)
    assert restarts.keep_running(SUPERVISOR, lambda: next(left), "config.json", [], restarts=1) == ends
    assert words in capsys.readouterr().err

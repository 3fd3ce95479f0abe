"""A start that diverges at the step of the previous one says so, also where its storage has changed in between."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from mst_scale.pretrain import resume
from mst_scale.pretrain.training_loop import Run
from mst_scale.run_logging.run_file import DIVERGED, FINISHED, STORAGE


@pytest.mark.parametrize(
    ("before", "again"),
    [
        ([], False),
        ([{"how": DIVERGED[0], "last_step": 9}], True),
        ([{"how": DIVERGED[0], "last_step": 9}, {"how": STORAGE, "last_step": 5}], True),
        ([{"how": DIVERGED[0], "last_step": 8}, {"how": STORAGE, "last_step": 5}], False),
        ([{"how": FINISHED, "last_step": 9}, {"how": STORAGE, "last_step": 9}], False),
    ],
)
def test_a_divergence_is_that_of_the_previous_start(monkeypatch, before, again):
    monkeypatch.setattr(resume, "is_restart", lambda *_: True)
    run = Mock(step=9, run_file=SimpleNamespace(starts=[*before, {"how": None}]))
    Run.end_diverged(run, ValueError("the loss is not finite"))
    run.record_end.assert_called_once_with(DIVERGED[again])
    ((error,), _) = run.ranks.fail.call_args
    assert ("restarting does not help" in str(error)) == again

"""With how many replicas a run began, where some of its starts have failed before."""

import json
from types import SimpleNamespace

from mst_scale.pretrain import resume

ON_FOUR = SimpleNamespace(world_size=4, on_first=lambda read: read())
ALL_DATA = SimpleNamespace(data=lambda ranks: ranks)


def test_a_start_that_failed_before_it_saved_does_not_count(tmp_path):
    def began(*starts):
        (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
        return resume.initial_replicas(tmp_path, ON_FOUR, ALL_DATA)

    failed, first, again = {"ranks": 2}, {"from_step": 0, "replicas": 8, "ranks": 16}, {"from_step": 20, "ranks": 3}
    assert began(failed, first) == 4, "no checkpoint: it starts now"
    (tmp_path / "checkpoints" / "step00000020").mkdir(parents=True)
    assert began(failed, first, again) == 8 and began(failed) == 2 and began(again) == 3

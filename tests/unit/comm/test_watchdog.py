"""What a rank does in which order when another one is lost."""

import pytest

from mst_scale.comm import watchdog


def test_the_launcher_knows_the_lost_rank_before_this_one_may_end(monkeypatch):
    """The main thread ends the process as soon as `lost` is set, perhaps before the watching thread's next line."""
    watch = watchdog.Watch()
    seen = []
    monkeypatch.setattr(watchdog, "report_failed", lambda rank: seen.append((rank, watch.lost)))
    monkeypatch.setattr(watch, "_pass_on", lambda message: None)
    monkeypatch.setattr(watch, "_leave", lambda: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        watch._lose("rank 1 (node, process 7)", "was killed")
    assert seen == [(1, None)] and watch.lost == "rank 1 (node, process 7) was killed"

"""What a rank does in which order when another one is lost."""

from types import SimpleNamespace

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


@pytest.mark.parametrize("on_nccl", [False, True])
def test_a_rank_that_torch_may_have_ended_is_not_said_to_be_killed(monkeypatch, on_nccl):
    """NCCL raises no error in a rank that waits for a stuck one: torch ends its process after the timeout."""
    watch, peer = watchdog.Watch(), SimpleNamespace(who="rank 1 (node, process 7)")
    watch.on_nccl, said = on_nccl, []
    monkeypatch.setattr(watch, "_lose", lambda who, how: said.append(how) or (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        watch._hear(peer, "")
    assert "disconnected without a message: it was killed (out of memory?), or its machine is down" in said[0]
    assert ("or it waited for a stuck rank until NCCL's timeout" in said[0]) == on_nccl

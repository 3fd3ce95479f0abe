"""`pretrain --health FILE --on-event CMD`."""

import json
import sys

from tests.support import pool
from tests.support.whole_runs import arguments, attempt


def test_operators_see_the_run(tmp_path):
    script = tmp_path / "note.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write(sys.argv[2] + '\\n')")
    health, seen = tmp_path / "health.prom", tmp_path / "seen"
    argv = arguments(tmp_path, "out", "--health", str(health), "--on-event", f"{sys.executable} {script} {seen}")
    assert pool.run(attempt, 1, [*argv, "--stop-at", "6"]) == [(0, "")]
    assert "mst_step{" in health.read_text() and "mst_last_save_step{" in health.read_text()
    assert pool.run(attempt, 1, argv) == [(0, "")]
    assert 'state="finished"' in health.read_text() and "mst_restarts{" in health.read_text()
    events = [json.loads(line)["event"] for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert events == ["started", "stopped where --stop-at says", "started", "finished"]
    assert {json.loads(line)["event"] for line in seen.read_text().splitlines()} >= {"started"}


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for options, name in (
        (["--on-event", "no-such-program"], "--on-event"),
        (["--health", str(tmp_path / "file" / "x")], "--health"),
    ):
        ((code, said),) = pool.run(attempt, 1, arguments(tmp_path, "out", *options))
        assert code == 2 and said.count("\n") == 1 and name in said

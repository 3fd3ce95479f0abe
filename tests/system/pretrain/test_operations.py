"""`pretrain --health FILE --on-event CMD`."""

import json
import subprocess
import sys

from tests.support import tiny_run
from tests.support.whole_runs import arguments


def run(tmp_path, *more):
    command = [sys.executable, "-m", "mst_scale.pretrain", *arguments(tmp_path, "out", *more)]
    return subprocess.run(command, env=tiny_run.environment(), capture_output=True, text=True, timeout=180, check=False)


def test_operators_see_the_run(tmp_path):
    script = tmp_path / "note.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write(sys.argv[2] + '\\n')")
    health, seen = tmp_path / "health.prom", tmp_path / "seen"
    options = ["--health", str(health), "--on-event", f"{sys.executable} {script} {seen}"]
    child = run(tmp_path, *options, "--stop-at", "6")
    assert child.returncode == 0, child.stderr
    assert "mst_step{" in health.read_text() and "mst_last_save_step{" in health.read_text()
    child = run(tmp_path, *options)
    assert child.returncode == 0, child.stderr
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
        child = run(tmp_path, *options)
        assert child.returncode == 2 and child.stderr.count("\n") == 1 and name in child.stderr

"""Programs of benchmarks that have no `mst bench` command report a mistake in one line, too."""

import subprocess
import sys

import pytest

from tests.support import tiny_run

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["studies.corpus", "--out", "file"], "--out 'file': 'file' is not a folder"),
        (["studies.overview", "--results", "none"], "none has no records of these studies"),
        pytest.param(
            ["studies.gain_law", "--results", "none"], "none has no records of these studies", marks=pytest.mark.slow
        ),
        pytest.param(["studies.in_time", "--study", "none"], "there is no study 'none'", marks=pytest.mark.slow),
        (["step", "--config", "none"], "none: no such config file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(tmp_path, words, said):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", f"mst_scale.benchmarks.{words[0]}", *words[1:]]
    child = subprocess.run(
        command, cwd=tmp_path, env=tiny_run.environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert child.returncode == 2 and not child.stdout
    (line,) = child.stderr.splitlines()
    assert line.startswith("mst_scale: ") and said in line

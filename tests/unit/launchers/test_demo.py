"""The demo ends with text of its model and of the dense baseline."""

from pathlib import Path

import pytest

from mst_scale.launch import demo
from tests.support.text_run import text_run


@pytest.mark.parametrize("words", [["--out", "{}"], ["--out=elsewhere", "--out={}"]], ids=["two words", "the last"])
def test_the_demo_ends_with_text_of_both_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
):
    text_run(tmp_path / "run", seq_length=128)
    monkeypatch.setattr(demo.local, "run", lambda *_, **__: 0)
    assert demo.main([word.format(tmp_path / "run") for word in words]) == 0
    head, *lines = capsys.readouterr().out.strip().splitlines()
    assert "def" in head and lines[0].strip().startswith(str(tmp_path / "run"))
    baseline = next(number for number, line in enumerate(lines) if line.strip().startswith("dense baseline"))
    assert len(lines) - baseline == 2 and "def" in lines[baseline]


def test_a_run_without_a_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo.local, "run", lambda *_, **__: 0)
    assert demo.main(["--out", str(tmp_path / "none")]) == 0
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1
    monkeypatch.setattr(demo.local, "run", lambda *_, **__: 3)
    assert demo.main(["--out", str(tmp_path / "none")]) == 3 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "folder"),
    [([], "runs/demo"), (["--steps", "9"], "runs/demo"), (["--out", "a"], "a"), (["--out", "a", "--out=b"], "b")],
)
def test_the_folder_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, words: list[str], folder: str):
    shown: list[Path] = []
    monkeypatch.setattr(demo.local, "run", lambda *_, **__: 0)
    monkeypatch.setattr(demo, "show", shown.append)
    assert demo.main(words) == 0 and shown == [Path(folder)]
    assert demo.main([*words, "--help"]) == 0 and len(shown) == 1

"""Each message is said once on the terminal, whoever else has come to log."""

import io
import logging
import sys

import pytest

from mst_scale.comm import messages


@pytest.mark.parametrize("others", ["nobody", "a file", "errors only", "the terminal"])
def test_a_message_is_said_once(tmp_path, monkeypatch, others):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    handlers: list[logging.Handler] = []
    if others == "a file":
        handlers = [logging.FileHandler(tmp_path / "log")]
    elif others != "nobody":
        handlers = [logging.StreamHandler(sys.stderr)]
        handlers[0].setLevel(logging.ERROR if others == "errors only" else logging.INFO)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", handlers)  # pytest's own ones too
    ours = logging.Logger("ours", logging.INFO)
    ours.parent = root
    ours.addHandler(messages._Terminal())
    ours.warning("look here")
    text = sys.stderr.getvalue()
    assert text.count("look here") == 1
    assert text.startswith("mst_scale: ") is (others != "the terminal")

"""Evaluation reads compact files."""

from pathlib import Path

import torch

from mst_scale.compact_files.export import export_compact
from mst_scale.evaluation.models import open_model
from tests.support.text_run import text_run


def test_a_compact_file_has_the_logits_of_the_run(tmp_path: Path):
    text_run(tmp_path / "run")
    export_compact(tmp_path / "run", tmp_path / "out")
    device, tokens = torch.device("cpu"), torch.randint(257, (2, 30))
    model, _ = open_model(str(tmp_path / "run"), None, device)
    for path in (tmp_path / "out", tmp_path / "out" / "model.safetensors"):
        found, text = open_model(str(path), None, device)
        with torch.no_grad():
            assert torch.equal(found.logits(tokens), model.logits(tokens))
        assert (text.name, found.context, found.step, found.folder) == ("byte", 48, 1, tmp_path / "out")
        assert found.parameters == model.parameters

"""`pretrain` with methods as their presets stand, and with the one of docs/methods.md: learned, counted, resumed to the
bit, exported."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from mst_scale.checkpoints.multiplied import multiplied_weights_of
from mst_scale.config import load
from mst_scale.flops.ledger import forecast
from mst_scale.hugging_face.export import export
from mst_scale.methods import METHODS
from mst_scale.models.gpt import GPT
from tests.support import pool, tiny_run
from tests.support.whole_runs import arguments, assert_same_run, attempt

pytestmark = pytest.mark.full

FUNCTIONS = [name for name, method in METHODS.items() if method.function]
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
MORE = {
    "acdc": {"sparsity": {"turn": 2}},
    "pixelfly": {"options": {"block": 4}},
    "halved": {"attention": {"stride": 8}},
}
END, STOP = "step00000012", "step00000008"


def logits_of_export(folder, tokens):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits


def example() -> str:
    """The program in docs/methods.md that makes a method of one's own."""
    text = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "class Halved" in code]
    return found


def attempt_example(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    METHODS._registered.clear()  # ranks are kept for other tests
    exec(example(), {})
    try:
        return attempt(rank, world, argv)
    finally:
        METHODS._registered.clear()


@pytest.fixture
def halved(monkeypatch):
    """Known here as it is on the ranks, and forgotten afterwards."""
    monkeypatch.setattr(METHODS, "_registered", {})
    exec(example(), {})


def test_a_custom_method(tmp_path, halved):
    check_run(tmp_path, "halved", 1, attempt_example)


@pytest.mark.parametrize("name", [*FUNCTIONS, "acdc", "spdf"])
def test_a_run_is_counted_resumed_to_the_bit_and_exported(tmp_path, name):
    stage = (1, 3)[FUNCTIONS.index(name) % 2] if name in FUNCTIONS else 2
    check_run(tmp_path, name, stage, attempt)


def check_run(tmp_path, name, stage, attempt):
    mst = {"method": name, **MORE.get(name, {})}
    blocks = {"optimizer": ADAM, "mst": mst, "zero_optimization": {"stage": stage}, "model": {"n_embd": 32}}
    assert pool.run(attempt, 2, arguments(tmp_path, **blocks)) == [(0, "")] * 2
    rows = tiny_run.rows(tmp_path / "out")
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.05, "it learns"
    expected = forecast(load(json.loads((tmp_path / "out" / "config.json").read_text())))
    for accounting, key in (("paper", "flops"), ("causal", "flops_causal")):
        assert rows[-1][key] == pytest.approx(12 * 8 * expected.mean[accounting].total, rel=1e-3)

    shutil.copytree(tmp_path / "out", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / END)  # it stopped after step 8
    assert pool.run(attempt, 2, arguments(tmp_path, "again", **blocks)) == [(0, "")] * 2
    assert_same_run(tmp_path / "out", tmp_path / "again")

    tokens = torch.arange(tiny_run.CONTEXT)[None] % 64
    for tag in (STOP, END):
        checkpoint = tmp_path / "out" / "checkpoints" / tag
        found = multiplied_weights_of(checkpoint)
        ours = GPT(load(json.loads((tmp_path / "out" / "config.json").read_text())).model).eval()
        with torch.no_grad():
            for key, parameter in ours.named_parameters():
                parameter.copy_(found.read(key))
            export(checkpoint, tmp_path / f"exported-{tag}")
            vocabulary = ours.config.vocab_size
            torch.testing.assert_close(
                logits_of_export(tmp_path / f"exported-{tag}", tokens)[..., :vocabulary],
                ours(tokens)[..., :vocabulary],
                rtol=1e-4,
                atol=1e-5,
            )

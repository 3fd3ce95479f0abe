"""Ready configs by name, wherever a config file is taken."""

import pytest

from mst_scale.config import load
from mst_scale.config.presets import ready_configs
from mst_scale.errors import UserError
from mst_scale.flops.budgets import shortened
from mst_scale.pretrain.start import output_folder, parse_arguments, read_experiment
from tests.support import tiny_run

FOLDER = tiny_run.ROOT / "ds_configs"


def test_every_ready_config_has_a_name():
    assert ready_configs() == {path.stem: path for path in FOLDER.glob("*.json") if path.name != "mst.schema.json"}


def test_a_name_means_the_file_of_that_name_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # no file
    assert load("demo") == load(FOLDER / "demo.json")
    tiny_run.config(tmp_path).rename(tmp_path / "gpt2_small")
    assert load("gpt2_small").model.n_embd == 16 and load(ready_configs()["gpt2_small"]).model.n_embd == 768


@pytest.mark.parametrize(
    ("name", "near"),
    [("gpt2-small", "gpt2_small"), ("ds_configs/gpt3_13b.json", "gpt3_13b"), ("gpt3_1.3", "gpt3_1.3b")],
)
def test_a_name_that_means_nothing(name, near, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as rejected:
        load(name)
    said = f"{name}: no such config file; the nearest ready-made config is '{near}' (of bert_base, demo, "
    assert str(rejected.value).startswith(said)


def test_names_are_taken_by_pretrain(tmp_path, monkeypatch):
    """The folder of the run has the whole name, dots and all."""
    monkeypatch.chdir(tmp_path)
    args = parse_arguments(["--deepspeed_config", "gpt3_1.3b", "--method", "dense-short", "--like", "gpt3_1.3b"])
    experiment = read_experiment(args)
    assert str(output_folder(args, experiment)) == "runs/gpt3_1.3b-dense-short"
    assert 0 < shortened(experiment, 32).training.steps < 280_000


def test_an_error_names_the_file():
    with pytest.raises(UserError, match=r"^demo: unknown key 'mst.spasity'"):
        load("demo", ["mst.spasity=1"])


def test_a_stride_as_wide_as_the_context_is_warned_of(tmp_path, caplog):
    """Its attention is dense, whatever the pattern is called."""
    said = "mst.attention.stride (128) is not below the context (128), so sparse attention leaves nothing out. Use 32"
    for stride, warned in (("128", True), ("1.0", True), ("32", False), ("0.25", False)):
        caplog.clear()
        words = ["--deepspeed_config", "demo", "--out", str(tmp_path), "--set", f"mst.attention.stride={stride}"]
        read_experiment(parse_arguments(words))
        assert (said in caplog.text) == warned, stride
    caplog.clear()
    read_experiment(parse_arguments([*words[:-1], "mst.attention.stride=256", "--method", "rigl"]))
    assert "attention is dense" not in caplog.text, "rigl's is dense by name"

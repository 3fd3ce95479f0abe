"""Runs that start from GPT-2's weights: the same model at step 0 under every ZeRO stage; what does not fit is named."""

import json
from pathlib import Path

import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.errors import Damaged, UserError
from mst_scale.hugging_face import start_from
from mst_scale.hugging_face.export import export, open_source
from mst_scale.models.gpt import GPT
from mst_scale.pretrain import start
from tests.support import pool, tiny_run, whole_runs
from tests.support.saved_model import save
from tests.support.whole_runs import attempt

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 48, "vocab_size": 300}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A GPT-2 as transformers saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    model.save_pretrained(folder)
    return folder


def arguments(folder: Path, gpt2: Path, *more: str, **blocks) -> list[str]:
    start = ["--init", str(gpt2), "--steps", "1", "--set", "training.warmup=1"]
    return whole_runs.arguments(folder, "out", *start, *more, **blocks)


@pytest.mark.parametrize(("world", "stage"), [(2, 1), (2, 3)])
@torch.no_grad()
def test_the_first_step_starts_from_those_weights(tmp_path, gpt2, world, stage):
    """With a learning rate of almost nothing the checkpoint after step 1 still holds them."""
    from transformers import AutoModelForCausalLM

    optimizer = {"type": "AdamW", "params": {"lr": 1e-12, "weight_decay": 0.0}}
    argv = arguments(tmp_path, gpt2, zero_optimization={"stage": stage}, optimizer=optimizer, training={"min_lr": 0.0})
    assert pool.run(attempt, world, argv) == [(0, "")] * world
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model"]["n_embd"] == 32 and config["model"]["bias"] and config["model"]["vocab_size"] == 300
    model = open_source(tmp_path / "out").model()
    tokens = torch.arange(2 * 48).view(2, 48) * 7 % 300
    theirs = AutoModelForCausalLM.from_pretrained(gpt2).eval()
    # logits of about 10; a step of 1e-12 and sums in another order
    assert (model(tokens)[..., :300] - theirs(tokens).logits).abs().max() < 1e-4


def test_a_sparse_run_starts_from_a_dense_run_of_ours(tmp_path):
    """--init RUN takes the newest checkpoint's weights: the first loss is that of the run it starts from."""
    shape = {"vocab_multiple": 128}  # the rows of the embedding are the other run's too
    dense = whole_runs.arguments(tmp_path, "dense", zero_optimization={"stage": 3}, model=shape)
    assert pool.run(attempt, 2, dense) == [(0, "")] * 2
    standing = {"type": "AdamW", "params": {"lr": 1e-12, "weight_decay": 0.0}}
    sparse = ["--method", "mst", "--set", "mst.attention.pattern=dense"]
    argv = arguments(tmp_path, tmp_path / "dense", *sparse, optimizer=standing, training={"min_lr": 0.0})
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    before, after = (tiny_run.rows(tmp_path / out)[-1] for out in ("dense", "out"))
    assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-6)


@pytest.mark.parametrize("stride", [0.25, 12])
def test_a_stride_in_parts_of_the_context_is_that_of_the_initial_weights(tmp_path, gpt2, stride):
    given = {"method": "mst", "attention": {"pattern": "strided", "stride": stride}}
    argv = arguments(tmp_path, gpt2, mst=given, model={"seq_length": 200})
    experiment = start.read_experiment(start.parse_arguments(argv))
    assert experiment.model.seq_length == 48 and experiment.mst.attention.stride == 12


def test_a_mismatch_is_named(tmp_path, gpt2):
    with pytest.raises(UserError, match="nowhere"):
        start_from.folder_of("./nowhere")
    with pytest.raises(UserError, match=r"config\.json"):
        start_from.model_keys(tmp_path)
    raw = json.loads((gpt2 / "config.json").read_text())
    for changes, message in (
        ({"model_type": "llama"}, "--init .*'llama'"),
        ({"activation_function": "relu"}, "activation_function .*'relu'.*'gelu_new'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights .*False.*True"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config .*{"bits": 4}'),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
        with pytest.raises(UserError, match=message):
            start_from.model_keys(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig(**start_from.model_keys(tmp_path))
    assert (config.n_embd, config.seq_length, config.bias, config.tied_head) == (32, 48, True, True)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        start_from.read(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes((gpt2 / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        start_from.read(tmp_path, config)


def from_hub(rank: int, world: int, argv: list[str], folder: Path | None) -> tuple[int, str, list]:
    """A run where the hub gives this folder, or cannot be reached, and what was asked of it."""
    import huggingface_hub

    asked, real = [], huggingface_hub.snapshot_download

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        if folder is None:
            raise ConnectionError("no network")
        return str(folder)

    huggingface_hub.snapshot_download = download
    try:
        return *attempt(rank, world, argv), asked
    finally:
        huggingface_hub.snapshot_download = real


@torch.no_grad()
def test_a_run_started_from_a_name_on_the_hub_resumes_without_it(tmp_path, gpt2):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-12, "weight_decay": 0.0}}
    argv = arguments(tmp_path, Path("gpt2"), optimizer=optimizer, training={"min_lr": 0.0})
    for code, text, asked in pool.run(from_hub, 2, argv, gpt2):
        assert (code, text) == (0, "")
        assert set(map(str, asked)) == {str(("gpt2", ["config.json", "*.safetensors", "*.safetensors.index.json"]))}
    model, config = open_source(tmp_path / "out").model(), ModelConfig(**start_from.model_keys(gpt2))
    for name, weight in start_from.read(gpt2, config).items():
        assert (dict(model.named_parameters())[name] - weight).abs().max() < 1e-9, name
    assert pool.run(from_hub, 2, [*argv, "--steps", "2"], None) == [(0, "", [])] * 2
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


def test_weights_of_another_shape_are_rejected_on_all_ranks(tmp_path, gpt2):
    """Under ZeRO-3 a rank that fails while the others wait for its weights would leave them waiting."""
    from safetensors.torch import load_file, save_file

    state = load_file(gpt2 / "model.safetensors")
    for name, message in (
        ("transformer.wpe.weight", r"wpe\.weight .*\(47, 32\).*\(48, 32\)"),
        ("transformer.h.1.mlp.c_fc.weight", r"blocks\.1\.mlp\.up\.weight .*\(128, 31\)"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
        save_file(
            {**state, name: state[name][:-1].contiguous()}, folder / "model.safetensors", metadata={"format": "pt"}
        )
        with pytest.raises(UserError, match=message):
            start_from.read(folder, ModelConfig(**start_from.model_keys(folder)))
    results = pool.run(attempt, 2, arguments(tmp_path, folder, zero_optimization={"stage": 3}), seconds=60)
    assert [code for code, _ in results] == [2, 2]
    assert "blocks.1.mlp.up.weight" in "".join(text for _, text in results)


def test_a_bert_is_not_started_from_a_gpt2(tmp_path, gpt2):
    code, text = attempt(0, 1, arguments(tmp_path, gpt2, model={"arch": "bert"}))
    assert code == 2 and "model.arch is 'bert'" in text


def test_without_a_network_there_is_one_line(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no network\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"--init gpt2.*ConnectionError"):
        start_from.folder_of("gpt2")


def test_an_exported_model_starts_a_run_without_biases(tmp_path):
    config = ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=8, vocab_size=20)
    torch.manual_seed(0)
    model = GPT(config)
    export(save(model, config, tmp_path / "run"), tmp_path / "theirs")
    found = ModelConfig(**start_from.model_keys(tmp_path / "theirs"))
    assert not found.bias
    other = GPT(found)
    start_from.fill(other, start_from.read(tmp_path / "theirs", found))
    assert torch.equal(other.wte.weight[:20], model.wte.weight[:20])
    assert torch.equal(other.blocks[0].mlp.up.weight, model.blocks[0].mlp.up.weight)

"""`mst export`, `eval`, `inspect` and `report` read what Trainer, Accelerate and a loop of your own leave behind."""

import json
import shutil

import pytest
import torch

import mst_scale
from mst_scale.checkpoints import finding
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.cli import main
from mst_scale.data.tokenizer import write_tokenizer
from mst_scale.errors import UserError
from mst_scale.evaluation.models import open_model
from mst_scale.hugging_face.export import export
from mst_scale.report.reader import Reader
from tests.ranks.integrations.test_trainer import arguments
from tests.support import pool
from tests.support.integrated import Words, deepspeed_config, model, opened

STEPS = 12
TOKENS = torch.arange(16)[None] * 5 % 64


def logits_of(made):
    with torch.no_grad():
        return made(TOKENS).logits


def with_trainer(rank, world, folder, stage, kind):
    """Logits of the model as Trainer has it at the end."""
    from transformers import Trainer

    with opened():
        args = arguments(f"{folder}/out", deepspeed_config(stage), save_strategy="steps", save_steps=4)
        trainer = Trainer(model(kind), args, train_dataset=Words())
        trainer.train()
        return logits_of(trainer.model)


def own_engine(config, kind):
    made = model(kind)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    plain = {key: value for key, value in config.items() if value != "auto" and key not in ("optimizer", "bf16")}
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    plain |= {**sizes, "training": {"steps": STEPS}, "zero_allow_untested_optimizer": True}
    return made, optimizer, plain


def steps_of(engine, backward, step, count):
    batch = {key: torch.stack([Words()[i][key] for i in range(4)]) for key in ("input_ids", "labels")}
    for _ in range(count):
        backward(engine(**batch).loss)
        step()


def with_accelerate(rank, world, folder, stage, kind):
    from accelerate import Accelerator, DeepSpeedPlugin

    with opened():
        made, optimizer, config = own_engine(deepspeed_config(stage), kind)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        engine, optimizer = accelerator.prepare(made, optimizer)
        recording = mst_scale.record(engine, f"{folder}/out", every=2)
        steps_of(engine, accelerator.backward, optimizer.step, 6)
        accelerator.save_state(f"{folder}/out")
        recording.close()
        return logits_of(engine)


def state_dict_of_accelerate(rank, world, method):
    """The state dict that Accelerate returns, and what the model answers."""
    from accelerate import Accelerator, DeepSpeedPlugin

    with opened():
        made, optimizer, config = own_engine(deepspeed_config(1), "llama")
        config["mst"] = {"method": method, "targets": {"lm_head": False}}
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        engine, optimizer = accelerator.prepare(made, optimizer)
        steps_of(engine, accelerator.backward, optimizer.step, 3)
        engine.eval()
        return accelerator.get_state_dict(engine), logits_of(engine)


@pytest.mark.parametrize("method", ["powerprop", "top-kast"])
def test_accelerate_returns_the_weights_that_layers_multiply_by(method):
    state, expected = pool.run(state_dict_of_accelerate, 1, method)[0]
    plain = model("llama").eval()
    plain.load_state_dict(state)
    torch.testing.assert_close(logits_of(plain), expected, rtol=0, atol=1e-5)


def with_own_loop(rank, world, folder, stage, kind):
    made, optimizer, config = own_engine(deepspeed_config(stage), kind)
    engine, *_ = mst_scale.initialize(model=made, optimizer=optimizer, config=config)
    recording = mst_scale.record(engine, f"{folder}/out", every=2)
    for _ in range(2):
        steps_of(engine, engine.backward, engine.step, 3)
        engine.save_checkpoint(f"{folder}/out")
    recording.close()
    return logits_of(engine)


CASES = {
    "trainer": (with_trainer, 1, 1, "llama", "checkpoint-12/global_step12", STEPS),
    "trainer, ZeRO-3": (with_trainer, 2, 3, "gpt2", "checkpoint-12/global_step12", STEPS),
    "accelerate": (with_accelerate, 1, 2, "gpt2", "pytorch_model", 6),
    "own loop": (with_own_loop, 1, 1, "llama", "global_step6", 6),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_exported_evaluated_inspected_and_reported(tmp_path, case):
    from transformers import AutoModelForCausalLM

    train, ranks, stage, kind, newest, step = CASES[case]
    wanted = pool.run(train, ranks, str(tmp_path), stage, kind)[0]
    out, exported = tmp_path / "out", tmp_path / "exported"
    assert finding.locate(out) == out / newest

    done = export(out, exported)
    assert done.step == step and done.checkpoint == out / newest and done.tokenizer is None
    loaded = AutoModelForCausalLM.from_pretrained(exported)
    about = json.loads((exported / "config.json").read_text())["mst_scale"]
    assert loaded.config.model_type == kind and about["step"] == step and about["method"] == "mst"
    sparse = "attention" in about
    assert sparse == (step < STEPS), "step 6 lies in the ultra-sparse phase"
    if sparse:
        from mst_scale.hybrid_sparse_attention import Pattern, attach

        assert not attach(loaded, Pattern(**about["attention"]))
        assert done.zeros / done.matrices == pytest.approx(0.8, abs=0.01)
    torch.testing.assert_close(logits_of(loaded), wanted, atol=1e-5, rtol=1e-5)
    assert "of 12" in (exported / "README.md").read_text()

    (out / newest).parent.joinpath("vocab.txt").write_text("")  # a broken tokenizer, to be named in one line
    with pytest.raises(UserError, match="--tokenizer"):
        open_model(str(out), None, torch.device("cpu"))
    report = inspect(out)
    assert report.step == step and report.layers
    reader = Reader(out)
    reader.update()
    notes = "\n".join(reader.run.notes)
    assert f"those of checkpoint {newest}" in notes and "not one of this version" not in notes
    assert reader.run.snapshots[0].step == step


class Bytes(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        tokens = (torch.arange(16) * (1 + i % 5) + 7 * i) % 257
        return {"input_ids": tokens, "labels": tokens}


def of_bytes(rank, world, folder):
    """A Trainer with a tokenizer, which its checkpoints hold then."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer

    torch.manual_seed(0)
    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 257, "n_positions": 32, "attn_pdrop": 0.0}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, **small))
    with opened():
        config = deepspeed_config(1, {"attention": {"pattern": "strided", "stride": 4, "dense_from": 1.0}})
        args = arguments(f"{folder}/out", config, max_steps=12, save_strategy="steps", save_steps=4)
        tokenizer = AutoTokenizer.from_pretrained(f"{folder}/tokenizer")
        tokenizer.pad_token = tokenizer.eos_token
        trainer = Trainer(made, args, train_dataset=Bytes(), processing_class=tokenizer)
        trainer.train()
        return logits_of(trainer.model)


def test_mst_eval_reads_a_trainers_folder(tmp_path, capsys):
    """With the tokenizer that Trainer saved, from the fp32 masters, and with the attention that it was trained with."""
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer", "byte", 257)
    (wanted,) = pool.run(of_bytes, 1, str(tmp_path))
    (tmp_path / "wikitext2.txt").write_text("a text of some bytes " * 20)
    words = ["--tasks", "wikitext2", "--data-dir", str(tmp_path), "--device", "cpu", "--json"]
    results = []
    for name in ("out", "out/checkpoint-12", "out/checkpoint-12/global_step12"):
        found, text = open_model(str(tmp_path / name), None, torch.device("cpu"))
        torch.testing.assert_close(found.logits(TOKENS), wanted, atol=1e-5, rtol=1e-5)
        assert (found.step, found.context, text.end_of_text) == (12, 32, 256)
        assert main(["eval", str(tmp_path / name), *words]) == 0
        results.append(json.loads(capsys.readouterr().out)["tasks"]["wikitext2"]["metrics"])
    assert results[0] == results[1] == results[2]
    assert (tmp_path / "out" / "eval.json").is_file()
    done = export(tmp_path / "out", tmp_path / "exported")
    assert done.tokenizer is not None and (tmp_path / "exported" / "tokenizer.json").is_file()
    with pytest.raises(UserError, match="--prune"):
        export(tmp_path / "out", tmp_path / "pruned", prune=0.5)


def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path):
    """Trainer was killed while it saved: DeepSpeed names a checkpoint in `latest` when it is complete."""
    for step in (8, 80):
        folder = tmp_path / f"checkpoint-{step}" / f"global_step{step}"
        folder.mkdir(parents=True)
        (folder / "mp_rank_00_model_states.pt").write_bytes(b"")
        (folder.parent / "latest").write_text(folder.name)
    assert finding.locate(tmp_path).name == "global_step80"
    (tmp_path / "checkpoint-80" / "latest").unlink()
    assert finding.locate(tmp_path).name == "global_step8"
    shutil.rmtree(tmp_path / "checkpoint-8")
    with pytest.raises(UserError, match="Trainer"):
        finding.locate(tmp_path)


def test_a_folder_without_a_configuration_asks_for_one(tmp_path):
    """A checkpoint of an older version, saved by Accelerate: --config names the model's config.json."""
    wanted = pool.run(with_accelerate, 1, str(tmp_path), 1, "llama")[0]
    out = tmp_path / "out"
    config = json.loads((out / "pytorch_model" / "transformers_config.json").read_text())
    pattern = config.pop("mst_scale")["attention"]
    (out / "pytorch_model" / "transformers_config.json").unlink()
    with pytest.raises(UserError, match="--config"):
        export(out, tmp_path / "exported")
    (tmp_path / "config-of-the-model.json").write_text(json.dumps(config))
    export(out, tmp_path / "exported", config=tmp_path / "config-of-the-model.json")
    about = json.loads((tmp_path / "exported" / "config.json").read_text())["mst_scale"]
    assert about["attention"] == pattern, "from run.json, which the recording has written"
    (tmp_path / "wrong.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(UserError, match="describes another model"):
        export(out, tmp_path / "other", config=tmp_path / "wrong.json")
    assert wanted.shape == (1, 16, 64)

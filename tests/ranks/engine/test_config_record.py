"""A resumed run says in one line which keys of its config have changed, and refuses other given masks."""

import json
from pathlib import Path

import pytest
import torch

import mst_scale
from mst_scale.checkpoints import open_masks
from mst_scale.data.prepare import prepare
from mst_scale.data.recipe import Recipe
from mst_scale.errors import UserError
from tests.ranks.engine.test_changed_weights import warned
from tests.ranks.integrations.test_trainer import arguments as trainer_arguments
from tests.support import pool
from tests.support.integrated import Words, opened
from tests.support.integrated import deepspeed_config as trainer_config
from tests.support.integrated import model as transformer
from tests.support.toy_engine import mst_config, train
from tests.support.toys import deepspeed_config, toy
from tests.support.whole_runs import arguments, attempt

LINE = "resuming with changes: "


def lines(call):
    return [line.removeprefix(LINE) for line in warned(call) if line.startswith(LINE)]


# --- a loop of one's own ---


def own_loop(rank, world, stage, folder):
    """Lines at a resume: unchanged, with other values, with another length, of weights alone, warm."""
    config = mst_config(stage, world, method="rigl")
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 4)
    engine.save_checkpoint(folder, tag="t")
    changed = json.loads(json.dumps(config))
    changed["mst"] |= {"topology": {**config["mst"]["topology"], "policy": "set", "check_every": 7}}
    changed["mst"]["sparsity"] = {**config["mst"]["sparsity"], "distribution": "uniform"}
    changed |= {"steps_per_print": 17, "gradient_clipping": 0.5}

    def resumed(config):
        engine, *_ = mst_scale.initialize(model=toy(), config=config)
        return lines(lambda: engine.load_checkpoint(folder, tag="t"))

    again, *_ = mst_scale.initialize(model=toy(), config=changed)
    weights = lines(lambda: again.load_checkpoint(folder, tag="t", load_module_only=True))
    warm, *_ = mst_scale.initialize(model=toy(), config=changed)
    anew, *_ = mst_scale.initialize(model=toy(), config=changed)
    return (
        resumed(config),
        resumed(changed),
        weights,
        lines(lambda: mst_scale.warm_start(warm, f"{folder}/t")),
        lines(lambda: mst_scale.warm_start(anew, f"{folder}/t", weights_only=True)),
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_own_loops(stage, tmp_path):
    changes = (
        "mst.sparsity.distribution 'erdos-renyi' → 'uniform', mst.topology.policy 'rigl' → 'set', "
        "gradient_clipping 1.0 → 0.5"
    )
    first, second = pool.run(own_loop, 2, stage, str(tmp_path))
    assert first == ([], [changes], [], [changes], [])
    assert second == ([], [], [], [], []), "the first rank says it"


def dense(rank, world, folder):
    found = deepspeed_config(1, world)
    engine, *_ = mst_scale.initialize(model=toy(), config={**found, "mst": {"method": "dense"}})
    train(engine, rank, world, 1)
    engine.save_checkpoint(folder, tag="t")
    found["optimizer"]["params"]["weight_decay"] = 0.2
    again, *_ = mst_scale.initialize(model=toy(), config={**found, "mst": {"method": "dense"}})
    return lines(lambda: again.load_checkpoint(folder, tag="t"))


def test_dense_runs_too(tmp_path):
    assert pool.run(dense, 1, str(tmp_path)) == [["optimizer.params.weight_decay 0.1 → 0.2"]]


# --- masks that a run was given ---


def given(rank, world, folder):
    def made(masks):
        config = deepspeed_config(2, world, training={"steps": 6})
        config["mst"] = {"method": "fixed", "masks": masks, "targets": {"include": ["up.weight"]}}
        return mst_scale.initialize(model=toy(), config=config)[0]

    if rank == 0:
        for name, step in (("one", 2), ("moved", 2), ("other", 3)):
            kept = (torch.arange(37 * 13) % step != 0).view(37, 13)
            open_masks.write(Path(folder) / f"{name}.safetensors", [("up.weight", kept)])
    torch.distributed.barrier()
    engine = made(f"{folder}/one.safetensors")
    train(engine, rank, world, 2)
    engine.save_checkpoint(folder, tag="t")
    said = lines(lambda: made(f"{folder}/moved.safetensors").load_checkpoint(folder, tag="t"))
    try:
        made(f"{folder}/other.safetensors").load_checkpoint(folder, tag="t")
    except UserError as error:
        return said, str(error)
    return said, None


def test_other_given_masks_are_refused_and_a_file_that_was_moved_is_not(tmp_path):
    first, second = pool.run(given, 2, str(tmp_path))
    assert len(first[0]) == 1 and first[0][0].startswith("mst.masks ")
    for _, refused in (first, second):
        assert refused is not None and "mst.masks" in refused and "other.safetensors" in refused


# --- transformers' Trainer ---


def by_trainer(rank, world, folder):
    from transformers import Trainer

    def trained(resume, policy):
        with opened():
            config = trainer_config(1, {"topology": {"interval": 2, "policy": policy}})
            args = trainer_arguments(f"{folder}/out", config, save_strategy="steps", save_steps=6)
            trainer = Trainer(transformer(), args, train_dataset=Words())
            return lines(lambda: trainer.train(resume_from_checkpoint=resume))

    checkpoint = f"{folder}/out/checkpoint-6"
    return trained(None, "rigl"), trained(checkpoint, "rigl"), trained(checkpoint, "set")


def test_trainer(tmp_path):
    ((first, same, changed),) = pool.run(by_trainer, 1, str(tmp_path))
    assert (first, same, changed) == ([], [], ["mst.topology.policy 'rigl' → 'set'"])


# --- pretrain ---


def corpus(folder, word):
    folder.mkdir()
    (folder / "text.txt").write_text(f"{word} and so on, " * 2000)
    prepare(Recipe(str(folder / "text.txt"), "byte", val_fraction=0.1), folder / "tokens", workers=1)
    return folder / "tokens"


def pretrained(tmp_path, *more):
    argv = arguments(
        tmp_path, "out", *more, mst={"method": "rigl", "topology": {"interval": 2}}, model={"vocab_size": 257},
    )  # fmt: skip
    return pool.run(attempt, 1, argv)[0]


def test_pretrain(tmp_path):
    one, other = (corpus(tmp_path / word, word) for word in ("one", "another"))
    data = f"--data={one}"
    code, text = pretrained(tmp_path, data)
    assert code == 0 and LINE not in text
    (tmp_path / "out" / "checkpoints" / "step00000012").rename(tmp_path / "away")  # so that there is something to do
    kept = ["--set=training.log_every=2", "--set=model.activation_checkpointing=true"]
    code, text = pretrained(tmp_path, data, *kept)
    assert code == 0 and LINE not in text, "nothing that changes the result"
    (tmp_path / "out" / "checkpoints" / "step00000012").rename(tmp_path / "away too")
    code, text = pretrained(tmp_path, f"--data={other}", "--set=mst.topology.policy=set", "--set=training.min_lr=1e-4")
    assert code == 0
    (line,) = (line for line in text.splitlines() if LINE in line)
    assert "mst.topology.policy 'rigl' → 'set'" in line and "training.min_lr 0.001 → 0.0001" in line
    assert "corpus" in line and "data.dir" not in line
    events = json.loads((tmp_path / "out" / "run.json").read_text())["events"]
    assert any(event["what"] == "resumed with changes" and len(event["changes"]) == 3 for event in events)


@pytest.mark.parametrize("wrong", ["model.n_layer=2", "bf16.enabled=true", "mst.method=set"])
def test_what_pretrain_refuses_stays_refused(tmp_path, wrong):
    data = f"--data={corpus(tmp_path / 'one', 'one')}"
    assert pretrained(tmp_path, data)[0] == 0
    code, text = pretrained(tmp_path, data, f"--set={wrong}")
    assert code == 2 and "choose another --out" in text

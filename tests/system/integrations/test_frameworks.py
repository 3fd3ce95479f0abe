"""Accelerate without Trainer, Lightning and Fabric: each trains as a loop of one's own, and continues bit for bit."""

import json

import pytest
import torch

import mst_scale
from mst_scale.checkpoints.reshape import reshape
from mst_scale.errors import UserError
from tests.support import pool
from tests.support.integrated import digests, opened
from tests.support.lightning_on_cpu import accelerator
from tests.support.toys import toy, toy_batch

STEPS = 10
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
    "training": {"steps": STEPS},
    "mst": {"method": "mst", "sparsity": {"max": 0.75}, "topology": {"interval": 2}},
}


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


class Batches(torch.utils.data.Dataset):
    """One item is a rank's whole micro-batch of a step, as `toy_batch` has it."""

    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, i):
        return toy_batch(i // 2, i % 2)


def loader():
    return torch.utils.data.DataLoader(Batches(), batch_size=None)


class Inside(torch.nn.Module):
    """A model as it stands in a LightningModule: random growth goes by names."""

    def __init__(self):
        super().__init__()
        self.inner = toy()

    def forward(self, *batch):
        return self.inner(*batch)


def own(rank, stage, made=toy):
    """(losses, mask digests) step by step in a loop of one's own."""
    model = made()
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine, *_ = mst_scale.initialize(model=model, optimizer=adam(model.parameters()), config=config)
    return followed(engine, rank, range(STEPS), engine.backward, engine.step)


def followed(engine, rank, steps, backward, step):
    found = []
    for i in steps:
        loss = engine(*toy_batch(i, rank))
        backward(loss)
        step()
        found.append((float(loss.detach()), digests(engine)))
    return found


def with_accelerate(rank, world, folder, stage):
    from accelerate import Accelerator, DeepSpeedPlugin

    def prepared():
        plugin = DeepSpeedPlugin(hf_ds_config={**CONFIG, "zero_optimization": {"stage": stage}})
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = toy()
        engine, optimizer = accelerator.prepare(model, adam(model.parameters()))
        return accelerator, engine, optimizer

    with opened():
        accelerator, engine, optimizer = prepared()
        recording = mst_scale.record(engine, f"{folder}/run", every=2)
        found = followed(engine, rank, range(6), accelerator.backward, optimizer.step)
        accelerator.save_state(f"{folder}/state")
        found += followed(engine, rank, range(6, STEPS), accelerator.backward, optimizer.step)
        recording.close()
    with opened():
        accelerator, engine, optimizer = prepared()
        accelerator.load_state(f"{folder}/state")
        again = followed(engine, rank, range(6, STEPS), accelerator.backward, optimizer.step)
    return found == own(rank, stage), again == found[6:], rows(folder) if rank == 0 else 5


def accelerated(rank, world, folder, stage, resumes):
    """Half a run on this number of processes, and its checkpoint; or the other half, from that."""
    from accelerate import Accelerator, DeepSpeedPlugin

    accumulation = 2 // world
    config = {**CONFIG, "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": accumulation}
    with opened():
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation)
        model = toy()
        engine, optimizer = accelerator.prepare(model, adam(model.parameters()))
        if resumes:
            try:
                accelerator.load_state(f"{folder}/state")
            except UserError as error:
                return str(error)
        found = [digests(engine)]
        for step in range(6, STEPS) if resumes else range(6):
            for part in range(accumulation):
                with accelerator.accumulate(engine):
                    accelerator.backward(engine(*toy_batch(step, rank * accumulation + part)))
                    optimizer.step()
            found.append(digests(engine))
        if not resumes:
            accelerator.save_state(f"{folder}/state")
    return engine.mst.step, found


@pytest.mark.parametrize(("stage", "before", "now"), [(2, 2, 1), (1, 1, 2)])
def test_accelerate_continues_on_another_number_of_processes(tmp_path, stage, before, now):
    _, masks = pool.run(accelerated, before, str(tmp_path), stage, False)[0]
    for said in pool.run(accelerated, now, str(tmp_path), stage, True):
        assert f"mst reshape {tmp_path}/state/pytorch_model" in said
    reshape(tmp_path / "state" / "pytorch_model")
    for step, found in pool.run(accelerated, now, str(tmp_path), stage, True):
        assert step == STEPS and found[0] == masks[-1], "the masks are those of the checkpoint"


def rows(folder):
    with open(f"{folder}/run/metrics.jsonl") as file:
        return sum(json.loads(line)["flops"] < json.loads(line)["flops_dense"] for line in file)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accelerate(tmp_path, stage):
    assert pool.run(with_accelerate, 2, str(tmp_path), stage) == [(True, True, 5)] * 2


def with_fabric(rank, world, folder, stage):
    from lightning.fabric import Fabric
    from lightning.fabric.accelerators import CUDAAccelerator
    from lightning.fabric.strategies import DeepSpeedStrategy

    def set_up():
        config = {key: value for key, value in CONFIG.items() if key != "training"}
        strategy = DeepSpeedStrategy(config={**config, "zero_optimization": {"stage": stage}})
        fabric = Fabric(accelerator=accelerator(CUDAAccelerator), devices=1, strategy=strategy)
        fabric.launch()
        model = toy()
        module, optimizer = fabric.setup(model, adam(model.parameters()))
        return fabric, module, optimizer

    def follow(fabric, module, optimizer, steps):
        engine = module._forward_module
        return followed(engine, rank, steps, fabric.backward, optimizer.step)

    with opened(steps=STEPS):
        fabric, module, optimizer = set_up()
        found = follow(fabric, module, optimizer, range(6))
        fabric.save(f"{folder}/state", {"model": module, "optimizer": optimizer})
        found += follow(fabric, module, optimizer, range(6, STEPS))
    with opened(steps=STEPS):
        fabric, module, optimizer = set_up()
        fabric.load(f"{folder}/state", {"model": module, "optimizer": optimizer})
        again = follow(fabric, module, optimizer, range(6, STEPS))
    return found == own(rank, stage), again == found[6:]


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fabric(tmp_path, stage):
    assert pool.run(with_fabric, 1, str(tmp_path), stage) == [(True, True)]


def with_lightning(rank, world, folder, stage):
    import lightning
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner, self.found = toy(), []

        def training_step(self, batch, index):
            return self.inner(*toy_batch(self.global_step, rank))

        def on_train_batch_end(self, outputs, batch, index):
            self.found.append((float(outputs["loss"].detach()), digests(self.trainer.strategy.model)))

        def configure_optimizers(self):
            return adam(self.parameters())

    def fit(resume=None):
        its = ("training", "gradient_accumulation_steps")  # the Trainer's
        config = {key: value for key, value in CONFIG.items() if key not in its}
        module = Module()
        trainer = lightning.Trainer(
            accelerator=accelerator(CUDAAccelerator), devices=1, max_steps=STEPS, logger=False, default_root_dir=folder,
            strategy=DeepSpeedStrategy(config={**config, "zero_optimization": {"stage": stage}}),
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_top_k=-1)],
        )  # fmt: skip
        trainer.fit(module, loader(), ckpt_path=resume)
        return module.found

    with opened():
        found = fit()
    with opened():
        again = fit(f"{folder}/step=6.ckpt")
    return found == own(rank, stage, Inside), again == found[6:]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lightning(tmp_path, stage):
    assert pool.run(with_lightning, 1, str(tmp_path), stage) == [(True, True)]


def accumulating_with_lightning(rank, world, folder, limits):
    """A run of epochs of 7 micro-batches, 3 of which are a step: its steps, its recorded losses, and the model's."""
    import lightning
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner, self.losses = toy(), []

        def on_train_start(self):
            self.recording = mst_scale.record(self.trainer.strategy.model, folder, every=1)

        def training_step(self, batch, index):
            loss = self.inner(*batch)
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return adam(self.parameters())

    config = {k: v for k, v in CONFIG.items() if k not in ("training", "gradient_accumulation_steps")}
    with opened():
        module = Module()
        trainer = lightning.Trainer(
            accelerator=accelerator(CUDAAccelerator), devices=1, logger=False, default_root_dir=folder, **limits,
            strategy=DeepSpeedStrategy(config={**config, "zero_optimization": {"stage": 2}}),
            accumulate_grad_batches=3, limit_train_batches=7,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, loader())
        module.recording.close()
    with open(f"{folder}/metrics.jsonl") as file:
        recorded = [json.loads(line)["loss"] for line in file]
    mst = module.recording.mst
    return mst.step, mst.schedule.total_steps, recorded, module.losses


@pytest.mark.parametrize(
    ("limits", "steps"),
    [({"max_epochs": 2}, 4), ({"max_steps": 4}, 4), ({"max_steps": 9}, 10), ({"max_epochs": 3, "max_steps": 9}, 7)],
)
def test_lightning_accumulates(tmp_path, limits, steps):
    """Lightning counts two steps in each epoch; DeepSpeed steps whenever it has three micro-batches."""
    ((taken, planned, recorded, losses),) = pool.run(accumulating_with_lightning, 1, str(tmp_path), limits)
    assert taken == planned == steps
    assert recorded == pytest.approx([sum(losses[3 * i : 3 * i + 3]) / 3 for i in range(steps)], rel=1e-6)

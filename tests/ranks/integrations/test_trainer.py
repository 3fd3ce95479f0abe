"""transformers' Trainer trains sparsely, exactly as a loop of one's own."""

import json
import logging

import pytest
import torch

import mst_scale
from mst_scale.cli import main
from mst_scale.config import load
from mst_scale.errors import UserError
from mst_scale.integrations.trainer import _logged
from tests.support import pool
from tests.support.integrated import Words, deepspeed_config, digests, model, opened
from tests.support.messages import logged
from tests.support.toy_engine import STAGES


def arguments(folder, config, **more):
    from transformers import TrainingArguments

    given = {
        "max_steps": 12, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(output_dir=folder, deepspeed=config, **{**given, **more})


def keeping(seen):
    """A Trainer that keeps what its model is given, and the loss it goes backward with."""
    from transformers import Trainer

    class Keeping(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if model.training:
                seen.append(({k: v.clone() for k, v in inputs.items()}, num_items_in_batch, float(found.detach())))
            return found

    return Keeping


def trained(folder, stage, kind, *, resume=None, callback=None, sets=None, **more):
    """Losses and mask digests step by step, what the model was given, and the trainer at its end."""
    from transformers import TrainerCallback

    seen, masks = [], []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            masks.append(digests(trainer.deepspeed))

    made = model(kind)  # before transformers knows of ZeRO-3, which would draw other weights
    args = arguments(folder, deepspeed_config(stage), **more)
    trainer = keeping(seen)(
        made,
        args,
        train_dataset=Words(),
        eval_dataset=sets or Words(8),
        callbacks=[Look(), *([callback] if callback else [])],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen, masks


def with_and_without_trainer(rank, world, folder, stage, kind):
    with opened():
        trainer, seen, masks = trained(folder, stage, kind)
        logged = [row for row in trainer.state.log_history if "loss" in row]
        config = dict(trainer.deepspeed.config)
    config = {**config, "training": {"steps": 12, "seed": 3}, "mst": deepspeed_config(stage)["mst"]}
    engine, *_ = mst_scale.initialize(model=model(kind), config=config)
    wrong = []
    for step in range(12):
        rate = 1e-2 * (12 - step) / 12  # Trainer's default falls linearly
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        for inputs, items, loss in seen[2 * step : 2 * step + 2]:
            own = engine(**inputs, num_items_in_batch=items).loss * world
            if float(own.detach()) != loss:
                wrong.append(f"step {step + 1}: loss {float(own.detach())}, not {loss}")
            engine.backward(own, scale_wrt_gas=False)
            engine.step()
        if digests(engine) != masks[step]:
            wrong.append(f"step {step + 1}: other masks")
    phases = {row["mst/phase"] for row in logged}
    return wrong, sorted({row["mst/sparsity"] for row in logged})[-1], phases, logged[-1]["mst/flops_reduction"]


@pytest.mark.full
@pytest.mark.parametrize(("stage", "kind"), [*((stage, "llama") for stage in STAGES), (2, "gpt2"), (3, "gpt2")])
def test_trainer_is_a_custom_loop(tmp_path, stage, kind):
    found = pool.run(with_and_without_trainer, 2, str(tmp_path), stage, kind)
    for wrong, sparsest, phases, reduction in found:
        assert wrong == []
        assert sparsest == pytest.approx(0.8, abs=0.01)
        assert phases == {0, 1, 2, 3}
        assert reduction > 1.3


@pytest.mark.parametrize("method", ["mst", "gd", "dsd", "acdc", "sparse", "dense"])
def test_a_phase_has_the_same_number_for_every_method(method):
    schedule = load({"training": {"steps": 280}, "mst": {"method": method}}).schedule
    for step in (0, 100, 200, 279):
        phase = schedule.at(step).phase
        row = {"phase": phase, "sparsity": 0.0, "target_sparsity": 0.0, "flops": 1, "flops_dense": 1, "reduction": 1.0}
        assert _logged(row)["mst/phase"] == {"warmup": 0, "ultra": 1, "restore": 2, "dense": 3}[phase]


def whole_state(trainer):
    """Weights, optimizer states and masks of this rank."""
    engine = trainer.deepspeed
    shards = engine.mst.store
    states = [shards.states(i) for i in range(len(shards.slices))]
    weights = [shards.weight(i).clone() for i in range(len(shards.slices))]
    return weights, [{k: v.clone() for k, v in one.items()} for one in states], digests(engine)


def resumed(rank, world, folder, stage, kind):
    """A run, and the second half of it again from the checkpoint in its middle."""
    more = {"save_strategy": "steps", "save_steps": 6, "per_device_eval_batch_size": 4}
    with opened():
        trainer, seen, masks = trained(folder, stage, kind, **more)
        whole, history = whole_state(trainer), trainer.state.log_history
    rows = without_times(folder) if rank == 0 else None
    with opened():
        trainer, again, second = trained(folder, stage, kind, resume=f"{folder}/checkpoint-6", **more)
        half, later = whole_state(trainer), trainer.state.log_history
    same = all(
        torch.equal(a, b) for a, b in zip(flat(whole), flat(half), strict=True)
    ) and whole[2] == half[2]  # fmt: skip
    losses = [loss for _, _, loss in seen[12:]] == [loss for _, _, loss in again]
    keys = ("loss", "step", "mst/sparsity", "mst/flops_saved", "mst/flops_reduction", "mst/phase")
    logs = [[{k: row.get(k) for k in keys} for row in one if "loss" in row] for one in (history, later)]
    files = rows is None or rows == without_times(folder)
    return same, losses, masks[6:] == second, logs[0] == logs[1], files


def flat(state):
    weights, states, _ = state
    return [*weights, *(value for one in states for value in one.values())]


def without_times(folder):
    times = ("tokens_per_s", "step_ms", "peak_memory_bytes", "state_bytes", "comm_bytes", "seconds")
    with open(f"{folder}/metrics.jsonl") as file:
        return [{k: v for k, v in json.loads(line).items() if k not in times} for line in file]


@pytest.mark.parametrize(("stage", "kind"), [(0, "gpt2"), (1, "llama"), (3, "llama")])
def test_a_run_continues_bit_for_bit(tmp_path, stage, kind):
    for same, losses, masks, logs, files in pool.run(resumed, 2, str(tmp_path), stage, kind):
        assert (same, losses, masks, logs, files) == (True, True, True, True, True)


def begun(rank, world, folder, stage, kind):
    """A run with a checkpoint in its middle: losses step by step, and the masks there."""
    with opened():
        more = {"save_strategy": "steps", "save_steps": 6, "gradient_accumulation_steps": 4 // world}
        trainer, _, masks = trained(folder, stage, kind, **more)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], masks[5]


def on_other_ranks(rank, world, folder, stage, kind):
    """Its second half on this number of processes: what it is told, or all losses and the masks that it began with."""
    from transformers import Trainer, TrainerCallback

    first = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            first.append(digests(trainer.deepspeed))

    with opened():
        args = arguments(folder, deepspeed_config(stage), gradient_accumulation_steps=4 // world)
        trainer = Trainer(model(kind), args, train_dataset=Words(), callbacks=[Look()])
        try:
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-6")
        except UserError as error:
            return str(error)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], first[0]


@pytest.mark.full
@pytest.mark.parametrize(("stage", "before", "now"), [(1, 2, 1), (2, 1, 2), (3, 2, 1)])
def test_a_run_continues_on_another_number_of_processes(tmp_path, stage, before, now):
    """With the same global batch: 16 sequences in micro-batches of 4."""
    whole, masks = pool.run(begun, before, str(tmp_path), stage, "llama")[0]
    args = (str(tmp_path), stage, "llama")
    for said in pool.run(on_other_ranks, now, *args):
        assert f"mst reshape {tmp_path}/checkpoint-6/global_step6" in said
    assert main(["reshape", f"{tmp_path}/checkpoint-6/global_step6"]) == 0
    for losses, first in pool.run(on_other_ranks, now, *args):
        assert first == masks, "the masks are those of the checkpoint"
        assert losses == pytest.approx(whole, rel=2e-3), "sums of other orders; at the end masks may differ by a tie"


def used(rank, world, folder, stage):
    """What people do around training: evaluation, the best checkpoint, saving, loading from a folder, generation."""
    from transformers import AutoModelForCausalLM, Trainer

    start = f"{folder}/start"
    if rank == 0:
        model("llama").save_pretrained(start)
    torch.distributed.barrier()
    with opened():
        sparse_to_the_end = {"sparsity": {"variation": "sparse", "max": 0.8}, "attention": {"pattern": "dense"}}
        config = deepspeed_config(stage, sparse_to_the_end)
        args = arguments(
            f"{folder}/out", config, save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=4,
            load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,  # the first one
            per_device_eval_batch_size=4,
        )  # fmt: skip
        loaded = AutoModelForCausalLM.from_pretrained(start)  # at stage 3 under zero.Init
        partitioned = all(hasattr(p, "ds_id") for p in loaded.parameters())
        trainer = Trainer(loaded, args, train_dataset=Words(), eval_dataset=Words(8))
        trainer.train()
        engine = trainer.deepspeed
        best, step = trainer.state.best_model_checkpoint, engine.mst.step
        trainer.save_model(f"{folder}/saved")
        loss = trainer.evaluate()["eval_loss"]
        tokens = Words()[0]["input_ids"][None, :8]
        made = trainer.model.generate(tokens, max_new_tokens=4, do_sample=False, synced_gpus=stage == 3)
        masks = {mask.name: mask.active / mask.numel for mask in engine.mst.masks}
        batch = {key: value[None] for key, value in Words()[0].items()}
        with torch.no_grad():
            here = float(trainer.model(**batch).loss)
    torch.distributed.barrier()
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    zeros = {name: float((p != 0).float().mean()) for name, p in saved.named_parameters() if name in masks}
    there = float(saved(**batch).loss.detach())
    history = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return partitioned, best, step, (masks, zeros), (loss, history), made.shape[1], (there, here)


def saved_functions(rank, world, folder, stage, method):
    """Three micro-batches per epoch, two in a step; then the loss of the model here and of the folder."""
    from transformers import AutoModelForCausalLM, Trainer

    with opened():
        block = {"method": method, "sparsity": {"variation": "sparse", "max": 0.5}, "attention": {"pattern": "dense"}}
        args = arguments(f"{folder}/out", deepspeed_config(stage, block), max_steps=5, per_device_eval_batch_size=4)
        trainer = Trainer(model("llama"), args, train_dataset=Words(20), eval_dataset=Words(8))
        trainer.train()
        trainer.save_model(f"{folder}/saved")
        batch = {key: value[None] for key, value in Words()[0].items()}
        with torch.no_grad():
            here = float(trainer.model(**batch).loss)
        torch.distributed.barrier()
    return here, float(AutoModelForCausalLM.from_pretrained(f"{folder}/saved")(**batch).loss.detach())


@pytest.mark.parametrize(("stage", "method"), [(1, "sr-ste"), (3, "spartan")])
def test_a_saved_model_has_the_weights_of_a_function_and_not_what_it_stores(tmp_path, stage, method):
    for here, there in pool.run(saved_functions, 2, str(tmp_path), stage, method):
        assert there == pytest.approx(here, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_common_uses_around_training(tmp_path, stage):
    found = pool.run(used, 2, str(tmp_path), stage)
    for partitioned, best, step, (masks, zeros), (loss, history), length, (there, here) in found:
        assert partitioned == (stage == 3)
        assert best.endswith("checkpoint-4") and step == 4, "the best checkpoint is loaded, and its masks and step"
        assert loss == pytest.approx(history[0], abs=1e-6)
        assert masks and zeros.keys() == masks.keys()
        for name, share in masks.items():
            assert share < 0.5 and zeros[name] <= share, name
        assert length == 12 and there == pytest.approx(here, abs=1e-6)
    assert found[0][4] == found[1][4]


@pytest.mark.full
def test_the_report_reads_a_trainers_folder(tmp_path):
    pool.run(reported, 1, str(tmp_path))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "not one of this version" not in page and "not known" not in page
    assert "ultra" in page and "restore" in page
    assert "LlamaForCausalLM, 22,688 parameters" in page and "8 sequences" in page and "warm-up 1" not in page


def reported(rank, world, folder):
    with opened():
        trained(folder, 1, "llama", eval_strategy="steps", eval_steps=6)[0].save_model()


def logged_seldom(rank, world, folder):
    with opened():
        trainer, *_ = trained(folder, 1, "gpt2", logging_steps=5, per_device_eval_batch_size=4)
        loss = trainer.evaluate()["eval_loss"]
    return loss, without_times(folder)


def test_the_last_step_has_a_row_and_an_evaluation_after_training_joins_it(tmp_path):
    ((loss, rows),) = pool.run(logged_seldom, 1, str(tmp_path))
    assert [(row["step"], row.get("val_loss")) for row in rows] == [(5, None), (10, None), (12, loss)]


def ended_early(rank, world, folder):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            control.should_training_stop = state.global_step == 8

    with logged(logging.INFO) as said, opened():
        trained(folder, 1, "gpt2", callback=Stop(), logging_steps=5)
    return without_times(folder), [line for line in said if "mst report" in line]


def test_a_run_that_ends_early_has_a_row_of_its_last_step(tmp_path):
    (((fifth, last), (line,)),) = pool.run(ended_early, 1, str(tmp_path))
    assert (fifth["step"], last["step"]) == (5, 8) and last["flops"] > fifth["flops"] and last["loss"] is not None
    assert line.startswith(f"8 steps: FLOPs ÷{last['reduction']:.2f}")


def with_two_sets(rank, world, folder, metric):
    more = {"eval_strategy": "steps", "eval_steps": 6, "per_device_eval_batch_size": 4, "metric_for_best_model": metric}
    with logged(logging.INFO) as said, opened():
        trainer, *_ = trained(folder, 1, "gpt2", sets={"web": Words(8), "code": Words(4)}, **more)
    history = [row for row in trainer.state.log_history if any(key.endswith("_loss") for key in row)]
    return history, without_times(folder), [line for line in said if "val_loss" in line]


@pytest.mark.full
@pytest.mark.parametrize(
    ("metric", "name"), [(None, "web"), ("eval_code_loss", "code"), ("code_loss", "code"), ("eval_code_runtime", "web")]
)
def test_one_of_several_evaluation_sets_is_the_validation_set(tmp_path, metric, name):
    ((history, rows, said),) = pool.run(with_two_sets, 1, str(tmp_path), metric)
    losses = [(row["step"], row[f"eval_{name}_loss"]) for row in history if f"eval_{name}_loss" in row]
    assert [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row] == losses and len(losses) == 2
    (line,) = said
    assert line.startswith(f"eval_{name}_loss is recorded as val_loss, of eval_web_loss, eval_code_loss")

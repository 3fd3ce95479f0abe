"""A loop of one's own is recorded as `mst_scale.pretrain` records: rows, FLOPs, run.json, and on through a resume."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mst_scale
from mst_scale.config import ModelConfig
from mst_scale.errors import UserError
from mst_scale.flops import any_model
from mst_scale.flops.any_model import ModelLedger, row
from mst_scale.flops.formulas import dense_step_flops, step_flops
from mst_scale.flops.ledger import Ledger
from mst_scale.hybrid_sparse_attention import SelfAttention
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.integrations import recording
from mst_scale.models import BERT, GPT
from mst_scale.report.groups import group_runs, model_of
from mst_scale.report.reader import Reader
from mst_scale.report.summary import headline
from mst_scale.run_logging import record
from mst_scale.tensor_parallel import TensorGroup
from tests.support import cut_sequences, pool
from tests.support.toy_engine import mst_config
from tests.support.toys import toy, toy_batch


def rows(folder):
    with open(f"{folder}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def recorded(rank, world, folder, method, stage):
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, method=method))
    recording = mst_scale.record(engine, folder, every=2)
    happened = []
    engine.mst.on_topology_step(lambda mst: happened.append((mst.step, sum(c.grown for c in mst.changes))))
    losses = []
    for step in range(5):
        loss = engine(*toy_batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        if step == 3:
            recording.log(val_loss=torch.tensor(1.5))
            recording.log(accuracy=np.float32(0.25))
    recording.close()
    return losses, happened, engine.mst.step


@pytest.mark.parametrize(("method", "stage"), [("rigl", 2), ("dense", 0), ("dense", 3)])
def test_a_custom_loop(tmp_path, method, stage):
    found = pool.run(recorded, 2, str(tmp_path), method, stage)
    written = rows(tmp_path)
    assert [one["step"] for one in written] == [2, 4]
    for one in written:
        mean = sum(losses[one["step"] - 1] for losses, *_ in found) / 2
        assert one["loss"] == pytest.approx(mean, rel=1e-6) and one["tokens"] == 16 * one["step"]
        assert (one["flops"] < one["flops_dense"]) == (method == "rigl")
    assert (written[1]["val_loss"], written[1]["accuracy"]) == (1.5, 0.25) and "val_loss" not in written[0]
    story = json.loads((tmp_path / "run.json").read_text())
    assert story["config"]["mst"]["method"] == method and story["starts"][0]["model"]["class"] == "Toy"
    assert list((tmp_path / "tensorboard").glob("events*"))
    happened = found[0][1]
    assert happened == found[1][1] and bool(happened) == (method == "rigl")


VALIDATED = (2, 4, 5)


def paced(rank, world, folder, every):
    """Steps of 100 ms, of a run that is stopped after the third and resumed; validations and starts take longer."""
    now = [0.0]

    def steps(count, load):
        engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
        recorded = mst_scale.record(engine, folder, every=every)
        if load:
            engine.load_checkpoint(f"{folder}/saved")
        now[0] += 60  # before the first step
        for step in range(engine.mst.step, count):
            loss = engine(*toy_batch(step, rank))
            now[0] += 0.1
            engine.backward(loss)
            engine.step()
            if step + 1 in VALIDATED:
                now[0] += 7
                recorded.note(val_loss=1.5)
        engine.save_checkpoint(f"{folder}/saved")
        recorded.close()

    with pytest.MonkeyPatch.context() as patch:
        for module in (record, recording, any_model):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        steps(3, load=False)
        steps(8, load=True)


@pytest.mark.parametrize("every", [1, 2])
def test_the_pace_is_that_of_the_steps(tmp_path, every):
    """Nothing else counts: no validation that is noted, and no start."""
    pool.run(paced, 1, str(tmp_path), every)
    written = rows(tmp_path)
    assert [one["step"] for one in written] == sorted({*VALIDATED, *range(every, 9, every)})
    for one in written:
        assert one["step_ms"] == pytest.approx(100), one["step"]
        assert one["tokens_per_s"] == pytest.approx(80), one["step"]


def test_two_rows_of_a_step_have_one_pace(tmp_path):
    first, second = pool.run(twice, 1, str(tmp_path))[0]
    assert first["tokens_per_s"] > 0 and first | {"loss": 2.5} == second


def twice(rank, world, folder):
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
    recording = mst_scale.record(engine, folder, every=10)
    engine.backward(engine(*toy_batch(0, rank)))
    engine.step()
    return recording.row(), recording.row(loss=2.5)


def with_ledger(rank, world, folder, mst):
    """Trains a GPT whose sequences are cut over all ranks; what our own ledger says after each step."""
    with cut_sequences.mesh_of(world) as mesh:
        raw = cut_sequences.config(1, mesh, "fp32", 8, **mst)
        engine, *_ = mst_scale.initialize(model=cut_sequences.model(), mpu=mesh, config=raw)
        ledger = Ledger(ModelConfig(**cut_sequences.SHAPE), cut_sequences.BATCH)
        recording = mst_scale.record(engine, folder, every=1)
        reported = []
        for step in range(8):
            ledger.add(engine.mst.pattern, engine.mst.densities(), engine.mst.gradient_densities())
            batch = cut_sequences.batch(step, cut_sequences.SHAPE["seq_length"])
            engine.backward(engine(*cut_sequences.mine(mesh, *batch)))
            engine.step()
            reported.append(ledger.row())
        recording.close()
        return reported


OF_FUNCTIONS = {"sparsity": {"variation": "sd", "warmup": 2, "ultra": 4, "max": 0.5}, "topology": {}, "attention": {}}


@pytest.mark.parametrize(
    ("world", "mst"),
    [
        (1, {}),
        (2, {}),  # a half of each sequence on a rank
        *((1, {"method": name, **OF_FUNCTIONS}) for name in ("sr-ste", "s-ste", "top-kast", "spartan")),
    ],
)
def test_our_model_has_the_flops_of_our_ledger(tmp_path, world, mst):
    """With its tied head, the pattern of whole sequences, and gradients of weights as the method counts them."""
    reported = pool.run(with_ledger, world, str(tmp_path), mst)[0]
    assert reported[-1]["reduction"] > 1.05
    for one, expected in zip(rows(tmp_path), reported, strict=True):
        assert {key: one[key] for key in expected} == pytest.approx(expected), one["step"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["gpt", "bert"])
def test_the_head_of_our_models_is_counted(arch, tied):
    """It is a product without a module where it is tied, and BERT's always; of masked positions alone there."""
    config = ModelConfig(arch=arch, n_layer=1, n_head=2, n_embd=16, seq_length=20, vocab_size=64, tied_head=tied)
    model = {"gpt": GPT, "bert": BERT}[arch](config)
    ledger = ModelLedger(model)
    tokens = torch.randint(64, (3, 20))
    targets = tokens.clone()
    targets[:, config.predicted :] = -1
    for _ in range(2):
        model(tokens, targets).backward()
    head = "wte.weight" if tied else "lm_head.weight"
    ledger.add(Pattern("dense"), {head: 0.25})
    assert ledger.spent["flops_dense"] == pytest.approx(6 * dense_step_flops(config).total)
    assert ledger.spent["flops"] == pytest.approx(6 * step_flops(config, {head: 0.25}).total)


def test_flops_are_those_of_the_formula():
    """A GPT-2 of transformers, against the ledger of our own model of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32}
    sizes = {"n_positions": 16, "vocab_size": 64, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **sizes))
    ledger = ModelLedger(model)
    tokens = torch.randint(64, (3, 16))
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        model(input_ids=tokens)  # an evaluation costs nothing here
    model.eval()(input_ids=tokens)
    pattern, density = Pattern("strided", 4), 0.25
    names = {product.name for product in ledger.products.values()}
    ledger.add(pattern, dict.fromkeys(names, density))
    like = ModelConfig(**shape, seq_length=16, vocab_size=64)
    for accounting, key in (("paper", "flops"), ("causal", "flops_causal")):
        assert ledger.spent[key] == pytest.approx(6 * step_flops(like, density, pattern, accounting).total)
        assert ledger.spent[key.replace("flops", "flops_dense")] == pytest.approx(
            6 * step_flops(like, accounting=accounting).total
        )
    assert ledger.spent["tokens"] == 6 * 16
    assert row(ledger.spent)["reduction"] == pytest.approx(ledger.spent["flops_dense"] / ledger.spent["flops"])
    ledger.add(pattern, {})
    assert ledger.spent["tokens"] == 6 * 16, "a step without a forward adds nothing"


def test_checkpointed_layers_are_counted_once():
    """What is computed again in the backward pass is not counted, as in the paper."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 8)

        def forward(self, x, again):
            if not again:
                return self.inner(x).sum()
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False).sum()

    spent = []
    for again in (False, True):
        model = Model()
        ledger = ModelLedger(model)
        for _ in range(2):
            model(torch.ones(5, 4, requires_grad=True), again).backward()
        ledger.add(Pattern("dense"), {})
        spent.append(ledger.spent)
    assert spent[0] == spent[1] and spent[0]["flops"] == 2 * 3 * 5 * 7 * 8


def test_frozen_matrices_have_no_gradients_of_weights():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    model[0].requires_grad_(False)
    ledger = ModelLedger(model)
    model(torch.ones(5, 4)).sum().backward()
    ledger.add(Pattern("dense"), {"0.weight": 0.5})
    frozen, trained = 2 * 5 * 7 * 8, 3 * 5 * 15 * 3
    assert (ledger.spent["flops"], ledger.spent["flops_dense"]) == (0.5 * frozen + trained, frozen + trained)


def rejected(rank, world, folder):
    import deepspeed

    found = []
    plain = deepspeed.initialize(
        model=toy(),
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    )[0]
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
    (Path(folder) / "file").touch()
    other, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
    recording, taken = mst_scale.record(engine, folder), mst_scale.record(other, f"{folder}/other")
    other.backward(other(*toy_batch(0, rank)))
    other.step()
    for call in (
        lambda: mst_scale.record(plain, folder),
        lambda: mst_scale.record(engine, folder, every=0),
        lambda: mst_scale.record(engine, folder, every="2"),
        lambda: mst_scale.record(engine, f"{folder}/file"),
        lambda: recording.log(val_loss=1.0),
        lambda: taken.log(step=300),
        lambda: taken.log(val_loss="1.5"),
        lambda: taken.log(val_loss=torch.ones(2)),
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


def test_wrong_use_is_one_line(tmp_path):
    (found,) = pool.run(rejected, 1, str(tmp_path))
    expected = (
        ".mst", "every=0", "every='2'", "file' is not a folder", "no step has been taken",
        "the recording counts step itself", "takes a number, not '1.5'", "takes a number, not tensor([1., 1.])",
    )  # fmt: skip
    for text, words in zip(found, expected, strict=True):
        assert words in text


def test_convolutions_are_left_out():
    """Of their outputs' last side nothing follows: it is a width or a length, not their outputs."""
    convolutions = torch.nn.Sequential(torch.nn.Conv2d(16, 64, 1), torch.nn.Flatten(), torch.nn.Linear(64 * 4, 3))
    ledger = ModelLedger(convolutions)
    convolutions(torch.ones(2, 16, 2, 2)).sum().backward()
    assert [product.name for product in ledger.products.values()] == ["2.weight"]
    assert ledger.describe().endswith("; 1 convolutions are not counted")


def test_a_rank_with_some_of_the_heads_counts_the_attention_of_all():
    layers = [SelfAttention(64, 4, tensor=group) for group in (None, TensorGroup(None, 0, 2))]
    assert [ModelLedger(layer).attention for layer in layers] == [[(64, True)]] * 2


def noted_at_the_end(rank, world, folder):
    """Rows when they are asked for (Trainer's way), and a validation loss after the run is closed."""
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world, steps=8))
    following = recording.Recording(engine, Path(folder), every=0, tensorboard=False, shows=False)
    for step in range(8):
        engine.backward(engine(*toy_batch(step, rank)))
        engine.step()
        if step == 4:
            following.row()
            engine.save_checkpoint(f"{folder}/saved")
    following.close()
    following.note(val_loss=2.5)
    engine.load_checkpoint(f"{folder}/saved")
    with pytest.raises(UserError, match="8, but the engine is at step 5"):
        following.note(val_loss=9.0)
    optimizer = json.loads((Path(folder) / "run.json").read_text())["starts"][0]["optimizer"]
    return rows(folder), optimizer["lr"]


def test_the_last_step_has_a_row_and_a_validation_loss_after_the_end_joins_it(tmp_path):
    ((found, rate),) = pool.run(noted_at_the_end, 1, str(tmp_path))
    assert [(row["step"], row.get("val_loss")) for row in found] == [(5, None), (8, 2.5)]
    assert found[1]["tokens"] > found[0]["tokens"] and found[1]["loss"] is not None and rate > 0


def of_two_models(rank, world, folder):
    for name, more in (("small", 0), ("large", 5)):
        model = torch.nn.ModuleList([toy(), *(torch.nn.Linear(2, 2) for _ in range(more))])
        model.forward = model[0].forward
        engine, *_ = mst_scale.initialize(model=model, config=mst_config(0, world, steps=4))
        with_rows = mst_scale.record(engine, f"{folder}/{name}", every=1)
        for step in range(4):
            engine.backward(engine(*toy_batch(step, rank)))
            engine.step()
        with_rows.close()


def test_recorded_runs_of_two_models_are_two_groups(tmp_path):
    """Their configs are the same: a loop's model stands in run.json alone."""
    pool.run(of_two_models, 1, str(tmp_path))
    readers = [Reader(tmp_path / name) for name in ("small", "large")]
    for reader in readers:
        reader.update()
    groups = group_runs([reader.run for reader in readers])
    assert len(groups) == 2 and len({str(model_of(group.first)) for group in groups}) == 2


def started_again(rank, world, folder):
    """A notebook's cell that was interrupted, and run once more; the first recording ends with the program."""
    first, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
    abandoned = mst_scale.record(first, folder, every=2)
    again, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
    for engine, steps in ((first, 4), (again, 12)):
        recording = abandoned if engine is first else mst_scale.record(again, folder, every=2)
        for step in range(steps):
            engine.backward(engine(*toy_batch(step, rank)))
            engine.step()
    recording.close()
    abandoned.close()


def test_an_abandoned_recording_leaves_the_files_of_the_next_one_alone(tmp_path):
    pool.run(started_again, 1, str(tmp_path))
    assert [row["step"] for row in rows(tmp_path)] == [2, 4, 6, 8, 10, 12]
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert starts[-1]["last_step"] == 12


def logs_after_saving(rank, world, folder):
    """Save a checkpoint, log the loss of a validation of that step, and continue from the checkpoint."""
    for first in (True, False):
        engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(1, world))
        recording = mst_scale.record(engine, folder, every=2)
        if not first:
            engine.load_checkpoint(f"{folder}/saved")
        for step in range(engine.mst.step, 3 if first else 6):
            engine.backward(engine(*toy_batch(step, rank)))
            engine.step()
            if step == 1:
                engine.save_checkpoint(f"{folder}/saved")
                recording.log(val_loss=1.5)
        recording.close()


def test_what_is_logged_after_a_save_stays(tmp_path):
    pool.run(logs_after_saving, 1, str(tmp_path))
    assert {row["step"]: row.get("val_loss") for row in rows(tmp_path)} == {2: 1.5, 4: None, 6: None}


class Batch:
    """A batch that is no tensor and no container of tensors."""

    def __init__(self, x, y):
        self.x, self.y = x, y


class OfBatches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = toy()

    def forward(self, batch):
        return self.inner(batch.x, batch.y)


def without_length(rank, world, folder):
    config = mst_config(0, world, method="dense")
    del config["training"]["steps"]
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    recording = mst_scale.record(engine, folder, every=1)
    for step in range(2):
        engine.backward(engine(*toy_batch(step, rank)))
        engine.step()
    recording.close()


def test_a_run_without_a_length_is_not_said_to_be_unfinished(tmp_path):
    """Its config states no training.steps, whose default is that of the paper."""
    pool.run(without_length, 1, str(tmp_path))
    reader = Reader(tmp_path)
    reader.update()
    assert reader.run.steps == 0 and reader.run.step == 2 and reader.run.ended
    assert not any("not finished" in note for note in reader.run.notes)
    assert "of 140,000" not in headline(group_runs([reader.run]))


def uncounted(rank, world, folder):
    engine, *_ = mst_scale.initialize(model=OfBatches(), config=mst_config(1, world))
    recording = mst_scale.record(engine, folder, every=1)
    for step in range(4):
        engine.backward(engine(Batch(*toy_batch(step, rank))))
        engine.step()
    recording.close()


def test_a_model_of_which_no_flops_are_counted_is_recorded(tmp_path):
    pool.run(uncounted, 1, str(tmp_path))
    assert len(rows(tmp_path)) == 4

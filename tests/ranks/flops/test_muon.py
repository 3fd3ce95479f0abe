"""Muon's FLOPs: counted by torch, for the matrices that DeepSpeed gives it, in forecast, ledger and `mst flops`."""

import json

import pytest
import torch
from deepspeed import set_optimizer_flags
from torch.utils.flop_counter import FlopCounterMode

import mst_scale
from mst_scale import cli
from mst_scale.config import load
from mst_scale.flops.budgets import shortened
from mst_scale.flops.formulas import muon_shapes, newton_schulz_flops, optimizer_flops
from mst_scale.flops.ledger import Ledger, forecast, stretches, tiny_flops
from mst_scale.models import BERT, GPT
from mst_scale.zero_shards.muon import orthogonalised
from tests.support import pool, tiny_run
from tests.support.toy_engine import mst_config, train
from tests.support.toys import toy
from tests.unit.flops.test_ledger import RAW

MUON = {**RAW, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(8, 8), (24, 7), (7, 24), (5, 3, 2, 2), (3, 4, 6)])
def test_torch_counts_the_same(shape, method):
    with FlopCounterMode(display=False) as counted:
        orthogonalised(torch.randn(shape), method)
    assert counted.get_total_flops() == newton_schulz_flops(shape, method)


class Named:
    optimizer_name, optimizer_params = "muon", {}


@pytest.mark.parametrize("overrides", [[], ["model.tied_head=false"], ["model.arch=bert"]])
def test_the_matrices_are_those_that_deepspeed_marks(overrides):
    config = load(RAW, overrides).model
    model = (BERT if config.arch == "bert" else GPT)(config)
    set_optimizer_flags(Named, model)
    assert muon_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters() if p.use_muon}


def test_it_is_added_to_the_flops_spent_and_to_those_of_dense_steps():
    plain, muon = load(RAW), load(MUON)
    added = optimizer_flops(muon.model, muon.deepspeed) / 4
    assert added > 0 == optimizer_flops(plain.model, plain.deepspeed)
    without, found = forecast(plain), forecast(muon)
    for a in ("paper", "causal"):
        assert found.mean[a].total == pytest.approx(without.mean[a].total + added)
        assert found.dense[a].total == pytest.approx(without.dense[a].total + added)
        assert found.mean[a].optimizer == pytest.approx(added)
    assert tiny_flops(muon)["paper"].optimizer > 0
    assert 1 < found.reduction() < without.reduction()


def test_the_ledger_states_it_apart_and_continues():
    muon = load(MUON)
    each = optimizer_flops(muon.model, muon.deepspeed)
    ledger = Ledger(muon.model, 4, each)
    for stretch in stretches(muon):
        for _ in range(stretch.steps):
            ledger.add(stretch.pattern, stretch.density)
    row, found = ledger.row(), forecast(muon)
    assert row["flops"] == pytest.approx(60 * 4 * found.mean["paper"].total, rel=1e-12)
    assert row["flops_dense"] == pytest.approx(60 * 4 * found.dense["paper"].total, rel=1e-12)
    assert row["flops_optimizer"] == pytest.approx(60 * each)
    again = Ledger(muon.model, 4, each)
    again.load(ledger.state())
    assert again.row() == row
    assert "flops_optimizer" not in Ledger(muon.model, 4).state()


def test_dense_short_pays_for_it_too(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(MUON))
    short = shortened(load(path, [f"mst.like={path}"], "dense-short"))
    assert forecast(short).reduction() == 1.0
    assert short.training.steps == round(forecast(load(MUON)).dense_steps())


def recorded(rank, world, folder):
    config = mst_config(2, world, steps=3, optimizer={"type": "Muon", "params": {"lr": 1e-2}})
    engine = mst_scale.initialize(model=toy(), config=config)[0]
    recording = mst_scale.record(engine, folder, every=1, tensorboard=False)
    train(engine, rank, world, 3)
    recording.close()


def test_a_recording_states_it(tmp_path):
    pool.run(recorded, 2, str(tmp_path))
    rows = tiny_run.rows(tmp_path)
    each = sum(newton_schulz_flops(shape) for shape in ((37, 13), (13, 37), (7, 13)))
    assert [row["flops_optimizer"] for row in rows] == pytest.approx([each, 2 * each, 3 * each])
    assert rows[-1]["flops_dense"] > rows[-1]["flops"] > 3 * each


def test_mst_flops_prints_it(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(MUON))
    assert cli.main(["flops", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    assert " optimizer " in text.splitlines()[2] and "are Muon's Newton-Schulz" in text
    assert cli.main(["flops", "--config", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    muon = load(MUON)
    assert found["optimizer_flops"] == 60 * optimizer_flops(muon.model, muon.deepspeed)

"""Runs that grow out of a smaller run: their first weights on any ranks and stage, FLOPs, resume, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import mst_scale
from mst_scale import cli
from mst_scale.checkpoints import finding
from mst_scale.config import load
from mst_scale.config.check import smaller_model
from mst_scale.data.corpus import open_tokens
from mst_scale.data.sampler import Sampler
from mst_scale.errors import UserError
from mst_scale.flops.budgets import shortened
from mst_scale.flops.formulas import dense_step_flops
from mst_scale.hugging_face.export import export, open_source
from mst_scale.pretrain.growth import GrowthGradients
from mst_scale.zero_shards.weight_files import weights_of
from tests.support import pool, tiny_run
from tests.support.toys import toy
from tests.support.whole_runs import arguments, attempt, weights, without_times

pytestmark = pytest.mark.full

SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "seq_length": tiny_run.CONTEXT, "vocab_size": 64}
DEEP = {**SMALL, "n_layer": 3}
WIDE = {**SMALL, "n_layer": 2, "n_embd": 32, "n_head": 4}
LIGO = {"method": "ligo", "options": {"steps": 4, "rate": 1e-3}}
STACK = {"method": "stack"}
STANDING = {"type": "AdamW", "params": {"lr": 1e-12, "weight_decay": 0.0}}
FIRST = {"steps": 1, "warmup": 1, "min_lr": 0.0}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A smaller run, of 2 ranks at ZeRO-3, and the corpus beside it."""
    folder = tmp_path_factory.mktemp("growing")
    argv = arguments(folder, "small", model=SMALL, zero_optimization={"stage": 3})
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    return folder / "small"


def larger(folder: Path, small: Path, out: str, *more: str, **blocks) -> list[str]:
    """The command of a run that grows, on the smaller one's corpus."""
    corpus = ["--set", f"data.dir={small.parent / 'corpus'}"]
    return [*arguments(folder, out, **blocks), "--from", str(small), *corpus, *more]


def by_definition(small: Path, config: Path) -> dict[str, torch.Tensor]:
    """What the method makes of the smaller run's weights, in this process."""
    experiment, model = load(config), smaller_model(str(small))
    checkpoint = weights_of(finding.locate(small))
    weights = {name: checkpoint.read(name).detach() for name in checkpoint.shapes}
    corpus = Sampler(open_tokens(small.parent / "corpus", "train"), model.seq_length, experiment.training.seed)
    return experiment.mst.growth.grow(
        weights,
        model,
        experiment.model,
        GrowthGradients(experiment.model, corpus, batch=8, micro=2),
        experiment.training.seed,
    )


def before(small: Path, model: dict, steps: int, own: float) -> dict[str, float]:
    """What a grown run has cost at its step 0: the smaller run's last row, and the growth's training."""
    last, shape = tiny_run.rows(small)[-1], load({"model": model}).model
    return {
        key: last[key] + own + steps * 8 * dense_step_flops(shape, accounting).total
        for key, accounting in (("flops", "paper"), ("flops_causal", "causal"))
    }


@pytest.mark.parametrize("mst", [LIGO, STACK], ids=lambda mst: mst["method"])
def test_the_first_weights_are_the_same_on_any_ranks_and_stage(tmp_path, small, mst):
    """With a learning rate of almost nothing the checkpoint after step 1 still holds them."""
    model = WIDE if mst is LIGO else DEEP
    for world, stage in ((1, 0), (2, 0), (1, 3), (2, 3)):
        out = f"{world}-{stage}"
        blocks = {"zero_optimization": {"stage": stage}, "optimizer": STANDING, "training": FIRST}
        argv = larger(tmp_path, small, out, model=model, mst=mst, **blocks)
        assert pool.run(attempt, world, argv) == [(0, "")] * world
        found = weights_of(finding.locate(tmp_path / out))
        expected = by_definition(small, tmp_path / out / "config.json")
        assert found.shapes.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found.read(name), weight, rtol=0, atol=1e-9, msg=f"{out} {name}")
    model, tokens = open_source(tmp_path / "1-0").model(), torch.arange(32)[None]
    export(tmp_path / "2-3", tmp_path / "exported")
    assert "including those before its first step" in (tmp_path / "exported" / "README.md").read_text()
    again = open_source(tmp_path / "2-3").model()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), again(tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mst", [LIGO, STACK], ids=lambda mst: mst["method"])
def test_flops_begin_with_the_smaller_runs_and_a_resumed_run_is_the_same(tmp_path, small, mst):
    theirs = tmp_path / "small"
    shutil.copytree(small, theirs)
    shutil.copytree(small.parent / "corpus", tmp_path / "corpus")
    model = WIDE if mst is LIGO else DEEP
    blocks = {"model": model, "mst": mst, "training": {"steps": 8}, "optimizer": {"params": {"lr": 1e-3}}}
    argv = larger(tmp_path, theirs, "out", **blocks, zero_optimization={"stage": 1})
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    out = tmp_path / "out"
    rows, run = tiny_run.rows(out), json.loads((out / "run.json").read_text())
    experiment = load(out / "config.json")
    shapes = smaller_model(str(theirs)), experiment.model
    steps, own = experiment.mst.growth.steps, experiment.mst.growth.flops(*shapes)
    assert (steps, own > 0) == ((4, True) if mst is LIGO else (0, False))
    start = before(theirs, model, steps, own)
    for row in rows:
        for key, accounting in (("flops", "paper"), ("flops_causal", "causal")):
            step = 8 * dense_step_flops(experiment.model, accounting).total
            assert row[key] == pytest.approx(start[key] + row["step"] * step, rel=1e-12)
        assert row["flops_dense"] == pytest.approx(row["step"] * 8 * dense_step_flops(experiment.model).total)
        assert row["reduction"] < 1, "dense steps of its own alone stand against what it has cost"
    (event,) = [event for event in run["events"] if event["what"] == "grown"]
    assert event["from"] == str(theirs / "checkpoints" / "step00000012") and event["its_step"] == 12
    for key, flops in start.items():
        assert event[f"{key}_of_run"] + event[f"{key}_of_growth"] == pytest.approx(flops, rel=1e-12)
    assert event.get("growth_steps", 0) == steps and ("last_loss" in event) == (mst is LIGO)
    assert run["config"]["mst"]["grow_from"] == str(theirs)

    # a resumed run begins at its own checkpoint: the smaller one need not be there any more
    whole, tensors = without_times(rows), weights(out, "step00000008")
    shutil.rmtree(out / "checkpoints" / "step00000008")
    shutil.rmtree(theirs)
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    again = weights(out, "step00000008")
    assert without_times(tiny_run.rows(out)) == whole
    assert tensors.keys() == again.keys() and all(torch.equal(tensors[name], again[name]) for name in tensors)
    run = json.loads((out / "run.json").read_text())
    assert [start["from_step"] for start in run["starts"]] == [0, 4]
    assert [event["what"] for event in run["events"]] == ["grown"]


@pytest.mark.parametrize("growth", [LIGO, STACK], ids=lambda mst: mst["method"])
def test_masks_may_follow_a_growth(tmp_path, small, growth):
    """Grown, then Mixed Sparsity Training; and what grows out of that run counts both."""
    shape = WIDE if growth is LIGO else DEEP
    mst = {**growth, "sparsity": {"variation": "sv", "max": 0.8}, "topology": {"policy": "mst", "interval": 2}}
    argv = larger(tmp_path, small, "out", model=shape, mst=mst)
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    rows = tiny_run.rows(tmp_path / "out")
    assert max(row["sparsity"] for row in rows) > 0.7 and rows[-1]["sparsity"] == 0
    experiment = load(tmp_path / "out" / "config.json")
    assert experiment.mst.attention.pattern == "dense" and not experiment.mst.stays_dense
    own = experiment.mst.growth.flops(smaller_model(str(small)), experiment.model)
    start = before(small, shape, experiment.mst.growth.steps, own)
    step = 8 * dense_step_flops(experiment.model).total
    assert rows[0]["flops"] == pytest.approx(start["flops"] + step, rel=1e-12), "the first step is dense"
    assert start["flops"] < rows[-1]["flops"] < start["flops"] + 12 * step

    twice = {**shape, "n_layer": 2 * shape["n_layer"]}
    argv = larger(tmp_path, small, "again", model=twice, mst=STACK, training={"steps": 4})
    argv[argv.index("--from") + 1] = str(tmp_path / "out")
    assert pool.run(attempt, 1, argv) == [(0, "")]
    deeper = load(tmp_path / "again" / "config.json").model
    first = tiny_run.rows(tmp_path / "again")[0]
    assert first["flops"] == pytest.approx(rows[-1]["flops"] + 8 * dense_step_flops(deeper).total, rel=1e-12)


def test_a_branch_of_a_grown_run_includes_the_flops_of_its_trunk(tmp_path, small):
    steady = {"lr_schedule": "wsd", "decay": 0, "steps": 4, "warmup": 1, "save_every": 4}
    blocks = {"model": DEEP, "mst": STACK, "training": steady}
    assert pool.run(attempt, 1, larger(tmp_path, small, "trunk", **blocks)) == [(0, "")]
    trunk = tmp_path / "trunk"
    words = ["--branch-decay-from", str(trunk), "--steps", "6"]
    assert pool.run(attempt, 1, larger(tmp_path, small, "branch", *words, **blocks)) == [(0, "")]
    step = 8 * dense_step_flops(load(trunk / "config.json").model).total
    (first, _) = tiny_run.rows(tmp_path / "branch")
    assert first["flops"] == pytest.approx(before(small, DEEP, 0, 0.0)["flops"] + 5 * step, rel=1e-12)
    (event,) = json.loads((tmp_path / "branch" / "run.json").read_text())["events"]
    assert event["what"] == "resumed with changes", "it has not grown itself"
    assert event["changes"] == ["training.steps 4 → 6", "training.decay 0 → 2"]


def test_flops_are_known_in_advance(tmp_path, small, capsys):
    config = tiny_run.config(tmp_path, model=WIDE)
    words = ["flops", "--config", str(config), "--method", "ligo", "--set", "mst.options.steps=4"]
    experiment = load(config, [f"mst.grow_from={small}", "mst.options.steps=4"], "ligo")
    start = before(small, WIDE, 4, experiment.mst.growth.flops(smaller_model(str(small)), experiment.model))
    assert cli.main([*words, "--from", str(small), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["grown"]["total"] == pytest.approx({"paper": start["flops"], "causal": start["flops_causal"]})
    assert found["grown"]["step"] == 12 and found["grown"]["steps"] == 4
    assert cli.main([*words, "--from", str(small)]) == 0
    said = capsys.readouterr().out
    assert f"FLOP of {small}/checkpoints/step00000012 and " in said and "for 4 steps that train the growth" in said
    assert cli.main(words) == 0
    assert "Not included: the FLOPs of the smaller run and of 4 steps that train the growth" in capsys.readouterr().out

    raw = json.loads(config.read_text())
    (tmp_path / "like.json").write_text(json.dumps({**raw, "mst": {**LIGO, "grow_from": str(small)}}))
    short = shortened(load(config, [f"mst.like={tmp_path / 'like.json'}"], "dense-short"))
    step = 8 * dense_step_flops(experiment.model).total
    assert short.training.steps == round(12 + start["flops"] / step) > 12, (
        "dense-short spends what was spent before too"
    )


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        (["--method", "rigl"], "mst.grow_from is for methods expand, ligo and stack, not for rigl: leave it out"),
        (["--init", "gpt2"], "leave out --init"),
        (["--from", "nowhere"], "--from nowhere: there is no nowhere/config.json: give the folder of a run"),
        (["--from", "{corpus}"], "there is no {corpus}/config.json"),
        (["--set", "model.n_embd=32"], "--from {small}: model.n_embd = 32"),
        (["--set", "model.seq_length=16"], "model.seq_length: it is 16 here and 32 in the smaller model"),
        (["--set", "mst.options.steps=3"], "unknown key 'mst.options.steps': mst.options"),
        (["--method", "ligo", "--set", "mst.options.rate=0"], "mst.options.rate must be"),
        (["--set", "sequence_parallel_size=2"], "method stack"),
        (["--set", "pipeline.stages=2"], "method stack"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_requests_are_rejected_in_one_line(tmp_path, small, more, reported):
    places = {"small": small, "corpus": small.parent / "corpus"}
    argv = larger(tmp_path, small, "out", *(word.format(**places) for word in more), model=DEEP, mst=STACK)
    code, text = attempt(0, 1, argv)
    assert code == 2 and reported.format(**places) in text and text.count("\n") <= 1, text
    assert not (tmp_path / "out").exists()


def test_a_growth_names_its_smaller_run(tmp_path):
    code, text = attempt(0, 1, arguments(tmp_path, "out", model=DEEP, mst=STACK))
    assert code == 2 and text.count("\n") == 1
    assert "method stack" in text


def test_an_error_on_rank_0_is_raised_on_all_ranks(tmp_path, small):
    """No whole checkpoint; one that does not say what it has cost; a loss that is no number."""
    empty, silent = tmp_path / "empty", tmp_path / "silent"
    for folder in (empty, silent):
        shutil.copytree(small, folder)
    shutil.rmtree(empty / "checkpoints")
    for path in (silent / "checkpoints").rglob("*model_states.pt"):
        torch.save({k: v for k, v in torch.load(path, weights_only=False).items() if k != "flops"}, path)
    for manifest in (silent / "checkpoints").rglob("manifest.json"):
        manifest.unlink()
    rate = ["--set", "mst.options.rate=1e30"]
    for run, more, mst, reported in (
        (empty, [], STACK, "contains no checkpoint"),
        (silent, [], STACK, "lacks flops"),
        (small, rate, LIGO, "mst.options.rate"),
    ):
        argv = larger(tmp_path, small, "out", *more, model=DEEP, mst=mst)
        argv[argv.index("--from") + 1] = str(run)
        results = pool.run(attempt, 2, argv)
        assert [code for code, _ in results] == [2, 2], results
        assert reported in results[0][1] and results[0][1].count("\n") == 1 and results[1][1] == "", results


def test_a_custom_loop_is_warned(small):
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "mst": {"method": "stack"}}
    with pytest.raises(UserError, match=r"method stack is available only in mst_scale\.pretrain"):
        mst_scale.initialize(model=toy(), config=config)

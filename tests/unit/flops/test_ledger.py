"""The forecast against a count step by step; the ledger of a run against the forecast; dense-short."""

import json

import pytest
import torch

from mst_scale.config import load
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import UserError
from mst_scale.flops.budgets import shortened
from mst_scale.flops.formulas import dense_step_flops, step_flops
from mst_scale.flops.ledger import (
    Ledger,
    densities,
    forecast,
    sparse_matrices,
    stretches,
    tiny_flops,
    topology_flops,
    uncounted_flops,
)
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.models import GPT

RAW = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "seq_length": 32, "vocab_size": 50, "vocab_multiple": 1},
    "training": {"steps": 60, "warmup": 6},
    "mst": {"method": "mst", "sparsity": {"max": 0.8}, "attention": {"stride": 8}},
}
ACCOUNTINGS = ("paper", "causal")


def step_by_step(experiment) -> dict[str, float]:
    """Every step on its own, from the schedules themselves: the definition of what `forecast` adds up in stretches."""
    schedule = experiment.schedule
    attention = experiment.attention_schedule
    sparse = sparse_matrices(experiment)
    total = dict.fromkeys(ACCOUNTINGS, 0.0)
    for step in range(experiment.training.steps):
        sparsity = schedule.at(step).sparsity
        counts = active_counts([(m.outputs, m.inputs) for m in sparse], sparsity, experiment.mst.sparsity.distribution)
        density = {m.name: n / (m.inputs * m.outputs) for m, n in zip(sparse, counts, strict=True)}
        for a in ACCOUNTINGS:
            total[a] += step_flops(experiment.model, density, attention.pattern_at(step), a).total
    return total


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("mst", []),
        ("mst", ["mst.sparsity.warmup_moves=staged", "mst.attention.dense_from=0.4"]),
        ("mst", ["mst.attention.dense_from=17", "mst.sparsity.distribution=uniform"]),
        ("mst", ["mst.attention.dense_from=1000", "model.arch=bert"]),
        ("rigl", ["mst.targets.lm_head=false"]),
        ("gmp", []),
        ("dsd", []),
        ("dense", []),
        ("dense", ["mst.sparsity.variation=acdc"]),
        ("mst", ["mst.sparsity.max=0"]),
        (
            "mst",
            [
                "training.steps=1",
                "training.warmup=1",
                "mst.sparsity.warmup=0",
                "mst.sparsity.restore=0",
                "mst.sparsity.ultra=1.0",
            ],
        ),
    ],
)
def test_forecast_is_the_sum_over_steps(method, overrides):
    experiment = load(RAW, overrides, method)
    found, steps = forecast(experiment), experiment.training.steps
    for a, total in step_by_step(experiment).items():
        assert found.mean[a].total * steps == pytest.approx(total, rel=1e-12)  # float64, sums in another order
        assert found.reduction(a) == pytest.approx(dense_step_flops(experiment.model, a).total * steps / total)
    assert [p.start for p in found.phases] == [0, *[p.stop for p in found.phases[:-1]]] and found.phases[
        -1
    ].stop == steps


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.tied_head=false"],
        ["mst.targets.lm_head=false"],
        ['mst.targets.include=["blocks.0.*"]', 'mst.targets.exclude=["*.proj.weight"]'],
    ],
)
def test_the_matrices_are_those_of_the_built_model(overrides):
    experiment = load(RAW, overrides)
    expected = {
        name: tuple(p.shape) for name, p in choose_targets(GPT(experiment.model), experiment.mst.targets).items()
    }
    assert {m.name: (m.outputs, m.inputs) for m in sparse_matrices(experiment)} == expected


def test_blocks_count_as_blocks():
    """1 block of 8 × 8 is the least change: 16 × 16 has 4, and min_blocks = 1 keeps one in every row and column."""
    overrides = ['mst.topology.granularity={"block": 8, "min_blocks": 1}', "mst.sparsity.distribution=uniform"]
    ultra = [s for s in stretches(load(RAW, overrides)) if s.phase == "ultra"]
    assert ultra[0].density["blocks.0.attention.proj.weight"] == 2 / 4, "0.2 · 4 blocks round to 1; the bound keeps 2"
    assert ultra[0].density["blocks.0.mlp.up.weight"] == 8 / 16
    assert ultra[0].density["wte.weight"] == 7 / 14, "50 rows are 7 block rows"


def test_whole_channels_are_counted_in_eights():
    """8 of 64 channels of each head are active at 96 %, and 16 of 256 neurons at 94 %."""
    topology = {"policy": "static", "granularity": "channel", "random_ratio": 1.0, "grown_moments": "active_mean"}
    block = {"sparsity": {"max": 0.96, "distribution": "uniform"}, "topology": topology, "targets": {"lm_head": False}}
    model = {**RAW["model"], "n_embd": 128, "d_ff": 256}
    e = load({**RAW, "model": model, "mst": {"method": "mst", **block}})
    found = densities(e, sparse_matrices(e), 0.94)
    assert set(found.values()) == {8 / 64, 16 / 256}
    assert {value for name, value in found.items() if "attention" in name} == {8 / 64}


def test_globs_that_match_nothing_are_rejected_without_a_model():
    with pytest.raises(UserError, match=r"'mlp\*' matches no parameter that can be sparse"):
        forecast(load(RAW, ['mst.targets.exclude=["mlp*"]']))


def test_the_flops_with_a_dense_head():
    experiment = load(RAW)
    assert forecast(experiment, dense_head=True).mean == forecast(load(RAW, ["mst.targets.lm_head=false"])).mean
    assert forecast(experiment, dense_head=True).reduction() < forecast(experiment).reduction()


def test_the_ledger_adds_up_to_the_forecast():
    experiment = load(RAW)
    ledger = Ledger(experiment.model, 4)
    for stretch in stretches(experiment):
        for _ in range(stretch.steps):
            ledger.add(stretch.pattern, stretch.density)
    row, found = ledger.row(), forecast(experiment)
    assert row["flops"] == pytest.approx(60 * 4 * found.mean["paper"].total, rel=1e-12)
    assert row["flops_causal"] == pytest.approx(60 * 4 * found.mean["causal"].total, rel=1e-12)
    assert row["flops_dense"] == pytest.approx(60 * 4 * found.dense["paper"].total, rel=1e-12)
    assert row["reduction"] == pytest.approx(found.reduction())
    assert row["reduction_causal"] == pytest.approx(found.reduction("causal"))
    assert row["reduction_causal"] < row["reduction"]


def test_the_ledger_continues_to_the_bit(tmp_path):
    experiment = load(RAW)
    states = [s for s in stretches(experiment) for _ in range(s.steps)]

    def add(ledger, part):
        for s in part:
            ledger.add(s.pattern, s.density)
        return ledger

    whole, first, second = (Ledger(experiment.model, 4) for _ in range(3))
    torch.save(add(first, states[:23]).state(), tmp_path / "state")
    second.load(torch.load(tmp_path / "state"))
    assert add(second, states[23:]).row() == add(whole, states).row()
    with pytest.raises(UserError, match="flops_causal, flops_dense_causal"):
        second.load({"flops": 1.0, "flops_dense": 2.0, "step": 3})


def test_sequences_are_counted_across_batches():
    """Of 4, then of 6 a step; an optimizer of its own, and what a smaller run has spent, are no sequences."""
    model = load(RAW).model
    first, second = Ledger(model, 4, optimizer=1e9), Ledger(model, 6, optimizer=1e9)
    first.begin({"paper": 1e12, "causal": 1e12})
    assert first.seen == 0
    for _ in range(3):
        first.add(Pattern("dense"), {})
    second.load(first.state())
    for _ in range(2):
        second.add(Pattern("strided", 4), {})
    assert (first.seen, second.seen) == (12, 24)


def test_topology_steps_by_hand():
    """static at first sparsity never moves; RigL's steps cost a backward pass (2 of 3 thirds) of what is masked."""
    overrides = ["mst.topology.interval=10", "mst.sparsity.max=0.5", "mst.sparsity.distribution=uniform"]
    rigl = load(RAW, overrides, "rigl")
    count, extra = topology_flops(rigl)
    assert count == 5  # steps 10 … 50; none after the last
    assert extra.matrices == pytest.approx(5 / 60 * 2 / 3 * 0.5 * dense_step_flops(rigl.model).matrices, rel=1e-3)
    assert extra.attention == 0
    assert topology_flops(load(RAW, overrides, "snfs"))[0] == 60, "momentum is an average of dense gradients"
    for method in ("static", "set", "mest", "gmp", "dense"):
        assert topology_flops(load(RAW, overrides, method))[0] == 0, "reads no gradient of masked weights"
    at_random = [*overrides, "mst.topology.random_ratio=1.0"]
    assert topology_flops(load(RAW, at_random, "mst"))[0] > 0, "seeded moments read them, however weights are chosen"
    for moments in ("active_mean", "zero"):
        assert topology_flops(load(RAW, [*at_random, f"mst.topology.grown_moments={moments}"], "mst"))[0] == 0


def test_topology_steps_only_add_flops_of_inactive_weights():
    """Counted step by step for MST: step s reads the gradient of the forward pass after s - 1 steps."""
    experiment = load(RAW, ["mst.topology.interval=1"])
    schedule, sparse = experiment.schedule, sparse_matrices(experiment)
    count, total = 0, 0.0
    for s in schedule.topology_steps():
        sparsity = schedule.at(s - 1).sparsity
        counts = active_counts([(m.outputs, m.inputs) for m in sparse], sparsity)
        density = {m.name: n / (m.inputs * m.outputs) for m, n in zip(sparse, counts, strict=True)}
        masked = dense_step_flops(experiment.model).matrices - step_flops(experiment.model, density).matrices
        count, total = count + (sparsity > 0), total + 2 / 3 * masked
    found, extra = topology_flops(experiment)
    assert found == count > 10
    assert extra.total == pytest.approx(total / 60)


def test_the_tiny_model_is_that_of_method_tiny():
    tiny = load(RAW, method="tiny").model
    assert tiny_flops(load(RAW)) == {a: dense_step_flops(tiny, a) for a in ACCOUNTINGS}


def test_dense_short_trains_as_many_dense_steps_as_the_flops_buy(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(RAW))
    sparse = load(RAW)
    short = shortened(load(path, [f"mst.like={path}"], "dense-short"))
    spent, step = 60 * forecast(sparse).mean["paper"].total, dense_step_flops(sparse.model).total
    assert abs(short.training.steps * step - spent) <= step / 2
    assert short.training.steps == round(forecast(sparse).dense_steps()) < 30
    assert short.training.warmup == round(6 * short.training.steps / 60), "its share of the run"
    assert shortened(short) == short, "a resolved config stands as it is"
    assert forecast(short).reduction() == 1.0
    half = shortened(load(path, [f"mst.like={path}", "train_batch_size=2"], "dense-short"))
    assert half.training.steps == pytest.approx(2 * short.training.steps, abs=1), "half the batch, twice the steps"
    assert shortened(load(path, [f"mst.like={path}"], "dense-short"), 48) == short, "the batch is stated: on any ranks"
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**RAW, "training": {"steps": 120}}))
    longer = shortened(load(path, [f"mst.like={folder}"], "dense-short"))
    assert longer.training.steps == pytest.approx(2 * short.training.steps, abs=1)
    assert shortened(sparse) is sparse


def test_dense_short_of_a_run_takes_the_batch_that_it_had(tmp_path):
    """Its config left the batch to the number of its ranks, which the new start does not have."""
    stated, opened = dict(RAW), {key: value for key, value in RAW.items() if key != "train_batch_size"}
    opened["train_micro_batch_size_per_gpu"] = 1
    for name, raw in (("stated", stated), ("opened", opened)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
    record = {"starts": [{"batch": {"sequences": RAW["train_batch_size"]}}]}
    (tmp_path / "opened" / "run.json").write_text(json.dumps(record))
    path = tmp_path / "c.json"
    path.write_text(json.dumps(RAW))
    steps = [shortened(load(path, [f"mst.like={tmp_path / name}"], "dense-short")) for name in ("stated", "opened")]
    assert steps[0].training.steps == steps[1].training.steps > 1


def test_dense_short_of_given_masks_takes_the_flops_that_their_run_recorded(tmp_path):
    path, run = tmp_path / "c.json", tmp_path / "run"
    path.write_text(json.dumps({**RAW, "mst": {"method": "fixed"}}))
    run.mkdir()
    (run / "config.json").write_text(path.read_text())
    for like in (path, run):
        with pytest.raises(UserError, match=r"depend on its masks, and .* is not a finished run"):
            shortened(load(path, [f"mst.like={like}"], "dense-short"))
    whole = load(path)
    spent = 17 * whole.deepspeed["train_batch_size"] * dense_step_flops(whole.model).total
    (run / "metrics.jsonl").write_text(json.dumps({"step": whole.training.steps, "flops": spent}) + "\n")
    assert shortened(load(path, [f"mst.like={run}"], "dense-short")).training.steps == 17


def test_dense_short_of_no_named_run_is_that_of_method_mst(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**RAW, "mst": {"method": "mst"}}))
    named = shortened(load(path, [f"mst.like={path}"], "dense-short"))
    short = shortened(load(path, method="dense-short"))
    assert short.training == named.training and short.mst.method == "dense"
    assert shortened(short) is short, "and its steps are its own"


@pytest.mark.parametrize(
    "mst", [{"sparsity": {"max": 0.5}}, {"attention": {"stride": 8}, "targets": {"lm_head": False}}]
)
def test_dense_short_of_no_named_run_keeps_what_the_config_says_of_mst(tmp_path, mst):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**RAW, "mst": {"method": "mst", **mst}}))
    named = shortened(load(path, [f"mst.like={path}"], "dense-short"))
    assert shortened(load(path, method="dense-short")).training == named.training


def test_dense_short_of_dense_short_is_rejected(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**RAW, "mst": {"method": "dense-short", "like": "x"}}))
    with pytest.raises(UserError, match="is itself a dense-short run"):
        shortened(load(path, [f"mst.like={path}"]))
    with pytest.raises(UserError, match=r"nope\.json: no such config file"):
        shortened(load(path, ["mst.like=nope.json"]))


# --- what the metrics do not count ---

SHORT = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "seq_length": 32, "vocab_size": 50, "vocab_multiple": 1},
    "training": {"steps": 60, "warmup": 6},
}
SHORT_WEIGHTS = (50 + 32) * 16 + 2 * 12 * 16 * 16  # embeddings and matrices


def test_a_dense_run_has_its_optimizer_alone():
    assert uncounted_flops(load(SHORT, method="dense"), 240) == 17 * 60 * SHORT_WEIGHTS
    untied = load(SHORT, ["model.tied_head=false"], "dense")
    assert uncounted_flops(untied, 240) == 17 * 60 * (SHORT_WEIGHTS + 50 * 16), "a head of its own is updated too"


def test_dense_gradients_of_topology_steps_are_added_for_every_sequence():
    """RigL at half sparsity reads 5 of them in 60 steps: two thirds of what is masked, of 4 sequences each."""
    overrides = ["mst.sparsity.max=0.5", "mst.topology.interval=10", "mst.sparsity.distribution=uniform"]
    experiment = load(SHORT, [*overrides, "mst.targets.lm_head=true"], "rigl")
    masked = 0.5 * dense_step_flops(experiment.model).matrices
    by_hand = 5 * 4 * 2 / 3 * masked + 17 * 60 * SHORT_WEIGHTS
    assert uncounted_flops(experiment, 240) == pytest.approx(by_hand, rel=1e-3)

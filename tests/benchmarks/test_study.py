"""`mst bench study`: what a plan comes to, and a queue of tiny runs that is stopped, goes on and is read."""

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from mst_scale.benchmarks.studies import against, corpus, facts, law, line, outcome, overview, page
from mst_scale.benchmarks.studies.plan import FOLDER, Cell, digest_of, job, read_plan

from mst_scale.benchmarks import study
from mst_scale.config import METHODS, in_steps, load
from mst_scale.costs.beside import UPDATE
from mst_scale.data.corpus import FORMAT
from mst_scale.data.prepare import prepare
from mst_scale.data.recipe import Recipe
from mst_scale.report import frontier

TINY = {
    "question": "Is it quick?",
    "success": "It ends.",
    "config": {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 0}, "tensorboard": {"enabled": False},
        "model": {"n_head": 2, "context": 32, "vocab_size": 257, "vocab_multiple": 1}, "data": {"dir": "corpus"},
        "training": {"lr_schedule": "wsd", "warmup": 2, "decay": 0.25, "eval_sequences": 4, "look_every": 0},
        "mst": {"method": "dense"},
    },
    "seeds": [1, 2], "rates": [1e-3, 1e-2], "tokens_per_parameter": [1],
    "sizes": {"tiny": {"model": {"n_layer": 1, "n_embd": 16}, "small": {"n_embd": 8}}},
    "variants": {
        "dense": {"shares": [0.5, 1.0]},
        "dense-short": {"as_long_as": "mst"},
        "mst": {"method": "mst", "set": {"mst.sparsity.max": 0.5, "mst.attention.pattern": "dense"}, "rates": [1e-2]},
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    return tmp_path


def row(one, loss: float, status: str = facts.FINISHED, **more):
    """A run that has spent `one.flops` in all, a tenth of it in topology steps."""
    flops = one.flops
    counted = 0.9 * flops - UPDATE * one.experiment.model.weights * one.steps
    told = {"val_loss": loss, "flops": counted, "flops_causal": counted - 0.1 * flops, "flops_dense": 2 * flops}
    versions = {"python": "3", "torch": "2", "deepspeed": "0"}
    same = {"corpus": "c", "commit": None, "versions": versions, "flops_topology": 0.1 * flops}
    return {**facts.about(one, status), "seconds": 20.0, "steps_run": one.steps, **told, **same, **more}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_the_plans_that_are_kept_can_run(name):
    """Each variant of the smallest size; the others differ in their numbers."""
    plan = read_plan(name)
    assert plan.question.endswith("?") and plan.success
    size = next(iter(plan.sizes))
    for cell in plan.cells():
        if cell.size == size and cell.budget == plan.tokens_per_parameter[0]:
            one = job(plan, cell, plan.rates_of(cell)[0], plan.seeds[0], "corpus")
            assert one.experiment.deepspeed["optimizer"]["params"]["lr"] == one.rate, "also of another optimizer"
            assert one.flops > 0 and load(one.experiment.deepspeed | {"model": vars(one.experiment.model)})


def test_a_variant_like_another(folder):
    other = {"like": "mst", "set": {"mst.sparsity.max": 0.7}, "rates": [1e-3]}
    (folder / "tiny.json").write_text(json.dumps({**TINY, "variants": {**TINY["variants"], "more": other}}))
    plan = read_plan("tiny", folder)
    mst, more = plan.variants["mst"], plan.variants["more"]
    assert (more.method, more.rates) == ("mst", (1e-3,)) and mst.set["mst.sparsity.max"] == 0.5
    assert more.set == {"mst.sparsity.max": 0.7, "mst.attention.pattern": "dense"}


def test_what_a_cell_comes_to(folder):
    plan = read_plan("tiny", folder)
    dense, short, mst = (job(plan, Cell("tiny", 1, name), 1e-2, 1, "c") for name in ("dense", "dense-short", "mst"))
    weights = 12 * 16**2 + (257 + 32) * 16
    assert dense.steps == mst.steps == round(weights / (4 * 32)) == 60
    spent = mst.flops + mst.topology_flops
    assert short.flops == pytest.approx(spent, rel=1 / short.steps), "to the nearest step, topology steps counted"
    assert dense.decays_from == 45 and mst.decays_from is None
    half = job(plan, Cell("tiny", 1, "dense", 0.5), 1e-2, 1, "c")
    assert half.trunk == dense.trunk == short.trunk and half.digest != dense.digest
    assert job(plan, Cell("tiny", 1, "dense"), 1e-3, 1, "c").trunk != dense.trunk
    assert in_steps(dense.experiment.training.decay, 60) == 15 and dense.experiment.training.min_lr == 1e-4


def test_a_digest_is_of_what_a_loss_depends_on():
    raw = TINY["config"]
    digest = digest_of(load(raw))
    same = ["data.dir=elsewhere", "training.save_every=7", "training.log_every=7", "mst.topology.interval=null"]
    assert all(digest_of(load(raw, [words])) == digest for words in same)
    assert digest_of(load(raw, ["training.steps=100", "training.decay=0.25"])) == digest_of(
        load(raw, ["training.steps=100", "training.decay=25"])
    )
    other = ["training.seed=7", "optimizer.params.lr=0.5", "model.n_embd=24", "mst.topology.interval=7"]
    assert len({digest, *(digest_of(load(raw, [words])) for words in other)}) == 5


def test_the_page_says_how_far_a_setting_lies_from_the_law_of_average_weights(folder):
    """Dense runs of four sizes obey one; MST learns 0.05 more than its active weights and tokens explain."""
    shares = [0.5, 1.0, 2.0]
    variants = {"dense": {"shares": shares}, "dense-small": {"small": True, "shares": shares}}
    variants["mst"] = TINY["variants"]["mst"]
    sizes = {**TINY["sizes"], "mid": {"model": {"n_layer": 2, "n_embd": 32}, "small": {"n_embd": 24}}}
    (folder / "tiny.json").write_text(json.dumps({**TINY, "variants": variants, "sizes": sizes}))
    plan, rows = read_plan("tiny", folder), {}
    true = law.Law(least=1.0, of_weights=100.0, of_tokens=400.0, alpha=0.5, beta=0.6)
    for cell in plan.cells():
        one = job(plan, cell, 1e-2, 1, "c")
        weights, tokens = law.active_weights(one.experiment), law.tokens(one.experiment)
        assert tokens == one.steps * 4 * 32
        less = 0.05 if cell.variant == "mst" else 0.0
        rows[one.digest] = row(one, true.loss(weights, tokens) - less)
    text = page.written(plan, rows, "c", folder).read_text()
    of_dense = text.partition("## The law of average weights")[2]
    assert "N^0.5" in of_dense and "D^0.6" in of_dense
    lines = [line.split("|") for line in of_dense.partition("## All runs")[0].splitlines()]
    told = {cells[1].strip(): cells[5].strip() for cells in lines if len(cells) > 5}
    assert told["mst, tiny, 1 tokens a parameter"] == told["mst, mid, 1 tokens a parameter"] == "-0.0500"
    assert told["dense × 2, mid, 1 tokens a parameter"] in ("+0.0000", "-0.0000")
    without = {digest: kept for digest, kept in rows.items() if (kept["size"], kept["variant"]) == ("tiny", "dense")}
    assert "average weights" not in page.written(plan, without, "c", folder).read_text()


def test_the_first_seed_chooses_the_rate_and_the_others_run_at_it(folder):
    plan = read_plan("tiny", folder)
    sure, guessed = facts.wanted(plan, {}, "c")
    assert len(sure) == 7 and {one.seed for one in sure if one.cell.variant != "mst"} == {1}
    assert len(guessed) == 4 and [one.flops for one in sure] == sorted(one.flops for one in sure)
    cell = Cell("tiny", 1, "dense")
    low, high = (job(plan, cell, rate, 1, "c") for rate in (1e-3, 1e-2))
    rows = {low.digest: row(low, 2.0)}
    assert facts.best_rate(plan, cell, rows, "c") is None, "the other rate has not run"
    rows[high.digest] = row(high, 1.0, facts.FAILED)
    assert facts.best_rate(plan, cell, rows, "c") is None, "it will be tried again, and may be better"
    rows[high.digest] = row(high, 9.0, facts.DIVERGED)
    assert facts.best_rate(plan, cell, rows, "c") == 1e-3
    assert job(plan, cell, 1e-3, 2, "c") in facts.wanted(plan, rows, "c")[0]


@pytest.mark.parametrize(("best", "tried"), [(0.005, [0.0025, 0.005, 0.01]), (0.03, [0.005, 0.01, 0.02, 0.04])])
def test_a_grid_goes_on_until_its_best_rate_is_inside(folder, best, tried):
    (folder / "tiny.json").write_text(json.dumps({**TINY, "rates": [0.005, 0.01], "widen": True}))
    plan, cell = read_plan("tiny", folder), Cell("tiny", 1, "dense")

    def loss(one):
        return 2 + abs(math.log(one.rate / best))

    def status(one):
        return facts.DIVERGED if one.rate > 0.03 else facts.FINISHED

    rows = {}
    while todo := [one for one in facts.wanted(plan, rows, "c")[0] if one.digest not in rows]:
        rows |= {one.digest: row(one, loss(one), status(one)) for one in todo}
    assert facts.rates_of(plan, cell, rows, "c") == pytest.approx(tried)
    found = next(one for one in outcome.outcomes(plan, rows, "c") if one.cell == cell)
    assert found.rate == (0.005 if best == 0.005 else 0.02)
    assert not found.edge and set(found.runs) == {1, 2}


def test_another_optimizer_is_a_method_of_its_own(folder):
    """It does not bend the line that methods with the plan's optimizer are read off."""
    sgd = {"set": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}, "zero_optimization.stage": 1}}
    (folder / "tiny.json").write_text(json.dumps({**TINY, "variants": {**TINY["variants"], "muon": sgd}}))
    plan = read_plan("tiny", folder)
    rows = everything(plan, lambda one: 1.0 if one.cell.variant == "muon" else 10 * one.flops**-0.05)
    cells = {(cell["variant"], cell["share"]): cell for cell in page.answers(plan, rows, "c")["cells"]}
    assert not cells["muon", 1.0]["dense"] and cells["muon", 1.0]["worth_all_sizes_paper"]["bound"] == "≥"
    assert cells["mst", 1.0]["worth_all_sizes_paper"]["value"] == pytest.approx(1.0)


def test_the_last_line_of_a_run_counts_and_a_torn_one_does_not(tmp_path):
    path = facts.path_of("a", tmp_path)
    facts.append(path, {"digest": "1", "status": facts.FAILED})
    with path.open("a") as file:
        file.write('{"digest": "2", "sta')
    facts.append(path, {"digest": "1", "status": facts.FINISHED})
    facts.append(facts.path_of("b", tmp_path), {"digest": "1", "status": facts.FAILED})
    assert facts.known(tmp_path) == {"1": {"digest": "1", "status": facts.FINISHED}}


def everything(plan, losses):
    """Rows of every run that the plan comes to want."""
    rows = {}
    while todo := [one for one in facts.wanted(plan, rows, "c")[0] if one.digest not in rows]:
        rows |= {one.digest: row(one, losses(one)) for one in todo}
    return rows


def test_the_page_says_what_a_method_is_worth(folder):
    """Loss = 10 · C^-0.05 for dense runs at the better rate; MST reaches what 1.25 times its FLOPs buy."""
    plan = read_plan("tiny", folder)

    def loss(one):
        worth = 1.25 if one.cell.variant == "mst" else 1.0
        return 10 * (worth * one.flops) ** -0.05 + (0.5 if one.rate == 1e-3 else 0)

    rows = everything(plan, loss)
    assert len(rows) == 11
    found = page.answers(plan, rows, "c")
    (mst,) = [cell for cell in found["cells"] if cell["variant"] == "mst"]
    assert mst["worth_all_sizes_paper"]["value"] == pytest.approx(1.25)
    assert mst["worth_same_model_causal"]["value"] == pytest.approx(1.25)
    of_mst = [one.flops for one in facts.wanted(plan, rows, "c")[0] if one.cell.variant == "mst"]
    assert mst["flops"] == pytest.approx(sum(of_mst) / len(of_mst)), "all that was spent"
    text = page.written(plan, rows, "c", folder).read_text()
    assert "1.25 (1.25 to 1.25)" in text and "0.01*" in text and text.count("| finished |") == 11
    assert (folder / "tiny-paper.svg").read_text() != (folder / "tiny-paper-dark.svg").read_text()


def test_dense_runs_of_other_studies_are_rivals_where_they_can_be_compared(folder):
    """Of the same text and seeds, at a known rate; a run that both studies have counts once."""
    plan = read_plan("tiny", folder)
    rows = everything(plan, lambda one: 10 * one.flops**-0.05)
    found = outcome.outcomes(plan, rows, "c")
    assert outcome.rivals_elsewhere(plan, found, rows, folder) == {}, "there is no other study"

    other = {
        **TINY,
        "variants": {"dense": {}, "dense-slow": {"set": {"training.decay": 0.5}}, "mst": {"method": "mst"}},
    }
    (folder / "other.json").write_text(json.dumps(other))
    theirs = read_plan("other", folder)
    more = {**rows, **everything(theirs, lambda one: 9 * one.flops**-0.05)}

    def rivals(rows, plan=plan):
        return {s: [m.name for m in its] for s, its in outcome.rivals_elsewhere(plan, found, rows, folder).items()}

    assert rivals(more) == {"other": ["dense-slow (other)"]}, "the other dense run is the plan's own"
    lacks = next(one for one in facts.wanted(theirs, more, "c")[0] if one.cell.variant == "dense-slow")
    assert rivals({digest: row for digest, row in more.items() if digest != lacks.digest}) == {}, "a rate is to come"
    texts = {digest: {**row, "corpus": "other"} if digest not in rows else row for digest, row in more.items()}
    assert rivals(texts) == {}
    (folder / "other.json").write_text(json.dumps({**other, "seeds": [2, 3]}))
    assert rivals({**more, **everything(read_plan("other", folder), lambda one: 1.0)}) == {}
    (folder / "other.json").write_text(
        json.dumps({**other, "config": {**TINY["config"], "training": {**TINY["config"]["training"], "eval_seed": 0}}})
    )
    assert rivals({**more, **everything(read_plan("other", folder), lambda one: 1.0)}) == {}

    def worth(its):
        each = frontier.rows([one.method for one in found], its)
        return next(row for row in each if row["name"].startswith("mst"))["worth_all_sizes_paper"]["value"]

    (folder / "other.json").write_text(json.dumps(other))
    elsewhere = outcome.rivals_elsewhere(plan, found, more, folder)["other"]
    assert worth(elsewhere) < worth([]), "a better rival makes a method worth less"


def test_what_differs_from_the_reference_by_more_than_its_noise_counts(folder):
    """Seeds lie 0.5 apart, so that means alone would say nothing; what spends other FLOPs is not set beside it."""
    means = {"dense-short": 3.0, "slow": 3.2, "fast": 3.001}
    noise = {"dense-short": [0.0, 0.0], "slow": [0.01, -0.01], "fast": [0.01, -0.01]}
    more = {name: {"as_long_as": "mst", "set": {"training.decay": x}} for name, x in (("slow", 0.5), ("fast", 0.1))}
    variants = {**TINY["variants"], **more}
    (folder / "tiny.json").write_text(json.dumps({**TINY, "variants": variants, "reference": "dense-short"}))
    plan = read_plan("tiny", folder)

    def loss(one):
        its = one.cell.variant
        return means.get(its, 4.0) + 0.5 * one.seed + noise.get(its, [0.0, 0.0])[one.seed - 1]

    rows = everything(plan, loss)
    told = {one["name"]: one for one in page.answers(plan, rows, "c")["against_reference"]}
    assert set(told) == {"slow", "fast"}
    assert told["slow"]["mean"] == pytest.approx(0.2) and told["slow"]["error"] == pytest.approx(0.01)
    assert told["slow"]["counts"] and not told["fast"]["counts"]
    text = page.written(plan, rows, "c", folder).read_text()
    assert "| slow | +0.2000 | 0.0100 | 2 | worse |" in text
    assert "| fast | +0.0010 | 0.0100 | 2 | within the noise |" in text
    assert "tiny-against.svg" in text and (folder / "tiny-against-dark.svg").is_file()
    assert against.difference("one seed", {1: 1.0}, {1: 2.0}) is None


def test_the_same_model_is_one_of_its_shape(folder):
    """Dense runs of a smaller model, or of one that a variant makes larger, are rivals on the frontier alone."""
    more = {
        "dense-small": {"small": True},
        "dense-large": {"set": {"model.n_embd": 32}},
        "dense-slow": {"set": {"training.decay": 0.4}},
    }
    (folder / "tiny.json").write_text(json.dumps({**TINY, "variants": {**TINY["variants"], **more}}))
    plan = read_plan("tiny", folder)
    rows = everything(plan, lambda one: 5.0 - (one.experiment.model.n_embd == 32))
    models = {one.cell.variant: one.method.model for one in outcome.outcomes(plan, rows, "c")}
    assert models["mst"] == models["dense"] == models["dense-slow"] == models["dense-short"]
    assert len({models[name] for name in ("mst", "dense-small", "dense-large")}) == 3


@pytest.mark.parametrize(
    ("recipe", "name", "variant"),
    [(overview.BEST, "main", "mst-best"), (overview.LEAN, "how-far", "4x-longer-to-the-end")],
)
def test_a_recipe_is_what_was_measured(recipe, name, variant):
    plan = read_plan(name)
    (cell,) = [cell for cell in plan.cells() if cell.variant == variant]
    measured = job(plan, cell, 0.016, 1, "c").experiment
    own = {"steps": measured.training.steps, "warmup": measured.training.warmup}
    model = {"context": measured.model.context}
    named = load({"optimizer": plan.config["optimizer"], "recipe": recipe, "model": model, "training": own})
    for what in ("schedule", "attention_schedule"):
        assert getattr(named, what) == getattr(measured, what)
    assert named.mst.topology == measured.mst.topology and named.mst.targets == measured.mst.targets
    decays = {in_steps(e.training.decay, e.training.steps) for e in (named, measured)}
    assert len(decays) == 1 and named.training.lr_schedule == measured.training.lr_schedule == "wsd"


def test_the_overview_is_of_the_runs_that_are_kept(tmp_path):
    """The committed page is what its runs come to, and its numbers are those of the studies' pages."""
    for path in FOLDER.glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    assert overview.written(tmp_path).read_text() == (FOLDER / "overview.md").read_text()
    found = overview.settings(tmp_path)
    of_main = next(one for one in found if one.study == "main" and one.recipe == overview.BEST)
    assert f"{of_main.worth['paper', 'all sizes']}" in (FOLDER / "main.md").read_text()
    assert all(one.worth.keys() == found[0].worth.keys() for one in found) and len(found[0].worth) == 4


def test_the_time_left_follows_what_runs_took(folder):
    plan = read_plan("tiny", folder)
    jobs, _ = facts.wanted(plan, {}, "c")
    mst = next(one for one in jobs if one.cell.variant == "mst")
    speed = 1e-6
    done = row(mst, 2.0, seconds=line.START_SECONDS + speed * mst.work_a_step * mst.steps)
    done["flops_dense"] = mst.work_a_step * mst.steps
    left = line.seconds_left([mst], {"x": done}, {})
    assert left == pytest.approx(line.START_SECONDS + speed * mst.work_a_step * mst.steps)
    dense = [one for one in jobs if one.cell == Cell("tiny", 1, "dense") and one.rate == 1e-2]
    assert line.seconds_left(dense, {}, {dense[0].trunk: 45}) < line.seconds_left(dense, {}, {})


def test_a_queue_stops_goes_on_and_repeats_nothing(folder, monkeypatch):
    plan = {**TINY, "seeds": [1], "rates": [1e-2]}
    plan["variants"] = {"dense": {"shares": [0.5, 1.0]}, "wrong": {"set": {"optimizer.params.nonsense": 1}}}
    (folder / "queue.json").write_text(json.dumps(plan))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    prepare(Recipe(source=str(folder / "text.txt"), tokenizer="byte"), folder / "corpus", workers=1)
    monkeypatch.setattr(study, "FOLDER", folder)
    monkeypatch.setattr(study, "read_plan", lambda name: read_plan(name, folder))
    monkeypatch.setattr(line, "POLL_SECONDS", 0.05)
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    words = ["queue", "--out", str(folder / "out"), "--results", str(folder), "--data", str(folder / "corpus")]

    def run(*more):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
            code = study.main([*words, *more, "--json"])
        return code, json.loads(said.getvalue())

    code, told = run("--budget", "0")
    assert code == 0 and told["done"] == 0 and not (folder / "out" / "runs").exists()
    code, told = run()
    path = facts.path_of("queue", folder)
    lines = path.read_text().splitlines()
    assert code == 1 and told["done"] == 2 and len(lines) == 3
    assert {"gpu", "torch"} <= told["machine"].keys() and len(told["rows"]) == len(told["cells"]) >= 2
    assert all({"variant", "val_loss", "flops"} <= row.keys() for row in told["rows"])
    rows = {found["variant"]: found for found in map(json.loads, lines)}
    assert rows["wrong"]["status"] == facts.FAILED and "optimizer.params.nonsense" in rows["wrong"]["reason"]
    assert rows["dense"]["steps_run"] == 60 - 45 + (45 - 22), "a branch of a trunk that stood at the shorter one's"
    assert rows["dense"]["curve"][-1] == [60, pytest.approx(rows["dense"]["val_loss"], abs=1e-5)]
    splits = json.loads((folder / "corpus" / "meta.json").read_text())["splits"]
    text = hashlib.sha256((splits["train"]["sha256"] + splits["val"]["sha256"]).encode()).hexdigest()[:16]
    told_by_run = json.loads((folder / "out" / "runs" / rows["dense"]["digest"] / "run.json").read_text())
    assert rows["dense"]["corpus"] == told_by_run["starts"][-1]["corpus"] == text, "what a rival's text is held against"
    with pytest.raises(ValueError, match="--resume goes on"):
        run()

    # what a killed queue had not written down is found in the run's folder, and only what failed is tried again
    path.write_text(lines[0] + "\n")
    code, told = run("--resume", "--at-once", "2")
    again = [json.loads(text) for text in path.read_text().splitlines()]
    assert told["done"] == 2 and len(again) == 3
    assert {r["digest"]: r.get("val_loss") for r in again} == {r["digest"]: r.get("val_loss") for r in rows_of(lines)}

    shutil.rmtree(folder / "corpus")
    with pytest.raises(ValueError, match=r"python -m mst_scale\.benchmarks\.studies\.corpus"):
        run("--resume")


def test_a_method_that_grows_spends_what_its_smaller_run_has_spent_too(folder):
    variants = {
        "dense": {},
        "stack": {"method": "stack", "as_long_as": "dense", "grown_from": {"model": {"n_layer": 1}, "share": 0.5}},
    }
    size = {"tiny": {"model": {"n_layer": 2, "n_embd": 16}}}
    (folder / "tiny.json").write_text(json.dumps({**TINY, "rates": [1e-2], "sizes": size, "variants": variants}))
    plan, data = read_plan("tiny", folder), folder / "corpus"
    text = folder / "text.txt"
    text.write_text("Once upon a time there was a small corpus, and nobody read it twice.\n" * 400)
    prepare(Recipe([str(text)], "byte", val_fraction=0.2), data)
    dense, stack = (job(plan, Cell("tiny", 1, name), 1e-2, 1, str(data)) for name in variants)
    assert stack.smaller.experiment.model.n_layer == 1 and stack.smaller.steps == round(dense.steps / 2)
    assert stack.flops == pytest.approx(dense.flops, rel=0.02) and stack.steps < dense.steps
    assert stack.decays_from is None and stack.begins_with == stack.smaller.digest

    queue = line.Line(plan, folder / "out", folder, data)
    made = queue._made(stack)
    assert made["status"] == facts.FINISHED, made
    assert made["flops"] == pytest.approx(stack.flops, rel=1e-9), "the smaller run's are among them"
    smaller = folder / "out" / "runs" / stack.smaller.digest
    assert line._stands_at(smaller) == stack.smaller.steps
    began = (smaller / "run.json").read_text()
    assert queue._had(stack.smaller) == 0 and (smaller / "run.json").read_text() == began, "made once"


def test_several_runs_at_once_are_each_made_once_and_never_two_of_a_trunk(folder, monkeypatch):
    plan = read_plan("tiny", folder)
    (folder / "corpus").mkdir()
    split = {"file": "ids.bin", "tokens": 1, "documents": 1, "max_id": 1, "sha256": "a"}
    meta = {"format": FORMAT, "tokenizer": "byte", "vocab_size": 257, "end_of_text": 256, "dtype": "uint16"}
    meta |= {"recipe": {}, "splits": {"train": split, "val": split}}
    (folder / "corpus" / "meta.json").write_text(json.dumps(meta))
    now, most, made = [], [], []
    all_in = threading.Barrier(2)

    def _made(self, one):
        now.append(one)
        trunks = [other.trunk for other in now if other.decays_from]
        assert len(set(trunks)) == len(trunks)
        if len(most) < 2:
            all_in.wait(20)  # the first two are under way together
        most.append(len(now))
        time.sleep(0.01)
        made.append(one.digest)
        now.remove(one)
        return row(one, 2.0 + one.rate, corpus=self.corpus)

    monkeypatch.setattr(line.Line, "_made", _made)
    queue = line.Line(plan, folder / "out", folder, folder / "corpus", at_once=2)
    queue.to_the_end()
    jobs, guessed = facts.wanted(plan, queue.rows, queue.data)
    assert sorted(made) == sorted(one.digest for one in jobs) and not guessed and max(most) == 2
    assert len(facts.known(folder)) == len(jobs)

    def _stopped(self, one):
        if self.asked_to_stop or one.seed == 1:
            raise line.Stopped
        return row(one, 2.0, corpus=self.corpus)

    (folder / "tiny.runs.jsonl").unlink()
    monkeypatch.setattr(line.Line, "_made", _stopped)
    with pytest.raises(line.Stopped):
        line.Line(plan, folder / "out", folder, folder / "corpus", at_once=2).to_the_end()


def test_pages_of_the_corpus_lose_their_markup_and_what_was_there_before():
    sentence = "The weights of a layer are pruned by their size, and grown in the order of the gradients that it has. "
    first = f"<head><title>x</title></head><p>Next &amp; Up</p><p>{sentence * 20}</p><pre>a &lt; b\n  c</pre>"
    assert corpus.plain(first)[0] == "Next & Up" and corpus.plain(first)[2] == "a < b\n  c"
    second = f"<p>Next &amp; Up</p><div>{sentence.upper() * 20}</div>"
    german = f"<p>{'Die Gewichte einer Schicht werden nach ihrer Größe beschnitten und wachsen dann wieder. ' * 20}</p>"
    found = list(corpus.distinct([first, second, first, german]))
    assert found == ["\n\n".join(corpus.plain(first)), corpus.plain(second)[1]]


def rows_of(lines):
    return [json.loads(text) for text in lines]


def test_what_is_wrong_is_said(folder):
    with pytest.raises(ValueError, match="choose one of ablations"):
        study.main(["nothing", "--page"])
    (folder / "bad.json").write_text(json.dumps({**TINY, "sedes": [1]}))
    with pytest.raises(ValueError, match="not a plan of a study"):
        read_plan("bad", folder)


def test_rivals_are_all_there_and_spend_the_flops_of_a_dense_run():
    plan = read_plan("rivals")
    methods = {variant.method for variant in plan.variants.values()}
    others = {"tiny", "dense-short", "fixed", "sparse", "sd", "dsd", "gd"}  # another model, a length, variants of mst
    assert methods == set(METHODS) - others
    jobs = {cell: job(plan, cell, plan.rates_of(cell)[0], 1, "corpora/study") for cell in plan.cells()}
    budget = next(one.flops for cell, one in jobs.items() if (cell.variant, cell.share) == ("dense", 1.0))
    for cell, one in jobs.items():
        if cell.share == 1:
            assert one.flops + one.topology_flops == pytest.approx(budget, rel=1e-3), cell
        assert one.experiment.mst.method == plan.variants[cell.variant].method

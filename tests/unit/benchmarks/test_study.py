"""`mst bench study`: what a plan comes to, and a queue of tiny runs that is stopped, goes on and is read."""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import shutil
import threading
import time

import pytest
from mst_scale.benchmarks.studies import corpus, outcome, overview, records, runner
from mst_scale.benchmarks.studies.plan import FOLDER, Cell, digest_of, job, model_of, read_plan

from mst_scale.benchmarks import study
from mst_scale.config import METHODS, in_steps, load
from mst_scale.data.corpus import FORMAT
from mst_scale.data.prepare import prepare
from mst_scale.data.recipe import Recipe
from mst_scale.errors import UserError
from mst_scale.flops.ledger import forecast
from mst_scale.sparsity_variation import MIN_DEFAULT_INTERVAL
from tests.support.tiny_study import TINY, everything, row


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
    assert more.set == {"mst.sparsity.max": 0.7, "mst.attention.pattern": "dense", "mst.topology.interval": 1}


def test_the_outcome_of_a_cell(folder):
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


def test_flops_are_matched_in_the_accounting_of_the_plan(folder):
    """Of a narrow model attention is a larger share, and half of it is what the accountings differ in."""
    variants = {"mst": TINY["variants"]["mst"], "narrow": {"as_long_as": "mst", "set": {"model.n_embd": 8}}}
    matched = {}
    for accounting in ("paper", "causal"):
        (folder / "tiny.json").write_text(json.dumps({**TINY, "variants": variants, "accounting": accounting}))
        plan = read_plan("tiny", folder)
        narrow, mst = (job(plan, Cell("tiny", 1, name), 1e-2, 1, "c") for name in ("narrow", "mst"))
        each = [one.steps * 4 * forecast(one.experiment).mean[accounting].total for one in (narrow, mst)]
        assert [narrow.flops, mst.flops] == pytest.approx(each)
        assert narrow.flops == pytest.approx(mst.flops + mst.topology_flops, rel=1 / narrow.steps)
        matched[accounting] = narrow.steps
        rows = everything(plan, lambda one: 2.0)
        (found,) = [one for one in outcome.outcomes(plan, rows, "c") if one.cell.variant == "narrow"]
        assert found.flops == pytest.approx(found.method.points[accounting][1].flops)
    assert matched["causal"] > matched["paper"]


def test_the_order_of_variants_runs_the_first_seed_of_each_before_the_second_of_any(folder):
    plan = {**TINY, "order": "variants", "seeds": [2, 1], "rates": [1e-2, 1e-3]}
    plan["variants"] = {name: TINY["variants"][name] for name in ("mst", "dense-short", "dense")}
    (folder / "tiny.json").write_text(json.dumps(plan))
    plan = read_plan("tiny", folder)
    order, rows = [], {}
    while todo := [one for one in outcome.wanted(plan, rows, "c")[0] if one.digest not in rows]:
        one = todo[0]
        order.append((one.seed, one.cell.variant, one.cell.share, one.rate))
        rows[one.digest] = row(one, 2.0 + one.rate)
    first = [(2, "mst", 1.0, 1e-2), *((2, "dense-short", 1.0, rate) for rate in (1e-3, 1e-2))]
    first += [(2, "dense", share, rate) for share in (0.5, 1.0) for rate in (1e-3, 1e-2)]
    second = [(1, "mst", 1.0, 1e-2), (1, "dense-short", 1.0, 1e-3), *((1, "dense", s, 1e-3) for s in (0.5, 1.0))]
    assert order == first + second


def test_a_variant_may_belong_to_some_sizes_alone(folder):
    sizes = {**TINY["sizes"], "large": {"model": {"n_layer": 1, "n_embd": 32}}}
    variants = {"dense": {}, "wide": {"sizes": ["large"], "set": {"model.n_embd": 40}}}
    (folder / "tiny.json").write_text(json.dumps({**TINY, "sizes": sizes, "variants": variants}))
    cells = [(cell.size, cell.variant) for cell in read_plan("tiny", folder).cells()]
    assert cells == [("tiny", "dense"), ("large", "dense"), ("large", "wide")]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"accounting": "fair"}, "paper, causal"),
        ({"order": "seeds"}, "flops, variants"),
        ({"variants": {"dense": {"sizes": ["huge"]}}}, "'huge'.*tiny"),
    ],
)
def test_a_plan_with_an_unknown_choice_is_rejected(folder, wrong, message):
    (folder / "tiny.json").write_text(json.dumps({**TINY, **wrong}))
    with pytest.raises(UserError, match=message):
        read_plan("tiny", folder)


def test_a_digest_covers_everything_that_a_loss_depends_on():
    raw = TINY["config"]
    digest = digest_of(load(raw))
    same = ["data.dir=elsewhere", "training.save_every=7", "training.log_every=7", "mst.topology.interval=null"]
    assert all(digest_of(load(raw, [words])) == digest for words in same)
    assert digest_of(load(raw, ["training.steps=100", "training.decay=0.25"])) == digest_of(
        load(raw, ["training.steps=100", "training.decay=25"])
    )
    other = ["training.seed=7", "optimizer.params.lr=0.5", "model.n_embd=24", "mst.topology.interval=7"]
    assert len({digest, *(digest_of(load(raw, [words])) for words in other)}) == 5


def test_the_first_seed_chooses_the_rate_and_the_others_run_at_it(folder):
    plan = read_plan("tiny", folder)
    sure, guessed = outcome.wanted(plan, {}, "c")
    assert len(sure) == 7 and {one.seed for one in sure if one.cell.variant != "mst"} == {1}
    assert len(guessed) == 4 and [one.flops for one in sure] == sorted(one.flops for one in sure)
    cell = Cell("tiny", 1, "dense")
    low, high = (job(plan, cell, rate, 1, "c") for rate in (1e-3, 1e-2))
    rows = {low.digest: row(low, 2.0)}
    assert outcome.best_rate(plan, cell, rows, "c") is None, "the other rate has not run"
    rows[high.digest] = row(high, 1.0, records.FAILED)
    assert outcome.best_rate(plan, cell, rows, "c") is None, "it will be tried again, and may be better"
    rows[high.digest] = row(high, 9.0, records.DIVERGED)
    assert outcome.best_rate(plan, cell, rows, "c") == 1e-3
    assert job(plan, cell, 1e-3, 2, "c") in outcome.wanted(plan, rows, "c")[0]


@pytest.mark.parametrize(("best", "tried"), [(0.005, [0.0025, 0.005, 0.01]), (0.03, [0.005, 0.01, 0.02, 0.04])])
def test_a_grid_is_widened_until_its_best_rate_is_inside(folder, best, tried):
    (folder / "tiny.json").write_text(json.dumps({**TINY, "rates": [0.005, 0.01], "widen": True}))
    plan, cell = read_plan("tiny", folder), Cell("tiny", 1, "dense")

    def loss(one):
        return 2 + abs(math.log(one.rate / best))

    def status(one):
        return records.DIVERGED if one.rate > 0.03 else records.FINISHED

    def of_cell():
        return next(one for one in outcome.outcomes(plan, rows, "c") if one.cell == cell)

    rows, edges = {}, []
    while todo := [one for one in outcome.wanted(plan, rows, "c")[0] if one.digest not in rows]:
        rows |= {one.digest: row(one, loss(one), status(one)) for one in todo}
        edges.append(of_cell().edge)
    assert outcome.rates_of(plan, cell, rows, "c") == pytest.approx(tried)
    assert of_cell().rate == (0.005 if best == 0.005 else 0.02)
    assert edges[0] and not edges[-1], "while the rate beyond the end has not run, it may be better"
    assert set(of_cell().runs) == {1, 2}


def test_the_last_record_of_a_run_counts_and_a_torn_one_does_not(tmp_path):
    path = records.path_of("a", tmp_path)
    old = tmp_path / "a.runs.jsonl"  # as earlier versions wrote it
    old.write_text(json.dumps({"digest": "1", "status": records.FAILED}) + '\n{"digest": "2", "sta')
    assert [row["status"] for row in records.rows_in(path)] == [records.FAILED]
    records.append(path, {"digest": "1", "status": records.FINISHED})
    records.append(records.path_of("b", tmp_path), {"digest": "1", "status": records.FAILED})
    assert [row["status"] for row in records.rows_in(path)] == [records.FAILED, records.FINISHED]
    assert not old.exists() and not list(tmp_path.glob("*.partial"))
    assert records.known(tmp_path) == {"1": {"digest": "1", "status": records.FINISHED}}


def test_equal_records_are_equal_bytes_and_a_killed_write_leaves_the_old_ones(tmp_path, monkeypatch):
    for name in ("a", "b"):
        for digest in ("1", "2"):
            records.append(records.path_of(name, tmp_path), {"digest": digest, "status": records.FINISHED})
    content = records.path_of("a", tmp_path).read_bytes()
    assert content == records.path_of("b", tmp_path).read_bytes() and content[4:8] == bytes(4), "no time in the header"

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        records.append(records.path_of("a", tmp_path), {"digest": "3", "status": records.FINISHED})
    assert records.path_of("a", tmp_path).read_bytes() == content and set(records.known(tmp_path)) == {"1", "2"}
    monkeypatch.undo()
    records.append(records.path_of("a", tmp_path), {"digest": "3", "status": records.FINISHED})
    assert [row["digest"] for row in records.rows_in(records.path_of("a", tmp_path))] == ["1", "2", "3"]


def test_recorded_runs_are_compressed_as_they_are_appended():
    for path in FOLDER.glob("*.runs.jsonl*"):
        assert path.suffix == ".gz" and path.read_bytes()[4:8] == bytes(4), path
        assert len(records.rows_in(path)) > 0


@pytest.mark.parametrize("name", ["channels", "confirm", "demo", "granularity-256", "phases"])
def test_recorded_runs_are_found_by_the_digests_of_their_plans(name):
    """The runs on a page are those that today's digests of the plan's configs find."""
    plan, rows = read_plan(name), records.known(FOLDER)
    sure, _ = outcome.wanted(plan, rows, plan.config["data"]["dir"])
    table = (FOLDER / f"{name}.md").read_text().partition("## All runs")[2]
    lines = [line for line in table.splitlines() if line.startswith("|") and "no longer planned" not in line]
    shown = [line.split("|")[1].strip() for line in lines[2:]]
    assert shown and shown == [one.digest for one in sure if one.digest in rows]


@pytest.mark.parametrize(
    ("recipe", "name", "variant"),
    [
        (overview.BEST, "main", "mst-best"),
        (overview.LEAN, "how-far", "4x-longer-to-the-end"),
        ("mst-channels", "channels-256", "channels-lean"),
    ],
)
def test_a_recipe_is_what_was_measured(recipe, name, variant):
    plan = read_plan(name)
    (cell,) = [cell for cell in plan.cells() if cell.variant == variant]
    measured = job(plan, cell, 0.016, 1, "c").experiment
    own = {"steps": measured.training.steps, "warmup": measured.training.warmup}
    own = {"model": dataclasses.asdict(measured.model), "training": own}
    own |= {key: measured.deepspeed[key] for key in ("train_batch_size", "optimizer")}
    named = load({**own, "recipe": recipe})
    assert named.attention_schedule == measured.attention_schedule and named.mst.targets == measured.mst.targets
    # the studies state the interval that was the default when they ran; today's default is never below 25
    stated, interval = measured.mst.topology.interval, measured.schedule.interval
    assert stated is None or stated < MIN_DEFAULT_INTERVAL == named.schedule.interval
    assert dataclasses.replace(named.schedule, interval=interval) == measured.schedule
    assert dataclasses.replace(named.mst.topology, interval=stated) == measured.mst.topology
    decays = {in_steps(e.training.decay, e.training.steps) for e in (named, measured)}
    assert len(decays) == 1 and named.training.lr_schedule == measured.training.lr_schedule == "wsd"


def test_the_remaining_time_is_estimated_from_finished_runs(folder):
    plan = read_plan("tiny", folder)
    jobs, _ = outcome.wanted(plan, {}, "c")
    mst = next(one for one in jobs if one.cell.variant == "mst")
    speed = 1e-6
    done = row(mst, 2.0, seconds=runner.START_SECONDS + speed * mst.dense_flops_per_step * mst.steps)
    done["flops_dense"] = mst.dense_flops_per_step * mst.steps
    left = runner.seconds_left([mst], {"x": done}, {})
    assert left == pytest.approx(runner.START_SECONDS + speed * mst.dense_flops_per_step * mst.steps)
    dense = [one for one in jobs if one.cell == Cell("tiny", 1, "dense") and one.rate == 1e-2]
    assert runner.seconds_left(dense, {}, {dense[0].trunk: 45}) < runner.seconds_left(dense, {}, {})


@pytest.mark.full
def test_a_queue_stops_and_resumes_without_repeating_anything(folder, monkeypatch):
    plan = {**TINY, "seeds": [1], "rates": [1e-2]}
    plan["variants"] = {"dense": {"shares": [0.5, 1.0]}, "wrong": {"set": {"optimizer.params.nonsense": 1}}}
    (folder / "queue.json").write_text(json.dumps(plan))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    prepare(Recipe(source=str(folder / "text.txt"), tokenizer="byte"), folder / "corpus", workers=1)
    monkeypatch.setattr(study, "FOLDER", folder)
    monkeypatch.setattr(study, "read_plan", lambda name: read_plan(name, folder))
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.05)
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    words = ["queue", "--out", str(folder / "out"), "--results", str(folder), "--data", str(folder / "corpus")]

    def run(*more):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
            code = study.main([*words, *more, "--json"])
        return code, json.loads(said.getvalue())

    code, reported = run("--budget", "0")
    assert code == 0 and reported["done"] == 0 and not (folder / "out" / "runs").exists()
    code, reported = run()
    path = records.path_of("queue", folder)
    before = records.rows_in(path)
    assert code == 1 and reported["done"] == 2 and len(before) == 3
    assert {"gpu", "torch"} <= reported["machine"].keys() and len(reported["rows"]) == len(reported["cells"]) >= 2
    assert all({"variant", "val_loss", "flops"} <= row.keys() for row in reported["rows"])
    rows = {found["variant"]: found for found in before}
    assert rows["wrong"]["status"] == records.FAILED and "optimizer.params.nonsense" in rows["wrong"]["reason"]
    assert rows["dense"]["steps_run"] == 60 - 45 + (45 - 22), "a branch of a trunk that stood at the shorter one's"
    assert rows["dense"]["curve"][-1] == [60, pytest.approx(rows["dense"]["val_loss"], abs=1e-5)]
    splits = json.loads((folder / "corpus" / "meta.json").read_text())["splits"]
    text = hashlib.sha256((splits["train"]["sha256"] + splits["val"]["sha256"]).encode()).hexdigest()[:16]
    run_json = json.loads((folder / "out" / "runs" / rows["dense"]["digest"] / "run.json").read_text())
    assert rows["dense"]["corpus"] == run_json["starts"][-1]["corpus"] == text, "what a rival's text is held against"
    with pytest.raises(UserError, match="--resume"):
        run()

    # what a killed queue had not written down is found in the run's folder, and only what failed is tried again
    path.unlink()
    records.append(path, before[0])
    code, reported = run("--resume", "--at-once", "2")
    again = records.rows_in(path)
    assert reported["done"] == 2 and len(again) == 3
    assert {r["digest"]: r.get("val_loss") for r in again} == {r["digest"]: r.get("val_loss") for r in before}

    shutil.rmtree(folder / "corpus")
    with pytest.raises(UserError, match=r"python -m mst_scale\.benchmarks\.studies\.corpus"):
        run("--resume")


@pytest.mark.full
def test_a_method_that_grows_includes_the_flops_of_its_smaller_run(folder):
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

    queue = runner.Runner(plan, folder / "out", folder, data)
    made = queue._make(stack)
    assert made["status"] == records.FINISHED, made
    assert made["flops"] == pytest.approx(stack.flops, rel=1e-9), "the smaller run's are among them"
    smaller = folder / "out" / "runs" / stack.smaller.digest
    assert runner._stands_at(smaller) == stack.smaller.steps
    began = (smaller / "run.json").read_text()
    assert queue._make_smaller(stack.smaller) == 0 and (smaller / "run.json").read_text() == began, "made once"


def test_several_runs_at_once_are_each_made_once_and_never_two_of_a_trunk(folder, monkeypatch):
    plan = read_plan("tiny", folder)
    (folder / "corpus").mkdir()
    split = {"file": "ids.bin", "tokens": 1, "documents": 1, "max_id": 1, "sha256": "a"}
    meta = {"format": FORMAT, "tokenizer": "byte", "vocab_size": 257, "end_of_text": 256, "dtype": "uint16"}
    meta |= {"recipe": {}, "splits": {"train": split, "val": split}}
    (folder / "corpus" / "meta.json").write_text(json.dumps(meta))
    now, most, made = [], [], []
    all_in = threading.Barrier(2)

    def _make(self, one):
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

    monkeypatch.setattr(runner.Runner, "_make", _make)
    queue = runner.Runner(plan, folder / "out", folder, folder / "corpus", at_once=2)
    queue.run_all()
    jobs, guessed = outcome.wanted(plan, queue.rows, queue.data)
    assert sorted(made) == sorted(one.digest for one in jobs) and not guessed and max(most) == 2
    assert len(records.known(folder)) == len(jobs)

    def _stopped(self, one):
        if self.asked_to_stop or one.seed == 1:
            raise runner.Stopped
        return row(one, 2.0, corpus=self.corpus)

    records.path_of("tiny", folder).unlink()
    monkeypatch.setattr(runner.Runner, "_make", _stopped)
    with pytest.raises(runner.Stopped):
        runner.Runner(plan, folder / "out", folder, folder / "corpus", at_once=2).run_all()


def test_pages_of_the_corpus_are_cleaned_of_markup():
    sentence = "The weights of a layer are pruned by their size, and grown in the order of the gradients that it has. "
    first = f"<head><title>x</title></head><p>Next &amp; Up</p><p>{sentence * 20}</p><pre>a &lt; b\n  c</pre>"
    assert corpus.plain(first)[0] == "Next & Up" and corpus.plain(first)[2] == "a < b\n  c"
    second = f"<p>Next &amp; Up</p><div>{sentence.upper() * 20}</div>"
    german = f"<p>{'Die Gewichte einer Schicht werden nach ihrer Größe beschnitten und wachsen dann wieder. ' * 20}</p>"
    found = list(corpus.distinct([first, second, first, german]))
    assert found == ["\n\n".join(corpus.plain(first)), corpus.plain(second)[1]]


def test_errors_are_reported(folder):
    with pytest.raises(UserError, match="ablations"):
        study.main(["nothing", "--page"])
    (folder / "bad.json").write_text(json.dumps({**TINY, "sedes": [1]}))
    with pytest.raises(UserError, match=r"bad\.json"):
        read_plan("bad", folder)


@pytest.mark.parametrize(
    ("name", "reference"), [("expand", "dense"), ("token-limited", "dense"), ("twice", "sparse-half")]
)
def test_variants_of_a_planned_study_spend_equal_flops(name, reference):
    plan = read_plan(name)
    jobs = {cell: job(plan, cell, plan.rates_of(cell)[0], 0, "corpora/study") for cell in plan.cells()}
    of = {(c.size, c.budget): one.flops for c, one in jobs.items() if (c.variant, c.share) == (reference, 1.0)}
    for cell, one in jobs.items():
        assert one.flops == pytest.approx(cell.share * of[cell.size, cell.budget], rel=0.01), cell


def test_twice_compares_with_dense_models_of_at_most_as_many_nonzero_weights():
    plan = read_plan("twice")

    def nonzero(cell):
        model = model_of(plan, cell)
        mst = job(plan, cell, 0.004, 0, "corpora/study").experiment.mst
        sparsity = 0 if mst.stays_dense else mst.sparsity.max
        matrices = 12 * model.n_layer * model.n_embd**2 + 257 * model.n_embd
        return matrices * (1 - sparsity) + 128 * model.n_embd

    cells = plan.cells()
    for size in plan.sizes:
        (sparse,) = (nonzero(cell) for cell in cells if (cell.size, cell.variant) == (size, "sparse-half"))
        dense = [nonzero(cell) for cell in cells if cell.size == size and cell.variant != "sparse-half"]
        assert dense and all(0.97 * sparse < each <= sparse for each in dense)


def test_all_baselines_are_there_and_use_the_flops_of_a_dense_run():
    plan = read_plan("rivals")
    methods = {variant.method for variant in plan.variants.values()}
    others = {"tiny", "dense-short", "fixed", "sparse", "sd", "dsd", "gd"}  # another model, a length, variants of mst
    own = {"expand"}  # has a study of its own
    of_plans = {"channels", "averaged"}  # registered once these plans have been read
    assert methods == set(METHODS) - others - own - of_plans
    jobs = {cell: job(plan, cell, plan.rates_of(cell)[0], 1, "corpora/study") for cell in plan.cells()}
    budget = next(one.flops for cell, one in jobs.items() if (cell.variant, cell.share) == ("dense", 1.0))
    for cell, one in jobs.items():
        if cell.share == 1:
            assert one.flops + one.topology_flops == pytest.approx(budget, rel=1e-3), cell
        assert one.experiment.mst.method == plan.variants[cell.variant].method

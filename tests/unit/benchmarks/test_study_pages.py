"""The page of a study: FLOP multipliers, baselines, differences, the law of average weights."""

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
from mst_scale.benchmarks.studies import against, law, outcome, overview, page
from mst_scale.benchmarks.studies.plan import FOLDER, job, read_plan

from mst_scale.report import frontier
from mst_scale.report.style import DARK, LIGHT
from tests.support.tiny_study import TINY, everything, row


def test_the_page_has_the_distance_of_a_setting_from_the_law_of_average_weights(folder):
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
    reported = {cells[1].strip(): cells[5].strip() for cells in lines if len(cells) > 5}
    assert reported["mst, tiny, 1 tokens per parameter"] == reported["mst, mid, 1 tokens per parameter"] == "-0.0500"
    assert reported["dense × 2, mid, 1 tokens per parameter"] in ("+0.0000", "-0.0000")
    without = {digest: kept for digest, kept in rows.items() if (kept["size"], kept["variant"]) == ("tiny", "dense")}
    assert "average weights" not in page.written(plan, without, "c", folder).read_text()


def test_another_optimizer_is_a_separate_method(folder):
    """It does not bend the line that methods with the plan's optimizer are read off."""
    sgd = {"set": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}, "zero_optimization.stage": 1}}
    (folder / "tiny.json").write_text(json.dumps({**TINY, "variants": {**TINY["variants"], "muon": sgd}}))
    plan = read_plan("tiny", folder)
    rows = everything(plan, lambda one: 1.0 if one.cell.variant == "muon" else 10 * one.flops**-0.05)
    cells = {(cell["variant"], cell["share"]): cell for cell in page.answers(plan, rows, "c")["cells"]}
    assert not cells["muon", 1.0]["dense"] and cells["muon", 1.0]["worth_all_sizes_paper"]["bound"] == "≥"
    assert cells["mst", 1.0]["worth_all_sizes_paper"]["value"] == pytest.approx(1.0)


def test_the_page_has_the_flop_multiplier_of_a_method(folder):
    """Loss = 10 · C^-0.05 for dense runs at the better rate; MST reaches what 1.25 times its FLOPs buy."""
    plan = read_plan("tiny", folder)

    def loss(one):
        multiplier = 1.25 if one.cell.variant == "mst" else 1.0
        return 10 * (multiplier * one.flops) ** -0.05 + (0.5 if one.rate == 1e-3 else 0)

    rows = everything(plan, loss)
    assert len(rows) == 11
    found = page.answers(plan, rows, "c")
    (mst,) = [cell for cell in found["cells"] if cell["variant"] == "mst"]
    assert mst["worth_all_sizes_paper"]["value"] == pytest.approx(1.25)
    assert mst["worth_same_model_causal"]["value"] == pytest.approx(1.25)
    of_mst = [one.flops for one in outcome.wanted(plan, rows, "c")[0] if one.cell.variant == "mst"]
    assert mst["flops"] == pytest.approx(sum(of_mst) / len(of_mst)), "all that was spent"
    (folder / "all").mkdir()
    text = page.written(plan, rows, "c", folder, folder / "all").read_text()
    assert "1.25 (1.25 to 1.25)" in text and "0.01*" in text and text.count("| finished |") == 11
    assert [path.name for path in sorted(folder.glob("*.svg"))] == ["tiny-multipliers-paper.svg", "tiny-paper.svg"]
    every = ["tiny-causal.svg", "tiny-multipliers-causal.svg", "tiny-multipliers-paper.svg", "tiny-paper.svg"]
    assert [path.name for path in sorted((folder / "all").iterdir())] == every


def test_one_picture_is_light_or_dark_as_its_reader_prefers(folder):
    plan = read_plan("tiny", folder)
    page.written(plan, everything(plan, lambda one: 10 * one.flops**-0.05), "c", folder)
    svg = (folder / "tiny-paper.svg").read_text()
    head, _, drawing = svg.partition("</style>")
    assert "prefers-color-scheme:dark" in head and all(c in head for c in [*LIGHT.colours().values(), DARK.ink])
    used = set(re.findall(r"var\(--([\w-]+)\)", drawing))
    assert {"paper", "ink"} <= used <= LIGHT.colours().keys() and not re.search(r"#[0-9a-f]{6}\b", drawing)
    ElementTree.fromstring(svg)


def test_comparable_dense_runs_of_other_studies_are_baselines(folder):
    """Of the same text and seeds, at a known rate; a run that both studies have counts once."""
    plan = read_plan("tiny", folder)
    rows = everything(plan, lambda one: 10 * one.flops**-0.05)
    found = outcome.outcomes(plan, rows, "c")
    assert outcome.baselines_elsewhere(plan, found, rows, folder) == {}, "there is no other study"

    other = {
        **TINY,
        "variants": {"dense": {}, "dense-slow": {"set": {"training.decay": 0.5}}, "mst": {"method": "mst"}},
    }
    (folder / "other.json").write_text(json.dumps(other))
    theirs = read_plan("other", folder)
    more = {**rows, **everything(theirs, lambda one: 9 * one.flops**-0.05)}

    def baselines(rows, plan=plan):
        return {s: [m.name for m in its] for s, its in outcome.baselines_elsewhere(plan, found, rows, folder).items()}

    assert baselines(more) == {"other": ["dense-slow (other)"]}, "the other dense run is the plan's own"
    lacks = next(one for one in outcome.wanted(theirs, more, "c")[0] if one.cell.variant == "dense-slow")
    assert baselines({digest: row for digest, row in more.items() if digest != lacks.digest}) == {}, "a rate is to come"
    texts = {digest: {**row, "corpus": "other"} if digest not in rows else row for digest, row in more.items()}
    assert baselines(texts) == {}
    (folder / "other.json").write_text(json.dumps({**other, "seeds": [2, 3]}))
    assert baselines({**more, **everything(read_plan("other", folder), lambda one: 1.0)}) == {}
    (folder / "other.json").write_text(
        json.dumps({**other, "config": {**TINY["config"], "training": {**TINY["config"]["training"], "eval_seed": 0}}})
    )
    assert baselines({**more, **everything(read_plan("other", folder), lambda one: 1.0)}) == {}

    def multiplier(its):
        each = frontier.rows([one.method for one in found], its)
        return next(row for row in each if row["name"].startswith("mst"))["worth_all_sizes_paper"]["value"]

    (folder / "other.json").write_text(json.dumps(other))
    elsewhere = outcome.baselines_elsewhere(plan, found, more, folder)["other"]
    assert multiplier(elsewhere) < multiplier([]), "a better rival makes a method worth less"


def test_differences_from_the_reference_beyond_the_noise_count(folder):
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
    reported = {one["name"]: one for one in page.answers(plan, rows, "c")["against_reference"]}
    assert set(reported) == {"slow", "fast"}
    assert reported["slow"]["mean"] == pytest.approx(0.2) and reported["slow"]["error"] == pytest.approx(0.01)
    assert reported["slow"]["counts"] and not reported["fast"]["counts"]
    text = page.written(plan, rows, "c", folder).read_text()
    assert "| slow | +0.2000 | 0.0100 | 2 | worse |" in text
    assert "| fast | +0.0010 | 0.0100 | 2 | within the noise |" in text
    assert "(tiny-against.svg)" in text and (folder / "tiny-against.svg").is_file()
    assert "(tiny-paper.svg)" in text and "multipliers-paper.svg" not in text, "a page shows two pictures"
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


@pytest.mark.full
def test_the_overview_is_of_the_runs_that_are_kept(tmp_path):
    """The committed page is what its runs come to, and its numbers are those of the studies' pages."""
    for path in FOLDER.glob("*.runs.jsonl.gz"):
        shutil.copy(path, tmp_path)
    assert overview.written(tmp_path).read_text() == (FOLDER / "overview.md").read_text()
    found = overview.settings(tmp_path)
    of_main = next(one for one in found if one.study == "main" and one.recipe == overview.BEST)
    assert f"{of_main.multipliers['paper', 'all sizes']}" in (FOLDER / "main.md").read_text()
    assert all(one.multipliers.keys() == found[0].multipliers.keys() for one in found)
    assert len(found[0].multipliers) == 4

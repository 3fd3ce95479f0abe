"""The page works in a real browser: no error, no request to anywhere, every figure there, no label over another."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from mst_scale.report import Report
from tests.support import reported_runs as runs
from tests.support.chromium import Browser, executable

pytestmark = [
    pytest.mark.skipif(executable() is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.full,
]

# For each figure: its box, and text and box of each label.
LABELS = """JSON.stringify([...document.querySelectorAll('figure')].map(figure => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom] };
  const svg = figure.querySelector('svg');
  return {id: figure.id, box: box(svg), labels: [...svg.querySelectorAll('text')].map(t => [t.textContent, box(t)]),
          size: Math.min(...[...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect().height)),
          images: [...svg.querySelectorAll('image')].length}
}))"""
COLOURS = """JSON.stringify([getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
  getComputedStyle(document.querySelector('figure svg text')).fill])"""
EVERY_CHOICE = """document.head.insertAdjacentHTML('beforeend',
  '<style>.place > figure { display: block !important; }</style>')"""
SHOWN = """JSON.stringify([...document.querySelectorAll('.place figure')].filter(f => f.offsetHeight).map(f => f.id))"""
# of each two neighbours in a row, how far apart the tops of their drawings are
LEVEL = """JSON.stringify([...document.querySelectorAll('.figures')].flatMap(grid => {
  const shown = [...grid.children].map(place => {
    const svg = [...place.querySelectorAll('svg')].find(svg => svg.getBoundingClientRect().height > 0)
    return [place.getBoundingClientRect(), svg.getBoundingClientRect().top]
  })
  return shown.slice(1).flatMap(([box, top], i) =>
    box.left > shown[i][0].right ? [Math.abs(top - shown[i][1])] : [])
}))"""
# of each grid of two columns, the width that its figures leave empty in its last row
EMPTY = """JSON.stringify([...document.querySelectorAll('.figures')].map(grid =>
  grid.getBoundingClientRect().right - grid.lastElementChild.getBoundingClientRect().right))"""
CUT_OFF = """[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth).length"""
WIDTH = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One run of many layers, and a comparison; with the names of their figures."""
    folder = tmp_path_factory.mktemp("pages")
    one = runs.write(folder / "one", blocks=30, until=500)
    others = [runs.write(folder / f"mst-{seed}", seed=seed) for seed in (1, 2)]
    others.append(runs.write(folder / "dense", "dense", steps=400, width=128))
    others.append(runs.write(folder / "long", steps=900, blocks=1))  # names of two settings in the legends
    made = {}
    for name, folders, out in (("one", [one], folder / "a"), ("several", others, folder / "b")):
        report = Report(folders, out)
        report.read()
        made[name] = report.write(pictures=False)
    return made


def overlap(a: list[float], b: list[float]) -> bool:
    """By more than a pixel in both directions."""
    return min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("window", [(1280, 900), (420, 800)], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", ["one", "several"])
def test_the_page_in_a_browser(browser, pages, name, window, scheme):
    browser.open(Path(pages[name]["page"]), width=window[0], height=window[1], scheme=scheme)
    assert browser.errors == []
    assert [url[:80] for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert [url for url in browser.requests if url.startswith("file:")] == [Path(pages[name]["page"]).as_uri()]
    browser.evaluate(EVERY_CHOICE)
    figures = json.loads(browser.evaluate(LABELS))
    assert [figure["id"] for figure in figures] == [figure["name"] for figure in pages[name]["figures"]]
    assert len(figures) >= 20
    for figure in figures:
        left, top, right, bottom = figure["box"]
        assert right - left > 300 and bottom - top > 100, f"{figure['id']} is drawn"
        assert len(figure["labels"]) >= 3 and figure["size"] >= 7, f"{figure['id']}: its text can be read"
        for text, box in figure["labels"]:
            inside = box[0] > left - 1 and box[1] > top - 1 and box[2] < right + 1 and box[3] < bottom + 1
            assert inside, f"{figure['id']}: {text!r} is cut off"
        for (first, a), (second, b) in combinations(figure["labels"], 2):
            assert not overlap(a, b), f"{figure['id']}: {first!r} and {second!r} overlap"
        if figure["id"].rpartition("run1-")[2].startswith("weights-"):
            dense = figure["id"].startswith("run2-")
            assert figure["images"] >= 1 + (not dense), "weights, beside masks where there are any"
    assert browser.evaluate(WIDTH) <= 0, "nothing but the table scrolls sideways"
    paper, ink, label = json.loads(browser.evaluate(COLOURS))
    assert paper == ("rgb(23, 24, 27)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert label == ink != paper, "the drawings follow the theme"


def test_one_figure_of_a_place_is_shown_and_the_reader_chooses_which(browser, pages):
    """By a click, without a script."""
    page = Path(pages["one"]["page"])
    assert "<script" not in page.read_text()
    browser.open(page, width=1400, height=900, scheme="light")
    shown = json.loads(browser.evaluate(SHOWN))
    assert {"loss-steps", "churn", "weights-blocks-0-mlp-up"} <= set(shown)
    assert not {"loss-flops", "loss-time", "layers-grown", "weights-blocks-15-mlp-up"} & set(shown)
    apart = json.loads(browser.evaluate(LEVEL))
    assert len(apart) > 4 and max(apart) <= 1, "neighbours are level"
    assert max(map(abs, json.loads(browser.evaluate(EMPTY)))) <= 1, "no place beside a figure is empty"
    for choice, figure in (("FLOPs", "loss-flops"), ("time", "loss-time")):
        browser.evaluate(f"[...document.querySelectorAll('label')].find(l => l.textContent == '{choice}').click()")
        assert [name for name in json.loads(browser.evaluate(SHOWN)) if name.startswith("loss")] == [figure]


@pytest.mark.parametrize("name", ["one", "several"])
def test_no_table_is_cut_off_on_a_wide_screen(browser, pages, name):
    browser.open(Path(pages[name]["page"]), width=1400, height=900, scheme="light")
    assert browser.evaluate("document.querySelectorAll('.scroll').length") >= 3
    assert browser.evaluate(CUT_OFF) == 0


def test_the_browser_sees_an_error_a_request_and_an_overlap(browser, tmp_path):
    """So that the checks above would fail."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<link rel="icon" href="data:,"><figure id="x"><svg width="100" height="50"><text x="5" y="20">one</text>'
        '<text x="9" y="22">two</text></svg></figure><img src="http://127.0.0.1:9/x.png"><script>nothing.here()</script>'
    )
    browser.open(bad, width=300, height=300, scheme="light")
    assert "http://127.0.0.1:9/x.png" in browser.requests
    assert any("nothing is not defined" in error for error in browser.errors)
    (figure,) = json.loads(browser.evaluate(LABELS))
    assert overlap(figure["labels"][0][1], figure["labels"][1][1])

"""Pages link to files that exist and keep to the glossary, the site shows every page, modules state what they do."""

import ast
import io
import pkgutil
import re
import sys
import tokenize
from pathlib import Path

import pytest

import mst_scale
from mst_scale import _deprecated
from tests.unit import test_docstrings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS))

import migration_tables  # noqa: E402
import plain_docstrings  # noqa: E402
import plain_pages  # noqa: E402

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("benchmarks/results/*.md")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


def links(text: str) -> list[str]:
    return [one or other for one, other in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.S))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path):
    for link in links(page.read_text()):
        if not link.startswith(("http://", "https://", "#")):
            assert (page.parent / link.split("#")[0]).exists(), f"{page.name} links to {link}"


def test_links_are_found():
    assert links('[a](b.md) <img src="c.svg"> ```[no](d.md)```') == ["b.md", "c.svg"]


def test_the_readme_is_short_and_its_first_screen_says_how_to_try_it():
    text = (ROOT / "README.md").read_text()
    words = re.sub(r"```.*?```|<picture>.*?</picture>", "", text, flags=re.S).split()
    assert len(words) <= 800
    first_screen = "\n".join(text.splitlines()[:25])
    assert "bash launchers/demo.sh" in first_screen and "bash launchers/test.sh" in first_screen


GENERATED = ["docs/compatibility.md", "docs/config.md"]  # their words are tested where they are generated
REVISED = [
    page
    for page in (
        "CONTRIBUTING.md",
        "README.md",
        "ds_configs/README.md",
        "examples/README.md",
        *(f"docs/{p.name}" for p in sorted(DOCS.glob("*.md"))),
    )
    if page not in GENERATED
]
# What pages and sources say instead: fix, baseline, integration, FLOP multiplier, active, revive, reject, per, again.
AVOIDED = re.compile(
    r"\b(?:mend(?:s|ed|ing)?|cures?|rivals?|doors?|worth|whence|told|anew|alive|living|woken|refus(?:es?|ed|als?)"
    r"|beside|born|sceptics?|sceptical|unclassified|newest whole|in vain|signs? of life|without a word|nobody"
    r"|somebody|(?<!there )is no (?:folder|file|run|config|model|number|integer|sparsity|multiple)|(?:goes|go) on"
    r"|multipl(?:y|ies|ied) with"
    r"|(?:one|program|loop|batch|sequence|checkpoint)s? of (?:your|one's) own"
    r"|(?:tokens?|bytes?|bits?|FLOPs|steps|numbers?|ms|seconds|[GMK]i?B|Gb/s) an? "
    r"(?:parameter|rank|GPU|token|step|weight|node|second|layer|element|sequence|run|process|head|channel|file|page))\b",
    re.I,
)


def prose(text: str) -> str:
    """A page without code, names in code, targets of links and HTML, on one line."""
    return " ".join(re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", text, flags=re.S).split())


RESULTS = [str(page.relative_to(ROOT)) for page in sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
SCRIPTS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "launchers").glob("*.sh"))]


@pytest.mark.parametrize("page", ["CHANGELOG.md", *REVISED, *RESULTS, *SCRIPTS])
def test_a_revised_page_keeps_to_the_glossary(page: str):
    """The pages of the studies quote plans that were written before their first run, and are left as they are."""
    assert AVOIDED.findall(prose((ROOT / page).read_text())) == []


@pytest.mark.parametrize(
    "text", ["the cure", "a rival is told", "20 tokens a\nparameter", "bytes a rank", "What it is worth", "Refused"]
)
def test_avoided_words_are_found(text: str):
    assert AVOIDED.search(prose(text))


@pytest.mark.parametrize(
    "text",
    ["`training.rival` is a key", "a [guide](doors.md)", "tokens per parameter", "```\nanew\n```", "recommend"],
)
def test_names_in_code_and_ordinary_words_are_not(text: str):
    assert not AVOIDED.search(prose(text))


def written(path: Path) -> str:
    """The comments, docstrings and messages of a source file; single words in quotes are values, not prose."""
    source = path.read_text()
    comments = (t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT)
    strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    sentences = (text for text in strings if isinstance(text, str) and " " in text)
    return re.sub(r"\"\w+\"", " ", "\n".join([*comments, *sentences]))


SOURCES = [
    *test_docstrings.FILES,
    *(path for d in ("benchmarks", "examples") for path in sorted((ROOT / d).rglob("*.py"))),
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_keeps_to_the_glossary(path: Path):
    assert AVOIDED.findall(prose(written(path))) == []


def test_comments_docstrings_and_messages_are_read(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text('"""No cure."""\nx = f"the rival {1} is here"  # woken\ny = "alive", "is \\"alive\\" `born`"\n')
    assert AVOIDED.findall(prose(written(path))) == ["woken", "cure", "rival"]


NAME = re.compile(r"(?<![\w./\-])mst_scale(?:\.[a-zA-Z_]\w*)+(?![\w/])")
NOT_A_NAME = {"mst_scale.compact"}  # the `format` of compact files


def names_of(text: str) -> set[str]:
    """The names of the package in a page: written out, or imported in an example."""
    names = set(NAME.findall(text)) - NOT_A_NAME
    for example in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mst_scale"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("page", [page for page in REVISED if page != "docs/migration.md"])
def test_every_name_in_a_page_exists(page: str):
    for name in names_of((ROOT / page).read_text()):
        assert pkgutil.resolve_name(name) is not None


def test_names_in_pages_are_found():
    text = "`mst_scale.a.b(x)` mst_scale/c.d\n```python\nfrom mst_scale.e import f\n```"
    assert names_of(text) == {"mst_scale.a.b", "mst_scale.e", "mst_scale.e.f"}


def test_the_navigation_of_the_site_names_every_page():
    index = set(links((DOCS / "index.md").read_text()))
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= index
    parts = plain_pages.SECTION.findall((DOCS / "index.md").read_text())
    assert [title for title, _ in parts] == ["Get started", "User guide", "How it works", "Reference", "Results"]


def test_the_page_of_results_names_every_result():
    listed = {DOCS / link for link in links((DOCS / "results.md").read_text())}
    there = [page for kind in ("results", "studies") for page in (ROOT / "benchmarks" / kind).glob("*.md")]
    assert {page.resolve() for page in there} == {page.resolve() for page in listed} - {DOCS / "benchmarks.md"}


def test_a_link_between_files_becomes_a_link_between_pages_of_the_site():
    plain_pages.copy_pages()
    page = "[a](exactness.md#muon) [b](../ds_configs/README.md) [c](../examples/lora.py) [d](https://x.org/y.md)"
    assert plain_pages.rewritten(page, "cluster") == page.replace("../ds_configs", "project/ds_configs")
    copied = "project/benchmarks/results/step"
    assert (
        plain_pages.rewritten("[a](gpu.md) [b](../../docs/blocks.md)", copied) == "[a](gpu.md) [b](../../../blocks.md)"
    )
    assert plain_pages.rewritten("```\n[a](../ds_configs/README.md)\n```", "cluster").count("project") == 0


def test_a_picture_becomes_an_image_for_each_theme():
    page = '<picture><source srcset="figures/a-dark.svg"><img alt="A" src="figures/a.svg" width="60%"></picture>'
    light, dark = plain_pages.rewritten(page, "report").splitlines()
    assert light == '![A](figures/a.svg){.only-light width="60%"}' and dark.startswith(
        "![A](figures/a-dark.svg){.only-dark"
    )


def test_docstrings_are_shown_as_they_are_meant():
    translated = plain_docstrings.translate(["The `w`s, |w| · g*.", "", "    y = x * `W`", "", "Args:", "    x: a|b"])
    assert translated == [
        "The ``w``\\ s, \\|w\\| · g\\*.", "", "::", "", "    y = x * `W`", "", "Args:", "    x: a\\|b"
    ]  # fmt: skip


def test_the_migration_page_names_every_old_name():
    page = (DOCS / "migration.md").read_text()
    assert migration_tables.filled(page) == page, "python docs/migration_tables.py"
    olds = [
        *_deprecated.MOVED,
        *_deprecated.CONFIG_KEYS,
        *_deprecated.FLAGS,
        *(f"{m}.{n}" for m, n in _deprecated.RENAMED),
    ]
    assert [name for name in olds if f"| `{name}` |" not in page] == []


def test_the_tables_of_the_migration_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_deprecated, "RENAMED", {("mst_scale.pruning", "Way"): "PruningMethod"})
    monkeypatch.setattr(_deprecated, "FLAGS", {})
    page = migration_tables.filled("<!-- table of RENAMED -->\nx\n<!-- end -->\n<!-- table of FLAGS -->\n<!-- end -->")
    assert "| `mst_scale.pruning.Way` | `mst_scale.pruning.PruningMethod` |\n<!-- end -->" in page
    assert migration_tables.EMPTY["FLAGS"] in page


MODULES = [path for top in ("mst_scale", "benchmarks") for path in sorted((ROOT / top).rglob("*.py"))]


def opening(source: str) -> str | None:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(source))
    return None if text is None else " ".join(text.split("\n\n")[0].split())


def states_something(text: str) -> bool:
    return text.endswith((".", ":")) and "?" not in text


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_states_what_it_does(path: Path):
    text = opening(path.read_text())
    assert text is None or states_something(text), text


def test_questions_and_half_sentences_are_seen():
    assert opening('"""One\nline.\n\nMore?"""') == "One line."
    assert opening("x = 1") is None
    assert states_something("Does this:") and not states_something("What is this? That.")
    assert not states_something("No end")


ONE_FILE_EACH = ("cli", "methods")  # named by what users name: a verb, a method


@pytest.mark.parametrize(
    "package", sorted(p.parent for p in (ROOT / "mst_scale").glob("*/__init__.py")), ids=lambda p: p.name
)
def test_a_package_says_what_its_modules_are_for(package: Path):
    modules = [path.stem for path in package.glob("*.py") if not path.stem.startswith("__")]
    if package.name not in ONE_FILE_EACH and len(modules) > 1:
        text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
        assert [name for name in modules if not re.search(rf"\b{name}\b", text)] == []


def test_the_public_surface_is_documented():
    from mst_scale.engine.types import MST

    text = (ROOT / "docs" / "api.md").read_text()
    names = [name for name in vars(MST) if not name.startswith("_")]
    assert len(names) > 10 and all(f"`{name}" in text for name in names)
    assert all(f"`mst_scale.{name}" in text for name in mst_scale.__all__) and set(mst_scale.__all__) <= set(
        dir(mst_scale)
    )

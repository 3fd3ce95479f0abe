"""What the pages link to is there, and the README stays short enough to be read."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def test_the_readme_is_read_in_three_minutes():
    text = (ROOT / "README.md").read_text()
    words = re.sub(r"```.*?```|<picture>.*?</picture>", "", text, flags=re.S).split()
    assert len(words) <= 650
    first_screen = "\n".join(text.splitlines()[:25])
    assert "bash launchers/demo.sh" in first_screen and "bash launchers/test.sh" in first_screen

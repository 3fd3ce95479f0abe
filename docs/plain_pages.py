"""A Sphinx extension that builds the site from pages which are plain Markdown and link to each other as files.

1. Pages outside docs/ (results, studies, configs, the changelog) are copied to docs/project/, which git ignores.
2. Links that lead to a page of the repository are rewritten, so that they lead to that page of the site.
3. The navigation is read from the lists of links on index.md: each section is one of its parts.
4. `<picture>` elements become an image for the light theme and one for the dark theme.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
COPIES = DOCS / "project"
OUTSIDE = ("*.md", "ds_configs/README.md", "examples/README.md", "benchmarks/results/*.md", "benchmarks/studies/*.md")
LISTS = ("index", "results")  # pages whose links are the navigation

FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
PICTURE = re.compile(
    r'<picture><source [^>]*srcset="(?P<dark>[^"]+)"><img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)"'
    r'(?: width="(?P<width>[^"]+)")?[^>]*></picture>'
)
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def copy_pages() -> None:
    """Copy the pages outside docs/ that have changed, and remove copies of pages that are gone."""
    pages = {page.relative_to(ROOT) for pattern in OUTSIDE for page in ROOT.glob(pattern)}
    for copy in COPIES.rglob("*.md"):
        if copy.relative_to(COPIES) not in pages:
            copy.unlink()
    for page in pages:
        copy = COPIES / page
        if not copy.exists() or copy.read_bytes() != (ROOT / page).read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / page, copy)


def original(docname: str) -> Path:
    """Return the file in the repository that a page of the site shows."""
    path = DOCS / f"{docname}.md"
    return ROOT / path.relative_to(COPIES) if path.is_relative_to(COPIES) else path


def link_target(link: str, docname: str) -> str:
    """Return what a link on a page of the repository has to say on the site, relative to that page of the site."""
    if re.match(r"\w+:", link):
        return link
    found = Path(os.path.normpath(original(docname).parent / link))
    copied = COPIES / found.relative_to(ROOT)
    return os.path.relpath(copied if copied.is_file() else found, (DOCS / docname).parent)


def image_pair(found: re.Match[str], docname: str) -> str:
    """Return the two images, each shown in its theme, that replace a `<picture>` element."""
    width = f' width="{found["width"]}"' if found["width"] else ""
    return "\n".join(
        f"![{found['alt']}]({link_target(found[theme], docname)}){{.only-{theme}{width}}}"
        for theme in ("light", "dark")
    )


def rewritten(text: str, docname: str) -> str:
    """Return a page with its links and pictures as the site needs them; code blocks stay as they are."""
    parts = FENCE.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = LINK.sub(lambda found: f"]({link_target(found[1], docname)}{found[2] or ''})", parts[i])
        parts[i] = PICTURE.sub(lambda found: image_pair(found, docname), parts[i])
    return "".join(parts)


def navigation(text: str) -> str:
    """Return one hidden toctree for each section of a page that lists other pages, with the titles used there."""
    trees = []
    for section in SECTION.finditer(text):
        links = re.findall(r"^(?:- |\| )\[(.+?)\]\(([^)#]+)\.md\)", section[2], re.MULTILINE)
        entries = "\n".join(f"{title.replace('`', '')} <{page}>" for title, page in links)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {section[1]}\n\n{entries}\n```\n")
    return "\n\n" + "\n".join(trees)


def read_source(app: Sphinx, docname: str, content: list[str]) -> None:
    """Rewrite a page when Sphinx reads it."""
    text = rewritten(content[0], docname)
    content[0] = text + navigation(text) if docname in LISTS else text


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension with Sphinx."""
    copy_pages()
    app.connect("source-read", read_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

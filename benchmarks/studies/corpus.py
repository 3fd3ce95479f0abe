"""Creates the text that studies train on: English pages from the documentation packages of a Debian system.

    python -m mst_scale.benchmarks.studies.corpus --out corpora/study
    python -m mst_scale.benchmarks.studies.corpus --out corpora/study --packages git-doc bash-doc --tokenizer gpt2

Packages are fetched by `apt-get download` and unpacked, not installed (run `apt-get update` first if the lists are
old). HTML markup is removed, as are paragraphs of earlier pages and pages that are short or not English. The remaining
pages, in the order of their digests, are written to OUT/text.jsonl, and by `mst data` to OUT/train.bin, val.bin and
meta.json. OUT/packages.txt lists the packages with their versions.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mst_scale.comm import run_program
from mst_scale.comm.parser import Parser, validate_folder
from mst_scale.errors import UserError

# Technical and natural English; linux-doc and the like only point to a package with a version in its name.
PACKAGES = (
    "anarchism", "apache2-doc", "bash-doc", "cmake-doc", "debian-handbook", "debian-policy", "debian-reference-en",
    "developers-reference", "git-doc", "harden-doc", "linux-doc", "maxima-doc", "nodejs-doc", "octave-doc",
    "postgresql-doc", "python3-doc", "r-doc-html", "rust-doc", "sqlite3-doc",
)  # fmt: skip
# Indices, and references that list the same traits on every page.
LEFT_OUT = re.compile(r"genindex|/html/(std|core|alloc|proc_macro|test|src)/|/search\.html|unstable-book")
FEWEST_LETTERS = 1_000  # of a page
COMMON = frozenset(re.findall(r"\w+", "the of and to a in is that for it as be with on by this are or from an"))
COMMON_SHARE = 0.2  # of a page's words, at least: German, French and tables of symbols stay below

DROPPED = re.compile(
    r"<!--.*?-->|<(script|style|head|nav|svg|math|footer|button)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE
)
BLOCK = re.compile(
    r"</?(p|div|li|ul|ol|dl|dt|dd|tr|table|h[1-6]|pre|blockquote|section|article|br|hr|body)\b[^>]*>", re.IGNORECASE
)
TAG = re.compile(r"<[^>]+>")
WORD = re.compile(r"[^\W\d_]+")


def plain(page: str) -> list[str]:
    """The paragraphs of a page of HTML; lines of code keep their breaks."""
    body = BLOCK.sub("\n\n", DROPPED.sub(" ", page))
    text = html.unescape(TAG.sub("", body)).replace("\xa0", " ").replace("¶", "").replace("\r", "")
    parts = re.split(r"\n\s*\n", text)
    return [part for part in ("\n".join(line.rstrip() for line in p.strip("\n").split("\n")) for p in parts) if part]


def english(text: str) -> bool:
    """Return whether a text is long enough and in English."""
    words = WORD.findall(text.lower())
    return len(text) >= FEWEST_LETTERS and sum(word in COMMON for word in words) >= COMMON_SHARE * len(words)


def distinct(pages: Iterable[str]) -> Iterator[str]:
    """The texts of English pages without the paragraphs of those before them."""
    seen: set[bytes] = set()
    for page in pages:
        fresh = []
        for paragraph in plain(page):
            digest = hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=8).digest()
            if digest not in seen:
                seen.add(digest)
                fresh.append(paragraph)
        text = "\n\n".join(fresh)
        if english(text):
            yield text


def pages_in(folder: Path) -> Iterator[str]:
    """In the order of their names, which is the same on every machine."""
    for path in sorted(folder.rglob("*")):
        name = path.name.removesuffix(".gz")
        if path.is_symlink() or not path.is_file() or not name.endswith((".html", ".htm")):
            continue
        if LEFT_OUT.search(path.as_posix()):
            continue
        content = path.read_bytes()
        yield (gzip.decompress(content) if path.suffix == ".gz" else content).decode(errors="ignore")


def fetched(packages: Sequence[str], folder: Path) -> list[Path]:
    """The packages' files; of one that is empty but for what it depends on, that."""
    wanted = dict.fromkeys(name for package in packages for name in (package, *_pointed_at(package)))
    # without a user of its own, which could not write here
    command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *wanted]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("there is no apt-get here: make the corpus on a Debian system, or with mst data") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UserError(f"apt-get download: {last}; run apt-get update, or name others with --packages") from None
    return sorted(folder.glob("*.deb"))


def _pointed_at(package: str) -> list[str]:
    found = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True, check=False).stdout
    names = [line.split()[-1] for line in found.splitlines() if "Depends:" in line]
    return [name for name in names if name.endswith("-doc") or "-doc-" in name]


def texts(debs: Sequence[Path]) -> list[str]:
    """The texts of all packages in the order of their digests, so that each part of the file has something of each."""

    def pages() -> Iterator[str]:
        for deb in debs:
            with tempfile.TemporaryDirectory(dir=deb.parent) as folder:
                subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
                yield from pages_in(Path(folder))
            print(deb.name, file=sys.stderr, flush=True)

    return sorted(distinct(pages()), key=lambda text: hashlib.sha256(text.encode()).digest())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its results."""
    from mst_scale.data.prepare import prepare
    from mst_scale.data.recipe import Recipe

    parser = Parser(prog="python -m mst_scale.benchmarks.studies.corpus", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("corpora/study"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, metavar="NAME", help="others than those listed here")
    parser.add_argument("--tokenizer", default="byte", metavar="T", help="as for mst data (byte)")
    options = parser.parse_args(arguments)
    validate_folder("--out", options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mst-corpus-") as folder:
        debs = fetched(options.packages, Path(folder))
        found = texts(debs)
    if not found:
        raise UserError("--packages: no English page of HTML in them: name others")
    file = options.out / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in found))
    (options.out / "packages.txt").write_text("".join(f"{deb.stem}\n" for deb in debs))
    meta = prepare(Recipe(source=str(file), tokenizer=options.tokenizer), options.out)
    tokens = {name: split["tokens"] for name, split in meta["splits"].items()}
    print(f"{options.out}: {len(found):,} pages, {file.stat().st_size:,} bytes; {tokens}")
    return 0


if __name__ == "__main__":
    run_program(main)

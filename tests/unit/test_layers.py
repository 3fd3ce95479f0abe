"""Imports go only downwards: a module may import modules of a lower layer, or of its own package.

The three parts of the paper (sparsity_variation, mixed_growing, hybrid_sparse_attention) share a layer, so they do not
know each other.
"""

import ast
from pathlib import Path

import pytest

import mst_scale

ROOT = Path(mst_scale.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "mst_scale" else [f"mst_scale.{a.name}" for a in node.names]
            assert node.level == 0, f"{path}: relative import"
        else:
            continue
        units |= {name.split(".")[1] for name in names if name.startswith("mst_scale.")}
    return units


def order_in_the_docs() -> list[str]:
    """Packages and modules, foundations first."""
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    tree = text[text.index("mst_scale/\n  ") : text.index("ds_configs/  launchers/")]
    return [line.split()[0].rstrip("/") for line in tree.splitlines()[1:]]


ORDER = order_in_the_docs()
PARTS = {"sparsity_variation", "mixed_growing", "hybrid_sparse_attention"}


def test_the_tree_names_each_package_once():
    assert sorted(ORDER) == sorted({unit_of(path) for path in FILES} - {"__init__", "__main__"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path):
    own = unit_of(path)
    if own in ORDER:
        for other in imported_units(path) - {own}:
            assert ORDER.index(other) < ORDER.index(own), f"{path.relative_to(ROOT)} imports {other}"
            assert not {own, other} <= PARTS, f"{path.relative_to(ROOT)} knows another part of the method"


def test_the_rule_sees_an_upward_import(tmp_path: Path):
    bad = tmp_path / "bad.py"
    bad.write_text("from mst_scale import engine\nimport mst_scale.cli.data\nfrom mst_scale.models.gpt import GPT\n")
    assert imported_units(bad) == {"engine", "cli", "models"}


def test_only_one_package_reads_deepspeeds_internals():
    public = (
        "deepspeed",
        "deepspeed.comm",
        "deepspeed.checkpointing",
        "deepspeed.pipe",
        "deepspeed.runtime.pipe.topology",
        "deepspeed.sequence.layer",
    )
    for path in FILES:
        if path.parent.name == "zero_shards":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            inside = [name for name in modules if name.split(".")[0] == "deepspeed" and name not in public]
            assert not inside, f"{path.relative_to(ROOT)} imports {inside}"

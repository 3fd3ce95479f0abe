"""Imports go only downwards: a module may import modules of a lower layer, or of its own package.

The three parts of the paper (sparsity_variation, mixed_growing, hybrid_sparse_attention) share a layer, so they do not
know each other.
"""

import ast
from itertools import takewhile
from pathlib import Path

import pytest

import mst_scale

ROOT = Path(mst_scale.__file__).parent
LAYERS = {
    "shipped": 0,
    "compiled": 1,
    "distributed": 1,
    "randomness": 1,
    "shard": 1,
    "hybrid_sparse_attention": 2,
    "mixed_growing": 2,
    "sparse_linear": 2,
    "sparsity_variation": 2,
    "zero_shards": 2,
    "checkpoints": 3,
    "config": 3,
    "costs": 4,
    "data": 4,
    "models": 4,
    "dead_units": 5,
    "plan": 5,
    "engine": 6,
    "runs": 7,
    "hugging_face": 8,
    "report": 8,
    "evaluation": 9,
    "benchmarks": 10,
    "cli": 10,
    "pretrain": 10,
    "__init__": 11,
    "__main__": 11,
}
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path):
    own = unit_of(path)
    assert own in LAYERS, f"give {own} a layer"
    for other in imported_units(path) - {own}:
        assert LAYERS[other] < LAYERS[own], f"{path.relative_to(ROOT)} (layer {LAYERS[own]}) imports {other}"


def test_the_tree_in_the_docs_names_every_module_below_what_it_imports():
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    tree = text[text.index("mst_scale/\n  ") : text.index("To read it")]
    units = {unit_of(path) for path in FILES} - {"__init__", "__main__"}
    order = []
    for line in tree.splitlines():
        if line.startswith("  ") and line[2] != " ":  # names, and behind them or below what they are for
            order += takewhile(units.__contains__, (word.rstrip("/") for word in line.split()))
    assert sorted(order) == sorted(units)
    for path in FILES:
        if (own := unit_of(path)) in units:
            later = [other for other in imported_units(path) - {own} if order.index(other) > order.index(own)]
            assert not later, f"{path.relative_to(ROOT)} imports {later}, which stand below it"


def test_the_rule_sees_an_upward_import(tmp_path: Path):
    bad = tmp_path / "bad.py"
    bad.write_text("from mst_scale import engine\nimport mst_scale.cli.data\nfrom mst_scale.models.gpt import GPT\n")
    assert imported_units(bad) == {"engine", "cli", "models"}


def test_only_one_package_reads_deepspeeds_internals():
    public = ("deepspeed", "deepspeed.comm", "deepspeed.checkpointing", "deepspeed.sequence.layer")
    for path in FILES:
        if path.parent.name == "zero_shards":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            inside = [name for name in modules if name.split(".")[0] == "deepspeed" and name not in public]
            assert not inside, f"{path.relative_to(ROOT)} imports {inside}"

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


def executed_imports(path: Path) -> set[str]:
    """Return the modules of mst_scale that are imported when this file is, not those that a function imports later."""
    found, todo = set(), list(ast.parse(path.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mst_scale":
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "mst_scale"}
        elif isinstance(node, ast.If):
            todo += node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else [*node.body, *node.orelse]
        elif isinstance(node, ast.ClassDef | ast.Try | ast.With):
            todo += node.body
    return found


def module_of(path: Path) -> str:
    return ".".join(("mst_scale", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def levels(imports: dict[str, set[str]]) -> dict[str, int]:
    """Return one more than the highest level that each node imports; a circle is an error."""
    found: dict[str, int] = {}

    def level(node: str, path: tuple[str, ...]) -> int:
        assert node not in path, f"circle of imports: {' -> '.join((*path, node))}"
        if node not in found:
            found[node] = 1 + max((level(other, (*path, node)) for other in imports[node]), default=0)
        return found[node]

    for node in imports:
        level(node, ())
    return found


def test_packages_have_at_most_ten_levels():
    imports: dict[str, set[str]] = {unit: set() for unit in ORDER}
    for path in FILES:
        if unit_of(path) in ORDER:
            imports[unit_of(path)] |= {name.split(".")[1] for name in executed_imports(path) if "." in name}
    known = {unit: (others - {unit}) & {*ORDER} for unit, others in imports.items()}
    assert max(levels(known).values()) <= 10, levels(known)


def test_files_do_not_import_in_circles():
    modules = {module_of(path): executed_imports(path) for path in FILES}
    levels({name: {other for other in others if other in modules and other != name and not name.startswith(f"{other}.")}
            for name, others in modules.items()})  # fmt: skip
    with pytest.raises(AssertionError, match="circle"):
        levels({"a": {"b"}, "b": {"a"}})


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

"""Public methods are documented, unless they override a method that is; ruff checks modules, classes and functions."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import mst_scale

ROOT = Path(mst_scale.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


class Source:
    """The classes of a module, and what its imports bind names to."""

    def __init__(self, path: Path):
        tree = ast.parse(path.read_text())
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.imports: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.imports |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def inherits(self, cls: ast.ClassDef, method: str) -> bool:
        """Whether a base class has a method of this name."""
        for base in cls.bases:
            name = ast.unparse(base).partition("[")[0]
            if name in self.classes:
                if any(method == one.name for one in methods_of(self.classes[name])):
                    return True
                if self.inherits(self.classes[name], method):
                    return True
            elif hasattr(resolve(name, self.imports), method):
                return True
        return False


def resolve(name: str, imports: dict[str, str]) -> object:
    first, *rest = name.split(".")
    parts = [*imports.get(first, f"builtins.{first}").split("."), *rest]
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found
    return None


def methods_of(cls: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (node for node in cls.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"))


def undocumented(path: Path) -> Iterator[str]:
    source = Source(path)
    for cls in source.classes.values():
        for method in methods_of(cls) if not cls.name.startswith("_") else ():
            setter = any(ast.unparse(each).endswith(".setter") for each in method.decorator_list)
            if ast.get_docstring(method) is None and not setter and not source.inherits(cls, method.name):
                yield f"{cls.name}.{method.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_methods_have_docstrings(path: Path):
    assert list(undocumented(path)) == []


def test_overrides_and_private_names_are_exempt(tmp_path: Path):
    path = tmp_path / "classes.py"
    path.write_text(
        "from logging import Handler\nclass A(Handler):\n def emit(self, record): ...\n def other(self): ...\n"
        " def _own(self): ...\nclass B(A):\n def other(self): ...\n def more(self): ...\n"
        "class _C:\n def all(self): ...\n"
    )
    assert list(undocumented(path)) == ["A.other", "B.more"]

"""Public methods are documented, unless they override a method that is; ruff checks modules, classes and functions."""

import ast
import importlib
import inspect
import re
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


def in_the_reference() -> Iterator[tuple[str, object]]:
    """The functions and methods that docs/reference.md lists."""
    text = (ROOT.parent / "docs" / "reference.md").read_text()
    for kind, name, options in re.findall(r"\.\. auto(\w+):: (\S+)\n((?: +:.*\n)*)", text):
        listed = re.search(r":members: (.+)", options)
        found = {name: resolve(name, {"mst_scale": "mst_scale"})}
        if kind == "module":
            module = found.pop(name)
            names = listed[1].split(", ") if listed else [
                key for key, value in vars(module).items() if getattr(value, "__module__", "") == name
            ]  # fmt: skip
            found = {f"{name}.{key}": getattr(module, key) for key in names if not key.startswith("_")}
        for place, one in found.items():
            if inspect.isfunction(one):
                yield place, one
            elif inspect.isclass(one) and (kind == "module" or not listed):
                methods = {key: getattr(value, "__func__", value) for key, value in vars(one).items() if key[0] != "_"}
                yield from ((f"{place}.{key}", value) for key, value in methods.items() if inspect.isfunction(value))


def test_the_reference_describes_every_argument():
    listed = dict(in_the_reference())
    assert len(listed) > 100 and "mst_scale.initialize" in listed and "mst_scale.MST.weights" in listed
    lacking = []
    for name, function in listed.items():
        names = [key for key in inspect.signature(function).parameters if key not in ("self", "cls")]
        described = re.findall(r"^ +\**(\w+)(?: \(.*?\))?: ", inspect.getdoc(function) or "", re.MULTILINE)
        lacking += [f"{name}: {key}" for key in names if key not in described]
    assert not lacking

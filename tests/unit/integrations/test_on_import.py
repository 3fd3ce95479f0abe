"""A function that is called when a module is imported, and not when it is only looked for."""

import importlib
import importlib.util
import sys

import pytest

from mst_scale.integrations.on_import import when_imported

NAME = "imported_once"


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield
    sys.modules.pop(NAME, None)
    assert sys.meta_path == before, "a finder goes when its module is executed"


@pytest.mark.parametrize("looks", [0, 2])
def test_looking_for_a_module_is_no_import(source, looks):
    """As transformers and Accelerate look for DeepSpeed."""
    values = []
    when_imported(NAME, lambda module: values.append(module.value))
    for _ in range(looks):
        assert importlib.util.find_spec(NAME) is not None and not values
    importlib.import_module(NAME)
    assert values == [1]


def test_two_functions_of_one_module(source):
    values = []
    for number in range(2):
        when_imported(NAME, lambda module, number=number: values.append(number + module.value))
    assert importlib.util.find_spec(NAME) is not None
    importlib.import_module(NAME)
    assert sorted(values) == [1, 2]

import importlib
import sys

import pytest

import mst_scale
from mst_scale import _deprecated


def test_a_moved_module_warns_and_gives_the_new_modules_names(monkeypatch):
    monkeypatch.setitem(_deprecated.MOVED, "mst_scale.former_errors", "mst_scale.errors")
    monkeypatch.setitem(_deprecated.RENAMED, ("mst_scale.errors", "FormerError"), "UserError")
    with pytest.warns(DeprecationWarning, match="mst_scale.errors"):
        former = importlib.import_module("mst_scale.former_errors")
    from mst_scale.errors import UserError

    assert former.UserError is UserError and former.FormerError is UserError
    with pytest.raises(AttributeError):
        former.never_there  # noqa: B018
    del sys.modules["mst_scale.former_errors"]


@pytest.mark.parametrize("old", sorted(_deprecated.MOVED))
def test_every_moved_module_can_be_imported(old):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning) as caught:
        exec(f"import {old}")
    assert {warning.filename for warning in caught} == {"<string>"}, "that of the code that imports it"
    importlib.import_module(_deprecated.MOVED[old])


def test_a_moved_package_is_an_attribute():
    """In 0.1, `mst_scale.initialize` had imported it."""
    for old in ("distributed", "doors", "costs", "runs"):
        sys.modules.pop(f"mst_scale.{old}", None)
        vars(mst_scale).pop(old, None)
        with pytest.warns(DeprecationWarning, match=_deprecated.MOVED[f"mst_scale.{old}"]):
            getattr(mst_scale, old)
    assert mst_scale.distributed.Mesh is mst_scale.comm.Mesh
    with pytest.raises(AttributeError, match="nowhere"):
        mst_scale.nowhere  # noqa: B018


@pytest.mark.parametrize(("old", "new"), [
    ("runs.metrics", "run_logging.metrics"), ("doors.integrate", "integrations.integrate"),
    ("distributed.exchange", "comm.exchange"), ("costs.formulas", "flops.formulas"),
])  # fmt: skip
def test_modules_of_a_moved_package_can_be_imported(old, new):
    with pytest.warns(DeprecationWarning, match=new):
        found = importlib.import_module(f"mst_scale.{old}")
    now = importlib.import_module(f"mst_scale.{new}")
    public = [name for name in vars(now) if not name.startswith("_")]
    assert public and all(getattr(found, name) is getattr(now, name) for name in public)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"mst_scale.{old}_never")


@pytest.mark.parametrize(("module", "name"), sorted(_deprecated.RENAMED))
def test_every_renamed_name_is_found(module, name):
    with pytest.warns(DeprecationWarning):
        assert _deprecated.renamed(module, name) is not None


def test_an_argument_and_an_attribute_keep_their_old_names():
    @_deprecated.renamed_arguments(anew="weights_only")
    def start(*, weights_only: bool = False) -> bool:
        return weights_only

    class Run:
        revived = 3
        woken = _deprecated.renamed_attribute("woken", "revived")

    with pytest.warns(DeprecationWarning, match="weights_only"):
        assert start(anew=True)
    with pytest.warns(DeprecationWarning, match="Run.revived"):
        assert Run().woken == 3


@pytest.mark.parametrize("name", mst_scale.__all__)
def test_public_names_are_not_looked_up_under_old_paths(name):
    old = {path.removeprefix("mst_scale.") for path in _deprecated.MOVED}
    assert mst_scale._WHERE[name].split(".")[0] not in old
    assert hasattr(mst_scale, name)

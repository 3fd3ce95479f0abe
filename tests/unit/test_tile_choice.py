"""Among which tiles a GPU's kernels choose."""

import os

import pytest

from mst_scale import tile_choice
from mst_scale.errors import UserError

TILES = ("a", "b", "c")


@pytest.mark.parametrize(("said", "taken"), [(None, TILES), ("", TILES), ("0", ("a",)), ("2", ("c",)), ("4", ("b",))])
def test_all_or_the_one_of_a_number(monkeypatch, said, taken):
    monkeypatch.delenv(tile_choice.VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(tile_choice.VARIABLE, said)
    assert tile_choice.among(TILES) == taken


def test_a_wrong_number_is_said(monkeypatch):
    monkeypatch.setenv(tile_choice.VARIABLE, "-1")
    with pytest.raises(UserError, match="MST_SCALE_TILE=-1"):
        tile_choice.among(TILES)


@pytest.mark.parametrize("said", [None, "", "1"])
def test_one_for_a_while(monkeypatch, said):
    monkeypatch.delenv(tile_choice.VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(tile_choice.VARIABLE, said)
    with pytest.raises(RuntimeError), tile_choice.one():
        assert tile_choice.among(TILES) == (("b",) if said else ("a",))
        raise RuntimeError
    assert os.environ.get(tile_choice.VARIABLE) == said

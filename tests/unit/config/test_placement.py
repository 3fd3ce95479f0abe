"""Whether tensor-parallel groups stay inside their nodes, as the launchers ask."""

import pytest

from mst_scale.config.placement import main, overrides, refusal


@pytest.mark.parametrize(
    ("tensor", "nodes", "cure"),
    [
        (1, {"a": 3}, None),
        (4, {"a": 8, "b": 4}, None),
        (8, {"a": 4}, "--set tensor_parallel.autotp_size=4"),
        (4, {"a": 8, "b": 6}, "the 6 processes of b are not whole groups"),
        (4, {"a": 3}, "--set tensor_parallel.autotp_size=1"),
    ],
)
def test_whole_groups(tensor, nodes, cure):
    said = refusal(tensor, nodes)
    assert said is None if cure is None else cure in said


def test_an_order_of_ones_own_is_refused_for_groups_only():
    assert refusal(1, {"a": 2}, "--map-by") is None and "leave --map-by out" in refusal(2, {"a": 2}, "--map-by")


def test_overrides_are_read_as_pretrain_reads_them():
    assert overrides(["--out", "x", "--set", "a=1", "--set=b=2"]) == ["a=1", "b=2"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["demo", "a=2", "a=2", "--", "--set", "tensor_parallel.autotp_size=4"], 0),  # two lines of one node
        (["demo", "a=2", "--", "--set", "tensor_parallel.autotp_size=4"], 2),
        (["demo", "a=2", "--mapped", "-rr", "--", "--set", "tensor_parallel.autotp_size=2"], 2),
        (["demo", "a=2", "--", "--set", "tensor_parallel.autotp_size=many"], 0),  # pretrain says it
        (["no-such-config", "a=2", "--"], 0),
    ],
)
def test_one_line_or_nothing(words, code, capsys):
    assert main(words) == code
    assert capsys.readouterr().out.count("\n") == (code == 2)

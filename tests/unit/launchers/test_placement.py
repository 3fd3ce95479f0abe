"""Whether tensor-parallel groups stay inside their nodes, which the launchers check before anything runs."""

import contextlib

import pytest

from mst_scale.errors import UserError
from mst_scale.launch.command_line import check_run, read_request


def groups_of(size: object) -> list[str]:
    return ["--set", f"tensor_parallel.autotp_size={size}", "--set", "model.n_head=8"]


@pytest.mark.parametrize(
    ("size", "nodes", "named"),
    [
        (1, {"a": 3}, None),
        (4, {"a": 8, "b": 4}, None),
        (8, {"a": 4}, "--set tensor_parallel.autotp_size=4"),
        (4, {"a": 8, "b": 6}, "the 6 processes of b cannot be divided into groups of 4"),
        (4, {"a": 3}, "--set tensor_parallel.autotp_size=1"),
        ("many", {"a": 3}, "autotp_size must be a positive integer"),
    ],
)
def test_whole_groups_on_every_node(size, nodes, named):
    with contextlib.nullcontext() if named is None else pytest.raises(UserError, match=named):
        check_run(read_request("demo", groups_of(size)), nodes.items())


def test_a_node_may_have_several_lines():
    check_run(read_request("demo", groups_of(4)), [("a", 2), ("a", 2)])
    with pytest.raises(UserError):
        check_run(read_request("demo", groups_of(4)), [("a", 2), ("b", 2)])


def test_another_order_of_ranks_is_rejected_for_groups_only():
    check_run(read_request("demo", groups_of(1)), [("a", 2)], "--map-by")
    with pytest.raises(UserError, match="leave --map-by out"):
        check_run(read_request("demo", groups_of(2)), [("a", 2)], "--map-by")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--method", "nope"], "nope"),
        (["--set", "mst.sparsity.max=7"], "mst.sparsity.max"),
        (["--steps", "0"], "training.steps"),
    ],
)
def test_a_wrong_run_is_rejected_before_anything_starts(arguments, named):
    with pytest.raises(UserError, match=named):
        read_request("demo", arguments)

"""Stated keys of the block mst that the method does not read are named; those of presets, recipes and runs are not."""

import pytest

from mst_scale.config import METHODS, RECIPES, describe_unread, load, to_dict
from mst_scale.config.presets import ready_configs

MINIMAL = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize(
    ("mst", "unread"),
    [
        ({"method": "rigl", "sparsity": {"warmup": 0.1}}, ["sparsity.warmup"]),
        ({"method": "rigl", "sparsity": {"sparse_tokens": 20}}, ["sparsity.sparse_tokens"]),
        ({"method": "rigl", "topology": {"mest_lambda": 2.0}}, ["topology.mest_lambda"]),
        ({"method": "rigl", "topology": {"update_decay": 0.9}}, ["topology.update_decay"]),
        ({"method": "rigl", "topology": {"update_schedule": "decay-n-cosine", "update_decay": 0.9}}, []),
        ({"method": "rigl", "topology": {"interval": 10, "update_fraction": 0.2}}, []),
        ({"method": "mest", "topology": {"mest_lambda": 2.0}}, []),
        ({"method": "gmp", "sparsity": {"start": 0.2, "warmup": 0.5, "ultra": 0.1}}, ["sparsity.ultra"]),
        ({"method": "gmp", "sparsity": {"warmup_moves": "staged", "stages": 9}}, []),
        ({"method": "gmp", "sparsity": {"stages": 9}}, ["sparsity.stages"]),
        ({"method": "gmp", "topology": {"update_fraction": 0.3, "interval": 10}}, ["topology.update_fraction"]),
        ({"method": "static", "topology": {"update_fraction": 0.3}}, ["topology.update_fraction"]),
        ({"method": "mst", "sparsity": {"turn": 0.1, "start": 9}}, ["sparsity.turn", "sparsity.start"]),
        ({"method": "mst", "sparsity": {"variation": "sparse", "ultra": 0.1}}, ["sparsity.ultra"]),
        ({"method": "mst", "sparsity": {"warmup": 0.1, "restore_moves": "continuous", "stages": 2}}, []),
        ({"method": "acdc", "sparsity": {"turn": 0.1, "restore": 0.3}}, ["sparsity.restore"]),
        ({"method": "dense", "sparsity": {"max": 0.8}}, ["sparsity.max"]),
        ({"method": "dense", "topology": {"regrow": False}}, ["topology.regrow"]),
        (
            {"method": "top-kast", "topology": {"policy": "rigl", "interval": 10}},
            ["topology.policy", "topology.interval"],
        ),
        ({"method": "spartan", "sparsity": {"warmup": 0.5}, "topology": {"interval": 10}}, []),
        ({"method": "powerprop", "sparsity": {"max": 0.8}}, ["sparsity.max"]),
        (
            {
                "method": "powerprop",
                "sparsity": {"variation": "sparse", "max": 0.8},
                "topology": {"policy": "rigl", "interval": 10},
            },
            [],
        ),
    ],
)
def test_stated_keys_without_effect_are_named_in_one_line(mst, unread):
    described = describe_unread({**MINIMAL, "mst": mst})
    if not unread:
        assert described is None
        return
    names = ", ".join(f"mst.{key}" for key in unread)
    assert described.startswith(
        f"{names} {'has' if len(unread) == 1 else 'have'} no effect with method {mst['method']}"
    )
    assert ("mst.sparsity.variation sparse" in described) == (mst.get("sparsity", {}).get("variation") == "sparse")


@pytest.mark.parametrize("name", [*METHODS])
def test_no_preset_and_no_resolved_config_has_such_keys(name):
    assert describe_unread({**MINIMAL, "mst": {"method": name}}) is None
    assert describe_unread(to_dict(load({**MINIMAL, "mst": {"method": name}}))) is None


def test_no_recipe_and_no_ready_made_config_has_such_keys():
    for name in RECIPES:
        assert describe_unread({**MINIMAL, "recipe": name}) is None
        assert describe_unread({**MINIMAL, "recipe": name}, ["mst.sparsity.variation=sparse"]) is None
        assert describe_unread({**MINIMAL, "recipe": name}, method="rigl") is None
    for name in ready_configs():
        assert describe_unread(name) is None


def test_the_keys_of_a_file_for_another_method_are_not_named():
    own = {**MINIMAL, "mst": {"method": "mst", "sparsity": {"warmup": 0.1}}}
    assert describe_unread(own, method="rigl") is None
    assert "warmup" in describe_unread(own, ["mst.sparsity.warmup=0.2"], method="rigl")
    assert "warmup" in describe_unread(own, ["mst.sparsity.variation=sparse"])
    assert "warmup" in describe_unread({**MINIMAL, "mst": {"sparsity": {"warmup": 0.1}}}, method="rigl")

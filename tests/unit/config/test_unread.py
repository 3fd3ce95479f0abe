"""Stated keys that a config does not read are named in one line; those of presets, recipes and runs are not."""

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
        ({"method": "mst", "sparsity": {"initial": "magnitude"}}, ["sparsity.initial"]),
        ({"method": "mst", "sparsity": {"initial": "magnitude", "warmup": 0}}, []),
        ({"method": "rigl", "sparsity": {"initial": "magnitude"}}, []),
        (
            {"method": "rigl", "topology": {"revive_dead_units": False, "reset_momentum": True, "regrow": False}},
            ["topology.revive_dead_units", "topology.reset_momentum"],
        ),
        (
            {"method": "gmp", "topology": {"regrow": False, "random_ratio": 0.5, "grown_moments": "zero"}},
            ["topology.regrow", "topology.random_ratio", "topology.grown_moments"],
        ),
        ({"method": "spdf", "topology": {"grown_moments": "zero", "revive_dead_units": False}}, []),
        (
            {"method": "dense", "seed": 3, "targets": {"lm_head": False}, "compute": {"backend": "cpu"}},
            ["seed", "targets.lm_head", "compute.backend"],
        ),
        ({"method": "monarch", "targets": {"lm_head": True}}, []),
        (
            {"method": "dense", "attention": {"pattern": "strided", "stride": 8}},
            ["attention.pattern", "attention.stride"],
        ),
        ({"method": "dense", "attention": {"pattern": "strided", "stride": 8, "dense_from": 9}}, []),
        (
            {"method": "sd", "attention": {"pattern": "strided", "phase_strides": {"restore": 8, "ultra": 8}}},
            ["attention.phase_strides.restore"],
        ),
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


@pytest.mark.parametrize(
    ("raw", "described"),
    [
        (
            {"mst": {"method": "rigl", "attention": {"stride": 8}}},
            "mst.attention.stride has no effect with mst.attention.pattern dense",
        ),
        ({"training": {"decay": 0.3}}, "training.decay has no effect with training.lr_schedule cosine"),
        ({"training": {"decay": 0.3, "lr_schedule": "wsd"}}, None),
        ({"training": {"eval_data": "x"}}, "training.eval_data has no effect without training.eval_tasks"),
        ({"training": {"checkpoint_form": "compact"}}, "with mst.compute.compact off"),
        ({"training": {"spike": {"skip": 2}}}, "training.spike.skip has no effect with training.spike.action log"),
        ({"training": {"spike": {"action": "rollback", "skip": 2}}}, None),
        ({"training": {"spike": {"action": "off", "window": 9}}}, "training.spike.window has no effect"),
        ({"training": {"spike": {"window": 9}}}, None),
        (
            {"training": {"baseline": {"flops": 1.0, "val_loss": 1.0}}},
            "training.baseline.flops, training.baseline.val_loss have no",
        ),
        ({"training": {"sparse_rate": 1.0}}, "training.sparse_rate has no effect with method dense"),
        ({"training": {"sparse_rate": 1.0}, "mst": {"method": "mst"}}, None),
        ({"model": {"mask_share": 0.2}}, "model.mask_share has no effect with model.arch gpt"),
        ({"model": {"mask_share": 0.2, "arch": "bert"}}, None),
        ({"data": {"dir": "x", "val_fraction": 0.1}}, "data.val_fraction has no effect without data.source"),
        ({"data": {"dir": "x", "source": "stdlib", "val_fraction": 0.1}}, None),
        ({"mst": {"method": "top-kast", "sparsity": {"initial": "magnitude"}}}, "mst.sparsity.initial has no effect"),
        ({"mst": {"method": "sr-ste", "sparsity": {"distribution": "uniform"}}}, "mst.sparsity.distribution has no"),
        ({"mst": {"method": "spartan", "sparsity": {"distribution": "uniform"}}}, None),
        ({"mst": {"method": "sr-ste", "seed": 3}}, "mst.seed has no effect with method sr-ste"),
        ({"mst": {"method": "powerprop", "compute": {"backend": "dense"}}}, "mst.compute.backend has no effect"),
        ({"mst": {"method": "fixed", "seed": 3}}, "mst.seed has no effect with method fixed"),
        ({"mst": {"method": "rigl", "seed": 3, "sparsity": {"initial": "magnitude"}}}, None),
        ({"model": {"n_layer": 2}, "mst": {"method": "tiny"}}, "model.n_layer has no effect with method tiny"),
        ({"model": {"n_layer": 6}, "mst": {"method": "tiny"}}, None),
        (
            {"training": {"decay": 0.3}, "model": {"mask_share": 0.2}},
            "model.mask_share has no effect with model.arch gpt: leave it out; training.decay has no effect",
        ),
    ],
)
def test_keys_of_every_block_are_named_with_the_reason(raw, described):
    found = describe_unread({**MINIMAL, **raw})
    assert found is None if described is None else described in found


def test_the_model_of_a_file_is_not_named_for_another_method():
    own = {**MINIMAL, "model": {"n_layer": 2}, "mst": {"method": "mst"}}
    assert describe_unread(own, method="tiny") is None
    assert "model.n_layer" in describe_unread(own, ["model.n_layer=3"], method="tiny")


def test_a_resolved_config_states_every_key_and_none_is_named():
    resolved = to_dict(load({**MINIMAL, "recipe": "mst-best", "model": {"seq_length": 64}}, method="rigl"))
    assert describe_unread(resolved) is None
    assert "training.spike.skip" in describe_unread(resolved, ["training.spike.skip=3"])


def test_only_some_blocks():
    raw = {**MINIMAL, "training": {"sparse_rate": 1.0}, "mst": {"method": "dense", "sparsity": {"max": 0.9}}}
    assert describe_unread(raw, blocks=("mst",)) == "mst.sparsity.max has no effect with method dense: leave it out"


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

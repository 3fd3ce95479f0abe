"""An optimizer that DeepSpeed or torch would reject is one line that names the key, before anything is made."""

import pytest
import torch

import mst_scale
from mst_scale.errors import UserError
from mst_scale.zero_shards import check_configured_optimizer, optimizer_checks
from tests.support import pool
from tests.support.toy_engine import mst_config
from tests.support.toys import toy

ALLOWED = {"zero_allow_untested_optimizer": True}


def config_of(kind, stage=1, zero=None, **params):
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}, "zero_optimization": {"stage": stage}} | (
        zero or {}
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("AdamW", lrr=1), "optimizer.params.lrr: AdamW has no such parameter: the nearest is 'lr'"),
        (config_of("AdamW", torch_adam=True, bias_correction=True), "optimizer.params.bias_correction: AdamW has no"),
        (config_of("AdamW", torch_adam=3), "optimizer.params.torch_adam must be true or false, not 3"),
        (config_of("AdamW", amsgrad=True), "optimizer.params.amsgrad: DeepSpeed's AdamW has no AMSGrad"),
        (config_of("Muon", momentun=0.9), "optimizer.params.momentun: Muon has no such parameter"),
        (config_of("Adagrad", rho=0.9), "optimizer.params.rho: Adagrad has no such parameter"),
        (config_of("sgd"), "optimizer.type = 'sgd' is not an optimizer: the nearest is 'SGD'"),
        (config_of("SGD"), "optimizer.type = SGD is not one that DeepSpeed has tested with ZeRO: set zero_allow_un"),
        (
            config_of("SGD", stage=0, nesterov=True),
            "optimizer.params are not valid for SGD: Nesterov momentum",
        ),
        (config_of("AdamW", torch_adam=True, lr=-1.0), "optimizer.params are not valid for AdamW: Invalid learning"),
        (config_of("Lion", zero=ALLOWED), "optimizer.type = Lion: DeepSpeed's FusedLion does not run on cpu"),
        (config_of("Lamb", zero=ALLOWED), "optimizer.type = Lamb: DeepSpeed's FusedLamb does not run on cpu"),
        (config_of("MuAdam"), "optimizer.type = MuAdam needs the package mup"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing"),
    ],
)
def test_a_wrong_optimizer_is_one_line(config, message):
    with pytest.raises(UserError) as met:
        check_configured_optimizer(config)
    assert message in str(met.value) and "\n" not in str(met.value)


@pytest.mark.parametrize(
    "config",
    [
        config_of("AdamW", betas=[0.9, 0.95], adam_w_mode=False),
        config_of("Adam", torch_adam=True, amsgrad=True, fused=True),
        config_of("AdamW", fp32_optimizer_states=True),
        config_of("muon", muon_lr=1e-2, adam_w_mode=True),
        config_of("adagrad", lr_decay=0.1),
        config_of("SGD", stage=0, momentum=0.9, nesterov=True),
        config_of("RMSprop", stage=3, zero=ALLOWED, centered=True),
    ],
)
def test_a_right_optimizer_passes(config):
    check_configured_optimizer(config)


@pytest.mark.parametrize("kind", ["AdamW", "Lion", "Adagrad", "Muon"])
def test_weights_on_an_accelerator_are_not_for_an_optimizer_on_the_cpu(kind, monkeypatch):
    """DeepSpeed's optimizers for the CPU assert in the first step that weights are there, which stage 0 does not do."""
    offload = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    sharded = {"zero_optimization": {**offload["zero_optimization"], "stage": 1}, **ALLOWED}
    check_configured_optimizer(config_of(kind, zero=offload))
    monkeypatch.setattr(optimizer_checks, "on_cpu", lambda: False)
    with pytest.raises(UserError, match="set the stage to 1, or remove offload_optimizer"):
        check_configured_optimizer(config_of(kind, zero=offload))
    check_configured_optimizer(config_of(kind, zero=sharded))
    check_configured_optimizer(config_of("SGD", zero=offload))


def own_optimizers(rank, world, method):
    """What `initialize` says of an optimizer that the loop makes itself, and of a config's with a wrong key."""
    offload = {"offload_optimizer": {"device": "cpu"}}

    def said(make, **extra):
        model = toy()
        try:
            mst_scale.initialize(
                model=model, optimizer=make(model), config=mst_config(2, world, method=method, **extra)
            )
        except UserError as error:
            return str(error)
        return None

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=1e-3)

    return [
        said(lambda model: sgd(model.parameters())),
        said(lambda model: sgd),
        said(lambda model: torch.optim.AdamW(model.parameters()), zero_optimization=offload),
        said(lambda model: None, optimizer={"type": "AdamW", "params": {"lr": 1e-3, "lrr": 1}}),
        said(lambda model: sgd, **ALLOWED),
    ]


@pytest.mark.parametrize("method", ["dense", "rigl"])
def test_a_loop_gets_one_line(method):
    untested = "the optimizer SGD is not one that DeepSpeed has tested with ZeRO: set zero_allow_untested_optimizer"
    words = [untested, untested, "the optimizer AdamW is not made for offload_optimizer", "optimizer.params.lrr"]
    for found in pool.run(own_optimizers, 2, method):
        assert found[-1] is None
        assert all(said.startswith(expected) for said, expected in zip(found, words, strict=False)), found

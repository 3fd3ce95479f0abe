"""Values that cannot be meant are refused with the key and a usable range; what anybody uses is not."""

import dataclasses
import typing

import pytest

from mst_scale.config import METHODS, load
from mst_scale.config.limits import USABLE
from mst_scale.config.load import BLOCKS
from mst_scale.errors import UserError

MINIMAL = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
# Numbers that nothing is trained with, learning rates (a high one diverges, which is seen), and shares of a whole,
# which the blocks themselves keep in [0, 1].
WITHOUT_A_RANGE = {
    "training.rival.flops", "training.rival.val_loss", "training.rival.spread", "training.min_lr", "mst.options.rate",
    "mst.options.alpha", "mst.options.floor", "mst.options.extra", "model.mask_share", "data.val_fraction",
    "training.sparse_rate", "mst.sparsity.max", "mst.topology.update_fraction", "mst.topology.random_ratio",
    "mst.topology.update_decay",
}  # fmt: skip


def stated(key, value):
    """A config that states one key."""
    raw = value
    for part in reversed(key.split(".")):
        raw = {part: raw}
    if key.startswith("optimizer.params."):
        raw["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, **raw["optimizer"]["params"]}}
    return {**MINIMAL, **raw}


def refusal(key, value):
    if key.startswith("mst.options."):
        name = key.removeprefix("mst.options.")
        method = next(m for m, of in METHODS.items() if name in {f.name for f in dataclasses.fields(of.options)})
        raw = {**MINIMAL, "mst": {"method": method, "options": {name: value}}}
    else:
        raw = stated(key, value)
    try:
        load(raw)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gradient_clipping", 1e-320), ("optimizer.params.eps", 1e308), ("optimizer.params.weight_decay", 2147483648),
        ("optimizer.params.betas", [0.9, 1 - 1e-12]), ("fp16.initial_scale_power", 1000), ("model.init_std", 1e-300),
        ("mst.topology.mest_lambda", 1e308), ("mst.options.sharpness", 1e308),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_meant_is_refused_with_its_key_and_range(key, value):
    told = refusal(key, value)
    assert told is not None and key in told and str(USABLE[key]) in told and "\n" not in told


@pytest.mark.parametrize("key", USABLE)
def test_every_range_is_held_at_its_ends(key):
    usable = USABLE[key]
    for value in (usable.least, usable.most, *([0] if usable.zero else [])):
        assert value in usable
        told = refusal(key, value)  # other keys of the block may ask for more
        assert told is None or str(usable) not in told
    for value in (usable.most * 2 + 1, -1e-9, *([usable.least / 2] if usable.least else [])):
        told = refusal(key, value)
        assert told is not None and key in told


@pytest.mark.parametrize("rate", [1e-30, 30.0, 1e30])
def test_learning_rates_have_no_range(rate):
    assert refusal("optimizer.params.lr", rate) is None


@pytest.mark.parametrize("key", ["gradient_clipping", "optimizer.params.eps", "optimizer.params.weight_decay"])
def test_what_trainer_fills_in_is_left_to_it(key):
    assert refusal(key, "auto") is None


def numbers(cls, path):
    """Keys that take a number with a point and no duration."""
    for name, hint in typing.get_type_hints(cls).items():
        options = typing.get_args(hint) or (hint,)
        for option in options:
            if dataclasses.is_dataclass(option):
                yield from numbers(option, f"{path}.{name}")
        if float in options and int not in options:
            yield f"{path}.{name}"


def test_every_number_of_our_blocks_has_a_range_or_a_reason():
    ours = {key for block, cls in BLOCKS.items() for key in numbers(cls, block)}
    ours |= {key for method in METHODS.values() for key in numbers(method.options, "mst.options")}
    assert ours == {key for key in USABLE if key.startswith(("mst.", "model.", "training."))} | WITHOUT_A_RANGE

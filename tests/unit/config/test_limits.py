"""Values that cannot be meant are refused with the key and a usable range; what anybody uses is not."""

import typing

import pytest
from annotated_types import Ge, Gt, Le, Lt

from mst_scale.config import METHODS, load
from mst_scale.config.check import check
from mst_scale.config.deepspeed import DeepSpeedKeys
from mst_scale.config.load import BLOCKS
from mst_scale.errors import UserError
from mst_scale.pretrain.learning_rate import learning_rate
from mst_scale.validation import ZeroOr, keys_of

MINIMAL = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
# Numbers that nothing is trained with, and learning rates: a high one diverges, which is seen.
WITHOUT_A_RANGE = {
    "training.baseline.flops", "training.baseline.val_loss", "training.baseline.spread", "training.min_lr",
    "mst.options.rate", "optimizer.params.lr", "optimizer.params.muon_lr",
    "optimizer.params.adam_lr",
}  # fmt: skip


def limits(annotation, metadata=()):
    """(type, limits) of every number that an annotation takes, in a union or a list too."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *own = typing.get_args(annotation)
        metadata = [*metadata, *(limit for one in own for limit in getattr(one, "metadata", [one]))]
    if annotation in (int, float):
        yield annotation, metadata
    elif typing.get_origin(annotation) is not typing.Literal:
        for inner in typing.get_args(annotation):
            yield from limits(inner, metadata)


def ends(metadata):
    """(least, most, whether 0 is allowed too)."""
    for one in metadata:
        if isinstance(one, ZeroOr):
            return one.least, one.most, True
    least = next((one.ge if isinstance(one, Ge) else one.gt for one in metadata if isinstance(one, Ge | Gt)), None)
    most = next((one.le if isinstance(one, Le) else one.lt for one in metadata if isinstance(one, Le | Lt)), None)
    return least, most, False


ALL = [
    *(found for block, cls in BLOCKS.items() for found in keys_of(cls, block)),
    *keys_of(DeepSpeedKeys, ""),
    *{key: (key, field) for of in METHODS.values() for key, field in keys_of(of.options, "mst.options")}.values(),
]
NUMBERS = [(key, *number) for key, field in ALL for number in limits(field.annotation, field.metadata)]
RANGES = [(key, *ends(metadata)) for key, kind, metadata in NUMBERS if kind is float and None not in ends(metadata)]


def stated(key, value):
    """A config that states one key."""
    raw = value
    for part in reversed(key.split(".")):
        raw = {part: raw}
    if key.startswith("optimizer.params."):
        raw["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, **raw["optimizer"]["params"]}}
    return {**MINIMAL, **raw}


def rejection(key, value):
    if key == "optimizer.params.betas" and not isinstance(value, list):
        value = [0.9, value]
    if key.startswith("mst.options."):
        name = key.removeprefix("mst.options.")
        method = next(m for m, of in METHODS.items() if name in of.options.__pydantic_fields__)
        raw = {**MINIMAL, "mst": {"method": method, "options": {name: value}}}
    else:
        raw = stated(key, value)
    try:
        load(raw)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("key", "value", "usable"),
    [
        ("gradient_clipping", 1e-320, "0 (no clipping) or a number from 1e-06 to 1e+12"),
        ("optimizer.params.eps", 1e308, "0 (none) or a number from 1e-30 to 1"),
        ("optimizer.params.weight_decay", 2147483648, "0 (none) or a number from 1e-12 to 100"),
        ("optimizer.params.betas", [0.9, 1 - 1e-12], "two numbers"),
        ("fp16.initial_scale_power", 1000, "a number from 0 to 32"),
        ("model.init_std", 1e-300, "a number from 1e-06 to 1"),
        ("mst.topology.mest_lambda", 1e308, "or a number from 1e-12 to 1e+12"),
        ("mst.options.sharpness", 1e308, "a number from 1e-06 to 1,000,000"),
    ],
)
def test_an_invalid_value_is_rejected_with_its_key_and_range(key, value, usable):
    reported = rejection(key, value)
    assert reported is not None and key in reported and usable in reported and "\n" not in reported


EXCLUDED = [
    ("model.mask_share", 0), ("model.mask_share", 1), ("mst.sparsity.max", 1),
    ("mst.sparsity.sparse_tokens", 0), ("mst.options.floor", 0), ("data.val_fraction", 1),
]  # fmt: skip


@pytest.mark.parametrize(("key", "least", "most", "zero"), RANGES, ids=[one[0] for one in RANGES])
def test_every_range_includes_or_excludes_its_ends(key, least, most, zero):
    for value in (least, most, *([0] if zero else [])):
        assert rejection(key, float(value)) is None or (key, value) in EXCLUDED
    for value in (most * 2 + 1.5, -1e-9, *([least / 2] if least else [])):
        reported = rejection(key, value)
        assert reported is not None and key in reported and "\n" not in reported


@pytest.mark.parametrize("rate", [1e-30, 30.0, 1e30])
def test_learning_rates_have_no_range(rate):
    assert rejection("optimizer.params.lr", rate) is None


@pytest.mark.parametrize("key", ["gradient_clipping", "optimizer.params.eps", "optimizer.params.weight_decay"])
def test_auto_values_are_left_to_trainer(key):
    assert rejection(key, "auto") is None


def test_every_integer_has_a_largest_value():
    without = {key for key, kind, metadata in NUMBERS if kind is int and ends(metadata)[1] is None}
    assert without == {"steps_per_print"}


def test_every_number_has_a_range_or_a_reason():
    """A number of ours, or of DeepSpeed's that is validated here."""
    without = {key for key, kind, metadata in NUMBERS if kind is float and None in ends(metadata)}
    assert without == WITHOUT_A_RANGE


@pytest.mark.parametrize(
    ("training", "reached"),
    [
        ({"warmup": 900, "decay": 500}, 72),
        ({"warmup": 0.9, "decay": 0.9}, 56),
        ({"warmup": 200, "decay": 0.2, "restart": 100}, 46),
        ({"warmup": 10, "decay": 400, "restart": 100}, 25),
    ],
)
def test_a_warmup_that_would_end_late_in_the_decay_is_rejected(training, reached):
    config = {**MINIMAL, "training": {"steps": 1000, "lr_schedule": "wsd", "min_lr": 0.0, **training}}
    with pytest.raises(UserError, match=rf"training\.warmup .* do not fit .* about {reached}% of its peak"):
        check(load(config))
    part = training.get("restart", 1000)
    highest = max(learning_rate(step, 1.0, load(config).training) for step in range(part))
    assert 100 * highest == pytest.approx(reached, abs=1)
    for fine in ({"warmup": 0.5, "decay": 0.5}, {"warmup": 0.05, "decay": 1.0}):
        check(load({**MINIMAL, "training": {"steps": 1000, "lr_schedule": "wsd", **fine}}))


@pytest.mark.parametrize("key", ["bf16.enabled", "zero_optimization.offload_optimizer"])
def test_values_that_only_trainer_fills_in_are_rejected(key):
    with pytest.raises(UserError, match=rf"{key} = .auto."):
        check(load(MINIMAL, [f"{key}=auto"]))


@pytest.mark.parametrize(("n", "m", "stated"), [(1, 3, 0.666667), (7, 10, 0.3), (1, 128, 0.992188)])
def test_the_sparsity_that_n_of_m_asks_for_is_accepted(n, m, stated):
    mst = {"method": "sr-ste", "options": {"n": n, "m": m}, "sparsity": {"max": stated}}
    assert load({**MINIMAL, "mst": mst}).mst.sparsity.max == stated

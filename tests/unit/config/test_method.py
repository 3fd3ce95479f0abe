"""The keys of a config give the right attention pattern at every step."""

import pytest

from mst_scale.config import load
from mst_scale.errors import UserError


def pieces(method="mst", **attention):
    """(first step, kind, stride) of a run of 140 steps: warm-up to 10, ultra to 110, restoration to 120, dense."""
    raw = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "training": {"steps": 140},
        "mst": {"method": method, "attention": attention},
    }
    mst = load(raw).mst
    schedule = mst.attention_schedule(140)
    return [(start, pattern.kind, pattern.stride) for start, pattern in schedule.pieces]


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ({"stride": 64}, [(0, "strided", 64), (120, "dense", 1)]),
        ({"stride": 64, "dense_from": "ultra_end"}, [(0, "strided", 64), (110, "dense", 1)]),
        ({"stride": 64, "dense_from": 100}, [(0, "strided", 64), (100, "dense", 1)]),
        ({"stride": 64, "dense_from": 0.5}, [(0, "strided", 64), (70, "dense", 1)]),
        (
            {"stride": 64, "phase_strides": {"warmup": 32, "restore": 16}},
            [(0, "strided", 32), (10, "strided", 64), (110, "strided", 16), (120, "dense", 1)],
        ),
        (
            {"pattern": "fixed", "phase_strides": {"ultra": 32}, "dense_from": 50},
            [(0, "fixed", 256), (10, "fixed", 32), (50, "dense", 1)],
        ),
        ({"pattern": "dense", "phase_strides": {"ultra": 32}}, [(0, "dense", 1)]),
    ],
)
def test_the_pattern_of_every_step(attention, expected):
    assert pieces(**attention) == expected


def test_attention_is_dense_from_the_start_where_restoration_begins_the_run():
    """`gd` restores from step 0 on, so that its ultra phase has ended before the run."""
    assert pieces(method="gd", stride=64, pattern="strided", dense_from="ultra_end") == [(0, "dense", 1)]
    restored = pieces(method="gd", stride=64, pattern="strided", dense_from="restore_end")
    assert restored == [(0, "strided", 64), (120, "dense", 1)]


def test_a_stride_of_a_phase_must_be_one():
    with pytest.raises(UserError, match=r"mst.attention.phase_strides.ultra must be .*, not 0"):
        pieces(phase_strides={"ultra": 0})
    with pytest.raises(UserError, match=r"phase_strides takes dense, warmup, ultra, restore"):
        pieces(phase_strides={"sparse": 3})

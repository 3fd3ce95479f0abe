from __future__ import annotations

import pytest

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import AttentionSchedule, Pattern, strides_per_phase

SPARSE, DENSE = Pattern("strided", 256), Pattern("dense")


def test_sparse_until_a_step_then_dense() -> None:
    schedule = strides_per_phase([(0, SPARSE), (120_000, DENSE)])
    assert [schedule.pattern_at(step) for step in (0, 119_999, 120_000, 139_999)] == [SPARSE, SPARSE, DENSE, DENSE]


def test_never_dense_and_always_dense() -> None:
    assert strides_per_phase([(0, SPARSE)]).pattern_at(10**9) == SPARSE
    assert strides_per_phase([(0, SPARSE), (0, DENSE)]).pattern_at(0) == DENSE
    assert AttentionSchedule().pattern_at(7) == DENSE


def test_phases_with_one_pattern_are_one_piece() -> None:
    assert strides_per_phase([(0, SPARSE), (10, SPARSE), (30, DENSE)]).pieces == ((0, SPARSE), (30, DENSE))


def test_a_stride_per_phase() -> None:
    schedule = strides_per_phase([(0, Pattern("strided", 128)), (10, SPARSE), (30, DENSE)])
    assert [schedule.pattern_at(s).stride for s in (0, 9, 10, 29)] == [128, 128, 256, 256]
    assert schedule.pattern_at(30) == DENSE
    assert schedule.pattern_at(3).stride == 128  # any order: a resumed run asks for an earlier step


def test_a_phase_without_steps_is_left_out() -> None:
    schedule = strides_per_phase([(0, Pattern("strided", 128)), (0, SPARSE), (5, DENSE)])
    assert schedule.pieces == ((0, SPARSE), (5, DENSE))


@pytest.mark.parametrize("pieces", [(), ((1, SPARSE),), ((0, SPARSE), (5, DENSE), (5, SPARSE))])
def test_bad_pieces_are_rejected(pieces: tuple[tuple[int, Pattern], ...]) -> None:
    with pytest.raises(UserError, match="attention schedule"):
        AttentionSchedule(pieces)
    with pytest.raises(UserError, match="negative"):
        AttentionSchedule().pattern_at(-1)

"""What do the words of a config choose: which schedule, which attention, which names?

Values and arithmetic only, without torch and without a model, so that a plan or a table starts at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from fnmatch import fnmatchcase

from mst_scale.config import AttentionConfig, MSTConfig, TargetsConfig
from mst_scale.config.check import require_method
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.hybrid_sparse_attention.schedule import AttentionSchedule, strides_per_phase
from mst_scale.sparsity_variation import Schedule, Variation


def variation_of(mst: MSTConfig) -> Variation:
    """The sparsity schedule that a config states."""
    require_method(mst)
    s, t = mst.sparsity, mst.topology
    return Variation(
        pattern=s.variation,
        max_sparsity=s.max,
        warmup=s.warmup,
        ultra=s.ultra,
        restore=s.restore,
        stages=s.stages,
        warmup_shape=s.warmup_moves,
        restore_shape=s.restore_moves,
        turn=s.turn,
        interval=t.interval,
        update=t.update_schedule,
        update_fraction=t.update_fraction,
        update_decay=t.update_decay,
    )


def stays_dense(mst: MSTConfig) -> bool:
    """Whether no weight is ever masked."""
    require_method(mst)
    return mst.stays_dense


def attention_schedule_of(attention: AttentionConfig, schedule: Schedule) -> AttentionSchedule:
    """The pattern of every step: the config's, until attention turns dense."""
    if attention.pattern == "dense":
        return AttentionSchedule()
    if attention.dense_from == "restore_end":
        dense_from: int | None = schedule.sparse_until
    elif attention.dense_from == "ultra_end":
        restored_from = schedule.first_step("restore")  # 0 in a run that begins with it
        dense_from = schedule.sparse_until if restored_from is None else restored_from
    elif isinstance(attention.dense_from, float):
        dense_from = round(attention.dense_from * schedule.total_steps)
    else:
        dense_from = attention.dense_from
    of_phase = vars(attention.phase_strides)
    pieces = [
        (piece.start, Pattern(attention.pattern, of_phase[piece.phase] or attention.stride))
        for piece in schedule.pieces
        if dense_from is None or piece.start < dense_from
    ]
    return strides_per_phase(pieces if dense_from is None else [*pieces, (dense_from, Pattern("dense"))])


def chosen_names(names: Collection[str], targets: TargetsConfig) -> list[str]:
    """Those of the matrices' names that match an `include` glob and no `exclude` glob, in their order."""
    for glob in targets.include + targets.exclude:
        if not any(fnmatchcase(name, glob) for name in names):
            near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
            raise ValueError(
                f"mst.targets: {glob!r} matches no parameter that can be sparse; the nearest is "
                f"{near[0] if near else 'none: the model has no matrices'!r}"
            )
    chosen = [
        name
        for name in names
        if any(fnmatchcase(name, glob) for glob in targets.include)
        and not any(fnmatchcase(name, glob) for glob in targets.exclude)
    ]
    if not chosen:
        raise ValueError("mst.targets: every parameter that could be sparse is excluded; use method dense instead")
    return chosen

"""Rejects backward passes whose gradient would be lost or multiplied, and loads that would mix one with other weights.

A second backward pass of the same micro-batch changes the gradient of the first:

    stage 0        each backward pass at an accumulation boundary reduces all that was added up: over ranks whose
                   gradients are summed and not averaged, what is already reduced is then counted several times
    stages 1, 2    the backward pass at an accumulation boundary hands its gradient to the optimizer, and the next one
                   before the step replaces it
    stage 3        in the first micro-batch of a step, gradients are replaced until the next forward pass begins

Otherwise, gradients are added up. In `engine.no_sync` nothing is reduced, and all passes in one
`engine.coalesce_grad_reduction` are reduced together, at its end.

A load leaves the gradient of a step that is under way, and the number of its micro-batches, as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mst_scale.comm import SharedMistake
from mst_scale.zero_shards.saving import Given, replace_method
from mst_scale.zero_shards.step import before_call, on_zero_grad, sets_boundaries

UNDER_WAY = "mst_step_under_way"  # on an engine: whether a load would keep the gradient of a step
OF_ZERO = "independent_gradient_partition_epilogue"  # which ends a reduction
OTHER_WAY = (
    ", or call engine.set_gradient_accumulation_boundary(False) before all passes of a step but the last, and (True) "
    "before the last one"
)


def changes_gradients(engine: Any) -> bool:
    """Return whether there are backward passes that change the gradient of the one before."""
    if engine.zero_optimization_stage() == 0:
        return _times_counted(engine) > 1
    return hasattr(engine.optimizer, "averaged_gradients")


def _times_counted(engine: Any) -> int:
    """Return how often stage 0 counts a gradient that it reduces twice."""
    return int(engine.sequence_parallel_size if engine.gradient_average else engine.seq_dp_world_size)


def reject_second_pass(engine: Any) -> None:
    """Raise an error in a backward pass that would change the gradient of another, unless `zero_grad` came between."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    # called once for all backward passes that are reduced together
    owner, name = (zero, OF_ZERO) if stage else (engine, "buffered_allreduce_fallback")
    effect = "lose the gradient of the first"
    if not stage:
        effect = f"count the gradient of the first {_times_counted(engine)} times"
    reductions = 0  # those that the next one would change

    def forget() -> None:
        nonlocal reductions
        reductions = 0

    def count_reduction() -> None:
        nonlocal reductions
        reductions += zero.micro_step_id == 0 if stage == 3 else not stage or zero.is_gradient_accumulation_boundary()
        if reductions > 1:
            raise SharedMistake(
                f"a second backward pass came before engine.step(), and ZeRO stage {stage} would {effect}: add up the "
                f"losses and call engine.backward once per forward pass{'' if stage == 3 else OTHER_WAY}"
            )

    before_call(owner, name, count_reduction)
    before_call(engine, "_backward_epilogue", lambda: _check_no_sync(engine))
    before_call(engine, "_take_model_step", forget)
    if stage == 3:
        before_call(zero, "clear_backward_seen_flag", forget)  # engine.forward calls it
    for holder in (engine, zero) if stage else (engine, zero, engine.module):
        before_call(holder, "zero_grad", forget)


def _check_no_sync(engine: Any) -> None:
    """Raise an error in a backward pass in `engine.no_sync` that reduces gradients before it ends, as stage 1 may."""
    zero = engine.optimizer
    overlaps = engine.zero_optimization_stage() == 1 and zero.overlap_comm and not zero._coalesce_grad_reduction
    if engine.inside_no_sync_ctxt and overlaps and engine.is_gradient_accumulation_boundary():
        raise SharedMistake(
            "zero_optimization.overlap_comm reduces gradients in engine.no_sync(), too: set it to false, or use "
            "engine.coalesce_grad_reduction()"
        )


def reject_loads_in_steps(engine: Any) -> None:
    """Raise an error in a load that comes between a backward pass and the end of its step."""

    def leave_out() -> None:
        if sets_boundaries(engine) or engine.micro_steps % engine.gradient_accumulation_steps() == 0:
            setattr(engine, UNDER_WAY, False)  # later in a step, the micro-batches before would be missing

    def load_checkpoint(load: Callable[..., Any], given: Given) -> Any:
        check_no_step_under_way(engine, "load_checkpoint")
        return load(**given)

    before_call(engine, "_backward_epilogue", lambda: setattr(engine, UNDER_WAY, True))
    before_call(engine, "_take_model_step", lambda: setattr(engine, UNDER_WAY, False))
    on_zero_grad(engine, leave_out)
    replace_method(engine, "load_checkpoint", load_checkpoint)


def check_no_step_under_way(engine: Any, call: str) -> None:
    """Raise an error if weights are loaded between a backward pass and the end of its step; `call` loads them."""
    if not getattr(engine, UNDER_WAY, False):
        return
    one = engine.gradient_accumulation_steps() == 1
    discard = ", or discard its gradient with engine.zero_grad() and engine.optimizer.zero_grad()"
    raise SharedMistake(
        f"{call} was called between engine.backward and the end of its step, and the gradient would be added to that "
        f"of the loaded weights: finish the step first{discard if one else ''}"
    )

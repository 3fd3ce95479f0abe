"""Rejects backward passes whose gradient would be lost, and loads that would mix one with the loaded weights.

A second backward pass of the same micro-batch loses the gradient of the first:

    stages 1, 2    the backward pass at an accumulation boundary hands its gradient to the optimizer, and the next one
                   before the step replaces it
    stage 3        in the first micro-batch of a step, gradients are replaced until the next forward pass begins

At stage 0, and otherwise, gradients are added up.

A load leaves the gradient of a step that is under way, and the number of its micro-batches, as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mst_scale.comm import SharedMistake
from mst_scale.zero_shards.saving import Given, replace_method
from mst_scale.zero_shards.step import before_call, on_zero_grad, sets_boundaries

UNDER_WAY = "mst_step_under_way"  # on an engine: whether a load would keep the gradient of a step
OTHER_WAY = (
    ", or call engine.set_gradient_accumulation_boundary(False) before all passes of a step but the last, and (True) "
    "before the last one"
)


def loses_gradients(engine: Any) -> bool:
    """Return whether there are backward passes whose gradient DeepSpeed replaces by that of the next one."""
    return engine.zero_optimization_stage() > 0 and hasattr(engine.optimizer, "averaged_gradients")


def reject_second_pass(engine: Any) -> None:
    """Raise an error in a backward pass that would replace the gradient of another, unless `zero_grad` came between."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    passes = 0  # those of which the last one alone would count

    def forget() -> None:
        nonlocal passes
        passes = 0

    def count_pass() -> None:
        nonlocal passes
        passes += zero.micro_step_id == 0 if stage == 3 else bool(engine.is_gradient_accumulation_boundary())
        if passes > 1:
            raise SharedMistake(
                f"a second backward pass came before engine.step(), and ZeRO stage {stage} would lose the gradient of "
                "the first: add up the losses and call engine.backward once per forward pass"
                f"{'' if stage == 3 else OTHER_WAY}"
            )

    before_call(engine, "_backward_epilogue", count_pass)  # one call for each backward pass
    before_call(engine, "_take_model_step", forget)
    if stage == 3:
        before_call(zero, "clear_backward_seen_flag", forget)  # engine.forward calls it
    for owner in (engine, zero):
        before_call(owner, "zero_grad", forget)


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

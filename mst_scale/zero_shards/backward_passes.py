"""Rejects a second backward pass of the same micro-batch where DeepSpeed would lose the gradient of the first.

    stages 1, 2    the backward pass at an accumulation boundary hands its gradient to the optimizer, and the next one
                   before the step replaces it
    stage 3        in the first micro-batch of a step, gradients are replaced until the next forward pass begins

At stage 0, and otherwise, gradients are added up.
"""

from __future__ import annotations

import functools
from typing import Any

from mst_scale.comm import SharedMistake

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
    reduce, take_step = engine._backward_epilogue, engine._take_model_step  # one call for each backward pass
    begin_forward = zero.clear_backward_seen_flag  # engine.forward calls it
    passes = 0  # those of which the last one alone would count

    def forget() -> None:
        nonlocal passes
        passes = 0

    def epilogue() -> None:
        nonlocal passes
        passes += zero.micro_step_id == 0 if stage == 3 else bool(engine.is_gradient_accumulation_boundary())
        if passes > 1:
            raise SharedMistake(
                f"a second backward pass came before engine.step(), and ZeRO stage {stage} would lose the gradient of "
                "the first: add up the losses and call engine.backward once per forward pass"
                f"{'' if stage == 3 else OTHER_WAY}"
            )
        reduce()

    def forward_begins() -> None:
        if stage == 3:
            forget()
        begin_forward()

    def step(lr_kwargs: Any) -> None:
        forget()
        take_step(lr_kwargs)

    engine._backward_epilogue, engine._take_model_step = epilogue, step
    zero.clear_backward_seen_flag = forward_begins
    for owner in (engine, zero):
        discard = owner.zero_grad

        @functools.wraps(discard)
        def zero_grad(*args: Any, discard: Any = discard, **named: Any) -> Any:
            forget()
            return discard(*args, **named)

        owner.zero_grad = zero_grad

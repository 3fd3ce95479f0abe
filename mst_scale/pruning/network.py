"""Prunes the matrices of a model, one after the other in the order of its network.

Wanda and SparseGPT (arXiv 2306.11695, 2301.00774) go from block to block: a block's layers are pruned by what they see
of the calibration when all blocks before it are pruned already, and it itself not yet. What lies behind the blocks (the
head's layers) follows the same way. Hidden states of all sequences are held between two blocks; a block's inputs are
summed up as they come.

A matrix that no linear layer multiplies with has no such inputs: a head that is the token embedding is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mst_scale.data.sampler import Batch
from mst_scale.errors import UserError
from mst_scale.pruning.way import Amount, Way


@torch.no_grad()
def prune_model(model: nn.Module, way: Way, amounts: Mapping[str, Amount], batches: Sequence[Batch] = ()) -> list[str]:
    """Prune the named matrices in place; returns those that were left as they are.

    `batches` is the calibration, tokens and targets; a way that looks at weights alone needs none.
    """
    parameters, of_inputs = dict(model.named_parameters()), way.of_inputs
    if of_inputs is None:
        for name, amount in amounts.items():
            way.prune(parameters[name].data, None, amount)
        return []
    assert not model.training and batches, "dropout would disturb what layers see"
    layers = _layers(model, amounts)
    blocks: list[nn.Module] = list(model.blocks)  # type: ignore[arg-type]
    done: set[str] = set()

    def step(names: Sequence[str], run: Callable[[], object]) -> None:
        if not names:
            return
        for name, total in _summed({name: layers[name] for name in names}, of_inputs, run).items():
            if not total.isfinite().all():
                raise UserError(f"what {name} is multiplied with is not finite: the weights are of no use")
            way.prune(layers[name].weight.data, total, amounts[name])
            done.add(name)

    hidden = [_entering(blocks[0], model, tokens) for tokens, _ in batches]
    for block in blocks:
        mine = {id(module) for module in block.modules()}
        step([name for name, layer in layers.items() if id(layer) in mine], partial(_each, block, hidden))
        hidden = _each(block, hidden)
    del hidden
    rest = [name for name in layers if name not in done]
    step(rest, lambda: [model(tokens, targets) for tokens, targets in batches])
    if not done:
        raise UserError(
            f"no linear layer multiplies with {', '.join(amounts)}, so there are no inputs to prune by: choose other "
            "mst.targets (--config FILE), or --method magnitude"
        )
    return [name for name in amounts if name not in done]


def _layers(model: nn.Module, names: Mapping[str, object]) -> dict[str, nn.Linear]:
    """The linear layers of these matrices."""
    found = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: found[name] for name in names if name in found}


def _each(block: nn.Module, hidden: Sequence[Tensor]) -> list[Tensor]:
    return [block(x) for x in hidden]


def _summed(
    layers: Mapping[str, nn.Linear], of_inputs: Callable[[Tensor], Tensor], run: Callable[[], object]
) -> dict[str, Tensor]:
    """The sums, in float64, over all that reaches these layers while `run` runs; what nothing reaches has none."""
    sums: dict[str, Tensor] = {}

    def see(name: str, layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        (x,) = given
        found = of_inputs(x.reshape(-1, x.shape[-1])).double()
        sums[name] = sums[name] + found if name in sums else found

    handles = [layer.register_forward_pre_hook(partial(see, name)) for name, layer in layers.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return sums


class _Reached(Exception):
    """A model's forward need not go on."""


def _entering(block: nn.Module, model: nn.Module, tokens: Tensor) -> Tensor:
    """The hidden states with which a model comes to its first block."""
    caught: list[Tensor] = []

    def catch(_: nn.Module, given: tuple[Any, ...]) -> None:
        caught.append(given[0])
        raise _Reached

    handle = block.register_forward_pre_hook(catch)
    try:
        model(tokens)
    except _Reached:
        pass
    finally:
        handle.remove()
    return caught[0]

"""Prunes the matrices of a model one after the other, in the order of its network.

Wanda and SparseGPT (arXiv 2306.11695, 2301.00774) proceed block by block: the layers of a block are pruned by the
inputs that they have when all earlier blocks have been pruned, but the block itself has not. The layers after the
blocks (those of the head) follow in the same way. Between two blocks, the hidden states of all sequences are in memory;
the inputs of a block's layers are summed as they are computed.

The calibration inputs are windows of a corpus's training split. They are drawn with a fixed seed, so that they are the
same for every run and differ from its batches. Both papers use 128 sequences. For BERT they are masked, as in training.
A matrix that no linear layer multiplies by has no inputs: a head tied to the token embedding is not pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mst_scale.config import ModelConfig
from mst_scale.data.sampler import Batch, Sampler, open_sampler
from mst_scale.errors import UserError
from mst_scale.pruning.method import Amount, PruningMethod

SEQUENCES = 128
SEED = 230100774
BATCH = 4  # sequences: the logits of a head that is pruned too are large


def open_calibration(folder: str, model: ModelConfig, sequences: int) -> Sampler:
    """Open a corpus to draw calibration sequences from.

    Raises:
        UserError: if it does not fit the model or is too small.
    """
    sampler = open_sampler(folder, "train", model, SEED)
    if sequences > sampler.n_starts:
        raise UserError(
            f"--calibration-sequences {sequences:,} is more than {folder} has, {sampler.n_starts:,}: choose fewer"
        )
    return sampler


def calibration_batches(sampler: Sampler, sequences: int) -> list[Batch]:
    """Return the first `sequences` calibration sequences, in batches of at most BATCH."""
    return [sampler.batch(0, range(start, min(start + BATCH, sequences))) for start in range(0, sequences, BATCH)]


@torch.no_grad()
def prune_model(
    model: nn.Module, method: PruningMethod, amounts: Mapping[str, Amount], batches: Sequence[Batch] = ()
) -> list[str]:
    """Prune the named matrices of a model in place.

    Args:
        model: The model, in evaluation mode.
        method: The pruning method.
        amounts: How much of each matrix becomes zero, by parameter name.
        batches: The calibration batches of tokens and targets; not needed by a method that only uses weights.

    Returns:
        The names of matrices that were not pruned, because no linear layer multiplies by them.

    Raises:
        UserError: if none of them can be pruned, or a weight or a value that the model computes is not finite.
    """
    parameters, of_inputs = dict(model.named_parameters()), method.of_inputs
    for name in amounts:
        if not parameters[name].isfinite().all():
            raise UserError(f"{name} has a weight that is not finite: choose an earlier checkpoint to prune")
    if of_inputs is None:
        for name, amount in amounts.items():
            method.prune(parameters[name].data, None, amount)
        return []
    assert not model.training and batches, "dropout would disturb the inputs of layers"
    linear = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers = {name: linear[name] for name in amounts if name in linear}
    blocks: list[nn.Module] = list(model.blocks)  # type: ignore[arg-type]
    done: set[str] = set()

    def step(names: Sequence[str], run: Callable[[], object]) -> None:
        if not names:
            return
        for name, total in _summed({name: layers[name] for name in names}, of_inputs, run).items():
            if not total.isfinite().all():
                raise UserError(f"the inputs of the layer of {name} are not finite: the model cannot be pruned")
            method.prune(layers[name].weight.data, total, amounts[name])
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
            f"no linear layer multiplies by {', '.join(amounts)}, so there are no inputs to prune by: use other "
            "mst.targets (--config FILE), or --method magnitude"
        )
    return [name for name in amounts if name not in done]


def _each(block: nn.Module, hidden: Sequence[Tensor]) -> list[Tensor]:
    return [block(x) for x in hidden]


def _summed(
    layers: Mapping[str, nn.Linear], of_inputs: Callable[[Tensor], Tensor], run: Callable[[], object]
) -> dict[str, Tensor]:
    """Sum `of_inputs` in float64 over the inputs that these layers receive in `run`; skip layers without inputs."""
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
    """Raised to end a model's forward pass at its first block."""


def _entering(block: nn.Module, model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the hidden states that a model's first block receives."""
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

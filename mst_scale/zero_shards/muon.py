"""Applies Muon at the same point at every ZeRO stage: after norm and clipping, with its momentum as optimizer state.

DeepSpeed 0.19.8 orthogonalizes gradients at stages 1 and 2 while they are being reduced, at stage 3 before the norm and
at stage 0 in the optimizer's step. Its norm and clipping therefore use the update at some stages and the gradient at
others, and masks would be applied too late, so its own Muon is switched off. The optimizer's step hook computes, from
gradients that are masked, unscaled and clipped as for any other optimizer:

    momentum ← momentum + (1 - β) · (gradient - momentum)     this rank's slice, in fp32
    blend = gradient + β · (momentum - gradient)              Nesterov's
    each matrix is gathered on one rank, orthogonalized there by DeepSpeed's Newton-Schulz, and split up again
    `engine.mst` masks this rank's slice of the update, since Newton-Schulz fills what was 0
    weight ← (1 - lr · decay) · weight - lr · update

Newton-Schulz runs in a dtype that its method and the kind of device determine (`newton_schulz_dtype`). DeepSpeed would
take fp16 on exactly those CPUs that have instructions for it, so that weights would depend on the CPU's model.

The ranks take turns, matrix by matrix; at stage 0 each of them computes all matrices. Every rank would compute a matrix
from the same numbers in the same order, so the update does not depend on the stage or the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import deepspeed.comm as ds_comm
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from mst_scale.comm import logger
from mst_scale.errors import UserError
from mst_scale.zero_shards.dense_store import dense_store
from mst_scale.zero_shards.logical import shape_of
from mst_scale.zero_shards.step import NamedCollectives, base_optimizer, optimized
from mst_scale.zero_shards.supported import check_engine, uses_muon

if TYPE_CHECKING:
    from mst_scale.zero_shards.hooks import HookTarget

STEPS = 5  # of Newton-Schulz, as DeepSpeed takes
MOMENTUM = "momentum_buffer"
OURS = "mst_muon"  # marks what is updated here


def takes_over(engine: Any, masks_weights: bool) -> bool:
    """Whether Muon is computed here: if there are masks, and in dense runs in which masks would be possible."""
    if not uses_muon(engine):
        return False
    try:
        check_engine(engine)
    except UserError as reason:
        if masks_weights:
            raise
        logger.warning("DeepSpeed's own Muon is used, which clips orthogonalized updates: %s", reason)
        return False
    return True


def matrices(engine: Any) -> dict[str, nn.Parameter]:
    """Return the matrices that Muon updates, which DeepSpeed has marked, by name."""
    updated = optimized(engine)
    named = engine.module.named_parameters()
    return {name: p for name, p in named if getattr(p, "use_muon", False) and id(p) in updated}


def shapes(engine: Any) -> list[tuple[tuple[int, ...], str]]:
    """Return the shape and the Newton-Schulz method of every matrix that Muon updates, here or in DeepSpeed.

    DeepSpeed has one method for all of an engine's matrices.
    """
    methods = [group["ns_method"] for group in base_optimizer(engine).param_groups if group.get("use_muon")]
    marked = (p for p in engine.module.parameters() if getattr(p, "use_muon", False) or getattr(p, OURS, False))
    return [(shape_of(p), methods[0]) for p in marked] if methods else []


class Muon:
    """One engine's Muon, in place of DeepSpeed's own; every rank builds it and steps it together."""

    def __init__(self, engine: Any, mst: HookTarget):
        self.mst, self.device = mst, engine.device
        self.optimizer = base_optimizer(engine)
        marked = matrices(engine)
        if not marked and any(group.get("use_muon") for group in self.optimizer.param_groups):
            raise UserError(
                "the Muon passed to initialize has no parameter marked use_muon, so DeepSpeed would orthogonalize "
                'none: pass no optimizer, and select Muon in the config with "optimizer": {"type": "Muon"}'
            )
        self.shards = dense_store(engine, marked)
        self.group = self.shards.group
        self.all_to_all = NamedCollectives("mst_muon").all_to_all
        self.lengths = self._lengths()
        self.away: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        _switch_off(engine)
        self.optimizer.register_step_pre_hook(self._before)
        self.optimizer.register_step_post_hook(self._after)

    def _lengths(self) -> list[list[int]]:
        """How much of each matrix each rank holds; the slices follow each other in the order of ranks."""
        mine = torch.tensor([s.length for s in self.shards.slices], dtype=torch.int64, device=self.device)
        if self.group is None:
            return [mine.tolist()]
        of_ranks = [torch.empty_like(mine) for _ in range(ds_comm.get_world_size(self.group))]
        ds_comm.all_gather(of_ranks, mine, group=self.group)
        return [of_rank.tolist() for of_rank in of_ranks]

    # --- the optimizer's step ---

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Update Muon's groups, and let the optimizer find only those of Adam."""
        held = self.mst.holds_update()
        for group in optimizer.param_groups:
            if group["use_muon"] and not held:
                self._step(group)
            if group["use_muon"] or held:  # its own step takes a missing gradient for zeros and decays weights
                self.away.append((group, group["params"]))
                group["params"] = []

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group, params in self.away:
            group["params"] = params
        self.away.clear()

    @torch.no_grad()
    def _step(self, group: dict[str, Any]) -> None:
        """At stages 1 and 2 once for each group of parameters, at stage 3 once for each sub-group."""
        owners = {id(p) for p in group["params"]}
        here = [i for i in range(len(self.shards.slices)) if id(self.shards.owner(i)) in owners]
        ranks = len(self.lengths)
        for start in range(0, len(here), ranks):
            turn = here[start : start + ranks]
            blends = [self._blend(i, group["momentum"]) for i in turn]
            updates = self._orthogonalised(turn, blends, group["ns_method"])
            for i, found in zip(turn, updates, strict=True):
                weight = self.shards.weight(i)
                update = found.to(weight.device)
                self.mst.mask_update(self.shards.parameters[i], update)
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _blend(self, i: int, beta: float) -> torch.Tensor:
        """Add this rank's gradient to the momentum, and return Nesterov's blend of both."""
        owner = self.shards.owner(i)
        state = self.optimizer.state[owner]
        momentum = state.get(MOMENTUM)
        if momentum is None or momentum.numel() != owner.numel():
            if momentum is not None:
                logger.warning(
                    "the checkpoint's momentum has the layout of DeepSpeed's own Muon, so momentum starts at 0"
                )
            state[MOMENTUM] = torch.zeros_like(owner.detach())
        elif momentum.dtype != owner.dtype:
            state[MOMENTUM] = momentum.to(owner.dtype)
        momentum = self.shards.part(i, state[MOMENTUM])
        gradient = torch.zeros_like(momentum) if owner.grad is None else self.shards.part(i, owner.grad)
        momentum.lerp_(gradient, 1 - beta)
        return gradient.lerp(momentum, beta).to(self.device)

    def _orthogonalised(self, turn: Sequence[int], blends: list[torch.Tensor], method: str) -> list[torch.Tensor]:
        """Return this rank's slices of these matrices' updates; each rank computes the update of one matrix."""
        shapes = [self.shards.slices[i].shape for i in turn]
        if self.group is None:
            return [orthogonalised(blends[0].view(shapes[0]), method).reshape(-1)]
        rank = ds_comm.get_rank(self.group)
        given = [self.lengths[rank][i] for i in turn] + [0] * (len(self.lengths) - len(turn))
        taken = [lengths[turn[rank]] if rank < len(turn) else 0 for lengths in self.lengths]
        whole = torch.empty(sum(taken), device=self.device)
        self.all_to_all(whole, torch.cat(blends), taken, given, group=self.group)
        if rank < len(turn):
            whole = orthogonalised(whole.view(shapes[rank]), method).reshape(-1)
        updates = torch.empty(sum(given), device=self.device)
        self.all_to_all(updates, whole, given, taken, group=self.group)
        return list(updates.split(given[: len(turn)]))


def orthogonalised(matrix: torch.Tensor, method: str) -> torch.Tensor:
    """Return the update of a whole matrix in float32, scaled as DeepSpeed does.

    DeepSpeed compiles Newton-Schulz, and then a matrix's result depends on the shapes that were seen before it.
    """
    original_muon = fix_dtype()
    gram = method == "gram"
    newton_schulz = original_muon.zeropower_via_gram_newtonschulz if gram else original_muon.zeropower_via_newtonschulz5
    rows, columns = matrix.shape[-2:]
    flat = matrix.view(len(matrix), -1) if matrix.dim() == 4 else matrix  # a convolution's filters
    with torch.compiler.set_stance("force_eager"):
        found: torch.Tensor = newton_schulz(flat, steps=STEPS)
    return found.float().mul_(math.sqrt(max(1, rows / columns))).view(matrix.shape)


def newton_schulz_dtype(ns_method: str = "gram") -> torch.dtype:
    """Return the dtype of an iteration: bfloat16 for `standard`; for `gram` float16 on GPUs and float32 on CPUs."""
    if ns_method == "standard":
        return torch.bfloat16
    return torch.float32 if get_accelerator().device_name() == "cpu" else torch.float16


def fix_dtype() -> Any:
    """Make DeepSpeed's Newton-Schulz use `newton_schulz_dtype`, whatever the accelerator reports; return its module."""
    from deepspeed.runtime.zero.muon import original_muon  # imported where it is used: it makes compiled functions

    original_muon.ns_compute_dtype = newton_schulz_dtype
    return original_muon


def _switch_off(engine: Any) -> None:
    for parameter in engine.module.parameters():
        setattr(parameter, OURS, getattr(parameter, "use_muon", False))
        parameter.use_muon = False  # stages 1 and 2 ask each parameter
    if hasattr(engine.optimizer, "use_muon"):
        engine.optimizer.use_muon = False  # stage 3

"""Verifies every N steps that ranks compute, share and keep their values without silent corruption.

Step V is verified if N divides it, in four comparisons of digests, all of them exact:

    computation   before the update of step V, one micro-batch of the step is computed a second time, and its loss and
                  the gradients of all parameters are compared with those it was trained with (see
                  `zero_shards.recompute`). Of V/N verifications each takes the next micro-batch of a step
    replicas      after step V, values that several ranks have are compared over these ranks: weights at stages 0 to 2,
                  everything at stage 0, indexes of compact parameters, buffers, step counters and learning rates
    memory        everything that a rank keeps is digested after step V, and again before the update of step V + 1:
                  ZeRO's shards of weights, master weights and moments, which no other rank has, and replicated values
    masks         masks and indexes change at topology steps alone: they are compared with the verification before, if
                  there was no topology step in between

A second result, or an earlier digest, shows which rank is wrong. Replicas show it if a majority of ranks agree. Every
rank learns the result and raises the same `CorruptedError`, so that none hangs.

A step counts as verified when its memory was compared, one step later: what a checkpoint of this step has read lay
between two equal digests. `verified` is the last such step, or the one at which this start began: whatever is found has
happened after it.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.comm import Ranks, logger
from mst_scale.errors import CorruptedError
from mst_scale.verification.tensor_digest import digest, digests
from mst_scale.zero_shards import HeldValue


class Verification:
    """Follows the steps of one engine.

    Attributes:
        verified: The last verified step, or the step at which this start began.
    """

    def __init__(self, engine: Any, ranks: Ranks, every: int, verified: int | None = None):
        """Verify each step that `every` divides.

        Args:
            engine: DeepSpeed's engine, with `engine.mst`.
            ranks: All ranks, which construct it together.
            every: Steps between verifications; 0: none, and the engine stays as it is.
            verified: The last step that a previous engine of this process has verified, if there was one.
        """
        self.engine, self.ranks, self.every = engine, ranks, every
        self.verified = int(engine.global_steps) if verified is None else verified
        self.recomputation: zero_shards.Recomputation | None = None
        self._before: dict[str, int] = {}  # digests after the last verified step, until the next update
        self._masks: tuple[int, dict[str, int]] = (-1, {})  # the last topology step, and digests of what it left
        self._buffers = self._versions()
        self._host = socket.gethostname()
        if not every:
            return
        if (why := _not_recomputed_reason(engine)) is None:
            self.recomputation = zero_shards.Recomputation(engine, digest)
        elif ranks.first:
            logger.warning("training.verify_every does not compare a second computation of micro-batches: %s", why)
        mates = dist.get_process_group_ranks(zero_shards.groups_of(engine).replicas)
        self._replica = min(mates)  # names the group of ranks that hold the same weights
        zero_shards.around_model_step(engine, self._before_update, self._after_step)
        self._watch_next()

    def forget(self) -> None:
        """Start again after weights, states and step were replaced, as by a rollback."""
        self._before, self._masks, self._buffers = {}, (-1, {}), self._versions()
        self.verified = int(self.engine.global_steps)
        self._watch_next()

    def finish(self) -> None:
        """Compare what the last step has left, as the update after it would have done.

        Raises:
            CorruptedError: on all ranks.
        """
        self._compare(recompute=False)

    def _is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def _watch_next(self) -> None:
        step = int(self.engine.global_steps) + 1
        if self.recomputation is not None and self._is_due(step):
            self.recomputation.watch(self._micro_batch_of(step))

    def _micro_batch_of(self, step: int) -> int:
        """Return the micro-batch of a step that is computed again: each in turn."""
        return (step // self.every) % int(self.engine.gradient_accumulation_steps())

    def _before_update(self) -> None:
        self._compare(recompute=self.recomputation is not None and self._is_due(int(self.engine.global_steps) + 1))

    def _compare(self, recompute: bool) -> None:
        """Compare a second computation with the first, and memory with its digests."""
        memory = bool(self._before)
        if not recompute and not memory:
            return
        done = int(self.engine.global_steps)
        computed = self._recompute() if recompute else []
        changed = _changed(self._before, _digests_by_name(v for v in self._values() if v.constant)) if memory else []
        self._before = {}
        reports = self.ranks.all((self._host, computed, changed))
        computing = [_Report(rank, host, found) for rank, (host, found, _) in enumerate(reports) if found]
        keeping = [_Report(rank, host, found) for rank, (host, _, found) in enumerate(reports) if found]
        if keeping:
            self._fail("memory", keeping, done, f"changed in memory between step {done} and the update after it")
        if memory:
            self.verified = done
        if computing:
            self._fail(
                "computation", computing, done + 1, "had another result in a second computation of the same micro-batch"
            )

    def _recompute(self) -> list[str]:
        """Return what differs in a second computation; end these comparisons if the model does not allow one."""
        assert self.recomputation is not None
        try:
            return self.recomputation.differing()
        except RuntimeError as error:
            if "incompatible with .grad()" not in str(error):
                raise
            self.recomputation = None  # on all ranks: they compute the same layers
            logger.warning(
                "training.verify_every does not compare a second computation of micro-batches: activation "
                "checkpointing is reentrant (use_reentrant=False would allow it)"
            )
            return []

    def _after_step(self) -> None:
        step = int(self.engine.global_steps)
        if self._is_due(step):
            values = self._values()
            found = _digests_by_name(values)
            self._compare_masks(step, found)
            self._compare_replicas(step, {value.name: found[value.name] for value in values if value.replicated})
            self._before = {value.name: found[value.name] for value in values if value.constant}
        self._watch_next()

    def _compare_masks(self, step: int, found: Mapping[str, int]) -> None:
        """Compare masks and indexes with the verification before, unless a topology step has changed them."""
        changed_at, before = self._masks
        now = {value.name: found[value.name] for value in self._mask_values()}
        self._masks = (int(self.engine.mst.changed_at), now)
        changed = _changed(before, now) if changed_at == self._masks[0] else []
        reports = self.ranks.all((self._host, changed))
        wrong = [_Report(rank, host, names) for rank, (host, names) in enumerate(reports) if names]
        if wrong:
            what = "changed in memory since the verification before, without a topology step"
            self._fail("memory", wrong, step, what)

    def _compare_replicas(self, step: int, found: Mapping[str, int]) -> None:
        """Compare replicated values: one number per rank, and all of them only if these differ."""
        total = int(digest(torch.tensor(list(found.values()), dtype=torch.int64)))
        of_group: dict[int, set[int]] = defaultdict(set)
        for replica, value in self.ranks.all((self._replica, total)):
            of_group[replica].add(value)
        if all(len(different) == 1 for different in of_group.values()):
            return
        reports = self.ranks.all((self._host, self._replica, dict(found)))
        for replica in of_group:
            mates = {rank: values for rank, (_, group, values) in enumerate(reports) if group == replica}
            if (name := first_difference(mates)) is not None:
                wrong, decided = minority({rank: values.get(name) for rank, values in mates.items()})
                named = [_Report(rank, reports[rank][0], [name]) for rank in wrong]
                others = "differs from that of the other ranks" if decided else (
                    "is not the same on these ranks, and nothing shows which of them is wrong"
                )  # fmt: skip
                self._fail("replicas", named, step, others, decided)

    def _values(self) -> list[HeldValue]:
        """Return what is to be compared; not buffers that forward passes write, such as running statistics."""
        versions = self._versions()
        written = {name for name, version in versions.items() if self._buffers.get(name) != version}
        held = [value for value in zero_shards.held_values(self.engine) if value.name not in written]
        return [*held, *self._mask_values()]

    def _versions(self) -> dict[str, int]:
        """Return how often each buffer has been written."""
        return {name: buffer._version for name, buffer in self.engine.module.named_buffers()}

    def _mask_values(self) -> list[HeldValue]:
        """Masks of this rank's slices, which are the same on all ranks at stage 0, and indexes, which always are."""
        mst, whole = self.engine.mst, zero_shards.groups_of(self.engine).zero is None
        masks = [HeldValue(f"the mask of {m.name}", m.bits, whole) for m in mst.masks if m.bits is not None]
        indexes = zero_shards.indexes_of(self.engine.module)
        return [*masks, *(HeldValue(f"the index of {index.name}", index.positions, True) for index in indexes)]

    def _fail(self, kind: str, wrong: Sequence[_Report], step: int, how: str, decided: bool = True) -> None:
        """Raise the same error on all ranks, about the first value that is wrong."""
        where = ", ".join(f"rank {one.rank} ({one.host})" for one in wrong[:_SHOWN])
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CorruptedError(
            f"corrupted at step {step}: {where}{more}: {wrong[0].first} {how}. The last verified step is "
            f"{self.verified}; started again, the run continues from a checkpoint of this step or an earlier one",
            kind=kind, value=wrong[0].first, ranks=[one.rank for one in wrong], hosts=[one.host for one in wrong],
            step=step, verified=self.verified, decided=decided,
        )  # fmt: skip


_SHOWN = 4  # ranks in a message


class _Report(NamedTuple):
    """What a rank has found to be wrong."""

    rank: int
    host: str
    names: Sequence[str]

    @property
    def first(self) -> str:
        more = len(self.names) - 1
        return self.names[0] + (f" and {more} other values" if more else "")


def minority(values: Mapping[int, int | None]) -> tuple[list[int], bool]:
    """Return the ranks whose value is not that of most ranks, and whether there is such a majority.

    Without one (two ranks that differ, for example) these are all ranks.
    """
    (common, count), *_ = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return sorted(values), False
    return sorted(rank for rank, value in values.items() if value != common), True


def first_difference(values: Mapping[int, Mapping[str, int]]) -> str | None:
    """Return the first name whose values differ between ranks; None if there is none."""
    names = dict.fromkeys(name for mine in values.values() for name in mine)
    return next((name for name in names if len({mine.get(name) for mine in values.values()}) > 1), None)


def _digests_by_name(values: Iterable[HeldValue]) -> dict[str, int]:
    values = list(values)
    return dict(zip((value.name for value in values), digests(value.tensor for value in values), strict=True))


def _changed(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    return [name for name, value in before.items() if name in now and now[name] != value]


def _not_recomputed_reason(engine: Any) -> str | None:
    """Return why the same computation may give other bits here, or cannot be repeated; None if it can be compared."""
    if isinstance(engine.module, deepspeed.PipelineModule):
        return "the stages of a pipeline compute their micro-batches together"
    if not zero_shards.on_cpu() and not torch.are_deterministic_algorithms_enabled():
        return "kernels of this device may add up in any order; torch.use_deterministic_algorithms(True) forbids that"
    recomputes = getattr(getattr(engine.module, "config", None), "activation_checkpointing", False)
    if recomputes and any(module._compiled_call_impl is not None for module in engine.module.modules()):
        return "torch.compile compiles a block and its recomputation separately, so that they may round differently"
    return None

"""Prunes and grows compact parameters, with nothing inactive in memory.

The masks of a topology step are those of dense storage, bit for bit: what it reads of a layer is expanded to this
rank's slice of the matrix and given to the same `mixed_growing.evolve`. Then the layer's values and moments move to
their new places. This happens in batches of layers that are no larger than the largest layer, and each batch shares its
collectives. The number of active weights stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mst_scale import zero_shards
from mst_scale.checkpoints import mask_files
from mst_scale.comm.exchange import Exchange
from mst_scale.engine.initial_masks import depends_on_weights
from mst_scale.engine.masking import Masking
from mst_scale.engine.topology import Topology, TopologyStep
from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.evolve import Change, Layer, unchanged
from mst_scale.mixed_growing.masks import assemble
from mst_scale.mixed_growing.scores import Scores, mean_squares, peak_keys
from mst_scale.sparse_linear.compact_index import WIDEST
from mst_scale.transforms import eagerly


class CompactMasking(Masking):
    """Knows the masks, and gives gradients to topology steps. There is nothing to mask."""

    store: zero_shards.CompactStore
    topology: CompactTopology

    def after_backward(self) -> None:
        if self.topology.under_way is None:
            return
        scale = zero_shards.loss_scale(self.engine)
        finite = self.topology.finish_dense_gradients(scale)
        for i in self.store.indexes:
            gradient = self.store.gradient(i)
            if gradient is None:  # the loss does not depend on this parameter
                gradient = self.store.values.weight(i).new_zeros(self.store.values.slices[i].length)
            elif not finite and gradient.numel():
                gradient[0] = torch.nan  # as in dense storage, DeepSpeed skips the step on all ranks
                self.store.put_gradient(i, gradient)
            self.topology.keep_gradient(i, gradient, scale)

    def mask_update(self, parameter: torch.nn.Parameter, update: Tensor) -> None:
        """Do nothing: an update has values of active weights alone."""

    def masks_restored(self) -> None:
        """Forget the gradients of before. There is nothing to mask: optimizer states are those of active weights."""
        self.topology.forget_gradients()

    def weights_written(self) -> None:
        """Do nothing: inactive weights were not written."""

    def begin_anew(self) -> None:
        """Keep the first masks, unless they were read off the weights before.

        Raises:
            UserError: if they were.
        """
        if depends_on_weights(self.initial, None if self.given is None else self.given.stated):
            raise UserError(
                "the first masks of this run were chosen from the weights at initialize, and compact weights cannot "
                "take others: load the weights into the model before initialize, or set mst.compute.compact to off"
            )
        if self.engine.global_steps:
            raise UserError(
                "a checkpoint without masks cannot be continued with mst.compute.compact: set it to off, or load only "
                "the weights (weights_only=True)"
            )

    def _choose_first_masks(self, step: int) -> None:
        self.topology.masks_from_index()
        self.state.refresh()


class CompactTopology(Topology):
    """Prunes and grows a few layers at a time."""

    store: zero_shards.CompactStore

    def __init__(self, *args: Any, sparsity: float | None, **named: Any):
        super().__init__(*args, **named)
        self.dense_gradients: dict[int, Tensor] = {}
        """Means over ranks, of this rank's slices and of the micro-batches so far."""
        self._uses: dict[tuple[int, int], Tensor] = {}
        """Gradients of whole matrices, by matrix and backward pass, that have not come to their last use yet."""
        self._kept: dict[int, Tensor] = {}
        """Gradients of whole matrices that are reduced at the end of the step, of the micro-batches so far."""
        self._wanted = False
        self._reduced_late = [
            i
            for i in self.store.indexes
            if not self.store.frozen(i) and (self.store.group is None or i in self.store.tied)
        ]
        """Parameters whose gradients are kept: at stage 0, where ranks may use different layers, as DeepSpeed allows
        there, and those that other stages of a pipeline hold too."""
        for i in self.store.indexes:
            if self.store.frozen(i):
                continue
            finish = self._keep_gradient_of_step if i in self._reduced_late else self._reduce_dense_gradient
            # this kind of hook does not run in torch.autograd.grad, and stays when a load broadcasts tied parameters; a
            # strong reference would keep the engine in memory, because Python's collector does not see these hooks
            self.store.parameters[i].register_post_accumulate_grad_hook(functools.partial(_weakly(finish), i))
        zero_shards.watch_losses(self.engine, _weakly(self._begin_backward))
        zero_shards.around_passes(self.engine, _weakly(self._around_pass))
        zero_shards.on_zero_grad(self.engine, _weakly(self._leave_out))
        if sparsity is None:  # given masks have as many as they have
            return
        counts = self.counts(sparsity)
        for i, index in self.store.indexes.items():
            assert index.count == counts[i], f"{index.name}: {index.count} values for {counts[i]} weights"

    def keep_gradient(self, i: int, gradient: Tensor, scale: float) -> bool:
        """Keep a copy of this rank's range of the values' gradient, if a topology step is under way."""
        if self.under_way is not None:
            self.under_way.gradients[i] = gradient.detach().to(torch.float32, copy=True).div_(scale)
        return True

    def after_step(self, updated: bool) -> None:
        super().after_step(updated)
        self.forget_gradients()

    def _leave_out(self) -> None:
        """Forget a batch that the loop leaves out; at stage 3 DeepSpeed itself calls `zero_grad` in its step, too."""
        if self.under_way is None:
            self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop the gradients of the step so far."""
        for kept in (self.dense_gradients, self._kept, self._uses):
            kept.clear()

    # --- dense gradients, in the one step that reads them ---

    def ask_for_dense_gradients(self, wanted: bool) -> None:
        """Set whether the next backward passes hand on the dense gradients of layers."""
        for i, index in self.store.indexes.items():
            index.on_gradient = functools.partial(self._add_use, i) if wanted else None
        self._wanted = wanted

    def _around_pass(self) -> contextlib.AbstractContextManager[Any]:
        return eagerly() if self._wanted else contextlib.nullcontext()

    def _add_use(self, i: int, gradient: Tensor, rows: Tensor | None = None) -> None:
        """Add up the uses of a matrix, such as a tied head's and its embedding's, in their dtype, as autograd does.

        Args:
            i: the parameter.
            gradient: of the matrix, or of some of its rows.
            rows: which these are; None if it is of the matrix.
        """
        shape, key = self.store.slices[i].shape, (i, _backward_pass())
        if key not in self._uses:
            self._uses[key] = gradient.reshape(-1) if rows is None else gradient.new_zeros(math.prod(shape))
            if rows is None:
                return
        if rows is None:
            self._uses[key].add_(gradient.reshape(-1))
        else:
            self._uses[key].view(shape).index_add_(0, rows, gradient)

    def _reduce_dense_gradient(self, i: int, _: Tensor) -> None:
        """One reduction per layer and micro-batch, when its values have their gradient; then only a slice is kept."""
        whole = self._uses.pop((i, _backward_pass()), None)
        if whole is not None:
            mine = self.store.reduced(i, whole)
            self.dense_gradients[i] = self.dense_gradients[i].add_(mine) if i in self.dense_gradients else mine

    def _keep_gradient_of_step(self, i: int, _: Tensor) -> None:
        """Ranks may use different layers, and stages of a pipeline compute a micro-batch at different times."""
        whole = self._uses.pop((i, _backward_pass()), None)
        if whole is not None:
            self._kept[i] = self._kept[i].add_(whole) if i in self._kept else whole

    def _begin_backward(self, *_: Any) -> None:
        """Forget what `torch.autograd.grad` has handed on since the last backward pass of the engine."""
        self._uses.clear()

    def finish_dense_gradients(self, scale: float) -> bool:
        """Reduce what was kept and remove the loss scale; return whether all values on all ranks are finite.

        The ranks of one stage agree: what is not finite on another stage is in its own gradients.
        """
        if self.under_way is not None and self.under_way.reads_dense_gradients:
            for i in self._reduced_late:  # on all ranks in this order
                whole = self._kept.pop(i, None)  # None: the loss does not depend on it here
                if whole is None:
                    whole = self.store.parameters[i].new_zeros(self.store.slices[i].numel)
                self.dense_gradients[i] = self.store.reduced(i, whole)
        bad = torch.zeros(len(self._masks), dtype=torch.int64)
        for i, gradient in self.dense_gradients.items():
            gradient.div_(scale)
            bad[i] = not self.becomes_finite(gradient, scale)
        return not (self.state.exchange.max(bad).any() if len(bad) else False)

    # --- pruning and growing ---

    def _evolve(self, under_way: TopologyStep, here: list[int]) -> list[Change]:
        found = {i: unchanged(self._masks[i]) for i in here if i not in self.store.indexes}
        for exchange, together in self.state.exchange.grouped(i for i in here if i not in found):
            for batch in self._batches(together):
                found |= zip(batch, self._evolve_batch(under_way, batch, exchange), strict=True)
        return [found[i] for i in here]

    def _batches(self, layers: list[int]) -> list[list[int]]:
        """Divide layers into batches that have no more weights, and no more active ones, than the largest layer."""
        known = self.store.indexes.values()
        most = max((x.numel for x in known), default=0), max((x.count for x in known), default=0)
        batches: list[list[int]] = []
        room = active = 0
        for i in layers:
            mask = self._masks[i]
            if mask.numel > room or mask.active > active:
                batches.append([])
                room, active = most
            batches[-1].append(i)
            room, active = room - mask.numel, active - mask.active
        return batches

    def _evolve_batch(self, under_way: TopologyStep, batch: list[int], exchange: Exchange) -> list[Change]:
        config, store, masks = self.config, self.store, [self._masks[i] for i in batch]
        usual: Sequence[float | None] = [None] * len(batch)
        if config.grown_moments == "active_mean":
            values = [under_way.gradients[i] for i in batch]
            scores = [Scores(mask.name, (of,)) for mask, of in zip(masks, values, strict=True)]
            usual = mean_squares(values, [mask.active for mask in masks], peak_keys(scores, exchange), exchange)
        gradients = self._dense_gradients(under_way, batch)
        weights = store.expanded([(i, store.values.weight(i)) for i in batch])
        layers = [
            Layer(mask, under_way.targets[i], weight, gradient)
            for i, mask, weight, gradient in zip(batch, masks, weights, gradients, strict=True)
        ]
        changes = self._change(under_way, layers, exchange)
        del weights, layers
        if config.grown_moments == "seeded":
            usual = [change.gradient_mean_square for change in changes]
        moved = [n for n, change in enumerate(changes) if change.pruned or change.grown]
        positions = self._positions([batch[n] for n in moved], exchange)
        stayed = store.move([(batch[n], at) for n, at in zip(moved, positions, strict=True)])
        self._start(
            [
                _Grown(batch[n], ~flags, mean, gradients[n])
                for n, flags in zip(moved, stayed, strict=True)
                if (mean := usual[n]) is not None and store.second_moment(batch[n]) is not None
            ]
        )
        return changes

    def _positions(self, layers: list[int], exchange: Exchange) -> list[Tensor]:
        """Return the positions of the active weights of whole matrices, ascending (two collectives).

        Each rank finds those of its slices.
        """
        masks = [self._masks[i] for i in layers]
        if not masks:
            return []
        own = [packed_bits.indices(mask.packed(), mask.length) + mask.shard.start for mask in masks]
        counts = torch.zeros(len(layers), exchange.ranks, dtype=torch.int64)
        counts[:, exchange.rank] = torch.tensor([len(found) for found in own])
        counts = exchange.sum(counts)
        for mask, found in zip(masks, counts.sum(1).tolist(), strict=True):
            if found != mask.active:
                raise RuntimeError(f"{mask.name}: its mask has {found} active weights instead of {mask.active}")
        if exchange.ranks == 1:
            return own
        lengths = [mask.active for mask in masks]
        narrow = all(mask.numel < WIDEST for mask in masks)
        kind = torch.int32 if narrow else torch.int64
        joined = torch.zeros(sum(lengths), dtype=kind, device=masks[0].device)
        starts = counts.cumsum(1)[:, exchange.rank] - counts[:, exchange.rank]
        for found, start, whole in zip(own, starts.tolist(), joined.split(lengths), strict=True):
            whole[start : start + len(found)] = found
        return list(exchange.sum_here(joined).to(masks[0].device).split(lengths))

    def _dense_gradients(self, under_way: TopologyStep, batch: list[int]) -> list[Tensor | None]:
        """Return the gradients that the policy reads: of all weights, of the active ones, or None."""
        values = [(i, under_way.gradients[i]) for i in batch]
        if under_way.reads_dense_gradients:
            found = [(i, self.dense_gradients.pop(i, None), of) for i, of in values]
            return [of.new_zeros(self._masks[i].length) if g is None else g.to(of.device) for i, g, of in found]
        if "gradient" not in self.policy.reads:
            return [None] * len(batch)
        return [*self.store.expanded(values)]

    def _start(self, grown: list[_Grown]) -> None:
        """Give what has grown the second moments that `Topology` gives it."""
        if self.config.grown_moments == "zero":
            return
        own: list[Tensor | None] = [None] * len(grown)
        if self.config.grown_moments == "seeded":
            own = [*self.store.taken([(of.parameter, of.gradient) for of in grown if of.gradient is not None])]
        factor = zero_shards.clip_factor(self.engine)
        for of, gradient in zip(grown, own, strict=True):
            moment = self.store.second_moment(of.parameter)
            assert moment is not None
            squares = torch.full_like(moment, of.usual, dtype=torch.float32)
            if gradient is not None:
                squares = torch.maximum(squares, gradient.square())
            share = self.store.second_moment_share(of.parameter)
            started = (squares * (factor * factor * share)).to(moment.dtype)
            moment.copy_(torch.where(of.where, started, moment))

    # --- the masks and the index say the same ---

    def masks_from_index(self) -> None:
        """Make masks of the index that the model's layers have."""
        for i, mask in enumerate(self._masks):
            if mask.ever is not None:
                mask.ever.zero_()  # the dense mask was never trained with
            if (index := self.store.indexes.get(i)) is None:
                mask.set_flags(torch.ones(mask.length, dtype=torch.bool, device=mask.device), mask.numel)
                continue
            flags = index.flags().to(mask.device)
            mask.set_flags(flags[mask.shard.start : mask.shard.start + mask.length].clone(), index.count)

    def take_index(self, checkpoint: Path) -> Callable[[], None]:
        """Give the layers the index of a checkpoint's masks, before its weights come; return what undoes it."""
        before = [(index, index.positions) for index in self.store.indexes.values()]
        if not (checkpoint / mask_files.FOLDER).is_dir():
            return lambda: None  # it has no masks: whoever takes its weights says what is to be done
        masks = mask_files.read_all(checkpoint)
        known = set(masks.head["names"])
        if any(index.name not in known for index, _ in before):
            return lambda: None  # masks of another model are rejected when they are restored
        whole = [(assemble(masks.shards(index.name), index.name), index.numel) for index, _ in before]
        found = [packed_bits.indices(bits, numel) for bits, numel in whole]
        for (index, _), positions in zip(before, found, strict=True):
            if positions.numel() != index.count:
                raise UserError(
                    f"{checkpoint}: {index.name} has {positions.numel()} active weights in the checkpoint and "
                    f"{index.count} in this run, but compact training cannot change their number: use the same "
                    "mst.sparsity, or set mst.compute.compact to off"
                )
        for (index, _), positions in zip(before, found, strict=True):
            index.replace(positions)

        def undo() -> None:
            for index, positions in before:
                index.replace(positions)

        return undo

    def index_from_masks(self) -> None:
        """Give the layers the index of masks that were restored (collective)."""
        for exchange, together in self.state.exchange.grouped(self.store.indexes):
            for batch in self._batches(together):
                for i, positions in zip(batch, self._positions(batch, exchange), strict=True):
                    self.store.indexes[i].replace(positions)


@dataclass
class _Grown:
    """What grew in one parameter."""

    parameter: int
    where: Tensor
    """Flags of this rank's range of the values."""
    usual: float
    """The mean square of the layer's gradients."""
    gradient: Tensor | None
    """This rank's slice of the gradient of the whole matrix, if it was computed."""


def _backward_pass() -> int:
    """Return the number of the backward pass, or call of `torch.autograd.grad`, that runs this."""
    return int(torch._C._current_graph_task_id())


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method as long as its object exists, and otherwise returns None."""
    found = weakref.WeakMethod(method)

    def call(*given: Any) -> Any:
        return None if (alive := found()) is None else alive(*given)

    return call

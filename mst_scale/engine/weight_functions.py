"""Makes layers multiply by a function of their stored parameters, until the schedule turns dense (`methods`).

The optimizer, ZeRO and checkpoint files see only the stored values. The values with which a function starts, and the
weights with which it ends, are computed by one rank and sent to the ranks that hold the same weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.checkpoints.multiplied import STATE
from mst_scale.comm import ParallelDims
from mst_scale.comm.exchange import Exchange
from mst_scale.config import Experiment
from mst_scale.config.parallel import describe_method_conflict
from mst_scale.engine.component import Component
from mst_scale.engine.masking import describe_phases
from mst_scale.engine.targets import choose_targets, head_of, is_read_by_fused_layer
from mst_scale.engine.topology import Criteria
from mst_scale.errors import UserError
from mst_scale.methods import METHODS, WeightFunction
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.shard import Shard
from mst_scale.sparse_linear import Product, SparseLayers

_HOLDS = "mst_holds_function"  # of a model: the method whose function its parameters are stored for


def held_by(model: torch.nn.Module) -> str | None:
    """Return the method that computes a model's weights from its parameters now; None if they are the weights."""
    return getattr(model, _HOLDS, None)


@dataclass
class LayerFunction:
    """The function of one layer, as its products call it."""

    function: WeightFunction
    kept: int
    scale: float

    def weight(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the weight that products use in place of the stored tensor."""
        return self.function.weight(stored, self.kept, self.scale)

    def linear(self, x: torch.Tensor, stored: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output."""
        return self.function.linear(x, stored, bias, self.kept, self.scale)


class WeightFunctions(Component, Criteria):
    """The functions of one engine's layers, from the first step until the final dense phase begins, or to the end."""

    state_key = STATE
    measures = True

    def __init__(self, engine: Any, experiment: Experiment):
        self.engine, mst = engine, experiment.mst
        self.method, self.options = str(mst.method), mst.options
        function = mst.function
        assert function is not None
        self.function: WeightFunction = function
        self.schedule, self.distribution = experiment.schedule, mst.sparsity.distribution
        self.always = mst.sparsity.variation == "dense"  # a function that has no schedule
        self.targets = choose_targets(engine.module, mst.targets)
        self.shapes = {name: tuple(zero_shards.shape_of(p)) for name, p in self.targets.items()}
        cut = ParallelDims(tensor=zero_shards.tensor_slices(engine), pipeline=zero_shards.stage_count(engine))
        if (reason := describe_method_conflict(mst, cut)) is not None:
            raise UserError(reason)
        if zero_shards.uses_muon(engine):
            raise UserError(
                f"method {self.method} trains stored tensors, but Muon needs the weights themselves: use AdamW"
            )
        head = head_of(engine.module)
        tables = [p for m in engine.module.modules() if isinstance(m, zero_shards.TABLES) for p in m.parameters()]
        for name, shape in self.shapes.items():
            if self.targets[name] is head and any(head is p for p in tables):
                raise UserError(
                    f"method {self.method}: {name} is a tied head, so the embedding would read stored values instead "
                    "of weights: set mst.targets.lm_head to false"
                )
            reason = function.unsupported_reason(shape, self.targets[name].device.type, self.targets[name].dtype)
            if reason is not None:
                raise UserError(f"method {self.method}: {name}: {reason}")
        self.pulls = type(function).pull is not WeightFunction.pull
        zero_shards.check_optimized(engine, self.targets)
        shards = zero_shards.shards_of(engine, self.targets)
        assert not isinstance(shards, zero_shards.CompactStore), "functions need all stored weights"
        self.shards = shards
        groups = zero_shards.groups_of(engine)
        self.zero, self.replicas = Exchange(groups.zero, engine.device), groups.replicas
        self.layers = {name: LayerFunction(function, math.prod(shape), 1.0) for name, shape in self.shapes.items()}
        self.products: dict[str, Product] = {}
        self.reseed = False
        self.first_squares: dict[int, torch.Tensor] = {}  # by layer, while the first step after `end` is under way
        self.rounded: dict[int, torch.Tensor] = {}  # by layer, while a step is under way
        """What the dtype of gradients has rounded away of the pull."""

    def use(self, products: dict[str, Product] | None) -> None:
        """Make these products call the functions; None for a run without masks, which gets its own products."""
        if products is None:
            products = SparseLayers(self.engine.module, self.targets, self.shapes, "dense", always=True).products
        for name, parameter in self.targets.items():
            if is_read_by_fused_layer(self.engine.module, parameter):
                raise UserError(
                    f"method {self.method}: a layer of torch that fuses its products reads {name} by itself in "
                    "evaluation: exclude it with mst.targets.exclude"
                )
            if name not in products or products[name].across:
                raise UserError(
                    f"method {self.method}: {name} is not the weight of an nn.Linear, which this method requires: "
                    "exclude it with mst.targets.exclude"
                )
        self.products = products

    # --- when they hold ---

    def hold_at(self, step: int) -> bool:
        """Return whether the forward pass after a step uses the functions: to the end if no dense phase follows."""
        ends_sparse = self.schedule.sparse_until == self.schedule.total_steps
        return self.always or ends_sparse or step < self.schedule.sparse_until

    def begin(self) -> None:
        self.weights_replaced()

    def before_step(self) -> None:
        self._pull()
        self._keep_first_squares()

    def after_step(self, updated: bool) -> None:
        self._end_if_due()
        self._follow()

    def weights_replaced(self) -> None:
        """Store the tensors that yield the current weights of the model."""
        if self.hold_at(self._step):

            def stored(name: str, weight: torch.Tensor) -> torch.Tensor:
                if not weight.isfinite().all():
                    raise UserError(f"method {self.method}: {name} has a weight that is not finite: load other weights")
                made, self.layers[name].scale = self.function.begin(weight)
                return made

            self._replace(stored)
        self._follow()

    @property
    def _step(self) -> int:
        return int(self.engine.global_steps)

    def _follow(self) -> None:
        """Set how the products compute in the next step."""
        holds = self.hold_at(self._step)
        setattr(self.engine.module, _HOLDS, self.method if holds else None)
        kept = self._kept() if holds else {}
        for name, layer in self.layers.items():
            layer.kept = kept.get(name, layer.kept)
            self.products[name].function = layer if holds else None

    def _pull(self) -> None:
        """Add the method's regularization to the reduced gradients, on which norm and clipping depend.

        In half precision, what does not fit into a gradient is kept for the float32 gradient of the master weights.
        """
        self.rounded = {}
        if not self.pulls or not self.hold_at(self._step):
            return
        scale = zero_shards.loss_scale(self.engine)
        for i, layer in enumerate(self.layers.values()):
            gradient, part = self.shards.gradient(i), self.shards.slices[i]
            pull = self.function.pull(self._read(i), layer.kept, layer.scale)
            if gradient is None or pull is None:
                continue
            mine = pull.view(-1)[part.start : part.stop].to(gradient.device)
            pulled = gradient.to(mine.dtype) + scale * mine
            self.shards.put_gradient(i, pulled.to(gradient.dtype))
            if gradient.dtype != mine.dtype:
                self.rounded[i] = (pulled - pulled.to(gradient.dtype)) / scale

    def _read(self, i: int) -> torch.Tensor:
        """Return the matrix that the forward pass reads, whole and at least in float32; ZeRO-3 has a part of it."""
        parameter, shape = list(self.targets.values())[i], list(self.shapes.values())[i]
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if parameter.numel() == math.prod(shape):
            return parameter.detach().to(wide)
        part, whole = self.shards.slices[i], torch.zeros(math.prod(shape), dtype=wide, device=self.engine.device)
        whole[part.start : part.stop] = self.shards.read(i)
        return self.zero.sum_here(whole).view(shape)

    def _kept(self) -> dict[str, int]:
        sparsity = 0.0 if self.function.elementwise else self.schedule.at(self._step).sparsity
        counts = active_counts(list(self.shapes.values()), sparsity, self.distribution)
        return dict(zip(self.shapes, counts, strict=True))

    def _end_if_due(self) -> None:
        """Continue with plain weights after the last step that uses the functions."""
        if self.hold_at(self._step) or not self.hold_at(self._step - 1):
            return

        def plain(name: str, stored: torch.Tensor) -> torch.Tensor:
            layer = self.layers[name]
            return self.function.end(stored, layer.kept, layer.scale)

        moved = self._replace(plain)
        if moved:
            for i in range(len(self.shapes)):
                for state in self.shards.states(i).values():
                    state.zero_()
            self.reseed = True

    def _keep_first_squares(self) -> None:
        """Keep the squared gradients with which Adam's second moments begin, since those of other values are discarded.

        They are of the first gradient or of the layer's usual one, whichever is larger.
        """
        self.first_squares = {}
        for i, shape in enumerate(self.shapes.values()) if self.reseed else ():
            gradient, v = self.shards.gradient(i), self.shards.second_moment(i)
            if v is None:
                continue
            g = torch.zeros_like(v) if gradient is None else gradient.detach().float()
            g = g / zero_shards.loss_scale(self.engine)
            mean = float(self.zero.sum(g.double().square().sum())) / math.prod(shape)
            self.first_squares[i] = g.square().clamp(min=mean)

    def before_update(self) -> None:
        """Complete gradients and start second moments: there was no overflow, and what clipping makes of them is known.

        ZeRO-3 updates its sub-groups one after the other, so that this is called before each of them.
        """
        groups, clip = zero_shards.base_optimizer(self.engine).param_groups, zero_shards.clip_factor(self.engine)
        for i in self.shards.within({id(p) for group in groups for p in group["params"]}):
            gradient = self.shards.owner(i).grad
            if (rounded := self.rounded.pop(i, None)) is not None and gradient is not None:
                self.shards.part(i, gradient).add_(rounded.to(gradient.device), alpha=clip)
            if (square := self.first_squares.pop(i, None)) is not None:
                warm = self.shards.second_moment_share(i)  # as in `topology`
                moment = self.shards.second_moment(i)
                assert moment is not None
                moment.copy_(square * (warm * clip**2))
        self.reseed = self.reseed and bool(self.first_squares)

    def _replace(self, new: Callable[[str, torch.Tensor], torch.Tensor]) -> bool:
        """Replace every matrix by `new(name, matrix)`; return whether any has changed."""
        first, same = dist.get_global_rank(self.replicas, 0), Exchange(self.replicas, self.engine.device)
        changed = False
        parameters = dict(zero_shards.named_parameters(self.engine.module))
        with torch.no_grad():
            for i, (name, shape) in enumerate(self.shapes.items()):
                weight, part = self.shards.weight(i), self.shards.slices[i]
                whole = torch.zeros(math.prod(shape), device=weight.device)
                whole[part.start : part.start + part.length] = weight
                whole = self.zero.sum_here(whole)
                layer = self.layers[name]
                made = torch.empty(whole.numel() + 1, dtype=torch.float64, device=whole.device)
                compute = functools.partial(new, name, whole.view(shape)) if same.rank == 0 else lambda: None
                replacement = same.agree(compute)
                if replacement is not None:
                    made[:-1], made[-1] = replacement.reshape(-1), layer.scale
                made = made.to(self.engine.device)
                dist.broadcast(made, first, group=self.replicas)
                layer.scale = float(made[-1])
                values = made[:-1].to(weight.device, torch.float32)
                changed = changed or not torch.equal(values, whole.to(values.device))
                weight.copy_(values[part.start : part.start + part.length])
                read = zero_shards.read_stored(name, parameters[name], _reader(values))
                zero_shards.put_reads(self.engine, parameters[name], read)
        return changed

    # --- Criteria: what masks over an elementwise function read ---

    def to_weight_gradient_(self, name: str, stored: torch.Tensor, gradient: torch.Tensor) -> None:
        """Divide the gradient of stored values by the function's slope."""
        gradient.div_(self._slope(name, stored))

    def ranked(
        self, name: str, stored: torch.Tensor, momentum: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weights and their momentum."""
        layer, slope = self.layers[name], self._slope(name, stored)
        with torch.no_grad():
            weight = self.function.weight(stored.detach(), layer.kept, layer.scale)
        return weight, None if momentum is None else momentum / slope

    def to_stored_squares(self, name: str, stored: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Multiply squared gradients by the squared slope."""
        return squares * self._slope(name, stored).square()

    def _slope(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Return the function's derivative at some stored values of a matrix."""
        layer = self.layers[name]
        with torch.enable_grad():
            stored = stored.detach().clone().requires_grad_()
            weight = self.function.weight(stored, layer.kept, layer.scale)
            (slope,) = torch.autograd.grad(weight.sum(), stored)
        return slope

    # --- what others read ---

    def multiplied(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a model's state dict of whole tensors with the weights of layers in place of what they store."""
        found = dict(state)
        for name in found.keys() & self.layers.keys() if self.hold_at(self._step) else ():
            layer, stored = self.layers[name], found[name]
            with torch.no_grad():
                found[name] = self.function.weight(stored.float(), layer.kept, layer.scale).to(stored.dtype)
        return found

    def densities(self) -> dict[str, float]:
        """Return the FLOPs of the layers' products divided by those of dense products."""
        return self._shares(self.function.density)

    def gradient_densities(self) -> dict[str, float]:
        return self._shares(self.function.gradient_density)

    def _shares(self, density: Any) -> dict[str, float]:
        if not self.hold_at(self._step):
            return dict.fromkeys(self.shapes, 1.0)
        kept = self._kept()
        return {name: density(shape, kept[name] / math.prod(shape)) for name, shape in self.shapes.items()}

    def sparsity(self) -> float:
        numels = {name: math.prod(shape) for name, shape in self.shapes.items()}
        dense = self.densities()
        return 1 - sum(dense[name] * n for name, n in numels.items()) / sum(numels.values())

    def describe(self) -> str:
        weights = sum(math.prod(shape) for shape in self.shapes.values())
        options = ", ".join(f"{key} {value}" for key, value in asdict(self.options).items())
        return (
            f"the layers of {len(self.shapes)} matrices with {weights:,} weights multiply by a function of them"
            f"{f' ({options})' if options else ''}: {METHODS[self.method].about}; {describe_phases(self.schedule)}"
        )

    def state_dict(self) -> dict[str, Any]:
        holds = self.hold_at(self._step)
        layers = {name: [layer.kept, layer.scale] for name, layer in self.layers.items()} if holds else {}
        return {"method": self.method, "options": asdict(self.options), "layers": layers, "reseed": self.reseed}

    def has_saved(self, state: Mapping[str, Any]) -> bool:
        """Return whether a `state_dict` is that of the same functions, while they held."""
        same = (state["method"], state["options"]) == (self.method, asdict(self.options))
        return same and bool(state["layers"])

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        stated = None if state is None else (state["method"], state["options"])
        if stated != (self.method, asdict(self.options)):
            raise UserError(
                f"the checkpoint was trained with {'another method' if state is None else f'method {stated}'}, with "
                f"which it must be continued; to use its weights with method {self.method}, start a new run with --init"
            )
        assert state is not None
        self.reseed = bool(state["reseed"])
        for name, (kept, scale) in state["layers"].items():
            self.layers[name].kept, self.layers[name].scale = int(kept), float(scale)
        self._follow()


def _reader(values: torch.Tensor) -> Any:
    def read(shard: Shard) -> torch.Tensor:
        return values[shard.start : shard.start + shard.length]

    return read

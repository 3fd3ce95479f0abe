"""Makes the sparse layers of a model compact before DeepSpeed takes the model over, if the run allows it.

A compact layer stores its K active weights as a vector (`CompactIndex`), so that whatever DeepSpeed keeps, reduces or
sends for it has K numbers. DeepSpeed lays out its shards when it starts, so K has to be known by then and must not
change: the sparsity is constant from the first step to the last. The first masks are those of a run with dense storage:
a hash of (seed, name, index), the largest weights, or those that `mst.masks` names.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

from mst_scale.comm import Mesh, ParallelDims, logger
from mst_scale.comm.exchange import Exchange, Stages
from mst_scale.comm.ranks import select_device
from mst_scale.config import Experiment
from mst_scale.config.compact import not_compact_reason
from mst_scale.config.deepspeed import precision_of
from mst_scale.engine.compact_linear import compact_embedding, compact_linear
from mst_scale.engine.initial_masks import GivenMasks, check_ties, depends_on_weights
from mst_scale.engine.targets import choose_targets, is_read_by_fused_layer
from mst_scale.errors import UserError
from mst_scale.mixed_growing import evolve, packed_bits
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.mixed_growing.evolve import Layer
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.shard import Shard
from mst_scale.sparse_linear.compact import compact_cross_entropy
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.sparse_linear.guarded import CompactLayer, parameter_of
from mst_scale.sparse_linear.layers import stored_across
from mst_scale.sparse_linear.replaced import Replaced, replace_forward
from mst_scale.zero_shards import indexes_of, mark, mark_model, shape_of, stages_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REPLICATED = "ds_pipe_replicated"  # of a parameter that DeepSpeed's norms count on another stage


def make_compact(
    model: nn.Module, experiment: Experiment, optimizer: Any, parameters: Any, others: dict[str, Any]
) -> Any:
    """Make the sparse layers of a model compact, or log in one line why they stay dense.

    Args:
        model: the model, which is changed in place.
        experiment: the config of the run.
        optimizer: what `mst_scale.initialize` was given as its optimizer.
        parameters: the parameters or parameter groups to optimize.
        others: further arguments of `deepspeed.initialize`.

    Returns:
        The parameters or groups with compact parameters in place of the dense ones.
    """
    if experiment.mst.compute.compact == "off" or experiment.mst.stays_dense:
        return parameters
    stages = stages_of(model)
    reason = _stays_dense_reason(optimizer, model, others) or not_compact_reason(experiment)
    if reason is None:
        targets = choose_targets(model, experiment.mst.targets, frozen=experiment.mst.masks is not None)
        why = next((why for name, p in targets.items() if (why := _layer_stays_dense_reason(model, name, p))), None)
        reason = next((of_stage for of_stage in stages.all(why) if of_stage is not None), None)
    if reason is not None and experiment.trains is not None:
        return parameters  # of a run whose storage changes: it has said when
    if reason is not None:
        logger.info("mst.compute.compact: inactive weights are kept as zeros, because %s", reason)
        return parameters
    made = _convert(model, experiment, targets, stages)
    found = stages.joined({index.name: (index.count, index.numel) for index in indexes_of(model)})
    if not found:
        logger.info("mst.compute.compact: inactive weights are kept as zeros, because no matrix has any")
        return parameters
    mark_model(model)
    active, stored = (sum(numbers) for numbers in zip(*found.values(), strict=True))
    logger.info(
        "mst.compute.compact: %d matrices store their active weights alone, %s of %s",
        len(found), f"{active:,}", f"{stored:,}",
    )  # fmt: skip
    return _replaced(parameters, made)


def _stays_dense_reason(optimizer: Any, model: nn.Module, others: dict[str, Any]) -> str | None:
    """Return which of the arguments keeps a run dense; None if none does."""
    mpu = others.get("mpu")
    mesh = mpu.sizes if isinstance(mpu, Mesh) else ParallelDims()
    cases = {
        "the optimizer is an object that has the dense weights": isinstance(optimizer, torch.optim.Optimizer),
        "the optimizer is not the config's Adam or AdamW": optimizer is not None,
        "layers are split over ranks": mesh.tensor * mesh.pipeline > 1
        or (isinstance(model, PipelineModule) and model.mpu().get_slice_parallel_world_size() > 1),
        "the mpu is not a mst_scale.comm.Mesh": mpu is not None and not isinstance(mpu, Mesh),
    }
    return next((reason for reason, applies in cases.items() if applies), None)


def _layer_stays_dense_reason(model: nn.Module, name: str, parameter: nn.Parameter) -> str | None:
    """Return why a parameter cannot be compact (something reads it as a matrix), or None."""
    if not parameter.requires_grad:
        return f"{name} is not trained"
    owners = [(m, key) for m in model.modules() for key, p in m._parameters.items() if p is parameter]
    for module, key in owners:
        known = type(module) in (nn.Linear, nn.Embedding, *stored_across()) or _is_table_of_head(module)
        if key != "weight" or not known or "forward" in vars(module):
            return f"{name} belongs to a {type(module).__name__}"
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
            return f"the embedding {name} has max_norm or sparse gradients"
        if torch.nn.utils.parametrize.is_parametrized(module):
            return f"{name} is parametrized"
    if is_read_by_fused_layer(model, parameter):
        return f"a layer of torch that fuses its products reads {name} by itself"
    if any(id(p) == id(parameter) for module in _read_by_functions(model) for p in module.parameters()):
        return f"a function of the pipeline (forward_fn) reads {name} by itself"
    tables = [module for module, _ in owners if isinstance(module, nn.Embedding)]
    heads = (model, *tables)
    if tables and len(tables) == len(owners) and not any(hasattr(module, "head_product") for module in heads):
        return f"the head reads the embedding {name} by itself"
    if not tables and len(owners) > 1:
        return f"{name} is shared by {len(owners)} layers"
    return None


def _is_table_of_head(module: nn.Module) -> bool:
    """Whether a module is an embedding that a tied head multiplies by through `head_product`."""
    looks_up = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return looks_up and hasattr(module, "head_product")


def _read_by_functions(model: nn.Module) -> list[nn.Module]:
    """Return this stage's tied modules that a function of the user's calls in place of their forward."""
    if not isinstance(model, PipelineModule):
        return []
    called = {
        spec.key for spec in model._layer_specs if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None
    }
    return [module for key, module in model.tied_modules.items() if key in called and not _is_table_of_head(module)]


def _convert(
    model: Any, experiment: Experiment, targets: dict[str, nn.Parameter], stages: Stages
) -> dict[int, nn.Parameter]:
    """Replace dense parameters by compact ones; these by the id of what they replace."""
    shapes = {name: tuple(shape_of(p)) for name, p in targets.items()}
    replicas = model.mpu().get_data_parallel_group() if isinstance(model, PipelineModule) else None
    choose = _FirstPositions(experiment, stages.joined(shapes), replicas)
    digests: dict[str, str] = {}
    made: dict[int, nn.Parameter] = {}
    tied = set(model.tied_modules.values()) if isinstance(model, PipelineModule) else set()
    for name, parameter in targets.items():
        with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
            index = CompactIndex(name, shapes[name], choose(name, parameter.detach()))
            if stages.group is not None:
                digests[name] = sha256(index.positions.cpu().numpy().tobytes()).hexdigest()
            if index.count == index.numel:
                continue  # the distribution, or a given mask, leaves it dense
            compact = nn.Parameter(index.to_store(parameter.detach()))
        mark(compact, index)
        if hasattr(parameter, REPLICATED):
            setattr(compact, REPLICATED, getattr(parameter, REPLICATED))
        made[id(parameter)] = compact
        for module in model.modules():
            for key, own in list(module._parameters.items()):
                if own is parameter:
                    module._parameters[key] = compact
                    _compute_with(module, index, read_by_deepspeed=module in tied)
        for module in model.modules():
            if hasattr(module, "head_product") and parameter_of(module.get_output_embeddings().weight) is compact:
                module.head_product = _Head(index)
                if hasattr(module, "head_loss"):
                    module.head_loss = module.head_product.loss
    check_ties(stages.differing(digests))
    return made


class _FirstPositions:
    """Chooses the weights that are active at first, as a run with dense storage does.

    All ranks start with the weights of rank 0, or of the first rank of their stage, which DeepSpeed sends them when it
    takes the model over. Masks that are read off the weights come before that, so these weights are sent here.

    Args:
        experiment: the config of the run.
        shapes: the shape of each matrix of the model.
        replicas: the ranks that hold the same stage of a pipeline; None: all ranks hold the whole model.
    """

    def __init__(self, experiment: Experiment, shapes: dict[str, tuple[int, ...]], replicas: Any):
        mst = experiment.mst
        self.replicas = replicas
        self.seed = experiment.training.seed if mst.seed is None else mst.seed
        self.shapes = shapes
        self.given = None if mst.masks is None else GivenMasks(mst.masks)
        self.later = self.given is None and experiment.trains is not None and experiment.trains[0] > 0
        """Whether the masks are those that the engine loads next, so that any positions do until then."""
        self.how = mst.sparsity.initial
        self.reads = not self.later and depends_on_weights(self.how, mst.masks)
        self.dtype = DTYPES[precision_of(experiment.deepspeed)]
        sparsity = max(experiment.sparsities)
        self.counts = dict(
            zip(shapes, active_counts(list(shapes.values()), sparsity, mst.sparsity.distribution), strict=True)
        )

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the positions of a matrix's active weights, in the order of the flattened matrix (collective)."""
        if self.later:
            return torch.arange(self.counts[name])
        if self.reads:
            _take_first_ranks(weight, self.replicas)
        stored = weight.to(self.dtype)  # what DeepSpeed makes its master weights of
        shape = self.shapes[name]
        if self.given is not None:
            return self.given.of_matrix(name, shape, stored.cpu()).flatten().nonzero().flatten()
        mask = LayerMask(Shard.whole(name, shape), torch.device("cpu"))
        read = stored.float().flatten().cpu() if self.how == "magnitude" else torch.zeros(()).expand(mask.numel)
        evolve.sparsify([Layer(mask, self.counts[name], read)], how=self.how, seed=self.seed, exchange=Exchange())
        return packed_bits.indices(mask.packed(), mask.length)


def _take_first_ranks(weight: torch.Tensor, replicas: Any) -> None:
    """Replace the values of a whole matrix by those of the first of the ranks that hold it."""
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(verbose=False)
        select_device()  # under mpirun, LOCAL_RANK is not set before
    sent = weight.to(deepspeed.get_accelerator().current_device_name()).contiguous()
    first = 0 if replicas is None else torch.distributed.get_global_rank(replicas, 0)
    torch.distributed.broadcast(sent, first, group=replicas)
    weight.copy_(sent)


def _compute_with(module: nn.Module, index: CompactIndex, *, read_by_deepspeed: bool) -> None:
    """Let a module compute with the values that its parameter stores from now on.

    Args:
        module: one that has the parameter as its weight.
        index: of the parameter.
        read_by_deepspeed: DeepSpeed reads the weight of tied layers of a pipeline from the module, so that it cannot be
            guarded.
    """
    index.across = index.across or type(module) in stored_across()
    if isinstance(module, nn.Embedding):
        forward = functools.partial(_embedding, module, index)
        module.forward = functools.wraps(type(module).forward)(forward)  # type: ignore[method-assign]
    else:
        replace_forward(module, _linear, index, Replaced if read_by_deepspeed else CompactLayer)
    module._register_state_dict_hook(functools.partial(_save_matrix, index=index))
    module._register_load_state_dict_pre_hook(functools.partial(_load_matrix, index=index))


def _linear(module: Any, index: CompactIndex, x: torch.Tensor) -> torch.Tensor:
    return compact_linear(x, _values_of(module, index), index, module.bias)


def _embedding(module: nn.Embedding, index: CompactIndex, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    (tokens,) = (*args, *named.values())
    values = _values_of(module, index)
    return compact_embedding(tokens, values, index, module.padding_idx, module.scale_grad_by_freq)


def _values_of(module: nn.Module, index: CompactIndex) -> torch.Tensor:
    """Return what the module's parameter stores.

    Raises:
        UserError: something (pruning, a parametrization) computes the weight, as if the parameter were the matrix.
    """
    if "weight" not in module._parameters:
        raise UserError(
            f"{index.name} was pruned or parametrized, but this layer stores its active weights as a vector: set "
            "mst.compute.compact to off to do that to a model in training"
        )
    values = module._parameters["weight"]
    assert values is not None
    return values


class _Head:
    """The product of a model's head with its token embedding."""

    def __init__(self, index: CompactIndex):
        self.index = index

    def __call__(self, x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return compact_linear(x, parameter_of(values), self.index, bias)

    def loss(
        self, x: torch.Tensor, values: torch.Tensor, targets: torch.Tensor, count: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the cross-entropy without keeping the logits, or None if they have to be computed."""
        if self.index.on_gradient is not None:
            return None
        return compact_cross_entropy(x, parameter_of(values)[: self.index.count], targets, self.index, count)


# --- state dicts have the whole matrix ---


def _save_matrix(module: Any, state: dict[str, Any], prefix: str, metadata: Any, *, index: CompactIndex) -> None:
    """Put the matrix in place of its values, unless these are asked for or the live parameters are."""
    key = prefix + "weight"
    value = state.get(key)
    if value is None or index.stores_values or isinstance(value, nn.Parameter) or value.numel() != index.stored:
        return
    state[key] = index.expand(value)


def _load_matrix(state: dict[str, Any], prefix: str, *more: Any, index: CompactIndex) -> None:
    """Take the active weights out of a matrix, and leave the others, which are 0 here."""
    key = prefix + "weight"
    value = state.get(key)
    if value is not None and not index.stores_values and tuple(value.shape) == index.shape:
        values = index.to_store(value.detach())
        dropped = int(value.count_nonzero()) - int(values.count_nonzero())
        if dropped:
            logger.warning(
                "%s: %d nonzero weights that were loaded are inactive, and compact layers do not store them",
                key, dropped,
            )  # fmt: skip
        state[key] = values


def _replaced(parameters: Any, made: dict[int, nn.Parameter]) -> Any:
    """Parameters, or groups of them, with what was made in place of what it replaces."""

    def one(parameter: Any) -> Any:
        if isinstance(parameter, tuple):  # (name, parameter)
            return parameter[0], one(parameter[1])
        return made.get(id(parameter), parameter)

    def group(item: Any) -> Any:
        if not isinstance(item, dict):
            return one(item)
        held = item["params"]
        held = [held] if isinstance(held, torch.Tensor) else held
        return {**item, "params": [one(p) for p in held]}

    if not isinstance(parameters, Iterable):
        raise UserError(f"model_parameters is a {type(parameters).__name__}: give parameters or groups of them")
    return [group(item) for item in parameters]

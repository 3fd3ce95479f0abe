"""`mst_scale.initialize`: the arguments and results of `deepspeed.initialize`, and an engine that trains sparsely."""

from __future__ import annotations

import copy
import inspect
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import TiedLayerSpec
from torch.optim.lr_scheduler import LRScheduler

from mst_scale import zero_shards
from mst_scale.comm import Mesh, complete_environment, logger, own_loops, speak, under_mpi
from mst_scale.comm.ranks import select_device
from mst_scale.compiled.first_use import announced
from mst_scale.config import RECIPES, Experiment, MSTConfig, describe_unread, load, overridden_in_recipe, read, states
from mst_scale.config.parallel import KEYS, check_pipeline, sizes_of
from mst_scale.config.support import check_supported, precision_of
from mst_scale.engine.checkpoint_calls import reshape_on_load, save_dense_form, save_in_background
from mst_scale.engine.compaction import make_compact
from mst_scale.engine.sequences import cut_sequences
from mst_scale.engine.sparse_training import SparseTraining
from mst_scale.engine.token_limit import unlimited, whole_size, with_durations
from mst_scale.engine.types import MST, Engine
from mst_scale.engine.weight_functions import held_by
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import SelfAttention
from mst_scale.methods import METHODS
from mst_scale.sparse_linear.layers import remove_products

zero_shards.check_versions()
_deepspeeds_own = deepspeed.initialize  # before anybody puts another in its place (integrations.integrate)

READ = ("steps", "seed", "async_save", "reshape_on_load", "checkpoint_form")  # of the block `training`
FIRST = ("args", "model", "optimizer", "model_parameters")
Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


def initialize(
    args: Namespace | None = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Parameters], torch.optim.Optimizer] | None = None,
    model_parameters: Parameters | None = None,
    *more: Any,
    config: Experiment | dict[str, Any] | str | Path | None = None,
    config_params: dict[str, Any] | str | None = None,
    **others: Any,
) -> tuple[Engine, torch.optim.Optimizer, Iterable[Any] | None, LRScheduler | None]:
    """Create a DeepSpeed engine that trains sparsely. Takes the arguments of `deepspeed.initialize`, in the same order.

    Args:
        args: Command-line arguments; `args.deepspeed_config` may name the config.
        model: The model to train.
        optimizer: An optimizer, or a function that creates one; by default, the config's.
        model_parameters: The parameters to optimize; by default, all of the model's.
        more: Further positional arguments of `deepspeed.initialize`.
        config: A DeepSpeed config that may also contain the blocks `mst`, `training`, `model` and `data`, as a dict,
            a file or the name of a ready-made config.
        config_params: Another name for `config`, as in DeepSpeed.
        others: Further keyword arguments of `deepspeed.initialize`.

    Returns:
        The engine, the optimizer, the data loader and the learning-rate scheduler. `engine.mst` controls and describes
        the sparse training.

    Raises:
        UserError: The config has a mistake, or a setting with which sparse training would not be exact.
    """
    if more:
        given = inspect.signature(_deepspeeds_own).bind(args, model, optimizer, model_parameters, *more).arguments
        config, config_params, others = _merge(given, config, config_params, others)
    source = _only_config(model, config, config_params, args)
    assert model is not None
    own_loop = not isinstance(source, Experiment)  # `pretrain` passes an Experiment
    experiment, unread = _read_own_loop(source, others) if own_loop else (source, [])
    notes = [*check_supported(experiment.deepspeed, experiment.mst), *unread]
    _check_arguments(model, optimizer, experiment, others)
    remove_products(model)  # of an earlier engine, whose masks are no longer followed
    speak()
    cut_sequences(model, others.get("mpu"))
    if own_loop and (changes := overridden_in_recipe(source)):
        logger.info("%s", changes)
    if own_loop and (ineffective := describe_unread(source, blocks=("mst",))):
        notes.append(ineffective)
    for note in notes:
        logger.warning("%s", note)
    _prepare_process(args)
    weights = _weights_of_whole(model, experiment, others)
    parameters = model.parameters() if model_parameters is None else model_parameters
    engine, made, loader, scheduler = _create_engine(
        unlimited(experiment) if own_loop else experiment, _without_config(args), model, optimizer, parameters, **others
    )
    if own_loop:
        experiment = with_durations(experiment, source, engine, weights)
    training = _attach(engine, experiment, own_loop)
    if own_loop:
        _change_saves(engine, training, experiment, source)
    if own_loop and experiment.training.reshape_on_load:
        reshape_on_load(engine)
    return engine, made, loader, scheduler


def _change_saves(engine: Engine, training: SparseTraining, experiment: Experiment, source: Any) -> None:
    """Let `engine.save_checkpoint` do what the config sets; what it leaves out is as in DeepSpeed."""
    form = experiment.training.checkpoint_form if states(source, "training", "checkpoint_form") else "compact"
    dense = form == "dense" and zero_shards.is_compact(engine.module)
    if states(source, "training", "async_save") and experiment.training.async_save:
        training.saves = save_in_background(engine, dense)
    if dense and training.saves is None:
        save_dense_form(engine)


def _merge(
    positional: Mapping[str, Any], config: Any, config_params: Any, others: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the config, config_params and other arguments, of which some have come in DeepSpeed's order."""
    named = {key: value for key, value in positional.items() if key not in FIRST}
    stated = {key for key, value in (("config", config), ("config_params", config_params)) if value is not None}
    if twice := sorted(named.keys() & (others.keys() | stated)):
        raise TypeError(f"mst_scale.initialize got {twice[0]} both as a positional and as a keyword argument")
    config, config_params = named.pop("config", config), named.pop("config_params", config_params)
    return config, config_params, {**named, **others}


def _only_config(model: torch.nn.Module | None, config: Any, config_params: Any, args: Namespace | None) -> Any:
    """Return the one config that was given, in whatever argument."""
    of_args = getattr(args, "deepspeed_config", None)
    configs = [given for given in (config, config_params, of_args) if given is not None]
    if model is None or len(configs) != 1:
        what = "a model" if model is None else f"one config, not {len(configs) or 'none'}"
        raise UserError(f"mst_scale.initialize needs {what}: initialize(model=…, config=…), or args.deepspeed_config")
    return configs[0]


def _without_config(args: Namespace | None) -> Namespace | None:
    """Return args without the config: DeepSpeed would read the file itself, our blocks and presets unseen."""
    if getattr(args, "deepspeed_config", None) is None:
        return args
    args = copy.copy(args)
    args.deepspeed_config = None  # type: ignore[union-attr]
    return args


def _check_arguments(model: torch.nn.Module, optimizer: Any, experiment: Experiment, others: dict[str, Any]) -> None:
    """Reject a model, an optimizer or other arguments that this config cannot train with."""
    zero_shards.check_precision(precision_of(experiment.deepspeed))
    _reject_unread_sizes(model, experiment, others)
    _reject_mpu_of_stages(model, others.get("mpu"))
    if isinstance(model, deepspeed.PipelineModule):
        shared = any(isinstance(spec, TiedLayerSpec) for spec in model._layer_specs)
        check_pipeline(experiment.deepspeed, tied=shared and model.num_stages > 1)
    if not experiment.mst.stays_dense or experiment.mst.function is not None:
        zero_shards.check_arguments(model, **others)
    if zero_shards.is_compact(model):
        raise UserError(
            "this model stores only the active weights of an earlier engine (mst.compute.compact): build it again, and "
            "load its weights, of which state_dict() returns whole matrices"
        )
    if (method := held_by(model)) is not None:
        raise UserError(
            f"this model stores what method {method} of an earlier engine computes its weights from: build it again, "
            "and load the weights that mst export computes from a checkpoint"
        )
    if optimizer is None and experiment.deepspeed.get("optimizer") is None:
        raise UserError('there is no optimizer: add "optimizer" to the config, or pass one to mst_scale.initialize')
    if optimizer is None:
        zero_shards.check_configured_optimizer(experiment.deepspeed)
    if zero_shards.has_engine(optimizer):
        raise UserError("an earlier engine has this optimizer, and masks what it updates: create one for each engine")


def _prepare_process(args: Namespace | None) -> None:
    """Prepare what all engines of this process share, before DeepSpeed starts."""
    zero_shards.hasten()
    zero_shards.use_readable_architectures()
    if not torch.distributed.is_initialized() and not under_mpi():
        complete_environment()  # a free port for a script that no launcher started: DeepSpeed would always take 29500
    select_device(getattr(args, "device_rank", None))
    own_loops.prepare()


def _weights_of_whole(model: torch.nn.Module, experiment: Experiment, others: dict[str, Any]) -> int | None:
    """Return the number of parameters of the whole model, or None if `model` is a part of it."""
    cut = sizes_of(experiment.deepspeed).tensor > 1 and others.get("mpu") is not None  # AutoTP cuts later
    return whole_size(model, is_part=cut or isinstance(model, deepspeed.PipelineModule))


def _create_engine(
    experiment: Experiment, args: Namespace | None, model: torch.nn.Module, optimizer: Any, parameters: Parameters,
    **others: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Let DeepSpeed create its engine, with compact parameters where the experiment asks for them."""
    if others.get("mpu") is None and not isinstance(model, deepspeed.PipelineModule):
        zero_shards.forget_mpu()
    parameters = make_compact(model, experiment, optimizer, parameters, others)
    optimizer = zero_shards.checked_optimizer(optimizer, experiment.deepspeed)
    cutting = zero_shards.asserted_of_cutting(model, sizes_of(experiment.deepspeed).tensor)
    with announced(), cutting, zero_shards.keeping_groups():
        created: tuple[Any, Any, Any, Any] = _deepspeeds_own(
            args, model, optimizer, parameters, config=experiment.deepspeed, **others
        )
    return created


def _attach(engine: Any, experiment: Experiment, own_loop: bool) -> SparseTraining:
    """Let DeepSpeed's engine train sparsely, as `engine.mst`."""
    training = SparseTraining(engine, experiment, own_loop)
    tensor = sizes_of(experiment.deepspeed).tensor
    if tensor > 1 and not experiment.mst.stays_dense:  # later than the errors of models that cannot be split
        zero_shards.check_no_shared_dropout(engine.module, tensor)
    public: MST = training
    engine.mst = public
    zero_shards.install(engine, training)
    latest, steps = weakref.ref(training), experiment.training.steps
    own_loops.watch(lambda: (engine := latest()) is None or engine.step >= steps)
    training.begin()
    return training


def _reject_unread_sizes(model: torch.nn.Module, experiment: Experiment, others: dict[str, Any]) -> None:
    """Reject keys that cut the model, which would have no effect here; `pretrain` acts on them and removes them."""
    sizes = sizes_of(experiment.deepspeed)
    ours = any(isinstance(module, SelfAttention) for module in model.modules())
    if sizes.tensor > 1 and ours:
        raise UserError(
            f"{KEYS['tensor']} = {sizes.tensor}: DeepSpeed's AutoTP does not support this model, which splits its own "
            "layers: pass GPT(config, TensorGroup.of(mesh)) and mpu=mesh, or use mst_scale.pretrain"
        )
    if sizes.tensor > 1 and others.get("mpu") is not None:
        raise UserError(
            f"{KEYS['tensor']} = {sizes.tensor} does not work with an mpu: DeepSpeed's AutoTP replaces its groups and "
            "would reduce split sequences wrongly. Leave mpu out, or use the GPT of mst_scale with a Mesh"
        )
    if sizes.tensor > 1:
        zero_shards.check_cuttable(model, experiment.deepspeed, sizes.tensor)
    if sizes.pipeline > 1 and not isinstance(model, deepspeed.PipelineModule):
        raise UserError(
            f"{KEYS['pipeline']} = {sizes.pipeline} requires a PipelineModule as model: pass one, such as "
            "mst_scale.models.pipelined_gpt.PipelinedGPT, or use mst_scale.pretrain"
        )
    if sizes.sequence > 1 and others.get("mpu") is None and not experiment.mst.stays_dense:
        raise UserError(
            f"{KEYS['sequence']} = {sizes.sequence} requires an mpu, or DeepSpeed would not reduce all gradients: pass "
            f"mpu=mst_scale.comm.Mesh(ParallelDims(sequence={sizes.sequence})), or use mst_scale.pretrain"
        )


def _reject_mpu_of_stages(model: torch.nn.Module, mpu: Any) -> None:
    """Reject an mpu of a PipelineModule, and a mesh with stages of another model, whose ranks would not be connected.

    Raises:
        UserError: in both cases, also with method dense.
    """
    if isinstance(model, deepspeed.PipelineModule) and mpu is not None:
        raise UserError("mpu does not work with a PipelineModule, which makes its own groups of ranks: leave mpu out")
    if not isinstance(model, deepspeed.PipelineModule) and isinstance(mpu, Mesh) and mpu.sizes.pipeline > 1:
        raise UserError(
            f"the mesh has {mpu.sizes.pipeline} pipeline stages, but {type(model).__name__} is not a PipelineModule: "
            "pass PipelinedGPT(config, mesh) without mpu, or leave pipeline out of the mesh"
        )


def _read_own_loop(config: dict[str, Any] | str | Path, others: dict[str, Any]) -> tuple[Experiment, list[str]]:
    """Read the config of a training loop that is the user's, and reject what only `mst_scale.pretrain` can do or know.

    Returns:
        The experiment, and a note on keys that only `pretrain` reads.

    Raises:
        UserError: if phases are fractions of a run whose length only the user knows; if only `pretrain` can do what
            the method does; if there are two schedules of the learning rate.
    """
    experiment = load(config)
    has_length = states(config, "training", "steps")
    _check_method(experiment.mst)
    if experiment.mst.depends_on_length and not has_length:
        raise UserError(
            "training.steps is missing, and the phases of sparsity are fractions of the run: add "
            '"training": {"steps": N}, the number of optimizer steps, to the config'
        )
    if said := experiment.describe_skipped_ramp():
        logger.info("%s", said)
    last = experiment.schedule.at(experiment.training.steps - 1)
    if not has_length and last.sparsity > 0 and last.update_fraction > 0:
        logger.warning(
            "training.steps is not set, so masks stop moving at step %d: set it to the length of the run",
            experiment.training.steps,
        )  # fmt: skip
    blocks = read(config)[1]
    unread = [key for key in blocks.get("training", {}) if key not in READ]
    of_deepspeed = "scheduler" in experiment.deepspeed or others.get("lr_scheduler") is not None
    if of_deepspeed and "lr_schedule" in unread:
        raise UserError(
            "the config has two schedules of the learning rate, training.lr_schedule and DeepSpeed's scheduler: remove "
            "training.lr_schedule, which only mst_scale.pretrain reads"
        )
    of_recipe = RECIPES.get(str(blocks.get("recipe")), {}).get("training", {})
    unread += [key for key in of_recipe if key not in unread]
    experiment = replace(experiment, has_length=has_length)
    if not unread:
        return experiment, []
    names = ", ".join(f"training.{key}" for key in unread)
    rate = "; your loop sets the learning rate (docs/own_loop.md)" if "lr_schedule" in unread else ""
    note = f"{names}: no effect in your own training loop, because only mst_scale.pretrain reads them{rate}"
    return experiment, [note]


def _check_method(mst: MSTConfig) -> None:
    """Reject methods that choose the model, its initial weights or the length of the run, which are the user's here."""
    if mst.growth is not None:
        fix = 'load the grown weights into the model, and choose "dense" or the method to continue with'
    elif mst.method is not None and METHODS[mst.method].model:
        fix = 'pass your own smaller model, and choose "dense"'
    elif mst.method == "dense-short":
        fix = 'choose "dense", and set training.steps to the smaller number of steps (mst flops)'
    else:
        return
    raise UserError(f"method {mst.method} is available only in mst_scale.pretrain: in your own training loop, {fix}")

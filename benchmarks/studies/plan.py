"""Reads the plan of a study (benchmarks/studies/NAME.json) strictly, and turns its cells into runs.

A cell is a model size, a budget of tokens per parameter, a variant and a share of the budget's steps. Its first seed
runs at every learning rate of the grid. The rate with the lowest validation loss becomes the cell's rate, and the other
seeds run at that rate only: baselines are tuned as well as the method, and only the first seed chooses.

A run is identified by a digest of its resolved config, without the keys that cannot change its loss (the corpus folder,
logging and checkpoint intervals) and without keys at their defaults. A new version of a plan or of the config schema
therefore repeats no run whose settings are the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from mst_scale.config import (
    DataConfig,
    Experiment,
    ModelConfig,
    MSTConfig,
    TrainingConfig,
    in_steps,
    load,
    to_dict,
)
from mst_scale.config.check import check
from mst_scale.config.deepspeed import global_batch, peak_learning_rate
from mst_scale.errors import UserError
from mst_scale.flops.budgets import of_growth
from mst_scale.flops.formulas import dense_step_flops
from mst_scale.flops.ledger import forecast, topology_flops
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS
from mst_scale.methods import register

FOLDER = Path(__file__).parent
FIRST_LETTERS = 16  # of the hexadecimal digest
WITHOUT_EFFECT = {  # on the loss
    "training": ("log_every", "eval_every", "save_every", "keep_checkpoints", "histogram_every"),
    "data": ("dir",),
    "": ("tensorboard", "steps_per_print"),
}
# Digests use the names that keys and values had when the runs were recorded: (block, key now) -> key then.
KEYS_THEN: dict[tuple[str, ...], str] = {
    ("model", "seq_length"): "context",
    ("training", "baseline"): "rival",
    ("training", "histogram_every"): "look_every",
    ("mst", "topology", "revive_dead_units"): "wake_dead_units",
    ("mst", "topology", "reset_momentum"): "fresh_momentum",
    ("model", "d_ff"): "d_ffw",
    ("mst", "allow_untested"): "allow_unclassified",
}
VALUES_THEN: dict[tuple[str, ...], dict[str, str]] = {("mst", "topology", "grown_moments"): {"active_mean": "living"}}
DEFAULTS: dict[str, Any] = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig, "mst": MSTConfig}
ORDERS = ("flops", "variants")
EVALUATIONS = 4  # points on the curve of a run
ROUNDS = 3  # iterations until a length matches its FLOPs
OTHER_TEXT = 1_000  # added to the seed of a smaller run, so that the larger one does not read the same batches again


@dataclass(frozen=True)
class Size:
    """A model size.

    `small` overrides `model` for variants with `small: true`. Its own rates, budgets and seeds replace the plan's.
    """

    model: dict[str, Any]
    small: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    tokens_per_parameter: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One way to train.

    `as_long_as` names the variant whose FLOPs this one spends; the number of steps follows from it, unless `steps`
    gives it (for runs whose FLOPs were counted differently when they ran). `sizes` names the sizes of the plan that
    the variant belongs to (default: all). `grown_from` describes the smaller model that a growing variant starts from:
    {"model": overrides of the model, "share": share of the budget's steps for which the smaller model is trained, dense
    and at a constant rate}; the FLOPs of that run and of the growth count as the variant's own.
    """

    method: str = "dense"
    set: dict[str, Any] = field(default_factory=dict)
    small: bool = False
    shares: tuple[float, ...] = (1.0,)
    as_long_as: str | None = None
    steps: int | None = None
    rates: tuple[float, ...] = ()
    last_rate: float | None = None  # final learning rate as a share of the peak; None: the plan's
    grown_from: dict[str, Any] | None = None
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """A study as planned. A variant's `rates` take precedence over those of its size, and these over the plan's.

    Attributes:
        reference: the variant that variants of equal FLOPs are compared with, seed by seed (against.py).
        program: the module that makes the runs; it takes the arguments of `mst_scale.pretrain` and defines a METHOD and
            its NAME.
        widen: whether a cell whose best rate is at an end of its grid tries another rate beyond it (outcome.rates_of).
        accounting: the FLOP accounting in which variants with `as_long_as` match FLOPs, "paper" or "causal".
        order: the order of runs of one size and budget. "flops" runs the cheapest first; "variants" runs the first seed
            of every variant in the plan's order, then the second seed of every variant, and so on (outcome.wanted).
    """

    name: str
    question: str
    success: str
    config: dict[str, Any]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    tokens_per_parameter: tuple[int, ...]
    sizes: dict[str, Size]
    variants: dict[str, Variant]
    last_rate: float = 0.01
    reference: str | None = None
    program: str = "mst_scale.pretrain"
    widen: bool = False
    accounting: str = "paper"
    order: str = "flops"

    def cells(self) -> list[Cell]:
        """Every cell of the plan, in its order."""
        return [
            Cell(size, budget, name, share)
            for size, its in self.sizes.items()
            for budget in its.tokens_per_parameter or self.tokens_per_parameter
            for name, variant in self.variants.items()
            if not variant.sizes or size in variant.sizes
            for share in variant.shares
        ]

    def rates_of(self, cell: Cell) -> tuple[float, ...]:
        """The learning rates of a cell's grid."""
        return self.variants[cell.variant].rates or self.sizes[cell.size].rates or self.rates

    def seeds_of(self, cell: Cell) -> tuple[int, ...]:
        """The seeds of a cell; the first chooses the rate."""
        return self.sizes[cell.size].seeds or self.seeds


@dataclass(frozen=True)
class Cell:
    """One setting of a study, whatever its rate and seed."""

    size: str
    budget: int
    variant: str
    share: float = 1.0

    def __str__(self) -> str:
        share = "" if self.share == 1 else f" × {self.share:g}"
        return f"{self.variant}{share}, {self.size}, {self.budget} tokens per parameter"


@dataclass(frozen=True)
class Job:
    """A run that a plan asks for.

    `flops` are forecast in the plan's accounting. `dense_flops_per_step` counts masked weights too, since the time of a
    run follows them. `smaller` is the run that this one grows from; its digest is this run's mst.grow_from.
    """

    cell: Cell
    rate: float
    seed: int
    experiment: Experiment
    digest: str
    block_flops: float
    flops: float
    topology_flops: float
    dense_flops_per_step: float
    smaller: Job | None = None

    def __str__(self) -> str:
        return f"{self.cell}, rate {self.rate:g}, seed {self.seed}"

    @property
    def steps(self) -> int:
        """Its number of optimizer steps."""
        return self.experiment.training.steps

    @property
    def decays_from(self) -> int | None:
        """The step from which its learning rate differs from that of a dense run without decay, if there is one."""
        training = self.experiment.training
        plain = (
            training.lr_schedule == "wsd"
            and isinstance(training.warmup, int)
            and not training.restart
            and not self.experiment.mst.depends_on_length
        )
        if not plain or not self.experiment.mst.stays_dense or self.smaller is not None:
            return None
        return self.steps - in_steps(training.decay, self.steps)

    @property
    def trunk(self) -> str:
        """The digest of that run, whatever its length."""
        endless = to_dict(replace(self.experiment, training=replace(self.experiment.training, decay=0)))
        return _digest_of({**endless, "training": {**endless["training"], "steps": 10**9}})

    @property
    def updates(self) -> int:
        """Weight updates (steps × weights), including those of the smaller run."""
        before = 0 if self.smaller is None else self.smaller.updates
        return self.steps * self.experiment.model.weights + before

    @property
    def begins_with(self) -> str | None:
        """The digest of the run that it starts from and may share with others: its trunk, or the smaller run."""
        return self.trunk if self.decays_from else None if self.smaller is None else self.smaller.digest


def read_plan(name: str, folder: Path = FOLDER) -> Plan:
    """Read NAME.json of the folder.

    Raises:
        UserError: if there is no such plan, or if it contains an unknown key or name.
    """
    path = folder / f"{name}.json"
    if not path.is_file():
        there = ", ".join(sorted(found.stem for found in folder.glob("*.json")))
        raise UserError(f"there is no study {name!r}: choose one of {there}")
    return _plan(path, path.read_text())


@functools.cache
def _plan(path: Path, text: str) -> Plan:
    """Parse a plan. Cached, so that equal text gives the same object, which is a key of the cache of `job`."""
    try:
        raw = json.loads(text)
        if "program" in raw:
            program = import_module(raw["program"])
            register(program.NAME, program.METHOD)
        plan = Plan(
            **{
                **raw,
                "name": path.stem,
                "sizes": _each(Size, raw["sizes"]),
                "variants": _each(Variant, _inherited(raw["variants"])),
            }
        )
    except (KeyError, TypeError, AttributeError, ValueError, ImportError) as error:
        raise UserError(f"{path}: not a plan of a study ({error}); see docs/benchmarks.md") from None
    for name, value, choices in (("accounting", plan.accounting, ACCOUNTINGS), ("order", plan.order, ORDERS)):
        if value not in choices:
            raise UserError(f"{path}: {name} is {value!r}; choose one of {', '.join(choices)}")
    for variant in plan.variants.values():
        if variant.as_long_as is not None and variant.as_long_as not in plan.variants:
            raise UserError(f"{path}: as_long_as names {variant.as_long_as!r}, which is not a variant of the plan")
        if unknown := [size for size in variant.sizes if size not in plan.sizes]:
            raise UserError(
                f"{path}: a variant belongs to {unknown[0]!r}; the plan's sizes are {', '.join(plan.sizes)}"
            )
    if plan.reference is not None and plan.reference not in plan.variants:
        raise UserError(f"{path}: reference names {plan.reference!r}, which is not a variant of the plan")
    return plan


def _inherited(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve `like`: a variant inherits from one above it, key by key within `set`."""
    found: dict[str, Any] = {}
    for name, own in raw.items():
        model = found[own["like"]] if "like" in own else {}
        rest = {key: value for key, value in own.items() if key != "like"}
        found[name] = {**model, **rest, "set": {**model.get("set", {}), **own.get("set", {})}}
    return found


def _each(kind: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Build the dataclasses by name, with tuples for lists."""
    return {
        name: kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()})
        for name, found in raw.items()
    }


def model_of(plan: Plan, cell: Cell) -> ModelConfig:
    """The model of a cell, which depends on neither rate nor seed."""
    rate = {"optimizer.params.lr": plan.rates_of(cell)[0]}
    return _experiment(plan, cell.size, plan.variants[cell.variant], rate).model


@functools.cache
def job(plan: Plan, cell: Cell, rate: float, seed: int, data: str) -> Job:
    """The run of a cell at a learning rate and seed; `data` is the corpus folder."""
    variant = plan.variants[cell.variant]
    settings = {"data.dir": data, "training.seed": seed, "optimizer.params.lr": rate}
    model = load(plan.config, _settings({"model": plan.sizes[cell.size].model})).model
    sequences = cell.budget * model.weights / model.seq_length
    smaller, before = None, 0.0
    if variant.grown_from is not None:
        smaller = _smaller(plan, cell, settings, sequences)
        settings["mst.grow_from"] = smaller.digest
    full = _experiment(plan, cell.size, variant, settings)
    batch = global_batch(full.deepspeed, 1)
    if smaller is not None:
        before = smaller.flops + of_growth(full, smaller.experiment.model, batch)[plan.accounting]
    budget_steps = max(1, round(sequences / batch))
    steps = max(1, round(cell.share * budget_steps))
    if variant.as_long_as is not None:
        plain = {key: value for key, value in settings.items() if key != "mst.grow_from"}
        other = _of_length(_experiment(plan, cell.size, plan.variants[variant.as_long_as], plain), steps)
        budget = steps * _flops_per_sequence(other, plan.accounting)
        for _ in range(ROUNDS):  # phases are rounded differently at another length
            each = _flops_per_sequence(_of_length(full, steps), plan.accounting)
            steps = max(1, round((budget - before / batch) / each))
    experiment = _of_length(full, variant.steps or steps)
    check(experiment)
    block = sequences * dense_step_flops(model, plan.accounting).total
    return _job(plan, cell, experiment, block_flops=block, before=before, smaller=smaller)


def _smaller(plan: Plan, cell: Cell, settings: Mapping[str, Any], sequences: float) -> Job:
    """The run that a growing variant starts from: dense, at a constant learning rate to its end."""
    wanted = plan.variants[cell.variant].grown_from
    assert wanted is not None
    other = {**settings, "training.seed": settings["training.seed"] + OTHER_TEXT}
    found = _experiment(plan, cell.size, Variant(), other, wanted["model"])
    steps = max(1, round(wanted["share"] * sequences / global_batch(found.deepspeed, 1)))
    short = _of_length(replace(found, training=replace(found.training, decay=0)), steps)
    return _job(plan, cell, short)


def _job(
    plan: Plan,
    cell: Cell,
    experiment: Experiment,
    *,
    block_flops: float = 0.0,
    before: float = 0.0,
    smaller: Job | None = None,
) -> Job:
    batch, steps = global_batch(experiment.deepspeed, 1), experiment.training.steps
    count, extra = topology_flops(experiment)
    return Job(
        cell=cell,
        rate=peak_learning_rate(experiment.deepspeed),
        seed=experiment.training.seed,
        experiment=experiment,
        digest=digest_of(experiment),
        block_flops=block_flops,
        flops=before + steps * batch * forecast(experiment).mean[plan.accounting].total,
        topology_flops=steps * batch * extra.total if count else 0.0,
        dense_flops_per_step=batch * dense_step_flops(experiment.model).total,
        smaller=smaller,
    )


def _flops_per_sequence(experiment: Experiment, accounting: str) -> float:
    """Mean FLOPs per sequence over the run, including topology steps."""
    return forecast(experiment).mean[accounting].total + topology_flops(experiment)[1].total


def _experiment(
    plan: Plan, size: str, variant: Variant, settings: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> Experiment:
    model = {**plan.sizes[size].model, **(plan.sizes[size].small if variant.small else {}), **(own or {})}
    last = plan.last_rate if variant.last_rate is None else variant.last_rate
    least = {"training.min_lr": last * settings["optimizer.params.lr"]}
    # the rate comes last, because a variant may replace the optimizer block
    return load(plan.config, _settings({"model": model, **variant.set, **settings, **least}), variant.method)


def _settings(settings: Mapping[str, Any]) -> list[str]:
    """Overrides as `--set` takes them; a model block overrides key by key."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if key == "model" else {key: value}
    return [f"{key}={json.dumps(value)}" for key, value in flat.items()]


def _of_length(experiment: Experiment, steps: int) -> Experiment:
    """The experiment with another number of steps; the WSD decay, and a warm-up given as a share, keep their shares."""
    training = replace(experiment.training, steps=steps)
    if training.lr_schedule == "wsd":
        training = replace(training, decay=in_steps(training.decay, steps))
    every = max(1, steps // EVALUATIONS)
    return replace(experiment, training=replace(training, eval_every=every, save_every=2 * every, log_every=every))


def digest_of(experiment: Experiment) -> str:
    return _digest_of(to_dict(experiment))


def _digest_of(resolved: dict[str, Any]) -> str:
    content = json.loads(json.dumps(resolved))
    training = content["training"]
    for name in ("warmup", "decay"):
        training[name] = in_steps(training[name], training["steps"])
    if training["lr_schedule"] == "cosine":
        del training["decay"]
    for block, keys in WITHOUT_EFFECT.items():
        for key in keys:
            (content[block] if block else content).pop(key, None)
    for block, kind in DEFAULTS.items():
        content[block] = _as_then(_difference(content[block], asdict(kind())), (block,))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:FIRST_LETTERS]


def _as_then(found: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """A block under the names with which runs were recorded."""
    old = {}
    for key, value in found.items():
        here = (*path, key)
        known = VALUES_THEN.get(here, {})
        now = _as_then(value, here) if isinstance(value, dict) else known.get(value, value) if known else value
        old[KEYS_THEN.get(here, key)] = now
    return old


def _difference(found: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults, block by block."""
    kept: dict[str, Any] = {}
    for key, value in found.items():
        usual = default.get(key)
        if isinstance(value, dict) and isinstance(usual, dict):
            kept |= {key: inner} if (inner := _difference(value, usual)) else {}
        elif value != usual:
            kept[key] = value
    return kept

"""A study's plan, a JSON file (benchmarks/studies/NAME.json), read strictly as a list of runs.

A cell is a size of model, a budget of tokens per parameter, a variant and a share of the budget's steps. Its first seed
runs at every learning rate of the grid; the rate with the lowest validation loss is the cell's, and the other seeds run
at that alone. So rivals are tuned as the method is, and no seed but the first chooses.

A run is known by a digest of its resolved config, without what cannot change its loss (where the corpus lies, how often
it logs and saves) and without keys at their defaults: what another version of the plan or of the config adds repeats
nothing that stays.
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
from mst_scale.config.check import check, global_batch, peak_learning_rate
from mst_scale.costs.budgets import of_growth
from mst_scale.costs.flops import dense_step_flops
from mst_scale.costs.ledger import forecast, topology_flops
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import ACCOUNTINGS
from mst_scale.methods import register

FOLDER = Path(__file__).parent
FIRST_LETTERS = 16  # of a digest
WITHOUT_EFFECT = {
    "training": ("log_every", "eval_every", "save_every", "keep_checkpoints", "look_every"),
    "data": ("dir",),
    "": ("tensorboard", "steps_per_print"),
}
DEFAULTS: dict[str, Any] = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig, "mst": MSTConfig}
ORDERS = ("flops", "variants")
EVALUATIONS = 4  # of a run, for its curve
ROUNDS = 3  # until a length fits its FLOPs
OTHER_TEXT = 1_000  # added to the seed of a smaller run, lest the larger one reads the same batches again


@dataclass(frozen=True)
class Size:
    """A model, and what a smaller one has instead; its own rates, budgets and seeds, if any, go before the plan's."""

    model: dict[str, Any]
    small: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    tokens_per_parameter: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One way to train. `as_long_as` names the variant whose FLOPs it spends; its length follows, or is one of `steps`
    outright, where FLOPs were counted otherwise when it ran. `sizes` names the sizes of the plan that it belongs to (by
    default all). One that grows says out of what, {"model": the smaller
    model's own keys, "share": of the budget's steps that it is trained, dense and at a constant rate}; that run's FLOPs
    and the growth's are its own too."""

    method: str = "dense"
    set: dict[str, Any] = field(default_factory=dict)
    small: bool = False
    shares: tuple[float, ...] = (1.0,)
    as_long_as: str | None = None
    steps: int | None = None
    rates: tuple[float, ...] = ()
    last_rate: float | None = None  # as a share of the peak; None: the plan's
    grown_from: dict[str, Any] | None = None
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """`rates` of a variant go before those of its size, and those before the plan's."""

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
    """The variant that others which spend alike are set against, seed by seed (against)."""
    program: str = "mst_scale.pretrain"
    """What makes its runs: a module that takes the same arguments. It has a METHOD of a NAME."""
    widen: bool = False
    """Whether a cell whose best rate is at an end of its grid tries another beyond it (facts.rates_of)."""
    accounting: str = "paper"
    """The accounting in which variants with `as_long_as` match FLOPs: "paper", or "causal"."""
    order: str = "flops"
    """The order of the runs of one size and budget: "flops" runs the cheapest first; "variants" runs the first seed of
    every variant in the order of the plan, then the second seed of every variant, and so on (facts.wanted)."""

    def cells(self) -> list[Cell]:
        return [
            Cell(size, budget, name, share)
            for size, its in self.sizes.items()
            for budget in its.tokens_per_parameter or self.tokens_per_parameter
            for name, variant in self.variants.items()
            if not variant.sizes or size in variant.sizes
            for share in variant.shares
        ]

    def rates_of(self, cell: Cell) -> tuple[float, ...]:
        return self.variants[cell.variant].rates or self.sizes[cell.size].rates or self.rates

    def seeds_of(self, cell: Cell) -> tuple[int, ...]:
        return self.sizes[cell.size].seeds or self.seeds


@dataclass(frozen=True)
class Cell:
    size: str
    budget: int
    variant: str
    share: float = 1.0

    def __str__(self) -> str:
        share = "" if self.share == 1 else f" × {self.share:g}"
        return f"{self.variant}{share}, {self.size}, {self.budget} tokens a parameter"


@dataclass(frozen=True)
class Job:
    """One run, before it runs. FLOPs are the forecast in the plan's accounting; `work` counts masked weights too, for
    the time it takes."""

    cell: Cell
    rate: float
    seed: int
    experiment: Experiment
    digest: str
    block_flops: float
    flops: float
    topology_flops: float
    work_a_step: float
    smaller: Job | None = None
    """The run that it grows out of, whose digest stands in its mst.grow_from."""

    def __str__(self) -> str:
        return f"{self.cell}, rate {self.rate:g}, seed {self.seed}"

    @property
    def steps(self) -> int:
        return self.experiment.training.steps

    @property
    def decays_from(self) -> int | None:
        """Where its learning rate leaves that of a dense run which never decays; None where there is no such step."""
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
        return digest_of(replace(self.experiment, training=replace(self.experiment.training, steps=10**9, decay=0)))

    @property
    def updates(self) -> int:
        """Of single weights, the smaller run's too."""
        before = 0 if self.smaller is None else self.smaller.updates
        return self.steps * self.experiment.model.weights + before

    @property
    def begins_with(self) -> str | None:
        """What it begins with that other runs may begin with too: its trunk, or the smaller run."""
        return self.trunk if self.decays_from else None if self.smaller is None else self.smaller.digest


def read_plan(name: str, folder: Path = FOLDER) -> Plan:
    path = folder / f"{name}.json"
    if not path.is_file():
        there = ", ".join(sorted(found.stem for found in folder.glob("*.json")))
        raise UserError(f"there is no study {name!r}: choose one of {there}")
    return _plan(path, path.read_text())


@functools.cache
def _plan(path: Path, text: str) -> Plan:
    """One object for one text, by which its jobs are found again."""
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
                "variants": _each(Variant, _alike(raw["variants"])),
            }
        )
    except (KeyError, TypeError, AttributeError, ValueError, ImportError) as error:
        raise UserError(f"{path}: not a plan of a study ({error}); see docs/benchmarks.md") from None
    for name, value, choices in (("accounting", plan.accounting, ACCOUNTINGS), ("order", plan.order, ORDERS)):
        if value not in choices:
            raise UserError(f"{path}: {name} is {value!r}; choose one of {', '.join(choices)}")
    for variant in plan.variants.values():
        if variant.as_long_as is not None and variant.as_long_as not in plan.variants:
            raise UserError(f"{path}: as_long_as names {variant.as_long_as!r}, which is no variant")
        if unknown := [size for size in variant.sizes if size not in plan.sizes]:
            raise UserError(
                f"{path}: a variant belongs to {unknown[0]!r}; the plan's sizes are {', '.join(plan.sizes)}"
            )
    if plan.reference is not None and plan.reference not in plan.variants:
        raise UserError(f"{path}: reference names {plan.reference!r}, which is no variant")
    return plan


def _alike(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A variant that is `like` one above it has what that has, key by key of `set`, but for what it says itself."""
    found: dict[str, Any] = {}
    for name, own in raw.items():
        model = found[own["like"]] if "like" in own else {}
        rest = {key: value for key, value in own.items() if key != "like"}
        found[name] = {**model, **rest, "set": {**model.get("set", {}), **own.get("set", {})}}
    return found


def _each(kind: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Lists become tuples, so that the values are frozen."""
    return {
        name: kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()})
        for name, found in raw.items()
    }


def model_of(plan: Plan, cell: Cell) -> ModelConfig:
    """Its shape, which no rate and no seed changes."""
    rate = {"optimizer.params.lr": plan.rates_of(cell)[0]}
    return _experiment(plan, cell.size, plan.variants[cell.variant], rate).model


@functools.cache
def job(plan: Plan, cell: Cell, rate: float, seed: int, data: str) -> Job:
    """`data` is the corpus folder."""
    variant = plan.variants[cell.variant]
    settings = {"data.dir": data, "training.seed": seed, "optimizer.params.lr": rate}
    model = load(plan.config, _settings({"model": plan.sizes[cell.size].model})).model
    sequences = cell.budget * model.weights / model.context
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
        budget = steps * _of_a_sequence(other, plan.accounting)
        for _ in range(ROUNDS):  # the phases of another length are rounded otherwise
            each = _of_a_sequence(_of_length(full, steps), plan.accounting)
            steps = max(1, round((budget - before / batch) / each))
    experiment = _of_length(full, variant.steps or steps)
    check(experiment)
    block = sequences * dense_step_flops(model, plan.accounting).total
    return _job(plan, cell, experiment, block_flops=block, before=before, smaller=smaller)


def _smaller(plan: Plan, cell: Cell, settings: Mapping[str, Any], sequences: float) -> Job:
    """The run that a growing one begins with: dense, and at a constant rate to its end."""
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
        work_a_step=batch * dense_step_flops(experiment.model).total,
        smaller=smaller,
    )


def _of_a_sequence(experiment: Experiment, accounting: str) -> float:
    """The mean FLOPs over the run, those of topology steps too."""
    return forecast(experiment).mean[accounting].total + topology_flops(experiment)[1].total


def _experiment(
    plan: Plan, size: str, variant: Variant, settings: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> Experiment:
    model = {**plan.sizes[size].model, **(plan.sizes[size].small if variant.small else {}), **(own or {})}
    last = plan.last_rate if variant.last_rate is None else variant.last_rate
    least = {"training.min_lr": last * settings["optimizer.params.lr"]}
    # the rate last: a variant may have an optimizer of its own
    return load(plan.config, _settings({"model": model, **variant.set, **settings, **least}), variant.method)


def _settings(settings: Mapping[str, Any]) -> list[str]:
    """A block is laid over the config's key by key."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if key == "model" else {key: value}
    return [f"{key}={json.dumps(value)}" for key, value in flat.items()]


def _of_length(experiment: Experiment, steps: int) -> Experiment:
    """So many steps, of which the decay of WSD keeps its share; the warm-up too, where it is a share."""
    training = replace(experiment.training, steps=steps)
    if training.lr_schedule == "wsd":
        training = replace(training, decay=in_steps(training.decay, steps))
    every = max(1, steps // EVALUATIONS)
    return replace(experiment, training=replace(training, eval_every=every, save_every=2 * every, log_every=every))


def digest_of(experiment: Experiment) -> str:
    content = json.loads(json.dumps(to_dict(experiment)))
    training = content["training"]
    for name in ("warmup", "decay"):
        training[name] = in_steps(training[name], training["steps"])
    if training["lr_schedule"] == "cosine":
        del training["decay"]
    for block, keys in WITHOUT_EFFECT.items():
        for key in keys:
            (content[block] if block else content).pop(key, None)
    for block, kind in DEFAULTS.items():
        content[block] = _unlike(content[block], asdict(kind()))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:FIRST_LETTERS]


def _unlike(found: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults, block by block."""
    kept: dict[str, Any] = {}
    for key, value in found.items():
        usual = default.get(key)
        if isinstance(value, dict) and isinstance(usual, dict):
            kept |= {key: inner} if (inner := _unlike(value, usual)) else {}
        elif value != usual:
            kept[key] = value
    return kept

"""Predicts the gain of a recipe at a size and length, by one law fitted to the records of the studies.

    ln M = a + b ln(N / 10^5) + c ln(d / 20) + e ln(d / 20)²

M is the FLOP multiplier of `mst-best` and `mst-lean`: the training FLOPs that the best dense model of any size needs
for the same loss, divided by those of the run, with causal attention. N is the number of parameters, and d that of
tokens per parameter. The law is fitted to 17 settings (bytes of English, 0.12 to 1.6 M parameters, 6 to 400 tokens per
parameter). `python -m mst_scale.benchmarks.studies.gain_law` fits it again and writes gain-law.md, and
tests/unit/benchmarks/test_gain_law.py compares its result with the constants here.

Little is extrapolated: more than a factor of 1.1 outside of the convex hull of the measured settings, on logarithmic
axes of parameters and tokens per parameter, there is no number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from mst_scale.config import RECIPES, Experiment, resolve
from mst_scale.config.presets import SPARSE_TOKENS
from mst_scale.sparsity_variation import SparsityConfig
from mst_scale.units import format_count

CONSTANT, OF_SIZE, OF_LENGTH, OF_LENGTH_SQUARED = 0.2757, -0.1917, -0.0649, -0.0799  # a, b, c, e
FACTOR = 1.157  # a run lies between M / FACTOR and M · FACTOR with a probability of 95 %
# Corners of the hull: parameters and tokens per parameter, counterclockwise.
CORNERS = ((122_944, 20.0), (429_416, 6.0), (1_554_608, 6.0), (122_944, 400.0))
SLACK = 1.1  # the law is still used at points outside of the hull by this factor
MEASURED = ("mst-best", "mst-lean")
PAGE = "docs/does-it-work.md"
_SMALL = "at 0.12 M parameters, it beats dense models of as many nonzeros at 100 and 400 tokens per parameter, not 20"

Goal = Literal["train-cost", "inference-cost"]


@dataclass(frozen=True)
class Gain:
    """An expected FLOP multiplier and its 95 % interval."""

    multiplier: float
    low: float
    high: float

    @property
    def is_established(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low > 1

    def __str__(self) -> str:
        return f"{self.multiplier:.2f} ({self.low:.2f} to {self.high:.2f})"


def law(parameters: float, tokens_per_parameter: float) -> Gain | None:
    """Return the multiplier that the law expects; None beyond what has been measured."""
    if not _is_measured(parameters, tokens_per_parameter):
        return None
    size, length = math.log(parameters / 1e5), math.log(tokens_per_parameter / 20)
    value = math.exp(CONSTANT + OF_SIZE * size + OF_LENGTH * length + OF_LENGTH_SQUARED * length**2)
    return Gain(value, value / FACTOR, value * FACTOR)


def _is_measured(parameters: float, tokens_per_parameter: float) -> bool:
    """Whether a point lies in the hull of the settings or close to it."""
    x, y = math.log(parameters), math.log(tokens_per_parameter)
    corners = [(math.log(size), math.log(length)) for size, length in CORNERS]
    for (x0, y0), (x1, y1) in pairwise([*corners, corners[0]]):
        dx, dy = x1 - x0, y1 - y0
        if ((x - x0) * dy - (y - y0) * dx) / math.hypot(dx, dy) > math.log(SLACK):  # distance to the right of the edge
            return False
    return True


def recipe_of(experiment: Experiment) -> str | None:
    """Return the recipe whose values a config has, whatever its model and length; None if it is none of them.

    Keys that change how a run is computed are not compared, nor is the limit of the sparse phase in tokens.
    """
    for name, recipe in RECIPES.items():
        own = resolve({"recipe": name, "model": {"seq_length": experiment.model.seq_length}})
        same_rates = all(getattr(experiment.training, key) == value for key, value in recipe["training"].items())
        if same_rates and _choices(own) == _choices(experiment):
            return name
    return None


def _choices(experiment: Experiment) -> tuple[Any, ...]:
    """Return the values of a config that make a recipe."""
    mst = experiment.mst
    topology, attention = mst.topology, mst.attention
    return (
        mst.method, mst.targets, replace(mst.sparsity, sparse_tokens=None),
        topology.policy, topology.granularity, topology.random_ratio, topology.grown_moments, topology.update_schedule,
        attention.pattern, attention.stride, attention.dense_from, attention.phase_strides,
    )  # fmt: skip


@dataclass(frozen=True)
class Expectation:
    """What a run is expected to gain; `why` says why there is no number."""

    recipe: str | None
    parameters: int
    tokens_per_parameter: float
    gain: Gain | None
    why: str = ""

    def __str__(self) -> str:
        name = "this config" if self.recipe is None else self.recipe
        of = (
            f"{name} ({format_count(self.parameters)} parameters, {self.tokens_per_parameter:.3g} tokens per parameter)"
        )
        if self.gain is None:
            return f"expected FLOP multiplier of {of}: {self.why} ({PAGE})"
        verdict = "" if self.gain.is_established else ", so a gain is not established"
        against = "against the best dense model of any size"
        return f"expected FLOP multiplier of {of}: {self.gain} {against} (causal FLOPs){verdict} ({PAGE})"

    def to_dict(self) -> dict[str, Any]:
        """Return the expectation for JSON."""
        gain = self.gain
        return {
            "recipe": self.recipe,
            "parameters": self.parameters,
            "tokens_per_parameter": self.tokens_per_parameter,
            "multiplier": None if gain is None else gain.multiplier,
            "interval": None if gain is None else [gain.low, gain.high],
            "text": str(self),
        }


def _differs(experiment: Experiment) -> str | None:
    """Return what a run does that no measured one did; None if it is like them."""
    optimizer = str((experiment.deepspeed.get("optimizer") or {}).get("type", "adam"))
    if experiment.model.arch != "gpt":
        return f"model.arch is {experiment.model.arch}"
    if optimizer.lower() not in ("adam", "adamw"):
        return f"optimizer.type is {optimizer}"
    if experiment.training.init is not None:
        return "training.init starts from trained weights"
    return None


def expect(experiment: Experiment, sequences: int) -> Expectation | None:
    """Return what a run with a global batch of `sequences` is expected to gain; None for plain dense training."""
    experiment = experiment.with_batch(sequences)
    mst, recipe = experiment.mst, recipe_of(experiment)
    if mst.stays_dense and mst.function is None and mst.growth is None:
        return None
    size, length = experiment.model.weights, _tokens_per_parameter(experiment, sequences)
    if (difference := _differs(experiment)) is not None:
        why = f"not known; GPTs were measured that start from random weights and train with Adam, and {difference}"
        return Expectation(recipe, size, length, None, why)
    if recipe == "mst-small":
        return Expectation(recipe, size, length, None, f"not established; {_SMALL}")
    if recipe not in MEASURED:
        return Expectation(recipe, size, length, None, f"not known; the law is one of {' and '.join(MEASURED)}")
    gain = law(size, length)
    if gain is None:
        return Expectation(recipe, size, length, None, f"beyond what has been measured ({_measured()})")
    unlimited = replace(experiment, mst=replace(mst, sparsity=replace(mst.sparsity, sparse_tokens=None)))
    if mst.sparsity.is_limited and experiment.schedule != unlimited.schedule:
        limit = f"{mst.sparsity.sparse_tokens:g} tokens per parameter"
        why = f"beyond what has been measured, because the sparse phase ends after {limit}"
        return Expectation(recipe, size, length, None, why)
    return Expectation(recipe, size, length, gain)


def _tokens_per_parameter(experiment: Experiment, sequences: int) -> float:
    return experiment.training.steps * sequences * experiment.model.seq_length / experiment.model.weights


def _measured() -> str:
    lengths: dict[int, list[str]] = {}
    for size, length in sorted(CORNERS):
        lengths.setdefault(size, []).append(f"{length:g}")
    *others, last = [f"{format_count(size)} parameters at {' to '.join(its)}" for size, its in lengths.items()]
    return f"between {', '.join(others)} and {last} tokens per parameter"


# --- which recipe fits a goal ---


@dataclass(frozen=True)
class Advice:
    """The recipe that fits a goal; `dense` is plain dense training."""

    goal: Goal
    recipe: str
    why: str

    def __str__(self) -> str:
        return f"for the goal {self.goal}: {self.name}, because {self.why} ({PAGE})"

    @property
    def name(self) -> str:
        """The recipe in a sentence."""
        return "plain dense training" if self.recipe == "dense" else self.recipe

    def to_dict(self) -> dict[str, Any]:
        """Return the advice for JSON."""
        return {"goal": self.goal, "recipe": self.recipe, "text": str(self)}


def advise(experiment: Experiment, sequences: int, goal: Goal) -> Advice:
    """Return the recipe that fits a goal at the size and length of an experiment, as far as the records say."""
    size, length = experiment.model.weights, _tokens_per_parameter(experiment, sequences)
    if (difference := _differs(experiment)) is not None:
        return Advice(goal, "dense", f"no recipe has been measured where {difference}")
    gain = law(size, length)
    if goal == "inference-cost":
        if gain is None:
            return Advice(goal, "dense", f"mst-small has not been measured at this size and length; {_SMALL}")
        return Advice(goal, "mst-small", f"it ends with a fifth of its weights; a gain is not established: {_SMALL}")
    if gain is None:
        return Advice(goal, "dense", f"this size and length are beyond what has been measured ({_measured()})")
    if not gain.is_established:
        return Advice(goal, "dense", f"the multiplier of the sparse recipes, {gain}, is not established to be above 1")
    if recipe_of(experiment) == "mst-best" and not experiment.mst.sparsity.is_limited:
        return Advice(goal, "mst-best", f"the multiplier of this config, whose sparse phase has no limit, is {gain}")
    best = SparsityConfig()
    assert isinstance(best.warmup, float) and isinstance(best.ultra, float) and isinstance(best.restore, float)
    if length * (best.warmup + best.ultra + best.restore) > SPARSE_TOKENS:
        limit = f"its sparse phase ends after {SPARSE_TOKENS:g} tokens per parameter"
        return Advice(goal, "dense", f"mst-best has not been measured at this length, where {limit}")
    keeping = "if attention may stay sparse in use, mst.attention.dense_from = 1.0 gained more in our studies"
    return Advice(goal, "mst-best", f"its multiplier is {gain}; {keeping}")


def describe_start(experiment: Experiment, sequences: int) -> str | None:
    """Return one line for the start of a sparse run: what it is expected to gain, and which recipe fits each goal."""
    if (gain := expect(experiment, sequences)) is None:
        return None
    fitting = (f"{advise(experiment, sequences, goal).name} for {goal}" for goal in get_args(Goal))
    return f"{gain}; recommended here: {', '.join(fitting)} (mst plan --goal)"

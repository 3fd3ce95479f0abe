"""Computes the whole plan of a config on given GPUs: memory, time, communication, and which setting to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from mst_scale.config import RATE_DURATIONS, Experiment
from mst_scale.config.compact import could_be_compact, layout_not_compact_reason, method_not_compact_reason
from mst_scale.config.deepspeed import BATCH_KEYS, largest_micro
from mst_scale.config.parallel import KEYS, describe_conflict, sizes_of
from mst_scale.errors import UserError
from mst_scale.flops.formulas import dense_step_flops, optimizer_flops
from mst_scale.plan.gpus import GB, Machine
from mst_scale.plan.memory import Memory
from mst_scale.plan.recommend import (
    FREE,
    MOST_GPUS,
    Best,
    Choice,
    best_masks,
    by_layout,
    choices,
    fewest_gpus,
    fitting,
    layout_problem,
    not_proposed,
    recommend,
    with_offload,
)
from mst_scale.plan.roofline import skips_anything, validate_backend
from mst_scale.plan.setting import Setting, parameters, setting_of, sparse_parameters
from mst_scale.plan.step_time import Phase, Seconds, Side, by_side, phases, sent_bytes
from mst_scale.plan.topology import TopologyStep, topology_step
from mst_scale.plan.traffic import traffic

OPTIONS = {"tensor": "--tp", "sequence": "--sp", "pipeline": "--pp"}


@dataclass(frozen=True)
class Plan:
    """All results of planning a run."""

    experiment: Experiment
    machine: Machine
    given: Setting  # of the config, with its own micro-batch, which may be too large to share the batch
    setting: Setting
    """The given setting with the largest possible micro-batch; with fixed sizes, the recommended setting."""
    memory: Memory
    seconds: Seconds  # of a dense step
    stages: list[Choice]  # the config at every ZeRO stage it can run at, with and without offload
    recommended: Choice
    best: Best  # the masks that save the most time, on the recommended layout
    layouts: list[Choice]  # the fastest choice of every way to share the model, with the recommended one for its own
    why: list[str]
    phases: list[Phase]
    sides: list[Side]  # the sparsest phase by the side of blocks, whatever the config's masks are made of
    topology: TopologyStep | None  # with dense storage; topology steps of compact storage send more

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(p.numel for p in parameters(self.experiment.model))

    @property
    def sparse_parameters(self) -> int:
        """The number of parameters that masks apply to."""
        if self.experiment.mst.stays_dense:
            return 0
        return sum(p.numel for p in sparse_parameters(self.experiment.model, self.experiment.mst.targets))

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.experiment.training.steps

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.steps * self.setting.batch * self.experiment.model.seq_length

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of a dense step: causal pairs only, and nothing counted twice."""
        peak = self.machine.gpu.peak(self.setting.precision)
        flops = dense_step_flops(self.experiment.model, "causal").total * self.setting.batch / self.setting.ranks
        return flops / (self.seconds.total * peak)

    @property
    def kept_copies(self) -> int:
        """Bytes of a node's memory that hold the copies of training.memory_every, at most.

        They are the newest copy and the one that is being written, of the ranks of the node and of another node.
        """
        if not self.experiment.training.memory_every:
            return 0
        ranks = min(self.setting.ranks, self.machine.gpu.per_node)
        return 2 * ranks * self.memory.snapshot * (2 if self.setting.ranks > ranks else 1)

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that a GPU sends in a dense step, by what it shares with the GPUs that it sends them to."""
        return sent_bytes(self.experiment.model, self.setting.dense)

    @property
    def storage(self) -> dict[str, Any]:
        """The phases whose sparse layers store only active weights, or the reason why all of them are dense."""
        s, found = self.setting, [phase.name for phase in self.phases if phase.compact]
        why = layout_not_compact_reason(s.sizes, s.offload_parameters) or method_not_compact_reason(self.experiment)
        return {"compact_phases": found, "why_dense": None if found else why}

    @property
    def could_be_compact(self) -> bool:
        """Whether "auto" as `mst.compute.compact`, which is off, would store only active weights in some phases."""
        s = self.setting
        return could_be_compact(self.experiment) and layout_not_compact_reason(s.sizes, s.offload_parameters) is None

    @property
    def sparsest(self) -> Phase:
        """The sparsest phase."""
        return max(self.phases, key=lambda phase: phase.sparsity)

    @property
    def dense_hours(self) -> float:
        """GPU-hours of a dense run."""
        return self.steps * self.seconds.total * self.setting.ranks / 3600

    @property
    def expected_hours(self) -> float:
        """The run's GPU-hours, by `Phase.expected_seconds`."""
        return sum(p.steps * p.expected_seconds for p in self.phases) * self.setting.ranks / 3600

    @property
    def flops(self) -> float:
        """FLOPs of the whole run, relative to dense, in the causal accounting."""
        return sum(p.steps * p.flops for p in self.phases) / self.steps

    @property
    def newton_schulz_flops(self) -> float:
        """FLOPs that Muon adds to a step; times assume Adam. 0 for another optimizer."""
        return optimizer_flops(self.experiment.model, self.experiment.deepspeed)

    @property
    def skips_products(self) -> bool:
        """Whether any matrix product skips inactive weights."""
        return skips_anything(self.experiment, self.setting.precision)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        model, s, best = self.experiment.model, self.setting, self.best
        sent = traffic(model, s.dense).of_step(s.accumulation)
        kinds = ("all-reduce", "gather", "scatter")
        return {
            "gpu": asdict(self.machine.gpu),
            "efficiency": asdict(self.machine.efficiency),
            "latency": asdict(self.machine.latency),
            "parameters": self.parameters,
            "sparse_parameters": self.sparse_parameters,
            "steps": self.steps,
            "tokens": self.tokens,
            "setting": asdict(s),
            "set": overrides(s, self.given),
            "storage": self.storage,
            "memory": self.memory.to_dict(),
            "kept_copies": self.kept_copies,
            "fits": True,
            "times": "expected by a roofline, not measured",
            "dense_step": {**asdict(self.seconds), "total": self.seconds.total, "mfu": self.mfu},
            "communication": {
                "payload": {kind: sum(c.payload for c in sent if c.kind == kind) for kind in kinds},
                "calls": len(sent),
                "sent_per_rank": sum(c.sent(s.shards) for c in sent),
            },
            "sent": self.sent,
            "layout": {"tensor": s.tensor, "sequence": s.sequence, "pipeline": s.pipeline, "data": s.data},
            "days": {"dense": self.dense_hours / s.ranks / 24, "expected": self.expected_hours / s.ranks / 24},
            "expected": {
                "ultra_speedup": self.sparsest.dense_seconds / self.sparsest.expected_seconds,
                "run_speedup": self.dense_hours / self.expected_hours,
                "by_side": [asdict(side) for side in self.sides],
            },
            "phases": [asdict(phase) for phase in self.phases],
            "flops_relative": self.flops,
            "gpu_hours_dense": self.dense_hours,
            "gpu_hours_expected": self.expected_hours,
            "topology_step": None if self.topology is None else asdict(self.topology),
            "left_out": {"newton_schulz_flops": self.newton_schulz_flops},
            "stages": [self._row(x) for x in self.stages],
            "recommended": {
                **self._row(self.recommended),
                "set": overrides(self.recommended.setting, self.given),
                "why": self.why,
            },
            "best": {
                "side": best.side,
                "speedup": best.speedup,
                "days": best.run_seconds / 3600 / 24,
                "dense_days": best.dense_seconds / 3600 / 24,
                "memory": best.memory.needed,
                "set": [*overrides(best.setting, self.given), *best.overrides],
            },
            "layouts": [{**self._row(x), "seconds": asdict(x.seconds)} for x in self.layouts],
        }

    def _row(self, found: Choice) -> dict[str, Any]:
        return {
            "setting": asdict(found.setting),
            "memory": found.memory.to_dict(),
            "fits": found.memory.fits(self.machine.gpu),
            "step_seconds": found.dense_step,
            "run_step_seconds": found.run_step,
        }


def plan(
    experiment: Experiment, gpus: int, machine: Machine, tokens: float | None = None, fixed: Mapping[str, int] = FREE
) -> Plan:
    """Plan a run of `tokens` tokens; without a number, the length is `training.steps`.

    `fixed` are tensor, sequence or pipeline sizes that every proposal must have.

    Raises:
        UserError: If the config does not fit; it names a setting or a number of GPUs that does.
    """
    validate_backend(experiment)
    shareable = experiment if fixed else _shareable(experiment, gpus, machine)
    own = own_setting(_with_sizes(shareable, fixed), gpus)
    can_share = shareable is experiment
    experiment = experiment.with_batch(own.batch)
    if tokens is not None:
        experiment = of_tokens(experiment, tokens, own.batch)
    _validate_layout(experiment, own, machine, fixed)
    found = fitting(experiment, own, machine, fixed)
    recommended = recommend(found, own, fixed)
    if recommended is None:
        raise UserError(_describe_nothing_fits(experiment, own, machine, fixed))
    s = own if can_share and not fixed else recommended.setting
    (planned,) = choices(experiment, [s], machine)
    if not planned.memory.fits(machine.gpu):
        raise UserError(_describe_misfit(planned, recommended, machine))
    dense = recommend(found, own, fixed, attrgetter("dense_step"))
    assert dense is not None
    rows = by_layout(found, recommended)
    why = not_proposed(recommended, rows, own)
    if not can_share:
        why.append(f"data {gpus:,} cannot share {own.batch:,} sequences, so some of the GPUs have to share the model")
    found_phases = phases(experiment, planned.seconds, s, machine)
    is_masked = any(phase.sparsity and not phase.compact for phase in found_phases)
    micro, sizes_given = experiment.deepspeed.get(BATCH_KEYS[1]), sizes_of(experiment.deepspeed)
    return Plan(
        experiment=experiment,
        machine=machine,
        given=replace(own, micro=micro if isinstance(micro, int) else own.micro, **asdict(sizes_given)),
        setting=s,
        memory=planned.memory,
        seconds=planned.seconds,
        stages=choices(experiment, with_offload(s, (0, 1) if s.pipeline > 1 else (0, 1, 2, 3)), machine),
        recommended=recommended,
        best=best_masks(experiment, recommended, dense, machine),
        layouts=rows,
        why=why,
        phases=found_phases,
        sides=by_side(experiment, s, machine),
        topology=topology_step(experiment, s, machine) if is_masked else None,
    )


def of_tokens(experiment: Experiment, tokens: float, batch: int) -> Experiment:
    """Return the experiment with as many steps as these tokens need.

    Phases stated in steps keep their fractions of the run.
    """
    before, model = experiment.training.steps, experiment.model
    steps = max(1, round(tokens / (batch * model.seq_length)))

    def scaled(owner: Any, *names: str) -> Any:
        lengths = {name: getattr(owner, name) for name in names}
        return replace(
            owner, **{name: min(1.0, x / before) if isinstance(x, int) else x for name, x in lengths.items()}
        )

    mst = experiment.mst
    sparsity = scaled(mst.sparsity, "warmup", "ultra", "restore", "turn", "start")
    mst = replace(mst, sparsity=sparsity, attention=scaled(mst.attention, "dense_from"))
    training = replace(scaled(experiment.training, *RATE_DURATIONS), steps=steps)
    return replace(experiment, training=training, mst=mst)


def _validate_layout(experiment: Experiment, own: Setting, machine: Machine, fixed: Mapping[str, int]) -> None:
    """Raise an error if the model cannot be shared in the config's own way, or with the fixed sizes."""
    wanted = own
    if fixed:
        sizes: dict[str, Any] = {"tensor": 1, "sequence": 1, "pipeline": 1, **fixed}
        wanted = replace(own, **sizes)
        if wanted.pipeline > 1:
            wanted = wanted.at_stage(min(1, own.stage))
    problem = _problem(experiment, wanted, machine)
    if problem is None and own.batch % wanted.data:
        problem = (
            f"{own.batch:,} sequences cannot be divided by data {wanted.data}: --set train_batch_size to a multiple"
        )
    if problem:
        raise UserError(problem)


def _problem(experiment: Experiment, s: Setting, machine: Machine) -> str | None:
    """Return why a run cannot share its model this way, by its model and by the rules of the run itself."""
    return layout_problem(experiment.model, s, machine.gpu.per_node) or describe_conflict(experiment, s.sizes)


def overrides(setting: Setting, given: Setting) -> list[str]:
    """Return the `--set` arguments that turn the given setting into this one."""
    pairs = zip(_keys(setting).items(), _keys(given).values(), strict=True)
    return [f"--set {key}={wanted}" for (key, wanted), now in pairs if wanted != now]


def _keys(setting: Setting) -> dict[str, str | int]:
    batch = {BATCH_KEYS[2]: setting.accumulation} if setting.states_accumulation else {}
    return {
        **batch,
        "zero_optimization.stage": setting.stage,
        "zero_optimization.offload_optimizer.device": "cpu" if setting.offload_optimizer else "none",
        "zero_optimization.offload_param.device": "cpu" if setting.offload_parameters else "none",
        "train_micro_batch_size_per_gpu": setting.micro,
        "model.activation_checkpointing": str(setting.recompute).lower(),
        "data_types.grad_accum_dtype": setting.accumulate,
        **{key: getattr(setting, axis) for axis, key in KEYS.items()},
    }


def describe_setting(setting: Setting) -> str:
    """Describe a setting in a few words, such as "ZeRO-2, micro-batch 4, recomputation"."""
    words = [setting.sizes.describe()] if setting.sizes.model > 1 else []
    words += [f"ZeRO-{setting.stage}", f"micro-batch {setting.micro}"]
    words += [f"{setting.offload} offloaded"] if setting.offload != "none" else []
    words += ["recomputation"] if setting.recompute else []
    return ", ".join(words)


def own_setting(experiment: Experiment, gpus: int) -> Setting:
    """Return the config's setting with the largest micro-batch with which the GPUs can share its global batch."""
    if gpus < 1:
        raise UserError(f"--gpus must be at least 1, not {gpus}")
    total, micro, accumulation = (experiment.deepspeed.get(key) for key in BATCH_KEYS)
    if isinstance(total, int) and isinstance(micro, int) and accumulation in (None, "auto"):
        shares = sizes_of(experiment.deepspeed).data(gpus)
        fitting_micro = {BATCH_KEYS[1]: largest_micro(total, micro, shares)}
        experiment = replace(experiment, deepspeed={**experiment.deepspeed, **fitting_micro})
    setting = setting_of(experiment, gpus)
    sparse = not experiment.mst.stays_dense
    if setting.separate_accumulation and (setting.stage == 0 or (setting.stage == 1 and sparse)):
        raise UserError(
            f"data_types.grad_accum_dtype = {setting.accumulate} with {setting.precision} does not run at "
            f"ZeRO-{setting.stage}: --set zero_optimization.stage=2, or "
            f"--set data_types.grad_accum_dtype={setting.precision}"
        )
    return setting


def _shareable(experiment: Experiment, gpus: int, machine: Machine) -> Experiment:
    """Return the config; if its batch is too small for the GPUs, with layers shared by as few of them as possible."""
    total, sizes = experiment.deepspeed.get(BATCH_KEYS[0]), sizes_of(experiment.deepspeed)
    if sizes.model > 1 or not isinstance(total, int) or total % gpus == 0:
        return experiment
    for tensor in range(2, machine.gpu.per_node + 1):
        if gpus % tensor or total % replace(sizes, tensor=tensor).data(gpus):
            continue
        wanted = _with_sizes(experiment, {"tensor": tensor})
        if _problem(wanted, own_setting(wanted, gpus), machine) is None:
            return wanted
    return experiment


def _with_sizes(experiment: Experiment, fixed: Mapping[str, int]) -> Experiment:
    """Return the config with fixed sizes, which share its global batch; as it is if it has a batch per rank."""
    if not isinstance(experiment.deepspeed.get(BATCH_KEYS[0]), int):
        return experiment
    config = dict(experiment.deepspeed)
    for axis, size in fixed.items():
        block, _, key = KEYS[axis].rpartition(".")
        config |= {block: {**config.get(block, {}), key: size}} if block else {key: size}
    return replace(experiment, deepspeed=config)


def _describe_nothing_fits(experiment: Experiment, own: Setting, machine: Machine, fixed: Mapping[str, int]) -> str:
    sizes = "".join(f" with {OPTIONS[axis]} {size}" for axis, size in fixed.items())
    enough = fewest_gpus(experiment, own, machine)
    return (
        f"nothing fits on {own.ranks:,} × {machine.gpu.name} at any ZeRO stage{sizes}, even with offload and "
        f"recomputation: use {f'{enough:,} GPUs' if enough else f'more than {MOST_GPUS:,} GPUs or larger ones'}"
    )


def _describe_misfit(planned: Choice, recommended: Choice, machine: Machine) -> str:
    gpu, s = machine.gpu, planned.setting
    return (
        f"{describe_setting(s)} needs {_needs(planned.memory)}, but {gpu.name} has {gpu.memory / GB:.0f} GB "
        f"({gpu.host_memory / GB:.0f} GB of host memory). {describe_setting(recommended.setting)} fits in "
        f"{_needs(recommended.memory)}: {' '.join(overrides(recommended.setting, s))}"
    )


def _needs(held: Memory) -> str:
    host = f" and {(held.host + held.host_step) / GB:.0f} GB of host memory" if held.host else ""
    return f"{held.needed / GB:.1f} GB per GPU{host}"

"""Works out the whole plan of a config on given GPUs: memory, time, communication, and what to run instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mst_scale.config import Experiment
from mst_scale.config.check import BATCH_KEYS, largest_micro
from mst_scale.config.parallel import KEYS, sizes_of
from mst_scale.costs.flops import dense_step_flops
from mst_scale.costs.muon import optimizer_flops
from mst_scale.errors import UserError
from mst_scale.plan.activations import activations
from mst_scale.plan.best import Best, best_setting
from mst_scale.plan.clock import Seconds, step_seconds
from mst_scale.plan.expected import ASSUMPTIONS, EXPECTED, Side, by_side
from mst_scale.plan.gpus import GB, Machine
from mst_scale.plan.held import ends, share
from mst_scale.plan.layouts import OPTIONS, refusal
from mst_scale.plan.links import Link, links
from mst_scale.plan.memory import Memory, memory
from mst_scale.plan.parameters import parameters, sparse_parameters
from mst_scale.plan.phases import Phase, of_tokens, phases, skips_masked_weights
from mst_scale.plan.recommend import FREE, Choice, best, by_layout, fewest_gpus, fitting
from mst_scale.plan.setting import Setting, setting_of
from mst_scale.plan.skipping import check_backend, in_channels
from mst_scale.plan.topology import TopologyStep, topology_step
from mst_scale.plan.traffic import traffic
from mst_scale.plan.why import why


@dataclass(frozen=True)
class Plan:
    """Everything that was worked out."""

    experiment: Experiment
    machine: Machine
    given: Setting
    """As the config says, also its own micro-batch, which may be too large for so many GPUs to share the batch."""
    setting: Setting
    """What is planned: that, with the largest micro-batch that can be, or what is fixed and recommended beside it."""
    memory: Memory
    seconds: Seconds
    """The seconds of a dense step."""
    stages: list[Choice]
    """The config at every ZeRO stage it can run at, with and without offload."""
    recommended: Choice
    best: Best
    """The masks that gain most on the recommended layout."""
    layouts: list[Choice]
    """The fastest of every way to share the model, and what is recommended of its own."""
    why: list[str]
    phases: list[Phase]
    sides: list[Side]
    """The sparsest phase by the side of blocks, whatever the config's masks are made of."""
    topology: TopologyStep | None

    @property
    def activations(self) -> dict[str, dict[str, int]]:
        """Bytes kept for backward, and worked with on top, without and with checkpointing."""
        model, s = self.experiment.model, self.setting
        ways = {"without_checkpointing": False, "with_checkpointing": True}
        found: dict[str, dict[str, int]] = {}
        for name, again in ways.items():
            parts = (activations(model, s.micro, s.weight_bytes, again, share(model, s, stage)) for stage in ends(s))
            found[name] = asdict(max(parts, key=lambda part: part.total))
        return found

    @property
    def parameters(self) -> int:
        return sum(p.numel for p in parameters(self.experiment.model))

    @property
    def sparse_parameters(self) -> int:
        if self.experiment.mst.stays_dense:
            return 0
        return sum(p.numel for p in sparse_parameters(self.experiment.model, self.experiment.mst.targets))

    @property
    def steps(self) -> int:
        return self.experiment.training.steps

    @property
    def tokens(self) -> int:
        return self.steps * self.setting.batch * self.experiment.model.seq_length

    @property
    def mfu(self) -> float:
        """Dense FLOPs of the model (causal pairs, nothing twice) over what the GPUs could do in that time."""
        gpu = self.machine.gpu
        peak = gpu.peak(self.setting.precision)
        flops = dense_step_flops(self.experiment.model, "causal").total * self.setting.batch / self.setting.ranks
        return flops / (self.seconds.total * peak)

    @property
    def links(self) -> list[Link]:
        return links(self.experiment.model, self.setting, self.machine)

    @property
    def sparsest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.sparsity)

    @property
    def dense_hours(self) -> float:
        """GPU-hours of the whole run, dense."""
        return self.steps * self.seconds.total * self.setting.ranks / 3600

    @property
    def best_hours(self) -> float:
        """GPU-hours that the sparse phases cannot fall below, by `Phase.best_seconds`."""
        return sum(p.steps * p.best_seconds for p in self.phases) * self.setting.ranks / 3600

    @property
    def expected_hours(self) -> float:
        """GPU-hours by `Phase.expected_seconds`."""
        return sum(p.steps * p.expected_seconds for p in self.phases) * self.setting.ranks / 3600

    @property
    def flops(self) -> float:
        """FLOPs of the whole run, relative to dense, in the causal accounting."""
        return sum(p.steps * p.flops for p in self.phases) / self.steps

    @property
    def newton_schulz_flops(self) -> float:
        """What Muon adds to a step beside the plan's figures, which are Adam's; 0 for another optimizer."""
        return optimizer_flops(self.experiment.model, self.experiment.deepspeed)

    @property
    def wall_clock(self) -> str:
        """What may be promised about the time of the run."""
        if not self.sparse_parameters:
            return "dense: nothing is skipped"
        if in_channels(self.experiment):
            return "not measured on GPUs for whole channels; expected by a roofline of narrow dense products"
        if skips_masked_weights(self.experiment, self.setting.precision):
            return "not measured on GPUs for blocks of weights; expected by a roofline of their kernels"
        return "FLOPs only for the matrix products: masked dense layers take as long as dense ones"

    def to_dict(self) -> dict[str, Any]:
        model, s = self.experiment.model, self.setting
        sent = traffic(model, s).of_step(s.accumulation)
        topology = None if self.topology is None else asdict(self.topology)
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
            "memory": self.memory.to_dict(),
            "activations": self.activations,
            "fits": True,
            "times": "expected by a roofline, not measured",
            "dense_step": {**asdict(self.seconds), "total": self.seconds.total, "mfu": self.mfu},
            "communication": {
                "payload": {
                    kind: sum(c.payload for c in sent if c.kind == kind) for kind in ("all-reduce", "gather", "scatter")
                },
                "calls": len(sent),
                "sent_per_rank": sum(c.sent(s.shards) for c in sent),
            },
            "links": [asdict(link) for link in self.links],
            "layout": {"tensor": s.tensor, "sequence": s.sequence, "pipeline": s.pipeline, "data": s.data},
            "sparsest_step": {
                "seconds": self.sparsest.dense_seconds,
                "not_below": self.sparsest.best_seconds,
                "expected": self.sparsest.expected_seconds,
            },
            "days": {
                "dense": self.dense_hours / s.ranks / 24,
                "bound": self.best_hours / s.ranks / 24,
                "expected": self.expected_hours / s.ranks / 24,
            },
            "expected": {
                "what": EXPECTED,
                "ultra_speedup": self.sparsest.dense_seconds / self.sparsest.expected_seconds,
                "run_speedup": self.dense_hours / self.expected_hours,
                "by_side": [asdict(side) for side in self.sides],
                "assumptions": ASSUMPTIONS,
            },
            "phases": [asdict(phase) for phase in self.phases],
            "flops_relative": self.flops,
            "gpu_hours_dense": self.dense_hours,
            "gpu_hours_bound": self.best_hours,
            "gpu_hours_expected": self.expected_hours,
            "wall_clock": self.wall_clock,
            "topology_step": topology,
            "left_out": {"newton_schulz_flops": self.newton_schulz_flops},
            "stages": [_row(choice, self.machine) for choice in self.stages],
            "recommended": {
                **_row(self.recommended, self.machine),
                "set": overrides(self.recommended.setting, self.given),
                "why": self.why,
            },
            "best": {
                "side": self.best.side,
                "speedup": self.best.speedup,
                "days": self.best.run_seconds / 3600 / 24,
                "dense_days": self.best.dense_seconds / 3600 / 24,
                "memory": self.best.memory.needed,
                "set": [*overrides(self.best.setting, self.given), *self.best.overrides],
            },
            "layouts": [{**_row(choice, self.machine), "seconds": asdict(choice.seconds)} for choice in self.layouts],
        }


def plan(
    experiment: Experiment, gpus: int, machine: Machine, tokens: float | None = None, fixed: Mapping[str, int] = FREE
) -> Plan:
    """The plan, or a ValueError that says what would fit. `fixed` are sizes that every proposal must have."""
    check_backend(experiment)
    shared = experiment if fixed else _shareable(experiment, gpus, machine)
    own = _setting(shared, gpus)
    if tokens is not None:
        experiment = of_tokens(experiment, tokens, own.batch)
    _refuse(experiment, own, machine, fixed)
    found = fitting(experiment, own, machine, fixed)
    recommended = best(found, own, fixed)
    if recommended is None:
        cuts = "".join(f" with {OPTIONS[axis]} {size}" for axis, size in fixed.items())
        enough = fewest_gpus(experiment, own, machine)
        where = f"{enough:,} GPUs are enough" if enough else "65,536 GPUs are not enough"
        raise UserError(
            f"nothing fits on {gpus:,} × {machine.gpu.name} at any ZeRO stage{cuts}, offloaded and recomputed: {where}"
        )
    setting = own if shared is experiment and not fixed else recommended.setting
    held = memory(experiment, setting)
    if not held.fits(machine.gpu):
        raise UserError(
            f"{stated(setting)} needs {_needs(held)}, {machine.gpu.name} has {machine.gpu.memory / GB:.0f} "
            f"({machine.gpu.host_memory / GB:.0f} of host memory): {stated(recommended.setting)} fits in "
            f"{_needs(recommended.memory)}: {' '.join(overrides(recommended.setting, setting))}"
        )
    seconds = step_seconds(experiment, setting, machine)
    micro = experiment.deepspeed.get(BATCH_KEYS[1])
    rows = by_layout(found, recommended)
    said = why(recommended, rows, own, bool(fixed))
    if shared is not experiment:
        said.append(f"data {gpus:,} cannot share {own.batch:,} sequences: GPUs that share the model can")
    return Plan(
        experiment,
        machine,
        replace(own, micro=micro if isinstance(micro, int) else own.micro, **asdict(sizes_of(experiment.deepspeed))),
        setting,
        held,
        seconds,
        _every_stage(experiment, setting, machine),
        recommended,
        best_setting(experiment, setting, recommended.setting, machine),
        rows,
        said,
        phases(experiment, seconds, setting, machine),
        by_side(experiment, setting, machine),
        topology_step(experiment, setting, machine),
    )


def _refuse(experiment: Experiment, own: Setting, machine: Machine, fixed: Mapping[str, int]) -> None:
    """A way to share the model that cannot be, stated or fixed."""
    wanted = own
    if fixed:
        wanted = replace(
            own,
            tensor=fixed.get("tensor", 1),
            sequence=fixed.get("sequence", 1),
            pipeline=fixed.get("pipeline", 1),
        )
    if fixed and wanted.pipeline > 1:
        wanted = wanted.at_stage(min(1, own.stage))
    said = refusal(experiment, wanted, machine.gpu.per_node)
    if said is None and own.batch % wanted.data:
        said = f"{own.batch:,} sequences cannot be shared by data {wanted.data}: --set train_batch_size to a multiple"
    if said:
        raise UserError(said)


def overrides(setting: Setting, given: Setting) -> list[str]:
    """The `--set` arguments that turn the given setting into this one."""
    pairs = zip(_keys(setting), _keys(given), strict=True)
    return [f"--set {key}={wanted}" for (key, wanted), (_, now) in pairs if wanted != now]


def _keys(setting: Setting) -> list[tuple[str, str | int]]:
    return [
        ("zero_optimization.stage", setting.stage),
        ("zero_optimization.offload_optimizer.device", "cpu" if setting.offload_optimizer else "none"),
        ("zero_optimization.offload_param.device", "cpu" if setting.offload_parameters else "none"),
        ("train_micro_batch_size_per_gpu", setting.micro),
        ("model.activation_checkpointing", str(setting.recompute).lower()),
        ("data_types.grad_accum_dtype", setting.accumulate),
        *((key, getattr(setting, axis)) for axis, key in KEYS.items()),
    ]


def stated(setting: Setting) -> str:
    words = [setting.sizes.in_words()] if setting.sizes.model > 1 else []
    words += [f"ZeRO-{setting.stage}", f"micro-batch {setting.micro}"]
    words += [f"{setting.offload} offloaded"] if setting.offload != "none" else []
    words += ["recomputation"] if setting.recompute else []
    return ", ".join(words)


def _setting(experiment: Experiment, gpus: int) -> Setting:
    if gpus < 1:
        raise UserError(f"--gpus must be at least 1, not {gpus}")
    setting = setting_of(_shared(experiment, gpus), gpus)
    sparse, beside = not experiment.mst.stays_dense, f"{setting.accumulate} beside {setting.precision}"
    if setting.separate_accumulation and (setting.stage == 0 or (setting.stage == 1 and sparse)):
        raise UserError(
            f"data_types.grad_accum_dtype = {beside} does not run at ZeRO-{setting.stage}: "
            f"--set zero_optimization.stage=2, or --set data_types.grad_accum_dtype={setting.precision}"
        )
    return setting


def _shareable(experiment: Experiment, gpus: int, machine: Machine) -> Experiment:
    """The config; or, where so many GPUs cannot share its batch, with layers shared by as few of them as then can."""
    total, sizes = experiment.deepspeed.get(BATCH_KEYS[0]), sizes_of(experiment.deepspeed)
    if sizes.model > 1 or not isinstance(total, int) or total % gpus == 0:
        return experiment
    for tensor in range(2, machine.gpu.per_node + 1):
        there = replace(sizes, tensor=tensor)
        if gpus % tensor or total % there.data(gpus):
            continue
        asked = {**experiment.deepspeed, "tensor_parallel": {"autotp_size": tensor}}
        wanted = replace(experiment, deepspeed=asked)
        if refusal(experiment, _setting(wanted, gpus), machine.gpu.per_node) is None:
            return wanted
    return experiment


def _shared(experiment: Experiment, gpus: int) -> Experiment:
    """The config with the micro-batch that so many GPUs allow: its global batch stays."""
    total, micro, accumulation = (experiment.deepspeed.get(key) for key in BATCH_KEYS)
    if not isinstance(total, int) or not isinstance(micro, int) or accumulation not in (None, "auto"):
        return experiment
    shares = sizes_of(experiment.deepspeed).data(gpus)
    deepspeed = {**experiment.deepspeed, BATCH_KEYS[1]: largest_micro(total, micro, shares)}
    return replace(experiment, deepspeed=deepspeed)


def _every_stage(experiment: Experiment, setting: Setting, machine: Machine) -> list[Choice]:
    rows = []
    for stage in (0, 1) if setting.pipeline > 1 else (0, 1, 2, 3):
        for optimizer, weights in ((False, False), (True, False), (True, True)):
            if (optimizer and stage < 2) or (weights and stage < 3):
                continue
            there = replace(setting.at_stage(stage), offload_optimizer=optimizer, offload_parameters=weights)
            rows.append(Choice(there, memory(experiment, there), step_seconds(experiment, there, machine)))
    return rows


def _row(choice: Choice, machine: Machine) -> dict[str, Any]:
    return {
        "setting": asdict(choice.setting),
        "memory": choice.memory.to_dict(),
        "fits": choice.memory.fits(machine.gpu),
        "step_seconds": choice.seconds.total,
    }


def _needs(held: Memory) -> str:
    host = f" and {(held.host + held.host_step) / GB:.0f} GB of host memory" if held.host else ""
    return f"{held.needed / GB:.1f} GB a GPU{host}"

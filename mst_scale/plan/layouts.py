"""Lists the ways in which ranks can share a model, and says why others cannot be.

Ranks of a tensor-parallel group stay inside a node, whose GPUs they divide; a proposed sequence is shared inside a node
too. DeepSpeed runs a pipeline at ZeRO stages 0 and 1, where sparse training adds gradients up in the type they are
computed in, and cuts no sequences there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mst_scale.config import Experiment, ModelConfig
from mst_scale.config.parallel import describe_conflict
from mst_scale.plan.setting import Setting

OPTIONS = {"tensor": "--tp", "sequence": "--sp", "pipeline": "--pp"}


def problem(model: ModelConfig, s: Setting, per_node: int) -> str | None:
    """Why a model cannot be shared so, with the cure; None if it can."""
    t, q, p, node = s.tensor, s.sequence, s.pipeline, min(per_node, s.ranks)
    if s.ranks % (t * q * p):
        return f"{s.ranks} GPUs cannot be cut into groups of {s.sizes.in_words()}: take a multiple of {t * q * p}"
    if node % t:
        return f"tensor {t} would leave the node: take a divisor of its {node} GPUs"
    if model.n_head % t or model.ffw % t:
        return f"tensor {t} must divide the {model.n_head} heads and the MLP's width of {model.ffw}"
    if model.n_head // t % q or model.seq_length % q:
        return f"sequence {q} must divide the {model.n_head // t} heads of a rank and the context of {model.seq_length}"
    if p > 1 and model.arch != "gpt":
        return f"a pipeline runs a GPT, and model.arch is {model.arch}: leave --pp out"
    if s.sizes.model > 1 and model.dropout:
        return f"GPUs that share a model would drop different values, and model.dropout is {model.dropout}: set it to 0"
    if p > model.n_layer:
        return f"pipeline {p} is longer than the model's {model.n_layer} layers: take at most that"
    if p > 1 and q > 1:
        return "a pipeline cuts no sequences: leave --sp or --pp out"
    if p > 1 and s.stage > 1:
        return f"a pipeline runs at ZeRO-0 and 1, not {s.stage}: --set zero_optimization.stage=1"
    return None


def refusal(experiment: Experiment, s: Setting, per_node: int) -> str | None:
    """Why a run cannot share its model so, by what the model allows and what the run itself would refuse."""
    return problem(experiment.model, s, per_node) or describe_conflict(experiment, s.sizes)


def layouts(model: ModelConfig, s: Setting, per_node: int, fixed: Mapping[str, int]) -> Iterator[Setting]:
    """Every way that can be, or that agrees with what is fixed, with one micro-batch of 1 for a start."""
    node = min(per_node, s.ranks)
    for t in _sizes("tensor", node, fixed):
        for q in _sizes("sequence", max(1, node // t), fixed):
            for p in _sizes("pipeline", min(s.ranks, model.n_layer), fixed):
                wanted = replace(s.at_stage(1) if p > 1 else s, tensor=t, sequence=q, pipeline=p)
                if problem(model, wanted, per_node) is None and s.batch % wanted.data == 0:
                    yield replace(wanted, micro=1, accumulation=s.batch // wanted.data)


def _sizes(axis: str, most: int, fixed: Mapping[str, int]) -> list[int]:
    return [fixed[axis]] if axis in fixed else [n for n in range(1, most + 1) if most % n == 0 or axis == "pipeline"]

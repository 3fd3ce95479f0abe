"""How many bytes does a GPU hold, by part, and how many does the host hold for it?

With N weights on R ranks, w bytes in the type of the forward pass and a in that of accumulation; P = N/R, padded:

    stage          0                1              2              3
    weights        w·N              w·N            w·N            w·P, and whole what is gathered (`fetching`)
    optimizer      8·N, 12·N mixed  12·P           12·P           12·P     fp32 master weights (a copy, in fp32 too),
                                                                           Adam's two moments
    gradients      w·N              w·N            a·P            a·P
    masks          2/8 per sparse weight, on its share: alive now, and alive at any time

Two moments are fullest: backward (activations, gradients on their way through buckets) and the optimizer's step
(gradients in fp32; on a topology step also their dense copy). What DeepSpeed allocates then was read from its source
(0.19) and is compared with the tensors of real runs in `tests/plan/test_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mst_scale.config import Experiment
from mst_scale.plan.activations import Activations, activations
from mst_scale.plan.fetching import whole_at_once
from mst_scale.plan.gpus import GPU
from mst_scale.plan.parameters import Parameter, groups, parameters, sparse_parameters
from mst_scale.plan.setting import Setting

FP32 = 4
CONTEXT = 2 * 10**9  # CUDA context, libraries, NCCL's buffers
FRAGMENTS = 0.05  # of what is allocated


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. `host` is what the node's memory holds for it."""

    weights: int
    gradients: int
    optimizer: int
    masks: int
    activations: Activations
    backward_buffers: int
    """Buckets, flattened copies and gathered parameters of the backward pass."""
    step_buffers: int
    """fp32 gradients of the optimizer's step, and dense ones of a topology step."""
    host: int

    @property
    def held(self) -> int:
        """From step to step."""
        return self.weights + self.gradients + self.optimizer + self.masks

    @property
    def backward(self) -> int:
        return self.held + self.activations.total + self.backward_buffers

    @property
    def step(self) -> int:
        return self.held + self.step_buffers

    @property
    def peak(self) -> int:
        return max(self.backward, self.step)

    @property
    def needed(self) -> float:
        """With what the driver, libraries and the allocator take."""
        return self.peak * (1 + FRAGMENTS) + CONTEXT

    def fits(self, gpu: GPU) -> bool:
        return self.needed <= gpu.memory and self.host <= gpu.host_memory

    def to_dict(self) -> dict[str, int | dict[str, int]]:
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "activations"}
        kept = {"kept": self.activations.kept, "working": self.activations.working}
        totals = {"backward": self.backward, "step": self.step, "peak": self.peak, "needed": int(self.needed)}
        return {**parts, "activations": kept, **totals}


def memory(experiment: Experiment, setting: Setting) -> Memory:
    """What the fullest GPU holds."""
    found = parameters(experiment.model)
    mst = experiment.mst
    sparse = mst.sparsity.variation != "dense" and mst.sparsity.max > 0
    masked = sparse_parameters(experiment.model, mst.targets) if sparse else []
    bits = (1 + mst.topology.track_coverage) * sum(-(-share(p, setting) // 8) for p in masked)
    kept = FP32 * sum(share(p, setting) for p in masked)  # dense gradients of a topology step
    acts = activations(experiment.model, setting.micro, setting.weight_bytes, setting.recompute)
    shape = {0: _replicated, 1: _flat, 2: _flat, 3: _cut}[setting.stage]
    return shape(found, setting, acts, bits, kept)


def share(parameter: Parameter, setting: Setting) -> int:
    """Elements of one parameter on the rank that holds most: all, an even cut, or a cut of its own."""
    return parameter.numel if setting.stage == 0 else -(-parameter.numel // setting.ranks)


def partition(found: list[Parameter], ranks: int) -> list[int]:
    """Elements per rank of the flat buffers of stages 1 and 2, one buffer a group, padded to 2 per rank."""
    sizes = [sum(p.numel for p in group) for group in groups(found)]
    return [-(-size // (2 * ranks)) * 2 for size in sizes if size]


def _replicated(found: list[Parameter], s: Setting, acts: Activations, bits: int, kept: int) -> Memory:
    n, w = sum(p.numel for p in found), s.weight_bytes
    mixed = w < FP32
    # fp16's optimizer converts gradients one by one, then flattens them; in fp32 they are taken as they are
    step = 2 * FP32 * n if mixed else 0
    return Memory(
        weights=w * n,
        gradients=w * n,
        optimizer=(3 if mixed else 2) * FP32 * n,
        masks=bits,
        activations=acts,
        backward_buffers=w * n if s.ranks > 1 else 0,  # flattened for one all-reduce, when backward is done
        step_buffers=step + kept,
        host=0,
    )


def _flat(found: list[Parameter], s: Setting, acts: Activations, bits: int, kept: int) -> Memory:
    n, w = sum(p.numel for p in found), s.weight_bytes
    parts = partition(found, s.ranks)
    part, full = sum(parts), sum(parts) * s.ranks
    largest = max(p.numel for p in found)
    bucket = s.reduce_bucket
    flattened = min(max(bucket, largest), n)  # copied once more to be all-reduced
    buffers = w * (bucket * (2 if s.overlap else 1) + flattened)
    gradients = w * n if s.stage == 1 else s.accumulate_bytes * part
    if s.offload_optimizer:
        host = (3 + 1) * FP32 * part + w * part + w * largest + (w * part if s.accumulation > 1 else 0)
        # gradients leave the GPU as they are reduced
        return Memory(w * full, w * n if s.stage == 1 else 0, 0, 0, acts, buffers + w * largest, 0, host + bits + kept)
    # a flat fp32 gradient, unless it has been added up in one; flattened first in its own type
    step = 0 if s.separate_accumulation else (w + FP32 if w < FP32 else FP32) * part
    return Memory(w * full, gradients, 3 * FP32 * part, bits, acts, buffers, step + kept, 0)


def _cut(found: list[Parameter], s: Setting, acts: Activations, bits: int, kept: int) -> Memory:
    w, a = s.weight_bytes, s.accumulate_bytes
    parts = [-(-p.numel // s.ranks) for p in found]
    part = sum(parts)
    largest = max(p.numel for p in found)
    whole = whole_at_once(found, s)
    reduced = min(max(s.reduce_bucket, largest), sum(p.numel for p in found))
    buffers = w * (s.reduce_bucket + reduced + whole)
    sub_group = min(part, s.sub_group + max(parts))
    step = FP32 * sub_group + (a * sub_group if a < FP32 else 0)
    if s.offload_optimizer:
        host = (3 + 1) * FP32 * part + a * part + (w * part if s.offload_parameters else 0) + bits + kept
        weights = 0 if s.offload_parameters else w * part
        return Memory(weights, 0, 0, 0, acts, buffers, FP32 * max(parts), host)
    return Memory(w * part, a * part, 3 * FP32 * part, bits, acts, buffers, step + kept, 0)

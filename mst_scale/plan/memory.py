"""Counts the bytes that a GPU holds, by part, and the bytes that the host holds for it.

With N weights of one rank before ZeRO (`held`) on R ranks that hold the same, w bytes in the type of the forward pass
and a in that of accumulation; P = N/R, padded:

    stage          0                1              2              3
    weights        w·N              w·N            w·N            w·P; and whole what is gathered (`fetching`)
    optimizer      8·N, 12·N mixed  12·P           12·P           12·P     fp32 master weights and Adam's two moments
    gradients      w·N              w·N            a·P, or 2w·P   a·P      2: of earlier and of this micro-batch
    masks          2/8 per sparse weight of the share: alive now, and alive at any time

Three moments can be the fullest: backward (activations, gradients on their way through buckets), the reduction behind
it (stages 0 and 1, when activations are gone) and the optimizer's step (gradients in fp32; on a topology step also
their dense copy and the lists of candidates). What DeepSpeed allocates then was read from its source (0.19), and
`tests/plan/test_memory.py` compares it with the tensors of real runs on the CPU. Two parts no test sees: gradients of
activations inside backward (`activations.working`), and the copy that a fused optimizer, DeepSpeed's choice on GPUs,
flattens at stage 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mst_scale.config import Experiment
from mst_scale.plan.activations import Activations, activations
from mst_scale.plan.fetching import fetches
from mst_scale.plan.gpus import GPU
from mst_scale.plan.held import ends, held, share
from mst_scale.plan.parameters import Parameter, groups, sparse_parameters
from mst_scale.plan.setting import Setting

FP32 = 4
CONTEXT = 2 * 10**9  # CUDA context, libraries, NCCL's buffers
FRAGMENTS = 0.05  # of what is allocated
ALL_REDUCE = 500_000_000  # elements that stage 0 flattens for one all-reduce
LISTED_WHOLE = 1 << 16  # a topology step lists the candidates of smaller layers, and of larger ones …
LISTED = 0.08  # … about this share
LISTED_BYTES = 8  # key and position


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, and what its node's memory holds for it."""

    weights: int
    optimizer: int
    masks: int
    gradients: int
    """While backward runs, at their most."""
    activations: Activations
    buckets: int = 0
    """Kept for good."""
    backward_buffers: int = 0
    """Beside the activations: buckets, flattened copies, gathered parameters."""
    reduction_buffers: int = 0
    """When backward is done."""
    step_gradients: int = 0
    """When the step begins."""
    step_buffers: int = 0
    host: int = 0
    """From step to step, …"""
    host_step: int = 0
    """… and on a topology step on top of it."""

    @property
    def held(self) -> int:
        return self.weights + self.optimizer + self.masks + self.buckets

    @property
    def backward(self) -> int:
        return self.held + self.gradients + self.activations.total + self.backward_buffers

    @property
    def reduction(self) -> int:
        return self.held + self.gradients + self.reduction_buffers

    @property
    def step(self) -> int:
        return self.held + self.step_gradients + self.step_buffers

    @property
    def peak(self) -> int:
        return max(self.backward, self.reduction, self.step)

    @property
    def buffers(self) -> int:
        """What the peak holds beside the other parts."""
        return self.peak - self.weights - self.optimizer - self.masks - self.gradients - self.activations.total

    @property
    def needed(self) -> float:
        """The peak, and what the driver, libraries and the allocator take."""
        return self.peak * (1 + FRAGMENTS) + CONTEXT

    def fits(self, gpu: GPU) -> bool:
        return self.needed <= gpu.memory and self.host + self.host_step <= gpu.host_memory

    def to_dict(self) -> dict[str, Any]:
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "activations"}
        kept = {"kept": self.activations.kept, "working": self.activations.working}
        moments = {name: getattr(self, name) for name in ("backward", "reduction", "step", "peak")}
        return {**parts, "activations": kept, **moments, "needed": int(self.needed)}


@dataclass(frozen=True)
class Sparse:
    """What masks and topology steps take on a rank."""

    masks: int = 0
    step: int = 0


def memory(experiment: Experiment, setting: Setting) -> Memory:
    """What the fullest GPU holds."""
    return max((_at(experiment, setting, stage) for stage in ends(setting)), key=lambda found: found.peak)


def _at(experiment: Experiment, setting: Setting, stage: int) -> Memory:
    """On the ranks of a pipeline's stage."""
    model = experiment.model
    found = held(model, setting, stage)
    part = share(model, setting, stage)
    acts = activations(model, setting.micro, setting.weight_bytes, setting.recompute, part)
    sparse = _sparse(experiment, setting, found)
    if setting.stage == 3:
        return _cut(found, setting, acts, sparse, fetches(experiment.model, setting).whole)
    return (_flat if setting.stage else _replicated)(found, setting, acts, sparse)


def partition(found: list[Parameter], ranks: int) -> list[int]:
    """Elements per rank of the flat buffers of stages 1 and 2, one buffer a group, padded to 2 per rank."""
    sizes = [sum(p.numel for p in group) for group in groups(found)]
    return [-(-size // (2 * ranks)) * 2 for size in sizes if size]


def sub_groups(found: list[Parameter], s: Setting) -> list[list[Parameter]]:
    """What stage 3 updates at a time."""
    filled: list[list[Parameter]] = []
    for group in groups(found):
        here: list[Parameter] = []
        elements = 0
        for p in group:
            here.append(p)
            elements += -(-p.numel // s.shards)
            if elements >= s.sub_group:
                filled.append(here)
                here, elements = [], 0
        filled += [here] if here else []
    return filled


def _sparse(experiment: Experiment, s: Setting, found: list[Parameter]) -> Sparse:
    mst = experiment.mst
    if mst.stays_dense:
        return Sparse()
    names = {p.name for p in sparse_parameters(experiment.model, mst.targets)}
    masked = [p for p in found if p.name in names]
    shares = [(p.numel, p.numel if s.stage == 0 else -(-p.numel // s.shards)) for p in masked]
    kept = FP32 * sum(share for _, share in shares)  # dense gradients
    lists = LISTED_BYTES * sum(share if numel <= LISTED_WHOLE else int(LISTED * share) for numel, share in shares)
    starts_sparse = mst.schedule(experiment.training.steps).at(0).sparsity > 0
    bits = 1 + (mst.topology.track_coverage and starts_sparse)
    return Sparse(bits * sum(-(-share // 8) for _, share in shares), kept + lists)


def _replicated(found: list[Parameter], s: Setting, acts: Activations, sparse: Sparse) -> Memory:
    n, w = sum(p.numel for p in found), s.weight_bytes
    mixed = w < FP32
    return Memory(
        weights=w * n,
        optimizer=(3 if mixed else 2) * FP32 * n,
        masks=sparse.masks,
        gradients=w * n,
        activations=acts,
        reduction_buffers=w * min(n, ALL_REDUCE + max(p.numel for p in found)) if s.shards > 1 else 0,
        step_gradients=w * n,
        # in fp32 one by one, and flattened for a fused optimizer
        step_buffers=((2 if s.fused else 1) * FP32 * n if mixed else 0) + sparse.step,
    )


def _flat(found: list[Parameter], s: Setting, acts: Activations, sparse: Sparse) -> Memory:
    n, w = sum(p.numel for p in found), s.weight_bytes
    parts = partition(found, s.shards)
    part = sum(parts)
    largest = max(p.numel for p in found)
    bucket = s.reduce_bucket * (2 if s.overlap else 1)
    # a parameter in several partitions is flattened to be all-reduced; one larger than a bucket is sent by itself
    alone = largest > s.reduce_bucket
    flattened = max(min(s.reduce_bucket, n), largest if alone and _straddles(found, s.shards, largest) else 0)
    before = s.accumulation > 1 and not s.separate_accumulation
    if s.stage == 1:  # a gradient moves into the bucket and out of it into this rank's partition
        gradients, reduction = w * n, w * (bucket + flattened - min(s.reduce_bucket, n))
        backward = reduction if s.overlap else w * bucket
    else:
        gradients = s.accumulate_bytes * part * (2 if before else 1)
        backward = reduction = w * (bucket + flattened + (largest if alone else 0))
    weights = w * part * s.shards
    if s.offload_optimizer:
        # gradients leave the GPU as they are reduced, through a buffer for the largest; in a type of their own they are
        # added up here all the same
        here = s.accumulate_bytes * part if s.separate_accumulation else 0
        return Memory(
            weights=weights,
            optimizer=0,
            masks=0,
            gradients=gradients if s.stage == 1 else here,
            activations=acts,
            backward_buffers=backward + w * largest,
            reduction_buffers=reduction + w * largest,
            step_gradients=here,
            host=_host(part, s) + w * part + w * largest + sparse.masks,
            host_step=sparse.step,
        )
    # flattened in their own type, then in fp32: both are one if they were added up in fp32 beside another type
    flat = 0 if s.separate_accumulation else (w + FP32 if w < FP32 else FP32) * max(parts)
    return Memory(
        weights=weights,
        optimizer=3 * FP32 * part,
        masks=sparse.masks,
        gradients=gradients,
        activations=acts,
        backward_buffers=backward,
        reduction_buffers=reduction,
        step_gradients=s.accumulate_bytes * part,
        step_buffers=flat + sparse.step,
    )


def _host(part: int, s: Setting) -> int:
    """What every offloaded optimizer keeps: master weights, moments and a gradient in fp32; gradients added up."""
    added_up = s.accumulate_bytes if s.stage == 3 else s.weight_bytes * (s.accumulation > 1)
    return (4 * FP32 + added_up) * part


def _straddles(found: list[Parameter], ranks: int, numel: int) -> bool:
    """Whether any parameter of this size lies in two partitions of its flat buffer."""
    for group, part in zip([g for g in groups(found) if g], partition(found, ranks), strict=True):
        start = 0
        for p in group:
            if p.numel == numel and start // part != (start + numel - 1) // part:
                return True
            start += p.numel
    return False


def _cut(found: list[Parameter], s: Setting, acts: Activations, sparse: Sparse, whole: int) -> Memory:
    n, w, a = sum(p.numel for p in found), s.weight_bytes, s.accumulate_bytes
    parts = [-(-p.numel // s.shards) for p in found]
    part, largest = sum(parts), max(p.numel for p in found)
    lasting = sum(p.numel for p in found if p.numel <= s.persistence)
    scattered = min(max(s.reduce_bucket, largest), n)  # put in the order of the ranks
    backward = w * (scattered + (largest if largest > s.reduce_bucket else 0) + whole)
    sub_group = min(part, s.sub_group + max(parts))
    step = FP32 * sub_group + (a * sub_group if a < FP32 else 0)
    weights, buckets = w * (part + lasting), w * s.reduce_bucket
    if s.offload_optimizer:
        on_host = w * part if s.offload_parameters else 0
        return Memory(
            weights=weights - on_host,
            optimizer=0,
            masks=0,
            gradients=0,
            activations=acts,
            buckets=buckets,
            backward_buffers=backward,
            step_buffers=FP32 * max(parts),
            host=_host(part, s) + on_host + sparse.masks,
            host_step=sparse.step,
        )
    return Memory(
        weights=weights,
        optimizer=3 * FP32 * part,
        masks=sparse.masks,
        gradients=a * part,
        activations=acts,
        buckets=buckets,
        backward_buffers=backward,
        step_gradients=a * part,
        step_buffers=step + sparse.step,
    )

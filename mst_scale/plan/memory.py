"""Counts the bytes that a GPU holds, by part, and the bytes that the host holds for it.

With N weights of one rank before ZeRO (`setting.held`) on R ranks that hold the same, w bytes in the type of the
forward pass and a in that of accumulation; P = N/R, padded:

    stage          0                1              2              3
    weights        w·N              w·N            w·N            w·P, and gathered ones whole (`traffic.fetches`)
    optimizer      8·N, 12·N mixed  12·P           12·P           12·P     fp32 master weights and Adam's two moments
    gradients      w·N              w·N            a·P, or 2w·P   a·P      2: of earlier and of this micro-batch
    masks          2/8 per sparse weight of the share: active now, and ever active

Memory can be largest at three moments: backward (activations, gradients on their way through buckets), the reduction
after it (stages 0 and 1, when activations are gone) and the optimizer step (gradients in fp32; on a topology step also
their dense copy and the lists of candidates). The formulas follow DeepSpeed's source (0.19), and
`tests/ranks/plan/test_memory.py` compares them with the tensors of real runs on the CPU. Two parts are not tested:
gradients of activations inside backward (`Activations.working`), and the copy that a fused optimizer, DeepSpeed's
choice on GPUs, flattens at stage 0. Activations: for b sequences of L tokens, width d, inner width f, h heads,
vocabulary V and w bytes per value, one block keeps inputs of ln_1 and ln_2, their outputs, q, k, v and attention's
output 8 · bLd · w the MLP's inner values before and after GELU 2 · bLf · w statistics of two norms and one number per
attention row, in fp32 bL · (16 + 4h) and the head keeps its input, its normalized input and the logits, and at the peak
also their gradient. BERT's blocks keep as much, and its head works on the masked positions only. Sparse attention keeps
the same tensors as dense flash attention, and a second number per row, which is not counted. With recomputation a block
keeps only its input, and one block at a time is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mst_scale.config import Experiment, ModelConfig
from mst_scale.plan.gpus import GPU
from mst_scale.plan.setting import Parameter, Setting, Share, ends, groups, held, partition, share, sparse_parameters
from mst_scale.plan.traffic import ALL_REDUCE, fetches

FP32 = 4
CONTEXT = 2 * 10**9  # CUDA context, libraries, NCCL's buffers
FRAGMENTS = 0.05  # of what is allocated
LOSS_PIECES = 3 * 128 * 2**20  # the loss works through the logits in fp32 pieces of 128 MiB on a GPU
LISTED_WHOLE = 1 << 16  # a topology step lists all candidates of smaller layers, and of larger ones …
LISTED = 0.08  # … about this share
LISTED_BYTES = 8  # key and position
WHOLE = Share()


@dataclass(frozen=True)
class Activations:
    """Bytes of activations, for one micro-batch."""

    kept: int  # saved for backward, when the forward pass is done
    working: int  # on top of that at the peak: gradients of activations, and with recomputation one whole block

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.kept + self.working


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU, and the bytes of its node's memory that hold its offloaded state."""

    weights: int
    optimizer: int
    masks: int = 0
    gradients: int  # the most during backward
    activations: Activations
    buckets: int = 0  # allocated for the whole run
    backward_buffers: int = 0  # next to the activations: buckets, flattened copies, gathered parameters
    reduction_buffers: int = 0  # when backward is done
    step_gradients: int = 0  # when the optimizer step begins
    step_buffers: int = 0
    host: int = 0  # from step to step, …
    host_step: int = 0  # … and on a topology step on top of it
    snapshot: int = 0  # of host memory, for the copy of a checkpoint that is being written (training.async_save)

    @property
    def held(self) -> int:
        """Bytes that stay allocated from step to step."""
        return self.weights + self.optimizer + self.masks + self.buckets

    @property
    def backward(self) -> int:
        """The peak during backward."""
        return self.held + self.gradients + self.activations.total + self.backward_buffers

    @property
    def reduction(self) -> int:
        """The peak of the reduction after backward."""
        return self.held + self.gradients + self.reduction_buffers

    @property
    def step(self) -> int:
        """The peak of the optimizer step."""
        return self.held + self.step_gradients + self.step_buffers

    @property
    def peak(self) -> int:
        """The largest of the three peaks."""
        return max(self.backward, self.reduction, self.step)

    @property
    def buffers(self) -> int:
        """The part of the peak that is none of the other parts."""
        return self.peak - self.weights - self.optimizer - self.masks - self.gradients - self.activations.total

    @property
    def needed(self) -> float:
        """The peak, and what the driver, libraries and the allocator need."""
        return self.peak * (1 + FRAGMENTS) + CONTEXT

    def fits(self, gpu: GPU) -> bool:
        """Return whether GPU and host memory are large enough."""
        return self.needed <= gpu.memory and self.host + self.host_step <= gpu.host_memory

    def to_dict(self) -> dict[str, Any]:
        """Return parts and peaks for JSON."""
        moments = {name: getattr(self, name) for name in ("backward", "reduction", "step", "peak")}
        return {**asdict(self), **moments, "needed": int(self.needed)}


def memory(experiment: Experiment, s: Setting) -> Memory:
    """Return the memory of the GPU that needs the most."""
    return max((_of_stage(experiment, s, stage) for stage in ends(s)), key=lambda found: found.peak)


def _of_stage(experiment: Experiment, s: Setting, stage: int) -> Memory:
    """Return the memory of the ranks of a pipeline stage."""
    model, found = experiment.model, held(experiment.model, s, stage)
    acts = activations(model, s.micro, s.weight_bytes, s.recompute, share(model, s, stage))
    if s.stage == 3:
        dense = _stage_3(found, s, acts, fetches(model, s).whole)
    else:
        dense = (_stage_1_2 if s.stage else _stage_0)(found, s, acts)
    masks, topology_step = _masks_and_topology_step(experiment, s, found)
    if experiment.training.async_save and s.offload == "none":
        # rank 0 copies the weights, too; at stage 3 the optimizer's are the only ones
        dense = replace(dense, snapshot=dense.optimizer + masks + (dense.weights if s.stage < 3 else 0))
    if s.offload_optimizer and s.stage:
        return replace(dense, host=dense.host + masks, host_step=topology_step)
    return replace(dense, masks=masks, step_buffers=dense.step_buffers + topology_step)


def _masks_and_topology_step(experiment: Experiment, s: Setting, found: Sequence[Parameter]) -> tuple[int, int]:
    """(bytes of the masks, bytes that a topology step takes) on a rank."""
    mst = experiment.mst
    if mst.stays_dense:
        return 0, 0
    names = {p.name for p in sparse_parameters(experiment.model, mst.targets)}
    masked = [p for p in found if p.name in names]
    shares = [(p.numel, p.numel if s.stage == 0 else -(-p.numel // s.shards)) for p in masked]
    dense_gradients = FP32 * sum(share for _, share in shares)
    lists = LISTED_BYTES * sum(share if numel <= LISTED_WHOLE else int(LISTED * share) for numel, share in shares)
    starts_sparse = mst.schedule(experiment.training.steps).at(0).sparsity > 0
    bits = 1 + (mst.topology.track_coverage and starts_sparse)
    return bits * sum(-(-share // 8) for _, share in shares), dense_gradients + lists


def _stage_0(found: Sequence[Parameter], s: Setting, acts: Activations) -> Memory:
    n, w = sum(p.numel for p in found), s.weight_bytes
    mixed = w < FP32
    return Memory(
        weights=w * n,
        optimizer=(3 if mixed else 2) * FP32 * n,
        gradients=w * n,
        activations=acts,
        reduction_buffers=w * min(n, ALL_REDUCE + max(p.numel for p in found)) if s.shards > 1 else 0,
        step_gradients=w * n,
        # in fp32 one by one, and flattened for a fused optimizer
        step_buffers=(2 if s.fused else 1) * FP32 * n if mixed else 0,
    )


def _stage_1_2(found: tuple[Parameter, ...], s: Setting, acts: Activations) -> Memory:
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
        # accumulated here all the same
        here = s.accumulate_bytes * part if s.separate_accumulation else 0
        return Memory(
            weights=weights,
            optimizer=0,
            gradients=gradients if s.stage == 1 else here,
            activations=acts,
            backward_buffers=backward + w * largest,
            reduction_buffers=reduction + w * largest,
            step_gradients=here,
            host=_offloaded(part, s) + w * part + w * largest,
        )
    # flattened in their own type, then in fp32: both are one if they were accumulated in fp32 next to another type
    flat = 0 if s.separate_accumulation else (w + FP32 if w < FP32 else FP32) * max(parts)
    return Memory(
        weights=weights,
        optimizer=3 * FP32 * part,
        gradients=gradients,
        activations=acts,
        backward_buffers=backward,
        reduction_buffers=reduction,
        step_gradients=s.accumulate_bytes * part,
        step_buffers=flat,
    )


def _stage_3(found: Sequence[Parameter], s: Setting, acts: Activations, whole: int) -> Memory:
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
            gradients=0,
            activations=acts,
            buckets=buckets,
            backward_buffers=backward,
            step_buffers=FP32 * max(parts),
            host=_offloaded(part, s) + on_host,
        )
    return Memory(
        weights=weights,
        optimizer=3 * FP32 * part,
        gradients=a * part,
        activations=acts,
        buckets=buckets,
        backward_buffers=backward,
        step_gradients=a * part,
        step_buffers=step,
    )


def _offloaded(part: int, s: Setting) -> int:
    """Return what an offloaded optimizer keeps: fp32 weights, moments and a gradient; accumulated gradients."""
    accumulated = s.accumulate_bytes if s.stage == 3 else s.weight_bytes * (s.accumulation > 1)
    return (4 * FP32 + accumulated) * part


def _straddles(found: tuple[Parameter, ...], ranks: int, numel: int) -> bool:
    """Return whether any parameter of this size lies in two partitions of its flat buffer."""
    for group, part in zip([g for g in groups(found) if g], partition(found, ranks), strict=True):
        start = 0
        for p in group:
            if p.numel == numel and start // part != (start + numel - 1) // part:
                return True
            start += p.numel
    return False


# --- activations ---


def activations(model: ModelConfig, micro: int, width: int, recompute: bool, share: Share = WHOLE) -> Activations:
    """Return the activations of one rank at their peak, for values of `width` bytes.

    A rank of a tensor-parallel group of t keeps 1/t of q, k, v, of attention's output and rows and of the MLP's inner
    values. A rank that shares a sequence with s - 1 others keeps everything of 1/s of the tokens. A pipeline stage
    keeps its own blocks, once for every micro-batch in flight.
    """
    tokens, predicted = micro * model.seq_length // share.sequence, micro * model.predicted // share.sequence
    layers = model.n_layer if share.layers is None else share.layers
    block = block_bytes(model, micro, width, share)
    ends = _ends_bytes(model, tokens, predicted, width) if share.head else 8 * tokens
    logits = predicted * model.padded_vocab * width  # their gradient
    inner = tokens * (2 * model.ffw // share.tensor + 2 * model.n_embd) * width  # gradients inside an MLP
    head = logits + min(LOSS_PIECES, 3 * FP32 * predicted * model.padded_vocab) if share.head else 0
    stream = tokens * model.n_embd * width
    # q, k and v before they are exchanged for whole sequences of fewer heads; activations from and to other stages
    exchanged = (3 * stream // share.tensor if share.sequence > 1 else 0) + (2 * stream if share.piped else 0)
    if not recompute:
        return Activations(share.in_flight * layers * block + ends, max(head, inner) + exchanged)
    kept = share.in_flight * layers * stream + ends
    # at the head's peak every block keeps only its input; what the head kept is gone when blocks are recomputed
    return Activations(kept, max(head, block + inner - ends) + exchanged)


def block_bytes(model: ModelConfig, micro: int, width: int, share: Share = WHOLE) -> int:
    """Return the bytes that one block keeps."""
    tokens, t = micro * model.seq_length // share.sequence, share.tensor
    wide = (4 * model.n_embd + (4 * model.n_embd + 2 * model.ffw) // t) * width
    return tokens * (wide + 4 * FP32 + FP32 * model.n_head // t)


def _ends_bytes(model: ModelConfig, tokens: int, predicted: int, width: int) -> int:
    """Return the bytes that embeddings, the last norm, the head and the loss keep."""
    norm = 2 * model.n_embd * width + 2 * FP32
    loss = model.padded_vocab * width + 8 + 2 * FP32  # logits; target, log-sum-exp and weight of each position
    if model.causal:
        return tokens * (norm + loss + 8)  # and the token itself
    # BERT: a norm after the embeddings; the head transforms and normalizes only the predicted positions
    return tokens * (model.n_embd * width + 2 * FP32 + 3 * 8) + predicted * (2 * model.n_embd * width + norm + loss)

"""Counts the bytes that a GPU holds, by part, and the bytes that the host holds for it.

With N weights of one rank before ZeRO (`setting.held`) on R ranks that hold the same, w bytes in the type of the
forward pass and a in that of accumulation; P = N/R, padded:

    stage          0                1              2              3
    weights        w·N              w·N            w·N            w·P, and gathered ones whole (`traffic.fetches`)
    optimizer      8·N, 12·N mixed  12·P           12·P           12·P     fp32 master weights and Adam's two moments
    gradients      w·N              w·N            a·P, or 2w·P   a·P      2: of earlier and of this micro-batch
    masks          2/8 per sparse weight of the shard: active now, and ever active

With compact storage N counts the values that are stored; each rank also has the whole index, 4 bytes per active weight.

Memory can be largest at three moments: backward (`backward` replays it), the reduction at its end (when activations are
gone) and the optimizer step (gradients in fp32; on a topology step also their dense copy and the lists of candidates).
The formulas follow DeepSpeed's source (0.19): stages 0 to 2 have no gradients between steps and allocate buckets at the
first gradient of a backward pass, stage 2 its part of the gradients when it first reduces a bucket, and stage 3 both
when it starts. `tests/ranks/plan/test_memory.py` compares them with the tensors of real runs on the CPU, and
`tests/unit/plan/test_gpu_memory.py` with what a GPU allocated. Not tested is the copy that a fused optimizer,
DeepSpeed's choice on GPUs, flattens at stage 0. Activations: for b sequences of L tokens, width d, inner width f, h
heads, vocabulary V and w bytes per value, one block keeps inputs of ln_1 and ln_2, their outputs, q, k, v and
attention's output 8 · bLd · w, the MLP's inner values before and after GELU 2 · bLf · w, and in fp32 statistics of two
norms and one number per attention row bL · (16 + 4h); the head keeps its input, its normalized input and the logits.
BERT's blocks keep as much, and its head works on the masked positions only. Sparse attention keeps the same tensors as
dense flash attention, and a second number per row, which is not counted. With recomputation a block keeps only its
input, and one block at a time is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mst_scale.config import Experiment, ModelConfig
from mst_scale.plan.backward import FP32, Moment, moments
from mst_scale.plan.gpus import GPU
from mst_scale.plan.setting import (
    Parameter,
    Setting,
    Share,
    ends,
    groups,
    held,
    is_tied,
    partition,
    share,
    sparse_parameters,
)
from mst_scale.plan.traffic import ALL_REDUCE, fetches

CONTEXT = 2 * 10**9  # CUDA context, libraries, NCCL's buffers
FRAGMENTS = 0.05  # of what is allocated
LISTED_WHOLE = 1 << 16  # a topology step lists all candidates of smaller layers, and of larger ones …
LISTED = 0.08  # … about this fraction
LISTED_BYTES = 8  # key and position
INDEX_BYTES, WIDE_INDEX_BYTES, NARROW = 4, 8, 1 << 31  # of a compact parameter, by the size of its matrix


@dataclass(frozen=True)
class Activations:
    """Bytes of activations at the fullest moment of backward."""

    kept: int  # saved for what is still to come of it
    working: int  # gradients of activations, and of the weights of the module that is computed

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
    gradients: int  # at the fullest moment of backward
    activations: Activations  # and there
    buckets: int = 0  # allocated for the whole run
    backward_buffers: int = 0  # at the fullest moment: buckets, flattened copies, gathered parameters
    reduced_gradients: int = 0  # when backward is done
    reduction_buffers: int = 0  # and then
    converted: int = 0  # a parameter's gradient that is added in fp32 after its all-reduce
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
        return self.held + self.reduced_gradients + self.reduction_buffers + self.converted

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
        """The part of the peak that does not belong to the other parts."""
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


def memory(experiment: Experiment, s: Setting, *, topology_steps: bool = True) -> Memory:
    """Return the memory of the GPU that needs the most, in steps that include topology steps or not."""
    return max((_of_stage(experiment, s, stage, topology_steps) for stage in ends(s)), key=lambda found: found.peak)


def _of_stage(experiment: Experiment, s: Setting, stage: int, topology_steps: bool) -> Memory:
    """Return the memory of the ranks of a pipeline stage."""
    model, found = experiment.model, held(experiment.model, s, stage)
    block, ends = _kept(model, s.micro, s.weight_bytes, share(model, s, stage))
    replayed = moments(model, s, stage, block, ends)
    if s.stage == 3:
        # a single rank holds whole parameters, which DeepSpeed does not copy
        stored = _stage_3(found, s, replayed, fetches(model, s).whole if s.shards > 1 else 0)
    else:
        stored = (_stage_1_2 if s.stage else _stage_0)(found, s, replayed)
    masks, topology_step = _masks_and_topology_step(experiment, s, found)
    topology_step *= topology_steps
    index = sum(p.active * (INDEX_BYTES if p.whole < NARROW else WIDE_INDEX_BYTES) for p in found if p.active)
    if experiment.training.async_save and s.offload == "none":
        # rank 0 copies the weights, too; at stage 3 the optimizer's are the only ones
        stored = replace(stored, snapshot=stored.optimizer + masks + index + (stored.weights if s.stage < 3 else 0))
    if s.offload_optimizer and s.stage:
        return replace(stored, masks=index, host=stored.host + masks, host_step=topology_step)
    return replace(stored, masks=masks + index, step_buffers=stored.step_buffers + topology_step)


def _masks_and_topology_step(experiment: Experiment, s: Setting, found: Sequence[Parameter]) -> tuple[int, int]:
    """(bytes of the masks, bytes that a topology step takes) on a rank."""
    mst = experiment.mst
    if mst.stays_dense:
        return 0, 0
    names = {p.name for p in sparse_parameters(experiment.model, mst.targets)}
    masked = [p for p in found if p.name in names]
    shares = [(p.whole, p.whole if s.stage == 0 else -(-p.whole // s.shards)) for p in masked]
    dense_gradients = FP32 * sum(share for _, share in shares)
    lists = [LISTED_BYTES * (share if whole <= LISTED_WHOLE else int(LISTED * share)) for whole, share in shares]
    taken = dense_gradients + sum(lists)
    if s.compacted and masked:  # layers are expanded in batches no larger than the largest, then get their new index
        by_gradient = mst.topology.reads_dense_gradients(mst.topology.update_fraction, False)
        largest = max(range(len(masked)), key=lambda i: masked[i].whole)
        whole, share = shares[largest]
        active = masked[largest].active or 0
        positions = WIDE_INDEX_BYTES * active * share // whole  # by this rank, in its slices
        gathered = 2 * FP32 * active  # the weights, then the index with one state at a time
        layer = 2 * FP32 * share + lists[largest] + positions + gathered
        # stages of a pipeline add up their gradients of a tied matrix, whole, when the last micro-batch is done
        tied = sum(s.weight_bytes * p.whole for p in masked if is_tied(experiment.model, s, p.name))
        taken = layer + (dense_gradients + tied if by_gradient else 0)
    starts_sparse = experiment.schedule.at(0).sparsity > 0
    bits = 1 + (mst.topology.track_coverage and starts_sparse)
    return bits * sum(-(-share // 8) for _, share in shares), taken


# --- what each ZeRO stage holds ---


def _fullest(
    replayed: Sequence[Moment], gradients: Callable[[Moment], int], buffers: Callable[[Moment], int]
) -> dict[str, Any]:
    """Return the parts of the fullest moment of backward, as `Memory` names them."""
    found = [(x.saved, x.working, gradients(x), buffers(x)) for x in replayed]
    saved, working, held_then, room = max(found, key=sum)
    return {"activations": Activations(saved, working), "gradients": held_then, "backward_buffers": room}


def _stage_0(found: Sequence[Parameter], s: Setting, replayed: Sequence[Moment]) -> Memory:
    n, w = sum(p.numel for p in found), s.weight_bytes
    mixed = w < FP32
    return Memory(
        weights=w * n,
        optimizer=(3 if mixed else 2) * FP32 * n,
        **_fullest(replayed, lambda x: w * (n if s.accumulation > 1 else x.done), lambda x: 0),
        reduced_gradients=w * n,
        reduction_buffers=w * min(n, ALL_REDUCE + max(p.numel for p in found)) if s.shards > 1 else 0,
        step_gradients=w * n,
        # in fp32 one by one, and flattened for a fused optimizer
        step_buffers=(2 if s.fused else 1) * FP32 * n if mixed else 0,
    )


def _stage_1_2(found: tuple[Parameter, ...], s: Setting, replayed: Sequence[Moment]) -> Memory:
    n, w = sum(p.numel for p in found), s.weight_bytes
    parts = partition(found, s.shards)
    part = sum(parts)
    # gradients of another type have a flat buffer; otherwise a parameter in several partitions is whole in each
    mine = s.accumulate_bytes * (part if s.separate_accumulation else max(_overlapping(found, s.shards)))
    largest = max(p.numel for p in found)
    bucket = s.reduce_bucket * (2 if s.overlap else 1)
    # a parameter in several partitions is flattened to be all-reduced; one larger than a bucket is sent by itself
    alone = largest > s.reduce_bucket
    flattened = max(min(s.reduce_bucket, n), largest if alone and _straddles(found, s.shards, largest) else 0)
    before = s.accumulation > 1
    if s.stage == 1:  # a gradient moves into the bucket and out of it into this rank's partition
        reduced, reduction = w * n, w * (bucket + flattened - min(s.reduce_bucket, n))
        reducing = reduction if s.overlap else w * bucket
    else:
        reduced = mine * (2 if before and not s.separate_accumulation else 1)
        reducing = reduction = w * (bucket + flattened + (largest if alone else 0))
    # what was reduced is added to gradients of another type parameter by parameter
    converted = FP32 * min(largest, max(parts)) if s.stage == 2 and s.separate_accumulation else 0
    # gradients leave the GPU as they are reduced, through a buffer for the largest; in a type of their own they are
    # accumulated here all the same
    through, here = 0, mine
    if s.offload_optimizer:
        through, here = w * largest, here if s.separate_accumulation else 0
        reduced = reduced if s.stage == 1 else here

    def gradients(x: Moment) -> int:
        if s.stage == 1:
            return w * (n if before else x.done)
        if s.offload_optimizer or s.separate_accumulation:
            return reduced if before or _reduces(x, s) else 0
        return mine * (before + _reduces(x, s))

    def buffers(x: Moment) -> int:
        if x.done + x.own == 0:
            return 0
        return reducing + converted + through if _reduces(x, s) else w * bucket

    memory = Memory(
        weights=w * part * s.shards,
        optimizer=3 * FP32 * part,
        **_fullest(replayed, gradients, buffers),
        reduced_gradients=reduced,
        reduction_buffers=reduction + through,
        converted=converted,
        step_gradients=here,
        # flattened in their own type, then in fp32: both are one if they were accumulated in fp32 next to another type
        step_buffers=0 if s.separate_accumulation else (w + FP32 if w < FP32 else FP32) * max(parts),
    )
    if not s.offload_optimizer:
        return memory
    return replace(memory, optimizer=0, step_buffers=0, host=_offloaded(part, s) + w * part + w * largest)


def _reduces(x: Moment, s: Setting) -> bool:
    """Return whether the first bucket is full: it is reduced, and what receives the gradients is allocated."""
    return x.done + x.own > s.reduce_bucket


def _stage_3(found: Sequence[Parameter], s: Setting, replayed: Sequence[Moment], whole: int) -> Memory:
    n, w, a = sum(p.numel for p in found), s.weight_bytes, s.accumulate_bytes
    parts = [-(-p.numel // s.shards) for p in found]
    part, largest = sum(parts), max(p.numel for p in found)
    lasting = sum(p.numel for p in found if p.numel <= s.persistence) if s.shards > 1 else 0
    scattered = min(max(s.reduce_bucket, largest), n)  # put in the order of the ranks
    reduction = w * (scattered + (largest if largest > s.reduce_bucket else 0))
    sub_group = min(part, s.sub_group + max(parts))
    on_host = w * part if s.offload_parameters else 0
    gradients = 0 if s.offload_optimizer else a * part
    memory = Memory(
        weights=w * (part + lasting) - on_host,
        optimizer=3 * FP32 * part,
        **_fullest(replayed, lambda x: gradients, lambda x: w * whole + (reduction if _reduces(x, s) else 0)),
        buckets=w * s.reduce_bucket,
        reduced_gradients=gradients,
        reduction_buffers=reduction + w * whole,
        step_gradients=gradients,
        step_buffers=FP32 * sub_group + (a * sub_group if a < FP32 else 0),
    )
    if not s.offload_optimizer:
        return memory
    return replace(memory, optimizer=0, step_buffers=FP32 * max(parts), host=_offloaded(part, s) + on_host)


def _offloaded(part: int, s: Setting) -> int:
    """Return what an offloaded optimizer keeps: fp32 weights, moments and a gradient; accumulated gradients."""
    accumulated = s.accumulate_bytes if s.stage == 3 else s.weight_bytes * (s.accumulation > 1)
    return (4 * FP32 + accumulated) * part


def _straddles(found: tuple[Parameter, ...], ranks: int, numel: int) -> bool:
    """Return whether any parameter of this size lies in two partitions of its flat buffer."""
    return any(p.numel == numel and first != last for p, first, last in _places(found, ranks))


def _overlapping(found: tuple[Parameter, ...], ranks: int) -> list[int]:
    """Return the elements of all parameters that lie at least partly in each rank's partitions."""
    elements = [0] * ranks
    for p, first, last in _places(found, ranks):
        for rank in range(first, last + 1):
            elements[rank] += p.numel
    return elements


def _places(found: tuple[Parameter, ...], ranks: int) -> Iterator[tuple[Parameter, int, int]]:
    """Yield each parameter with the first and the last rank in whose partition of a flat buffer it lies."""
    for group, part in zip([g for g in groups(found) if g], partition(found, ranks), strict=True):
        start = 0
        for p in group:
            yield p, start // part, (start + p.numel - 1) // part
            start += p.numel


# --- activations ---


def _kept(model: ModelConfig, micro: int, width: int, share: Share) -> tuple[int, int]:
    """(bytes of a block, bytes of everything before and after the blocks)."""
    tokens, predicted = micro * model.seq_length // share.sequence, micro * model.predicted // share.sequence
    ends = _ends_bytes(model, tokens, predicted, width) if share.head else 8 * tokens
    return block_bytes(model, micro, width, share), ends


def block_bytes(model: ModelConfig, micro: int, width: int, share: Share) -> int:
    """Return the bytes that autograd saves in the forward pass of one block, for values of `width` bytes.

    A rank of a tensor-parallel group of t keeps 1/t of q, k, v, of attention's output and rows and of the MLP's inner
    values. A rank that shares a sequence with s - 1 others keeps everything of 1/s of the tokens.
    """
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

"""Lists the collectives of a training step and their bytes, between all ranks that share anything.

Ranks that hold the same weights: a payload is the whole of what is reduced, gathered or scattered; a ring sends
2(R-1)/R of it per rank in an all-reduce and (R-1)/R in a gather or scatter. DeepSpeed 0.19 with its defaults, N weights
of w bytes:

    stage 0    all-reduce w·N                                              once per step
    stage 1    all-reduce w·N, gather w·N                                  once per step
    stage 2    all-reduce w·N                  with every micro-batch,     gather w·N once per step
    stage 3    gather as `fetches` lists, scatter w·N with every micro-batch

Stages 1 and 2 all-reduce buckets and keep their part (`use_multi_rank_bucket_allreduce`). N is what one rank holds
before ZeRO (`setting.held`; with compact storage the values that are stored), R the number of ranks that hold the same.

Ranks that share a model: with b sequences of L tokens, width d, t, s and p ranks that share a layer, a sequence and the
layers, b·(L/s)·d·w bytes of activations lie between layers. In each micro-batch

    tensor      all-reduces them 2 times per layer forward, 2 backward     (AutoTP: after proj and down, qkv and up)
    sequence    4 all-to-alls of 1/t of them per layer forward, 4 backward (Ulysses: q, k, v and attention's output)
    pipeline    sends them on and returns their gradient, once per stage

Recomputation repeats the forward calls. A tied head of a pipeline has a copy of the token embedding, whose gradient the
two ends add up once per step. With three or more replicas, runs with masks then make it equal bit for bit: replicas
assemble it in float32 at stage 1, and one end sends it to the other (`zero_shards.tied_gradients`). None of this is
hidden by compute.

Tests compare every call of real runs on 2 ranks with this, byte for byte; only the calls of tensor and pipeline
parallelism follow from DeepSpeed's source alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from mst_scale.config import ModelConfig
from mst_scale.plan.setting import Parameter, Setting, groups, held, is_tied, layers_of, partition, sub_groups

ALL_REDUCE = 500_000_000  # elements that stage 0 flattens for one all-reduce


@dataclass(frozen=True)
class Call:
    """One collective."""

    kind: str  # all-reduce, gather, scatter; between ranks that share a model also all-to-all, send
    payload: int

    def sent(self, ranks: int) -> int:
        """Return the bytes that a rank sends: in a ring, to all others their parts, or to one neighbor."""
        if self.kind == "send":
            return self.payload
        return (2 if self.kind == "all-reduce" else 1) * (ranks - 1) * self.payload // ranks


@dataclass(frozen=True)
class Traffic:
    """The collectives of a training step."""

    micro: list[Call]  # with every micro-batch
    step: list[Call]  # once more per optimizer step

    def of_step(self, accumulation: int) -> list[Call]:
        """Return all calls of an optimizer step."""
        return self.micro * accumulation + self.step


# --- between ranks that hold the same weights ---


def traffic(model: ModelConfig, s: Setting) -> Traffic:
    """Return the collectives between ranks that hold the same weights; of a pipeline those of its first stage."""
    if s.shards == 1:
        return Traffic([], [])
    recompute = s.recompute and s.stage == 3
    return _traffic(model, replace(s, micro=1, accumulation=1, recompute=recompute, offload_optimizer=False))


@cache
def _traffic(model: ModelConfig, s: Setting) -> Traffic:
    found, w = held(model, s), s.weight_bytes
    if s.stage == 0:
        return Traffic([], [Call("all-reduce", w * size) for size in _stage_0_buckets(found)])
    if s.stage == 3:
        return _traffic_of_stage_3(model, found, s)
    weights = [Call("gather", w * part * s.shards) for part in partition(found, s.shards)]
    norms = [Call("all-reduce", 8 if s.compacted else 4) for _ in weights]  # compact runs sum them in float64
    overflow = [Call("all-reduce", 1)] if w < 4 else []
    # stage 1 without overlap takes gradients group by group, stage 2 in the order in which backward computes them
    by_group = s.stage == 1 and not s.overlap
    order = [p for group in groups(found) for p in group] if by_group else _backward_order(found, s.stage)
    reduced = [Call("all-reduce", w * sum(p.numel for p in bucket)) for bucket in _buckets(order, s.reduce_bucket)]
    if s.stage == 1:
        assembled = [Call("all-reduce", 4 * p.numel) for p in _equalized(model, s)]
        return Traffic([], [*reduced, *assembled, *overflow, *norms, *weights])
    return Traffic(reduced, [*overflow, *norms, *weights])


def _traffic_of_stage_3(model: ModelConfig, found: tuple[Parameter, ...], s: Setting) -> Traffic:
    def whole(p: Parameter) -> int:  # with the padding of the last ranks
        return s.weight_bytes * -(-p.numel // s.shards) * s.shards

    gathers = [Call("gather", sum(map(whole, together))) for together in fetches(model, s).gathers]
    buckets = _buckets(_backward_order(found, s.stage), s.reduce_bucket)
    scatters = [Call("scatter", sum(map(whole, bucket))) for bucket in buckets]
    lasting = [Call("gather", whole(p)) for p in found if p.numel <= s.persistence]
    norms = [Call("all-reduce", 8) for _ in sub_groups(found, s)]
    return Traffic([*gathers, *scatters], [*norms, *lasting])


def _backward_order(found: Sequence[Parameter], stage: int) -> list[Parameter]:
    """Return the parameters in the order in which backward computes their gradients.

    Modules come from the last to the first, a linear layer's bias before its weight, a norm's after it. ZeRO-3 has a
    linear function of its own (`memory_efficient_linear`), which computes the weight's gradient first.
    """
    modules: dict[str, list[Parameter]] = {}
    for p in found:
        modules.setdefault(p.name.rpartition(".")[0] or "lm_head", []).append(p)  # the head's bias is the model's own
    last = modules.pop("lm_head", [])
    order = [last, *reversed(modules.values())]
    return [p for m in order for p in (reversed(m) if stage < 3 and m[:1] and m[0].is_matrix else m)]


def _stage_0_buckets(found: Sequence[Parameter]) -> list[int]:
    """Stage 0 closes a bucket once it is more than full."""
    sizes, elements = [], 0
    for p in found:
        elements += p.numel
        if elements > ALL_REDUCE:
            sizes.append(elements)
            elements = 0
    return [*sizes, elements] if elements else sizes


def _buckets(order: Sequence[Parameter], bucket: int) -> list[list[Parameter]]:
    """Return the buckets of the other stages, which close one before it would be more than full."""
    filled: list[list[Parameter]] = [[]]
    elements = 0
    for p in order:
        if elements + p.numel > bucket and filled[-1]:
            filled.append([])
            elements = 0
        filled[-1].append(p)
        elements += p.numel
    return filled


# --- between ranks that share a model ---


def exchange(model: ModelConfig, s: Setting) -> dict[str, list[Call]]:
    """Return the calls of a micro-batch by axis, on the stage with most layers; none for an axis of size 1."""
    stream = s.micro * model.seq_length // s.sequence * model.n_embd * s.weight_bytes
    passes, layers = (3 if s.recompute else 2), layers_of(model, s, 0)
    return {
        "tensor": [Call("all-reduce", stream)] * (2 * passes * layers if s.tensor > 1 else 0),
        "sequence": [Call("all-to-all", stream // s.tensor)] * (4 * passes * layers if s.sequence > 1 else 0),
        "pipeline": [Call("send", stream)] * (2 if s.pipeline > 1 else 0),
    }


def tied_ends(model: ModelConfig, s: Setting) -> list[Call]:
    """Return the calls for a tied embedding's gradient between the ends of a pipeline, once per step."""
    added = [Call("all-reduce", p.numel * s.weight_bytes) for p in _tied(model, s)]
    return [*added, *(Call("send", 4 * p.numel) for p in _equalized(model, s))]


def _tied(model: ModelConfig, s: Setting) -> list[Parameter]:
    return [p for p in held(model, s) if is_tied(model, s, p.name)]


def _equalized(model: ModelConfig, s: Setting) -> list[Parameter]:
    """Return the parameters of which one end of a pipeline takes over the other's gradient."""
    return _tied(model, s) if s.masked and s.shards > 2 else []


# --- ZeRO-3: which parameters are gathered when ---

Event = tuple[bool, str]  # (whether the module begins or ends, its name)


@dataclass(frozen=True)
class Fetches:
    """The all-gathers of one micro-batch, forward and backward."""

    gathers: list[list[Parameter]]  # the parameters that each all-gather makes whole
    whole: int  # the most elements that are whole at once, without those that always are


def fetches(model: ModelConfig, s: Setting) -> Fetches:
    """Replay which parameters ZeRO-3 gathers in a micro-batch, and how many are whole at once.

    DeepSpeed 0.19 records the order in which modules run. From then on, before each module, it gathers the module's
    missing parameters, then looks ahead in the recorded order and gathers up to a bucket more. After each module it
    releases the parameters that are not needed again within `stage3_max_reuse_distance` elements and not yet looked
    ahead for. Bytes and memory so follow from a config's thresholds.
    """
    alone = replace(s.at_stage(3), ranks=s.tensor, sequence=1, micro=1, accumulation=1, compact=s.compacted)
    return _fetches(model, replace(alone, offload_optimizer=False, offload_parameters=False))


@cache
def _fetches(model: ModelConfig, s: Setting) -> Fetches:
    by_module: dict[str, list[Parameter]] = {}
    for p in held(model, s):
        by_module.setdefault(p.name.rpartition(".")[0], []).append(p)
    if model.tied_head:  # the model itself multiplies by the embedding's weight
        by_module[""] = by_module.get("", []) + by_module["wte"]
    events = _events(model, s.recompute)
    return _Replay(by_module, [module for begins, module in events if begins], s).run(events)


def _calls_of(*names: str) -> list[Event]:
    return [event for name in names for event in ((True, name), (False, name))]


def _events(model: ModelConfig, recompute: bool) -> list[Event]:
    """Return the begins and ends of modules in a forward and a backward pass."""
    blocks = [f"blocks.{i}" for i in range(model.n_layer)]
    first = ("wte", "wpe", "dropout") if model.causal else ("wte", "wpe", "wtt", "ln_e", "dropout")
    last = ["ln_f"] if model.causal else ["transform", "ln_h"]
    last += [] if model.tied_head else ["lm_head"]
    events = [(True, ""), *_calls_of(*first)]
    for block in blocks:
        events += _block(block, model.causal, backward=False)
    events += [*_calls_of(*last), (False, ""), (True, ""), *_calls_of(*reversed(last))]
    for block in reversed(blocks):
        if recompute:
            events += _block(block, model.causal, backward=False)
        events += _block(block, model.causal, backward=True)
    # token numbers have no gradient, so no event marks the end of the embeddings
    events += _calls_of("dropout")
    events += [] if model.causal else [*_calls_of("ln_e"), (True, "wtt")]
    return [*events, (True, "wpe"), (True, "wte")]


def _block(block: str, causal: bool, backward: bool) -> list[Event]:
    """Return the events of a block: a GPT normalizes before attention and MLP, a BERT after them."""
    halves = [("ln_1", "attention", ["qkv", "proj"]), ("ln_2", "mlp", ["up", "down"])]
    events: list[Event] = [(True, block)]
    for norm, outer, names in reversed(halves) if backward else halves:
        whole = f"{block}.{outer}"
        inner = _calls_of(*(f"{whole}.{name}" for name in (reversed(names) if backward else names)))
        around = [(True, whole), *inner, (False, whole)]
        parts = [_calls_of(f"{block}.{norm}"), around, _calls_of("dropout")]
        if not causal:
            parts = [*parts[1:], parts[0]]
        events += [event for part in (reversed(parts) if backward else parts) for event in part]
    return [*events, (False, block)]


@dataclass
class _Replay:
    by_module: dict[str, list[Parameter]]
    order: list[str]
    s: Setting
    step: int = 0
    whole_now: set[str] = field(default_factory=set)
    users: dict[str, set[str]] = field(default_factory=dict)
    asked_until: dict[str, int] = field(default_factory=dict)  # last step for which a parameter was looked ahead for
    elements: int = 0
    most: int = 0
    gathers: list[list[Parameter]] = field(default_factory=list)

    def run(self, events: list[Event]) -> Fetches:
        self.queue = deque((p, step) for step, module in enumerate(self.order) for p in self.by_module.get(module, []))
        self.lasting = {p.name for p, _ in self.queue if p.numel <= self.s.persistence}
        self.whole_now |= self.lasting
        for begins, module in events:
            self._begin(module) if begins else self._end(module)
        return Fetches(self.gathers, self.most)

    def _begin(self, module: str) -> None:
        wanted = self.by_module.get(module, [])
        self._gather([p for p in wanted if p.name not in self.whole_now])
        for p in wanted:
            self.users.setdefault(p.name, set()).add(module)
        passed = {p.name for p in wanted if self.asked_until.get(p.name, -1) < self.step}
        while self.queue and passed:
            p, step = self.queue.popleft()
            self.asked_until[p.name] = step
            passed.discard(p.name)
        self._look_ahead()
        self.step += 1

    def _look_ahead(self) -> None:
        room = min(self.s.live_parameters - self.elements, self.s.prefetch_bucket)
        ahead: dict[str, Parameter] = {}
        elements = 0
        while self.queue and elements < room:
            p, step = self.queue.popleft()
            self.asked_until[p.name] = max(self.asked_until.get(p.name, -1), step)
            if p.name not in self.whole_now and p.name not in ahead:
                ahead[p.name] = p
                elements += p.numel
        self._gather(list(ahead.values()))

    def _gather(self, missing: list[Parameter]) -> None:
        if missing:
            self.gathers.append(missing)
            self.whole_now |= {p.name for p in missing}
            self.elements += sum(p.numel for p in missing)
            self.most = max(self.most, self.elements)

    def _end(self, module: str) -> None:
        mine = self.by_module.get(module, [])
        if not mine:
            return
        released = {
            p.name for p in mine if p.name not in self.lasting and self.asked_until.get(p.name, -1) <= self.step
        }
        distance = 0
        for later in self.order[self.step :]:
            if distance >= self.s.reuse_distance or not released:
                break
            for p in self.by_module.get(later, []):
                released.discard(p.name)
                distance += p.numel
        for p in mine:
            self.users[p.name].discard(module)
            if p.name in released and not self.users[p.name] and p.name in self.whole_now:
                self.whole_now.discard(p.name)
                self.elements -= p.numel

"""Replays which parameters ZeRO-3 gathers in a micro-batch, and how many are whole at once.

DeepSpeed 0.19 records in which order modules run, and from then on, before each module: gathers what that module needs
and is not there, then looks ahead in the recorded order and gathers up to a bucket more. After each module it gives up
what is not wanted again within `stage3_max_reuse_distance` elements and not yet looked ahead for. This replays it, so
that bytes and memory follow from a config's thresholds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache

from mst_scale.config import ModelConfig
from mst_scale.plan.held import held
from mst_scale.plan.parameters import Parameter
from mst_scale.plan.setting import Setting

Event = tuple[bool, str]
"""(begins, module's name)"""


@dataclass(frozen=True)
class Fetches:
    """The all-gathers of one micro-batch, forward and backward."""

    gathers: list[list[Parameter]]
    """What each all-gather brings together."""
    whole: int
    """Elements that are whole at once, at most; those that always are not counted."""


def fetches(model: ModelConfig, setting: Setting) -> Fetches:
    """The fetches of a model; they depend only on thresholds, recomputation and how matrices are cut."""
    alone = replace(setting.at_stage(3), ranks=setting.tensor, sequence=1, micro=1, accumulation=1)
    return _fetches(model, replace(alone, offload_optimizer=False, offload_parameters=False))


@cache
def _fetches(model: ModelConfig, setting: Setting) -> Fetches:
    found = held(model, setting)
    kept = {p.name for p in found if p.numel <= setting.persistence}
    by_module: dict[str, list[Parameter]] = {}
    for p in found:
        by_module.setdefault(p.name.rpartition(".")[0], []).append(p)
    if model.tied_head:  # the model itself multiplies with the embedding's weight
        by_module[""] = by_module.get("", []) + by_module["wte"]
    events = _events(model, setting.recompute)
    return _Replay(by_module, kept, [module for begins, module in events if begins], setting).run(events)


def _events(model: ModelConfig, recompute: bool) -> list[Event]:
    forward: list[Event] = [(True, "")]
    for name in ("wte", "wpe", "dropout") if model.causal else ("wte", "wpe", "wtt", "ln_e", "dropout"):
        forward += [(True, name), (False, name)]
    for i in range(model.n_layer):
        forward += _block(f"blocks.{i}", model.causal, backward=False)
    ends = ["ln_f"] if model.causal else ["transform", "ln_h"]
    ends += [] if model.tied_head else ["lm_head"]
    for name in ends:
        forward += [(True, name), (False, name)]
    backward: list[Event] = [(True, "")]
    for name in reversed(ends):
        backward += [(True, name), (False, name)]
    for i in reversed(range(model.n_layer)):
        if recompute:
            backward += _block(f"blocks.{i}", model.causal, backward=False)
        backward += _block(f"blocks.{i}", model.causal, backward=True)
    # token numbers have no gradient, so nothing tells that the embeddings are done
    backward += [(True, "dropout"), (False, "dropout")]
    backward += [] if model.causal else [(True, "ln_e"), (False, "ln_e"), (True, "wtt")]
    return [*forward, (False, ""), *backward, (True, "wpe"), (True, "wte")]


def _block(block: str, causal: bool, backward: bool) -> list[Event]:
    """A GPT normalises before attention and MLP, a BERT behind them."""
    halves = [("ln_1", ["attention", "attention.qkv", "attention.proj"]), ("ln_2", ["mlp", "mlp.up", "mlp.down"])]
    events: list[Event] = [(True, block)]
    for norm, (outer, first, second) in reversed(halves) if backward else halves:
        inner: list[Event] = [(True, f"{block}.{outer}")]
        for name in (second, first) if backward else (first, second):
            inner += [(True, f"{block}.{name}"), (False, f"{block}.{name}")]
        inner.append((False, f"{block}.{outer}"))
        dropout: list[Event] = [(True, "dropout"), (False, "dropout")]
        normalise: list[Event] = [(True, f"{block}.{norm}"), (False, f"{block}.{norm}")]
        parts = [normalise, inner, dropout] if causal else [inner, dropout, normalise]
        events += [event for part in (reversed(parts) if backward else parts) for event in part]
    return [*events, (False, block)]


@dataclass
class _Replay:
    by_module: dict[str, list[Parameter]]
    kept: set[str]
    order: list[str]
    setting: Setting
    step: int = 0
    there: set[str] = field(default_factory=set)
    users: dict[str, set[str]] = field(default_factory=dict)
    asked_until: dict[str, int] = field(default_factory=dict)
    """Last step for which a parameter was looked ahead for."""
    elements: int = 0
    whole: int = 0
    gathers: list[list[Parameter]] = field(default_factory=list)

    def run(self, events: list[Event]) -> Fetches:
        self.queue = deque((p, step) for step, module in enumerate(self.order) for p in self.by_module.get(module, []))
        self.there |= self.kept
        for begins, module in events:
            self._begin(module) if begins else self._end(module)
        return Fetches(self.gathers, self.whole)

    def _begin(self, module: str) -> None:
        wanted = self.by_module.get(module, [])
        self._gather([p for p in wanted if p.name not in self.there])
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
        room = min(self.setting.live_parameters - self.elements, self.setting.prefetch_bucket)
        ahead: dict[str, Parameter] = {}
        elements = 0
        while self.queue and elements < room:
            p, step = self.queue.popleft()
            self.asked_until[p.name] = max(self.asked_until.get(p.name, -1), step)
            if p.name not in self.there and p.name not in ahead:
                ahead[p.name] = p
                elements += p.numel
        self._gather(list(ahead.values()))

    def _gather(self, missing: list[Parameter]) -> None:
        if missing:
            self.gathers.append(missing)
            self.there |= {p.name for p in missing}
            self.elements += sum(p.numel for p in missing)
            self.whole = max(self.whole, self.elements)

    def _end(self, module: str) -> None:
        mine = self.by_module.get(module, [])
        if not mine:
            return
        given_up = {p.name for p in mine if p.name not in self.kept and self.asked_until.get(p.name, -1) <= self.step}
        distance = 0
        for later in self.order[self.step :]:
            if distance >= self.setting.reuse_distance or not given_up:
                break
            for p in self.by_module.get(later, []):
                given_up.discard(p.name)
                distance += p.numel
        for p in mine:
            self.users[p.name].discard(module)
            if p.name in given_up and not self.users[p.name] and p.name in self.there:
                self.there.discard(p.name)
                self.elements -= p.numel

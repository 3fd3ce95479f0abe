"""Replays the backward pass of one micro-batch, to find the moment at which the most memory is needed.

Saved activations are freed and weight gradients are allocated module by module, so activations and gradients are never
all in memory at once. With D = tokens × width, F = tokens × inner width, A = D over the ranks that share a layer, in
values, and W the module's weight:

    moment        freed of the block before        working
    loss                                           the logits' gradient, and two pieces of them in fp32
    head          logits                           the logits' gradient, D, W
    down                                           D, F, W
    up            2 F                              2 D, F, W
    attention     2 F, 2 D                         D, 7 A: gradients of q, k and v, before and after they are stacked
    qkv           2 F, 2 D, 4 A                    2 D, 3 A, W
    embeddings    the block                        D, W

The gradient of a tied head waits for that of the embeddings. A compact layer also expands W, in backward a second time,
and then keeps the gradient of its active weights alone. With recomputation only the block in hand is whole. BERT's
blocks have the same moments, its norms elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from mst_scale.config import ModelConfig
from mst_scale.flops.formulas import head_name
from mst_scale.plan.setting import Parameter, Setting, held, layers_of, share

FP32 = 4
PIECE = 2**25  # values of the logits that the loss computes in fp32 at a time, on a GPU
PIECES = 2  # the piece that is computed, and the one before it


@dataclass(frozen=True)
class Moment:
    """A module's backward pass. Bytes of activations, elements of the gradients of weights."""

    saved: int  # by autograd for what is still to come, this module included
    working: int  # gradients of activations, the gradient of the module's weight, and what waits
    done: int = 0  # elements whose gradients have been computed before
    own: int = 0  # elements of the gradients that this module computes


def moments(model: ModelConfig, s: Setting, stage: int, block: int, ends: int) -> tuple[Moment, ...]:
    """Return the moments in order, on a rank of a pipeline stage.

    Autograd saves `block` bytes for one block, and `ends` bytes for embeddings, the last norm, the head and the loss.
    """
    replayed = replace(s, accumulation=min(s.accumulation, s.pipeline), ranks=s.sizes.model, offload_optimizer=False)
    return _moments(model, replace(replayed, compact=s.compacted, offload_parameters=False), stage, block, ends)


@cache
def _moments(model: ModelConfig, s: Setting, stage: int, block: int, ends: int) -> tuple[Moment, ...]:
    return tuple(_Backward(model, s, stage, block, ends).replay())


class _Backward:
    def __init__(self, model: ModelConfig, s: Setting, stage: int, block: int, ends: int):
        part = share(model, s, stage)
        self.model, self.s, self.part, self.block, self.ends = model, s, part, block, ends
        self.found = {p.name: p for p in held(model, s, stage)}
        self.left: dict[str, int] = {}  # elements without a gradient, by module
        for name, p in self.found.items():
            module = name.rpartition(".")[0]
            self.left[module] = self.left.get(module, 0) + p.numel
        self.done = 0
        tokens = s.micro * model.seq_length // s.sequence
        self.stream = tokens * model.n_embd * s.weight_bytes
        self.inner = tokens * model.ffw * s.weight_bytes // s.tensor
        self.heads = self.stream // s.tensor
        self.predicted = s.micro * model.predicted // s.sequence
        layers = layers_of(model, s, stage)
        names = (name.split(".")[1] for name in self.found if name.startswith("blocks."))
        self.blocks = sorted({int(number) for number in names}, reverse=True)
        kept = self.stream if s.recompute else block
        # q, k and v before they are exchanged for whole sequences of fewer heads; activations from and to other stages
        self.waits = (3 * self.heads if s.sequence > 1 else 0) + (2 * self.stream if part.piped else 0)
        self.each, self.earlier = kept, (part.in_flight - 1) * layers * kept

    def replay(self) -> Iterator[Moment]:
        saved = self.earlier + len(self.blocks) * self.each
        if self.part.head:
            yield from self._head(saved)
        for number in self.blocks:
            yield from self._block(f"blocks.{number}", saved)
            saved -= self.each
        yield self._moment(saved, self.stream + self._dense("wte.weight"), *self.left)

    def _head(self, saved: int) -> Iterator[Moment]:
        model, w = self.model, self.s.weight_bytes
        logits = self.predicted * model.padded_vocab
        yield Moment(saved + self.ends, w * logits + _fp32_pieces(self.predicted, model.padded_vocab) + self.waits)
        name = head_name(model)
        working = w * logits + self.stream + self._dense(name)
        yield self._moment(saved + self.ends - w * logits, working, "lm_head", "")  # "": the bias of BERT's head
        if model.tied_head:
            self.waits += w * self.found[name].numel
        yield self._moment(saved + 2 * self.stream, 3 * self.stream, "ln_f", "ln_h", "transform")

    def _block(self, name: str, saved: int) -> Iterator[Moment]:
        d, f, a = self.stream, self.inner, self.heads
        whole = saved - self.each + self.block  # recomputed from the input that was kept
        down, up, proj, qkv = (f"{name}.{m}" for m in ("mlp.down", "mlp.up", "attention.proj", "attention.qkv"))
        yield self._moment(whole, d + f + self._dense(f"{down}.weight"), down)
        yield self._moment(whole - 2 * f, 2 * d + f + self._dense(f"{up}.weight"), up, f"{name}.ln_2")
        yield self._moment(whole - 2 * f - 2 * d, d + 7 * a, proj)
        freed = 2 * f + 2 * d + 4 * a
        yield self._moment(whole - freed, 2 * d + 3 * a + self._dense(f"{qkv}.weight"), qkv, f"{name}.ln_1")

    def _moment(self, saved: int, working: int, *modules: str) -> Moment:
        elements = sum(self.left.pop(module, 0) for module in modules)
        before, self.done = self.done, self.done + elements
        return Moment(saved, working + self.waits, before, elements)

    def _dense(self, name: str) -> int:
        """Return the bytes of a weight's dense gradient; of a compact one also of the weight, which is expanded."""
        p: Parameter | None = self.found.get(name)
        return 0 if p is None else self.s.weight_bytes * p.whole * (1 if p.active is None else 2)


def _fp32_pieces(rows: int, columns: int) -> int:
    """Return the bytes of the pieces in which the loss computes with logits of this shape."""
    each = max(1, PIECE // columns)
    return FP32 * columns * min(rows, PIECES * each)

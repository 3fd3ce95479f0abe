"""Implements G_stack, depth expansion and LiGO, which train a large model from the weights of a smaller one.

G_stack stacks the layers of a shallow model g times; layer l of L is layer l mod L/g. Embeddings, the last norm and the
head are copied, and the widths are those of the small model. The optimizer and the learning-rate schedule restart. The
paper recommends g = 4 and a briefly trained small model (about 10 billion tokens for 300 billion of the large one).

Depth expansion trains a model of one or a few layers for most of the run, at a learning rate that does not decay, and
adds all other layers at once behind them, late. New layers are copies, random, or copies that add nothing at first
(their output projections are zero, so the larger model computes the same as the smaller one).

In LiGO, the large weights are a linear function of the small ones, which is trained for a few steps. Widths grow by
matrices B (larger × smaller) and depth by matrices D (layers × layers), with one D for each kind of weight:

    W_l  ←  Σ_k D_lk · B_out W_k A_inᵀ,   A = B / c

There is one B for the residual stream (embeddings, norms, inputs and outputs of blocks), one each for q, k and v, and
one for the MLP's hidden units; the side that reads v or the hidden units uses the same B as the side that computes
them. Biases and norms use B_out and the D of their layer. Initially B is the identity with copies of its rows below, D
stacks layers (layer l from layer l mod L), and c counts the copies of each unit, so that the contributions of all
copies add up to that of the unit. The large model then computes the same as the stacked small one: exactly if n_embd is
a multiple of the smaller one (norms see the same mean and variance), approximately otherwise. With a tied head, the
last norm is divided by c instead of the head.

Heads keep their width, and their number grows. Copied rows get some `noise`, since identical rows would always have
identical gradients. `steps` steps of Adam train all B and D on the loss of the larger model, with a rate that decays to
0. The paper does not divide by c. Its code keeps the identity fixed and trains the rows below it from random values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from mst_scale.errors import UserError
from mst_scale.methods.method import Gradients, Growth, Method, NoOptions, Shape
from mst_scale.methods.presets import DENSE
from mst_scale.randomness import counter_hash
from mst_scale.validation import MILLION, Field, StrictFloat, StrictInt, ZeroOr, block

if TYPE_CHECKING:  # FLOPs of a growth are counted without torch
    from torch import Tensor

BLOCK = "blocks."


def _parts_of_blocks(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of a block's weights, without the name of the block."""
    first = f"{BLOCK}0."
    return [name.removeprefix(first) for name in weights if name.startswith(first)]


def _outside_blocks(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if not name.startswith(BLOCK)}


def _check_same_widths(small: Shape, large: Shape, method: str) -> None:
    for name, key in (("n_embd", "n_embd"), ("n_head", "n_head"), ("ffw", "d_ff")):
        mine, theirs = getattr(large, name), getattr(small, name)
        if mine != theirs:
            raise UserError(
                f"model.{key} = {mine}, but the smaller model has {theirs}, and method {method} keeps widths: use the "
                "same value, or method ligo"
            )


@block("mst.options")
class ExpandOptions:
    """Options of method `expand`."""

    new_layers: Literal["copy", "random", "zero"] = Field(
        "copy", description="`copy`: copies of the layers in their order; `random`: initial weights; `zero`: copies "
        "that add nothing at first.",
    )  # fmt: skip


class Expand(Growth):
    """Puts new layers behind those of the smaller model."""

    method = "expand"

    def __init__(self, options: ExpandOptions):
        self.new_layers = options.new_layers

    def check_supported(self, small: Shape, large: Shape) -> None:
        super().check_supported(small, large)
        _check_same_widths(small, large, self.method)

    def grow(
        self, weights: Mapping[str, Tensor], small: Shape, large: Shape, gradients: Gradients, seed: int
    ) -> dict[str, Tensor]:
        grown = dict(weights)
        residual = large.init_std / (2 * large.n_layer) ** 0.5
        for layer in range(small.n_layer, large.n_layer):
            for part in _parts_of_blocks(weights):
                name, weight = f"{BLOCK}{layer}.{part}", weights[f"{BLOCK}{layer % small.n_layer}.{part}"]
                to_stream = part.startswith(("attention.proj", "mlp.down"))
                if self.new_layers == "copy" or (self.new_layers == "zero" and not to_stream):
                    grown[name] = weight
                elif self.new_layers == "zero" or part.endswith("bias"):
                    grown[name] = weight * 0
                elif part.startswith(NORMS):
                    grown[name] = weight * 0 + 1
                else:
                    std = residual if to_stream else large.init_std
                    grown[name] = _drawn(weight, std, counter_hash(seed, "expand", name))
        return grown


class Stack(Expand):
    """Repeats the layers of the smaller model in their order."""

    method = "stack"

    def __init__(self, options: NoOptions):
        super().__init__(ExpandOptions(new_layers="copy"))

    def check_supported(self, small: Shape, large: Shape) -> None:
        super().check_supported(small, large)
        if large.n_layer % small.n_layer:
            raise UserError(
                f"model.n_layer = {large.n_layer} is not a multiple of the smaller model's {small.n_layer}: choose a "
                "multiple, or method expand or ligo"
            )


def _drawn(like: Tensor, std: float, seed: int) -> Tensor:
    """Return normally distributed initial weights, the same on every device."""
    import torch

    return (std * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))).to(like)


STREAM, HIDDEN = "stream", "hidden"
QKV = ("q", "k", "v")
# The widths of the outputs and of the inputs of each matrix of a block.
SIDES = {
    "q": ("q", STREAM),
    "k": ("k", STREAM),
    "v": ("v", STREAM),
    "attention.proj": (STREAM, "v"),
    "mlp.up": (HIDDEN, STREAM),
    "mlp.down": (STREAM, HIDDEN),
}
NORMS = ("ln_1", "ln_2")


@block("mst.options")
class Options:
    """Options of method `ligo`."""

    steps: StrictInt = Field(100, ge=0, le=MILLION, description="Steps that train the growth operators.")
    rate: StrictFloat = Field(3e-4, gt=0, description="Learning rate of these steps.")
    noise: Annotated[StrictFloat, ZeroOr(1e-12, 100, "none")] = Field(
        0.01, description="Scale of the noise on copied rows, which lets copies of a unit differ."
    )


class Operators:
    """All B and D, and the weights that they make."""

    def __init__(self, small: Shape, large: Shape, like: Tensor, noise: float, seed: int):
        import torch

        self.tied_head = large.tied_head
        self.width: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}
        for name, (mine, theirs) in widths(small, large).items():
            of = torch.arange(mine) % theirs
            first = torch.nn.functional.one_hot(of, theirs).to(like)
            self.copies[name] = first.sum(0)
            generator = torch.Generator().manual_seed(counter_hash(seed, "ligo", name))
            drawn = torch.randn(mine - theirs, theirs, generator=generator).to(like)
            first[theirs:] += noise * drawn / theirs**0.5
            self.width[name] = first
        layers = torch.arange(large.n_layer) % small.n_layer
        stacking = torch.nn.functional.one_hot(layers, small.n_layer).to(like)
        self.depth = {name: stacking.clone() for name in (*SIDES, *NORMS)}

    @property
    def parameters(self) -> list[Tensor]:
        """All B and D."""
        return [*self.width.values(), *self.depth.values()]

    def reads(self, name: str) -> Tensor:
        """Return A = B / c of this width, by which inputs are multiplied."""
        return self.width[name] / self.copies[name]

    def grown(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of the larger model."""
        grown = {name: self._outside(name, weight) for name, weight in _outside_blocks(weights).items()}
        for part in _parts_of_blocks(weights):
            small = [weights[f"{BLOCK}{layer}.{part}"] for layer in range(self.depth["q"].shape[1])]
            for layer, weight in enumerate(self._in_blocks(part, small)):
                grown[f"{BLOCK}{layer}.{part}"] = weight
        return grown

    def _outside(self, name: str, weight: Tensor) -> Tensor:
        """Grow an embedding, the last norm, or a head that is not tied."""
        reads = name.startswith("lm_head") or (name.startswith("ln_f") and self.tied_head)
        return weight @ (self.reads(STREAM) if reads else self.width[STREAM]).t()

    def _in_blocks(self, part: str, small: list[Tensor]) -> Tensor:
        """Grow one weight of all blocks; return (layers of the larger model, …)."""
        import torch

        module, stacked = part.rpartition(".")[0], torch.stack(small)
        if module != "attention.qkv":
            return self._of(module, stacked)
        thirds = stacked.chunk(3, dim=1)
        return torch.cat([self._of(name, third) for name, third in zip(QKV, thirds, strict=True)], dim=1)

    def _of(self, name: str, small: Tensor) -> Tensor:
        """Grow (layers, outputs) of a norm or a bias, or (layers, outputs, inputs) of a matrix."""
        import torch

        outputs, inputs = SIDES.get(name, (STREAM, STREAM))
        wide = small @ self.width[outputs].t() if small.dim() == 2 else self.width[outputs] @ small
        wide = wide @ self.reads(inputs).t() if small.dim() == 3 else wide
        return torch.tensordot(self.depth[name], wide, dims=1)


def widths(small: Shape, large: Shape) -> dict[str, tuple[int, int]]:
    """Return (larger, smaller) width for each B."""
    stream, hidden = (large.n_embd, small.n_embd), (large.ffw, small.ffw)
    return {STREAM: stream, **dict.fromkeys(QKV, stream), HIDDEN: hidden}


class LiGO(Growth):
    """Grows width and depth by a trained linear map."""

    def __init__(self, options: Options):
        self.steps, self.rate, self.noise = options.steps, options.rate, options.noise

    def check_supported(self, small: Shape, large: Shape) -> None:
        super().check_supported(small, large)
        for key, mine, theirs in (("n_embd", large.n_embd, small.n_embd), ("d_ff", large.ffw, small.ffw)):
            if mine < theirs:
                raise UserError(f"model.{key} = {mine}, but the smaller model has {theirs}: use at least as much")
        head, theirs = large.n_embd // large.n_head, small.n_embd // small.n_head
        if head != theirs:
            fitting = f"model.n_head to {large.n_embd // theirs}" if large.n_embd % theirs == 0 else "another n_embd"
            raise UserError(
                f"model.n_head makes heads {head} wide, but those of the smaller model are {theirs} wide, and ligo "
                f"only adds heads of the same width: set {fitting}"
            )

    def flops(self, small: Shape, large: Shape) -> float:
        """Return the FLOPs of applying all B and D, once forward and 3 × (with gradients) in each training step."""
        of, total = widths(small, large), 0.0
        for outputs, inputs in SIDES.values():
            (p, o), (n, i) = of[outputs], of[inputs]
            total += small.n_layer * (_product_flops(p, o, i) + _product_flops(p, i, n))
            total += _product_flops(large.n_layer, small.n_layer, p * n)
        rows = (1 if large.tied_head else 2) * large.padded_vocab + large.seq_length
        total += _product_flops(rows, small.n_embd, large.n_embd)
        return (3 * self.steps + 1) * total

    def grow(
        self, weights: Mapping[str, Tensor], small: Shape, large: Shape, gradients: Gradients, seed: int
    ) -> dict[str, Tensor]:
        import torch

        operators = Operators(small, large, next(iter(weights.values())), self.noise, seed)
        for parameter in operators.parameters:
            parameter.requires_grad_()
        optimizer = torch.optim.Adam(operators.parameters, lr=self.rate)
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.rate * (1 - step / self.steps)
            grown = operators.grown(weights)
            of = gradients({name: weight.detach() for name, weight in grown.items()}, step)
            optimizer.zero_grad()
            torch.autograd.backward(list(grown.values()), [of[name] for name in grown])
            optimizer.step()
        with torch.no_grad():
            return operators.grown(weights)


def _product_flops(rows: int, inner: int, columns: int) -> float:
    """Return the FLOPs of a matrix product, counted as in `flops.formulas`."""
    return float(rows * (2 * inner - 1) * columns)


METHODS = {
    "stack": Method(
        "the layers of a smaller run, stacked; then dense, or any schedule",
        DENSE,
        "Du et al. 2024, Stacking Your Transformers: A Closer Look at Model Growth for Efficient LLM Pre-Training, "
        "arXiv 2405.15319",
        growth=Stack,
    ),
    "expand": Method(
        "a smaller run's layers, with new ones behind them; then dense, or any schedule",
        DENSE,
        "Bu 2025, Scaling depth capacity via zero/one-layer model expansion, arXiv 2511.04981",
        options=ExpandOptions,
        growth=Expand,
    ),
    "ligo": Method(
        "a smaller run's weights, grown by a trained linear map; then dense, or any schedule",
        DENSE,
        "Wang et al. 2023, Learning to Grow Pretrained Models for Efficient Transformer Training, arXiv 2303.00980",
        options=Options,
        growth=LiGO,
    ),
}

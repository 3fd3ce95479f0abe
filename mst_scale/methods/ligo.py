"""LiGO: a larger model's weights as a linear function of a smaller one's, which is trained for a few steps itself.

Widths grow by matrices B (larger × smaller), depth by matrices D (layers × layers), one for each kind of part:

    W_l  ←  Σ_k D_lk · B_out W_k A_inᵀ,   A = B / c

There is one B for the residual stream (embeddings, norms, what blocks read and add), one each for q, k and v, one for
the MLP's hidden units; the side that reads v or the hidden units takes the same B as the side that makes them. Biases
and norms take B_out and the D of their part. B begins as the identity with copies of its rows under it, D as stacking
(layer l from layer l mod L), and c counts the copies of each unit, so that what reads them takes each in part. So the
model computes at first what the small one does, stacked: exactly where n_embd is a multiple of the smaller (norms see
the same mean and variance), nearly where it is not. With a tied head the last norm is divided by c in the head's place.

Heads keep their width: there are more of them. Rows that are copies get some `noise`: those that are the same would
have the same gradients for ever. `steps` of Adam train all B and D on the larger model's loss, its rate falling to 0.

The paper divides by no c. Its code holds the identity fixed and trains what stands under it, which begins at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from mst_scale.errors import UserError
from mst_scale.methods.growth import BLOCK, Gradients, Growth, Shape, around_blocks, of_blocks
from mst_scale.methods.method import NO_HSA, Method
from mst_scale.randomness import counter_hash
from mst_scale.validation import MILLION, Field, StrictFloat, StrictInt, ZeroOr, block

if TYPE_CHECKING:
    from torch import Tensor

STREAM, HIDDEN = "stream", "hidden"
QKV = ("q", "k", "v")
# A matrix of a block: what its outputs are, and its inputs.
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

    steps: StrictInt = Field(default=100, ge=0, le=MILLION, description="Steps that train the growth operators.")
    rate: StrictFloat = Field(default=3e-4, gt=0, description="Learning rate of these steps.")
    noise: Annotated[StrictFloat, ZeroOr(1e-12, 100, "none")] = Field(
        default=0.01, description="Scale of the noise on copied rows, which lets copies of a unit differ."
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
        return [*self.width.values(), *self.depth.values()]

    def reads(self, name: str) -> Tensor:
        """What inputs are multiplied with: each in equal parts from its copies."""
        return self.width[name] / self.copies[name]

    def grown(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The larger model's weights."""
        grown = {name: self._around(name, weight) for name, weight in around_blocks(weights).items()}
        for part in of_blocks(weights):
            small = [weights[f"{BLOCK}{layer}.{part}"] for layer in range(self.depth["q"].shape[1])]
            for layer, weight in enumerate(self._in_blocks(part, small)):
                grown[f"{BLOCK}{layer}.{part}"] = weight
        return grown

    def _around(self, name: str, weight: Tensor) -> Tensor:
        """Embeddings, the last norm, a head of its own."""
        reads = name.startswith("lm_head") or (name.startswith("ln_f") and self.tied_head)
        return weight @ (self.reads(STREAM) if reads else self.width[STREAM]).t()

    def _in_blocks(self, part: str, small: list[Tensor]) -> Tensor:
        """(layers, …): a part of every block of the larger model from that of every block of the smaller one."""
        import torch

        module, stacked = part.rpartition(".")[0], torch.stack(small)
        if module != "attention.qkv":
            return self._of(module, stacked)
        thirds = stacked.chunk(3, dim=1)
        return torch.cat([self._of(name, third) for name, third in zip(QKV, thirds, strict=True)], dim=1)

    def _of(self, name: str, small: Tensor) -> Tensor:
        """(layers, outputs) of a norm or a bias, (layers, outputs, inputs) of a matrix."""
        import torch

        outputs, inputs = SIDES.get(name, (STREAM, STREAM))
        wide = small @ self.width[outputs].t() if small.dim() == 2 else self.width[outputs] @ small
        wide = wide @ self.reads(inputs).t() if small.dim() == 3 else wide
        return torch.tensordot(self.depth[name], wide, dims=1)


def widths(small: Shape, large: Shape) -> dict[str, tuple[int, int]]:
    """(larger, smaller) of each B."""
    stream, hidden = (large.n_embd, small.n_embd), (large.ffw, small.ffw)
    return {STREAM: stream, **dict.fromkeys(QKV, stream), HIDDEN: hidden}


class LiGO(Growth):
    def __init__(self, options: Options):
        self.steps, self.rate, self.noise = options.steps, options.rate, options.noise

    def refuse(self, small: Shape, large: Shape) -> None:
        super().refuse(small, large)
        for key, mine, theirs in (("n_embd", large.n_embd, small.n_embd), ("d_ff", large.ffw, small.ffw)):
            if mine < theirs:
                raise UserError(f"model.{key} = {mine}, and the smaller model has {theirs}: give at least as much")
        head, theirs = large.n_embd // large.n_head, small.n_embd // small.n_head
        if head != theirs:
            fitting = f"model.n_head to {large.n_embd // theirs}" if large.n_embd % theirs == 0 else "another n_embd"
            raise UserError(
                f"a head is {head} wide here and {theirs} in the smaller model, and ligo adds heads of the same width: "
                f"set {fitting}"
            )

    def flops(self, small: Shape, large: Shape) -> float:
        """An application of all B and D to the matrices, forward once and with its gradients (3 ×) in each step."""
        of, total = widths(small, large), 0.0
        for outputs, inputs in SIDES.values():
            (p, o), (n, i) = of[outputs], of[inputs]
            total += small.n_layer * (product(p, o, i) + product(p, i, n))
            total += product(large.n_layer, small.n_layer, p * n)
        rows = (1 if large.tied_head else 2) * large.padded_vocab + large.seq_length
        total += product(rows, small.n_embd, large.n_embd)
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


def product(rows: int, inner: int, columns: int) -> float:
    """FLOPs of a product of matrices, as costs.flops counts them."""
    return float(rows * (2 * inner - 1) * columns)


METHOD = Method(
    "a smaller run's weights, grown by a trained linear map; then dense, or any schedule",
    {"sparsity": {"variation": "dense"}, "attention": NO_HSA},
    "Wang et al. 2023, Learning to Grow Pretrained Models for Efficient Transformer Training, arXiv 2303.00980",
    options=Options,
    growth=LiGO,
)

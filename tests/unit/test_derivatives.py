"""Every hand-written gradient under second derivatives, torch.func, forward-mode AD, torch.compile and autocast.

Each either gives what plain torch operations give, or raises one UserError that names what to do instead.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.comm import comm as deepspeed_comm
from torch import Tensor, nn
from torch.autograd import forward_ad

import mst_scale
from mst_scale.engine.compact_linear import compact_embedding
from mst_scale.engine.weight_functions import LayerFunction
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, attention
from mst_scale.hybrid_sparse_attention.sequence_shards import SequenceShard
from mst_scale.methods import METHODS
from mst_scale.methods.baselines.n_of_m import kept_both_ways, kept_of, soft_threshold
from mst_scale.methods.baselines.top_kast import largest
from mst_scale.models.cross_entropy import cross_entropy
from mst_scale.sparse_linear import Product, SparseLayers, cpu, semi_structured
from mst_scale.sparse_linear.compact import compact_cross_entropy, compact_linear
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.sparse_linear.narrow import NarrowIndex
from mst_scale.tensor_parallel import copied, summed
from tests.support.triton_interpreter import interpret

ROOT = Path(mst_scale.__file__).parent
Layer = Callable[[Tensor, Tensor], Tensor]
BACKEND, ONE_RANK, METHOD = "mst.compute.backend", "one rank", "mst.method"  # what messages tell the user to change


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A layer with hand-written gradients, and the same by operations of torch alone; (x, weight) → y."""

    covers: str
    """Where these gradients are: file:class, or file:function for an operator; several are separated by spaces."""
    ours: Layer
    plain: Layer
    x: Tensor
    weight: Tensor
    fix: str
    second: bool = True
    """Whether it has second derivatives."""
    transforms: bool = False
    """Whether torch.func and forward-mode AD may transform it."""
    """What our layer adds to the gradient of the weight in every backward pass."""


X, W, WIDE_X, WIDE_W = drawn(4, 5), drawn(6, 5, seed=1), drawn(4, 8), drawn(6, 8, seed=1)
SQUARES = drawn(4, 8), drawn(8, 8, seed=1)
Q, K = drawn(1, 2, 12, 8), drawn(1, 2, 12, 8, seed=1)
ACTIVE = torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) < 0.5
WHOLE = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)[:, None] & torch.tensor([1, 1, 0, 1, 0], dtype=torch.bool)
TARGETS, TOKENS = torch.tensor([0, 5, -1, 2]), torch.tensor([0, 5, 2, 2])


def sparse(index: Any, dense_gradient: bool = False) -> Product:
    """A layer that multiplies with what a mask keeps, as a model calls it."""
    product = Product("layer", (6, 5))
    product.index, product.dense_gradient = index, dense_gradient
    return product


def masked(active: Tensor) -> Layer:
    return lambda x, w: F.linear(x, w * active)


def of_method(name: str, **options: Any) -> Product:
    """A layer that multiplies with a method's function of its weight."""
    method, product = METHODS[name], Product("layer", (6, 8))  # its shape is not read
    assert method.function is not None
    product.function = LayerFunction(method.function(method.options(**options)), 20, 1.0)
    return product


def straight_through(function: Callable[[Tensor], Tensor]) -> Layer:
    return lambda x, w: F.linear(x, w + (function(w) - w).detach())


def with_extra_gradients(w: Tensor) -> Tensor:
    """Top-KAST: the 20 largest forward, the 25 largest backward."""
    used, moved = largest(w, 20), largest(w, 25)
    return w * moved - (w * (moved & ~used)).detach()


HEAD = sparse(cpu.CompiledIndex(ACTIVE))


def compact_index(backend: str = "dense") -> CompactIndex:
    index = CompactIndex("layer", tuple(ACTIVE.shape), ACTIVE.flatten().nonzero().flatten())
    index.backend = backend
    return index


COMPACT_HEAD = compact_index("cpu")


def head(x: Tensor, w: Tensor) -> Tensor:
    loss = HEAD.loss(x, w, TARGETS)
    assert loss is not None
    return loss


def compact(backend: str) -> Layer:
    index = compact_index(backend)
    return lambda x, w: compact_linear(x, w[ACTIVE], index)


def embedded(x: Tensor, w: Tensor) -> Tensor:
    return x * compact_embedding(TOKENS, w[ACTIVE], compact_index(), None, False)


def compact_head(x: Tensor, w: Tensor) -> Tensor:
    loss = compact_cross_entropy(x, w[ACTIVE], TARGETS, COMPACT_HEAD)
    assert loss is not None
    return loss


def plain_loss(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), TARGETS, ignore_index=-1)


def mean_over_parts(x: Tensor, w: Tensor) -> Tensor:
    part = SequenceShard()
    part.parts = 2  # of which the other one adds nothing
    return part.mean(F.linear(x, w).square().sum())


def attended(backend: str) -> Layer:
    return lambda q, k: attention(q, k, q * k, Pattern("strided", 3), True, backend)


CASES = {
    "compiled": Case(
        "sparse_linear/derivatives:Linear sparse_linear/derivatives:InputGradient",
        sparse(cpu.CompiledIndex(ACTIVE)), masked(ACTIVE), X, W, BACKEND,
    ),
    "compiled, dense gradient": Case(
        "sparse_linear/derivatives:Product sparse_linear/derivatives:WeightGradient",
        sparse(cpu.CompiledIndex(ACTIVE), True), F.linear, X, W * ACTIVE, BACKEND,
    ),
    "narrow": Case("sparse_linear/narrow:_Kept", sparse(NarrowIndex(WHOLE)), masked(WHOLE), X, W, BACKEND),
    "narrow, placed": Case("sparse_linear/narrow:_Placed", sparse(NarrowIndex(WHOLE)), masked(WHOLE), X, W, BACKEND),
    "compact": Case("sparse_linear/compact:_Expanded", compact("dense"), masked(ACTIVE), X, W, BACKEND),
    "compact, compiled": Case("sparse_linear/derivatives:ValuesLinear", compact("cpu"), masked(ACTIVE), X, W, BACKEND),
    "compact embedding": Case(
        "engine/compact_linear:_Embedding", embedded, lambda x, w: x * F.embedding(TOKENS, w * ACTIVE), X, W,
        "mst.compute.compact",
    ),
    "sparse head": Case(
        "sparse_linear/derivatives:_Gather", head, lambda x, w: plain_loss(x, w * ACTIVE), X, W, BACKEND, second=False
    ),
    "compact head": Case(
        "sparse_linear/head:_CrossEntropy", compact_head, lambda x, w: plain_loss(x, w * ACTIVE), X, W, BACKEND,
        second=False,
    ),
    "cross-entropy": Case(
        "models/cross_entropy:_CrossEntropy", lambda x, w: cross_entropy(F.linear(x, w), TARGETS), plain_loss, X, W,
        "", transforms=True,
    ),
    "copied": Case(
        "tensor_parallel:Copied", lambda x, w: F.linear(x, copied(w, None)).tanh(), lambda x, w: F.linear(x, w).tanh(),
        X, W, ONE_RANK,
    ),
    "summed": Case(
        "tensor_parallel:Summed", lambda x, w: summed(F.linear(x, w).tanh(), None),
        lambda x, w: F.linear(x, w).tanh(), X, W, ONE_RANK,
    ),
    "parts of sequences": Case(
        "hybrid_sparse_attention/sequence_shards:_Sum", mean_over_parts,
        lambda x, w: F.linear(x, w).square().sum(), X, W, ONE_RANK,
    ),
    "two of four": Case(
        "sparse_linear/semi_structured:_Product",
        of_method("sr-ste", products="semi-structured", transposable=True, decay=0.0),
        straight_through(lambda w: w * kept_both_ways(w)), *SQUARES, METHOD,
    ),
    "sr-ste": Case(
        "methods/baselines/n_of_m:StraightThrough", of_method("sr-ste", decay=0.0),
        straight_through(lambda w: w * kept_of(w, 2, 4)), WIDE_X, WIDE_W, METHOD,
    ),
    "s-ste": Case(
        "methods/baselines/n_of_m:StraightThrough", of_method("s-ste"),
        straight_through(lambda w: soft_threshold(w, 2, 4)), WIDE_X, WIDE_W, METHOD,
    ),
    "top-kast": Case(
        "methods/baselines/top_kast:Sets", of_method("top-kast", penalty=0.0),
        lambda x, w: F.linear(x, with_extra_gradients(w)), WIDE_X, WIDE_W, METHOD,
    ),
    "spartan": Case(
        "methods/baselines/spartan:SoftlyMasked", of_method("spartan"), F.linear, WIDE_X, WIDE_W, METHOD, second=False
    ),
    "attention, compiled": Case(
        "hybrid_sparse_attention/custom_op:sparse_operator", attended("cpp"), attended("definition"), Q, K,
        "mst.attention.backend", second=False,
    ),
    "attention, blocked": Case(
        "hybrid_sparse_attention/custom_op:sparse_operator", attended("blocked"), attended("definition"), Q, K,
        "mst.attention.backend", second=False,
    ),
}  # fmt: skip
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce over one rank; dense products in the place of those that want a GPU."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: None)
    monkeypatch.setattr(semi_structured, "multiplied", F.linear)


def test_deepspeeds_backend_of_a_destroyed_process_group_is_not_used(monkeypatch: pytest.MonkeyPatch):
    backend = deepspeed_comm.cdb
    if backend is None:
        backend = SimpleNamespace(is_initialized=dist.is_initialized)
        monkeypatch.setattr(deepspeed_comm, "cdb", backend)
    monkeypatch.setattr(backend, "all_reduce", lambda *_, **__: pytest.fail("the backend is used"), raising=False)
    assert torch.equal(summed(X, None), X)


def test_every_hand_written_gradient_has_a_case():
    written = set()
    for path in ROOT.rglob("*.py"):
        place = str(path.relative_to(ROOT).with_suffix(""))
        for node in ast.walk(ast.parse(path.read_text())):
            function = isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases)
            if function or (isinstance(node, ast.FunctionDef) and "torch.library.custom_op(" in ast.unparse(node)):
                written.add(f"{place}:{node.name}")  # type: ignore[attr-defined]
    # the one below, under Triton's interpreter; the other in tests of all backends, as their definition
    elsewhere = {"sparse_linear/block:_BlockLinear", "sparse_linear/definition:_Masked"}
    # only torch.compile runs these: tests/unit/sparse_linear/test_compact.py
    elsewhere |= {"sparse_linear/compact:_Traced", "sparse_linear/compact:expand"}
    assert written == {place for case in CASES.values() for place in case.covers.split()} | elsewhere


def assert_rejected(case: Case, what: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as caught:
        what()
    assert case.fix in str(caught.value) and len(str(caught.value).splitlines()) == 1


def derivatives(layer: Layer, case: Case) -> list[Tensor]:
    """Of a loss, and of a penalty on these."""
    x, weight = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
    y = layer(x, weight)
    first = list(torch.autograd.grad(y.pow(3).sum(), (x, weight), create_graph=True))
    penalty = first[0].square().sum() + 2 * first[1].square().sum()
    of_x, of_weight = torch.autograd.grad(penalty, (x, weight))
    return [*first, of_x, of_weight]


@each
def test_second_derivatives(case: Case):
    if not case.second:
        assert_rejected(case, lambda: derivatives(case.ours, case))
        return
    found, expected = derivatives(case.ours, case), derivatives(case.plain, case)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.detach().sub(plain).abs().max() <= 1e-12 * plain.abs().max(), "float64 sums in another order"
        assert plain.any()


def forward_mode(layer: Layer, case: Case) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(case.x, forward_ad.make_dual(case.weight, case.weight))).tangent
        assert tangent is not None
        return tangent


def gradient(layer: Layer, case: Case) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda w: layer(case.x, w).square().sum())


TRANSFORMS: dict[str, Callable[[Layer, Case], Tensor]] = {
    "grad": lambda layer, case: gradient(layer, case)(case.weight),
    "vmap of grad": lambda layer, case: torch.func.vmap(gradient(layer, case))(
        torch.stack([case.weight, -case.weight])
    ),
    "jvp": lambda layer, case: torch.func.jvp(lambda w: layer(case.x, w), (case.weight,), (case.weight,))[1],
    "forward mode": forward_mode,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@each
def test_transforms(case: Case, transform: Callable[[Layer, Case], Tensor]):
    if not case.transforms:
        assert_rejected(case, lambda: transform(case.ours, case))
        return
    torch.testing.assert_close(transform(case.ours, case), transform(case.plain, case))


@pytest.mark.parametrize("backend", ["cpp", "blocked"])
def test_vmap_of_attention(backend: str):
    """torch maps an operator over a batch by itself."""
    q = torch.stack([Q, -Q])
    found, expected = (torch.func.vmap(attended(name), (0, None))(q, K) for name in (backend, "definition"))
    torch.testing.assert_close(found, expected)


SLOW = ("two of four", "spartan")  # torch.compile unrolls their choice for minutes


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_compiled(name: str):
    """Graphs end where a kernel cannot be traced, and the values and gradients are those of the layer itself."""
    torch._dynamo.reset()
    case, found = CASES[name], []
    for layer in (case.ours, torch.compile(case.ours, backend="aot_eager")):
        x, weight = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
        y = layer(x, weight)
        found.append([y, *torch.autograd.grad(y.pow(3).sum(), (x, weight))])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


def test_fullgraph_with_a_sparse_layer_is_rejected_with_the_fix():
    torch._dynamo.reset()
    compiled = torch.compile(CASES["compiled"].ours, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=BACKEND):
        compiled(X, W)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 8))


def with_masks(model: nn.Sequential, backend: str) -> nn.Sequential:
    """The second and third layer sparse, after a dense one."""
    names = ["2.weight", "4.weight"]
    parameters = {name: dict(model.named_parameters())[name] for name in names}
    channels = backend == "narrow"
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    layers = SparseLayers(model, parameters, shapes, "auto" if channels else backend, channels=channels)
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(1)
        rows, columns = (torch.rand(extent, generator=generator) < 0.7 for extent in parameter.shape)
        active = rows[:, None] & columns if channels else torch.rand(parameter.shape, generator=generator) < 0.3
        parameter.data.masked_fill_(~active, 0)
        if backend != "dense":
            layers.set_mask(name, active, backend)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["cpu", "narrow"])
def test_autocast(backend: str, dtype: torch.dtype):
    """A sparse layer computes in the type in which F.linear would, after a dense layer and after another sparse one."""
    model = with_masks(network(), backend)
    plain = network()
    plain.load_state_dict(model.state_dict())
    x, found = torch.randn(5, 16), []
    for net in (model, plain):
        with torch.autocast("cpu", dtype):
            y = net(x)
            assert y.dtype == dtype
            y.float().square().sum().backward()
        found.append([y, *(p.grad for p in net.parameters())])
    for (name, parameter), ours, theirs in zip(plain.named_parameters(), found[0][1:], found[1][1:], strict=True):
        assert ours.dtype == torch.float32
        kept = parameter != 0 if name in ("2.weight", "4.weight") else torch.ones_like(parameter, dtype=torch.bool)
        # every layer rounds to 8 bits (bfloat16) or 11, in another order
        assert (ours - theirs)[kept].abs().max() <= 4 * torch.finfo(dtype).eps * theirs.abs().max(), name


def test_a_penalty_through_two_sparse_layers_is_that_of_dense_products():
    found = []
    for backend in ("dense", "cpu"):
        model, x = with_masks(network(), backend).double(), drawn(5, 16).requires_grad_()
        (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert dx.requires_grad
        dx.square().sum().backward()
        found.append([(p.grad * (p != 0)) for p in model.parameters() if p.grad is not None])
    for dense, ours in zip(*found, strict=True):
        assert dense.any() and torch.allclose(dense, ours, rtol=1e-10, atol=1e-12)


def test_second_derivatives_of_blocks_under_tritons_interpreter():
    pytest.importorskip("triton")
    said = interpret(["-m", "tests.support.interpret_block"], [{"twice": True}])
    errors = json.loads(said.splitlines()[-1].removeprefix("result "))
    assert set(errors) == {"dx", "dw", "ddx", "ddw"}
    # float32 sums of up to 70 terms, three in a row
    assert max(errors.values()) < 1e-5

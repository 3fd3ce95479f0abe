"""Layers over values and an index: against the dense layer, bit for bit where the backend promises it."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mst_scale.errors import UserError
from mst_scale.models.cross_entropy import cross_entropy
from mst_scale.sparse_linear import cpu
from mst_scale.sparse_linear.compact import compact_cross_entropy, compact_linear
from mst_scale.sparse_linear.compact_index import CompactIndex
from tests.unit.sparse_linear.test_backends import SHAPES, assert_close, case


def index_of(mask, across=False, backend="dense"):
    """The index of a mask, as the engine builds it."""
    index = CompactIndex("layer", tuple(mask.shape), mask.reshape(-1).nonzero().view(-1))
    index.across, index.backend = across, backend
    return index


def gradients(linear, x, parameter, bias, dy):
    """y, dx, the parameter's gradient, db."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, parameter, bias)]
    y = linear(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy.to(y.dtype))]


def compact_and_dense(shape, dtype, *, bias=True, across=False, backend="dense"):
    """Both layers' results; those of the dense weight at the index."""
    active, x, weight, b, dy = case(*shape, 0.8, dtype)
    weight[~active] = 0
    stored = active.T if across else active
    index = index_of(stored, across=across, backend=backend)
    values = (weight.T if across else weight)[stored]
    found = gradients(lambda x, v, b: compact_linear(x, v, index, b), x, values, b if bias else None, dy)
    dense = gradients(F.linear, x, weight, b if bias else None, dy)
    dense[2] = (dense[2].T if across else dense[2])[stored]
    return found, dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48, 32, 64), (37, 19, 5), (192, 256, 128), (3, 5, 0), (1, 1, 17)], ids=str)
def test_expanded_values_give_the_bits_of_a_dense_layer(shape, dtype, bias):
    for ours, dense in zip(*compact_and_dense(shape, dtype, bias=bias), strict=True):
        assert ours.dtype == dtype and torch.equal(ours, dense)


@pytest.mark.parametrize("backend", ["dense", "cpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("across", [False, True])
def test_forward_and_gradients(backend, shape, across):
    found, _ = compact_and_dense(shape, torch.float32, across=across, backend=backend)
    _, exact = compact_and_dense(shape, torch.float64, across=across)
    assert_close(found, exact, torch.float32, max(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("across", [False, True])
def test_the_kernel_gives_the_same_bits_as_from_a_dense_weight(shape, dtype, across):
    found, _ = compact_and_dense(shape, dtype, across=across, backend="cpu")
    active, x, weight, bias, dy = case(*shape, 0.8, dtype)
    index = cpu.CompiledIndex(active)
    dense = gradients(lambda x, w, b: index.linear(x, w, b, False), x, weight, bias, dy)
    dense[2] = dense[2].T[active.T] if across else dense[2][active]
    assert all(torch.equal(a, b) for a, b in zip(found, dense, strict=True))


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_dense_matrix_exists(dtype):
    """Neither of the weight nor of its gradient: with 8 tokens, the values are the largest tensor."""
    active, x, weight, bias, dy = case(256, 384, 8, 0.8, dtype)
    index = index_of(active, backend="cpu")
    leaves = [t.clone().requires_grad_() for t in (x, weight[active], bias)]
    assert index.products is not None  # built before
    with Largest() as largest:
        torch.autograd.grad(compact_linear(leaves[0], leaves[1], index, leaves[2]), leaves, dy)
    assert largest.numel == index.count


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [40, 1600])
def test_the_loss_of_a_head(across, dtype, columns):
    active, x, weight, _, _ = case(130, columns, 70, 0.8, dtype)
    weight, targets = weight / 3, torch.randint(130, (70,), generator=torch.Generator().manual_seed(1))
    stored, kept = (active.T, weight.T[active.T]) if across else (active, weight[active])
    index = index_of(stored, across=across, backend="cpu")
    leaves = [t.clone().requires_grad_() for t in (x, kept)]
    loss = compact_cross_entropy(*leaves, targets, index)
    found = [loss.detach(), *torch.autograd.grad(2 * loss, leaves)]
    leaves = [t.double().requires_grad_() for t in (x, weight.masked_fill(~active, 0))]
    loss = cross_entropy(F.linear(*leaves), targets)
    exact = [loss.detach(), *torch.autograd.grad(2 * loss, leaves)]
    exact[2] = (exact[2].T if across else exact[2])[stored]
    for ours, truth in zip(found, exact, strict=True):
        assert (ours.double() - truth).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-7) * truth.abs().max()
    assert compact_cross_entropy(x, kept, targets, index_of(stored, across)) is None


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_values_are_expanded_and_collected(backend):
    active = case(30, 21, 4, 0.7)[0]
    index = index_of(active, backend=backend)
    assert (index.shape, index.count) == ((30, 21), int(active.sum()))
    values = torch.randn(index.count)
    expanded = torch.zeros(30, 21).masked_scatter(active, values)
    assert torch.equal(index.expand(values), expanded) and torch.equal(index.collect(expanded), values)


def test_tensors_that_do_not_fit_the_index():
    index = index_of(torch.eye(4, 5, dtype=torch.bool))
    x, values, bias = torch.ones(2, 5), torch.ones(4), torch.ones(4)
    compact_linear(x, values, index, bias)
    for tensors in ((x[:, :4], values, bias), (x, values[:3], bias), (x, values.double(), bias), (x, values, bias[:2])):
        with pytest.raises(UserError):
            compact_linear(tensors[0], tensors[1], index, tensors[2])


@pytest.mark.parametrize("backend", ["dense", "cpu"])
@pytest.mark.parametrize("across", [False, True])
def test_second_derivatives(backend, across):
    active, x, weight, bias, _ = case(7, 5, 6, 0.5, torch.float64)
    stored = active.T if across else active
    index = index_of(stored, across=across, backend=backend)
    leaves = [t.requires_grad_() for t in (x, (weight.T if across else weight)[stored], bias)]
    assert torch.autograd.gradcheck(lambda x, v, b: compact_linear(x, v, index, b), leaves)
    assert torch.autograd.gradgradcheck(lambda x, v, b: compact_linear(x, v, index, b), leaves)


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_the_dense_gradient_is_shown_and_the_values_get_theirs_from_it(backend):
    active, x, weight, bias, dy = case(40, 30, 16, 0.8)
    weight[~active] = 0
    index = index_of(active, backend=backend)
    shown = []

    def linear(x, values, bias):
        return compact_linear(x, values, index, bias, dense_gradient=shown.append)

    found = gradients(linear, x, weight[active], bias, dy)
    dense = gradients(F.linear, x, weight, bias, dy)
    assert torch.equal(shown[0], dense[2]) and torch.equal(found[2], dense[2][active])


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_autocast_and_compile(backend):
    active, x, weight, bias, _ = case(40, 30, 16, 0.8)
    weight[~active] = 0
    index = index_of(active, backend=backend)
    values = weight[active].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = compact_linear(x, values, index, bias)
        expected = F.linear(x, weight, bias)
    assert y.dtype == torch.bfloat16 and torch.allclose(y.float(), expected.float(), atol=0.1)
    (gradient,) = torch.autograd.grad(y.float().sum(), values)
    assert gradient.dtype == torch.float32
    compiled = torch.compile(lambda x, v, b: 2 * compact_linear(x, v, index, b), backend="eager")
    assert torch.equal(compiled(x, values, bias), 2 * compact_linear(x, values, index, bias))


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("biased", [True, False])
def test_torch_compile_traces_a_layer_and_keeps_no_matrix(across, biased):
    active, x, weight, bias, dy = case(40, 30, 16, 0.8)
    weight[~active] = 0
    stored, bias = active.T if across else active, bias if biased else None
    index = index_of(stored, across=across)
    kept = []

    def layer(x, v, b):
        return 2 * compact_linear(x, v, index, b)

    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    values = (weight.T if across else weight)[stored]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        found = gradients(compiled, x, values, bias, dy)
    for ours, eager in zip(found, gradients(layer, x, values, bias, dy), strict=True):
        assert torch.equal(ours, eager)
    assert kept and max(kept) < active.numel()


def test_growth_by_gradient_breaks_the_graph_of_torch_compile():
    active, x, weight, bias, _ = case(40, 30, 16, 0.8)
    index, shown = index_of(active), []

    def layer(x, v, b):
        return compact_linear(x, v, index, b, dense_gradient=shown.append)

    leaves = x, weight[active].requires_grad_(), bias
    with pytest.raises(Exception, match="leave out fullgraph=True"):
        torch.compile(layer, backend="eager", fullgraph=True)(*leaves)
    torch.compile(layer, backend="eager")(*leaves).sum().backward()
    assert shown[0].shape == active.shape


def test_torch_func_is_rejected():
    index = index_of(torch.eye(4, dtype=torch.bool))
    with pytest.raises(UserError):
        torch.func.grad(lambda v: compact_linear(torch.ones(2, 4), v, index).sum())(torch.ones(4))


def test_torch_func_is_rejected_before_the_products_of_a_head_are_built():
    index, targets = index_of(torch.eye(4, dtype=torch.bool), backend="cpu"), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UserError):
        torch.func.grad(lambda v: compact_cross_entropy(torch.ones(2, 4), v, targets, index))(torch.ones(4))

"""The loss of a sparse head without its logits, against cross-entropy of the definition's logits in float64."""

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.models.cross_entropy import cross_entropy
from mst_scale.sparse_linear import cpu, head, kernel
from mst_scale.sparse_linear.definition import definition

# float32 sums of up to 1600 products, in random-walk size, then a softmax: some 1e-6; 16-bit types round the gradients
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def case(rows, columns, tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    active = torch.rand(rows, columns, generator=generator) >= 0.8
    weight = (torch.randn(rows, columns, generator=generator) / 3).to(dtype)
    x = torch.randn(tokens, columns, generator=generator).to(dtype)
    targets = torch.randint(rows, (tokens,), generator=generator)
    targets[1::5] = -1
    return active, weight, x, targets


def results(loss, x, weight):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    value = loss(x, weight)
    return [value.detach(), *torch.autograd.grad(2 * value, (x, weight))]  # 2: backward scales


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((130, 40, 70), torch.float32),
        ((130, 1600, 100), torch.float32),  # two panels
        ((1, 3, 1), torch.float32),
        ((50, 7, 4), torch.float64),  # three tokens count: a third is no float32 and no float64
        ((130, 1600, 100), torch.float64),
        ((300, 64, 64), torch.bfloat16),
        ((300, 64, 64), torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 3])
def test_loss_and_gradients(shape, dtype, threads, monkeypatch):
    monkeypatch.setattr(kernel, "PER_THREAD", 1)
    torch.set_num_threads(threads)
    check(shape, dtype)


def check(shape, dtype):
    active, weight, x, targets = case(*shape, dtype)
    index = cpu.CompiledIndex(active)
    found = results(lambda x, w: index.cross_entropy(x, w, targets), x, weight)
    wide = x.double(), weight.double()
    expected = results(lambda x, w: cross_entropy(definition(x, w, active), targets), *wide)
    assert [t.dtype for t in found] == [torch.promote_types(dtype, torch.float32), dtype, dtype]
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= TOLERANCE[dtype] * b.abs().max()
    assert not found[2][~active].any()
    again = results(lambda x, w: index.cross_entropy(x, w, targets), x, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "the same for the same threads"


@pytest.mark.parametrize("spread", [1.0, 0.01], ids=["few rows dominate", "all rows are alike"])
def test_many_rows_cost_no_digits(spread):
    """Loss and both gradients are sums over the rows: within 4 times the error of float32 logits and torch's logsumexp
    and products, which sum in pieces; half an ulp, which storing the loss costs anyone, is never too much."""
    generator = torch.Generator().manual_seed(0)
    active = torch.rand(50304, 64, generator=generator) >= 0.8
    weight = spread * torch.randn(50304, 64, generator=generator)
    x, targets = torch.randn(64, 64, generator=generator), torch.randint(50304, (64,), generator=generator)
    index = cpu.CompiledIndex(active)

    def by_logits(x, w):
        return cross_entropy(definition(x, w, active), targets)

    found = results(lambda x, w: index.cross_entropy(x, w, targets), x, weight)
    exact, torchs = results(by_logits, x.double(), weight.double()), results(by_logits, x, weight)
    for what, ours, theirs, truth in zip(("loss", "dx", "dw"), found, torchs, exact, strict=True):
        error, torchs_error = (float((t.double() - truth).abs().max() / truth.abs().max()) for t in (ours, theirs))
        assert error <= max(4 * torchs_error, 2**-24), f"{what}: {error:.1e}, torch {torchs_error:.1e}"


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_processors(another_processor, dtype):
    """Without this machine's widest vectors; 1100 rows are several pieces of each sum."""
    check((1100, 3, 70), dtype)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_evaluation_computes_no_gradients(without, monkeypatch):
    """Also of a model in training, whose weights want gradients."""
    active, weight, x, targets = case(130, 40, 70)
    index, given = cpu.CompiledIndex(active), []
    run = index.products.run
    monkeypatch.setattr(
        index.products, "run", lambda name, *of, **more: given.append((name, of[2])) or run(name, *of, **more)
    )
    with without():
        loss = index.cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets)
    assert [name for name, _ in given] == ["sl_gather", "sl_head"]
    assert given[1][1]["dx"] is None and given[1][1]["gradient"] is None
    assert torch.allclose(loss, cross_entropy(definition(x, weight, active), targets), atol=1e-6)


def test_edges():
    """Large logits, one that is not finite, no token that counts, targets that do not fit."""
    active, weight, x, targets = case(130, 40, 70)
    index = cpu.CompiledIndex(active)
    huge = index.cross_entropy(1e4 * x, weight, targets)
    assert torch.allclose(huge, cross_entropy(definition(1e4 * x, weight, active), targets), rtol=1e-5)
    bad = x.clone()
    bad[0] = torch.nan
    loss, dx, dw = results(lambda x, w: index.cross_entropy(x, w, targets), bad, weight)
    assert loss.isnan() and dx[0].isnan().any() and dx[1:].isfinite().all() and not dw[active].isfinite().any()
    assert index.cross_entropy(x, weight, torch.full_like(targets, -1)).isnan(), "as the mean of nothing"
    for wrong, message in ((targets[:-1], "need 70 targets, not 69"), (targets.clamp(min=130), "must be below 130")):
        with pytest.raises(UserError, match=message):
            index.cross_entropy(x, weight, wrong)
    with pytest.raises(UserError, match="a target is -100"):
        index.cross_entropy(x, weight, targets.clone().index_fill_(0, torch.tensor([3]), -100))


def test_a_heads_threads_share_a_bounded_scratch(monkeypatch):
    active, weight, x, targets = case(130, 40, 70)
    index = cpu.CompiledIndex(active)
    monkeypatch.setattr(kernel, "PER_THREAD", 1)
    monkeypatch.setattr(head, "SCRATCH", 3 * 4 * (index.products.entries + 64 * 130))
    torch.set_num_threads(7)
    used, inner = [], index.products._call
    monkeypatch.setattr(
        index.products, "_call", lambda *of, **given: used.append(given["threads"]) or inner(*of, **given)
    )
    results(lambda x, w: index.cross_entropy(x, w, targets), x, weight)
    assert used[1] == 3, "the loss; its values and its gradient's dense layout take no scratch"


def test_no_tokens_give_no_gradient():
    active, weight, x, _ = case(300, 200, 0)
    index = cpu.CompiledIndex(active)
    junk = [torch.full((int(active.sum()),), 7.0) for _ in range(8)]
    del junk
    weight.requires_grad_()
    loss = index.cross_entropy(x.requires_grad_(), weight, torch.empty(0, dtype=torch.long), torch.tensor(10))
    assert loss == 0 and not torch.autograd.grad(loss, weight)[0].any()


def test_a_nan_of_a_gpu_stays_nan():
    active, weight, x, targets = case(30, 8, 12)
    weight[0][active[0]] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert cpu.CompiledIndex(active).cross_entropy(x, weight, targets).isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_positions_do_not_depend_on_the_default_type(dtype):
    active = case(20, 30, 1)[0]
    torch.set_default_dtype(dtype)
    try:
        where = kernel.CompiledProducts(active).where
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(where, active.view(-1).nonzero().view(-1))

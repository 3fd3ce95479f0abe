"""Where products are replaced, which backend is chosen, and what is refused."""

import copy
import json
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.models.gpt import GPT
from mst_scale.sparse_linear import SparseLayers, crossovers, dispatch
from mst_scale.sparse_linear.layers import remove_products
from mst_scale.sparse_linear.replaced import Replaced


class Other(nn.Module):
    """A product that is not an nn.Linear's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))


def layers(model, names, backend="cpu"):
    parameters = {name: dict(model.named_parameters())[name] for name in names}
    return SparseLayers(model, parameters, {n: tuple(p.shape) for n, p in parameters.items()}, backend)


def sparse(model, names, backend="cpu", sparsity=0.5):
    found = layers(model, names, backend)
    for name in names:
        weight = dict(model.named_parameters())[name]
        active = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) >= sparsity
        weight.data.masked_fill_(~active, 0)
        found.set_mask(name, active, dispatch.select_for(found, name, sparsity))
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_the_gpt_computes_the_same_with_every_matrix_sparse(tied):
    torch.manual_seed(0)
    shape = ModelConfig(n_layer=2, n_head=2, n_embd=16, seq_length=8, vocab_size=40, vocab_multiple=8, tied_head=tied)
    model = GPT(shape)
    names = [n for n, p in model.named_parameters() if p.dim() == 2 and "wpe" not in n and (tied or "wte" not in n)]
    found = sparse(model, names)
    assert all(p.index is not None for p in found.products.values()) and len(found.products) == 9
    tokens = torch.randint(40, (2, 8))
    loss = model(tokens, tokens)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    for name in names:
        found.set_mask(name, None, "dense")
    model.zero_grad()
    dense = model(tokens, tokens)
    dense.backward()
    assert torch.allclose(loss, dense, atol=1e-6)  # float32 sums in another order
    for name, p in model.named_parameters():
        active = p.data != 0 if name in names and name != "wte.weight" else torch.ones_like(p, dtype=torch.bool)
        if name == "wte.weight" and tied:
            active = p.data != 0
        assert torch.allclose(gradients[name][active], p.grad[active], atol=1e-6), name


def test_torch_compile_uses_one_graph_for_all_layers_of_a_shape():
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))  # more than torch compiles a function for
    layers(model, [f"{i}.weight" for i in range(10)], "auto")
    for layer in model:
        layer.compile(backend="aot_eager")
    model(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_computes_with_its_own_weights_and_no_mask(again):
    """An average of weights over time, say, is a copy that no topology step reaches."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=8, vocab_size=40, vocab_multiple=8))
    names = [n for n, p in model.named_parameters() if p.dim() == 2 and "wpe" not in n]
    tokens = torch.randint(40, (2, 8))
    fresh = copy.deepcopy(model)
    sparse(model, names)
    copied = again(model)
    assert torch.allclose(copied(tokens, tokens), model(tokens, tokens), atol=1e-6)  # float32 sums in another order
    copied.load_state_dict(fresh.state_dict())
    assert torch.equal(copied(tokens, tokens), fresh(tokens, tokens))


class Doubled:
    """A function of a layer's weight."""

    def weight(self, stored):
        return 2 * stored

    def linear(self, x, stored, bias):
        return F.linear(x, 2 * stored, bias)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_layer_keeps_the_function_of_its_weight(again):
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    SparseLayers(model, {"weight": model.weight}, {"weight": (8, 8)}, "dense", always=True)
    model.replacement.function = Doubled()
    assert torch.equal(again(model)(x), F.linear(x, 2 * model.weight, model.bias))


def test_an_input_may_be_given_by_its_name():
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    layers(model, ["weight"])
    assert isinstance(model, Replaced) and torch.equal(model(input=x), model(x))


def test_dense_layers_are_left_alone():
    """No index: F.linear, to the bit; and backend dense installs nothing."""
    model = nn.Linear(8, 8)
    x = torch.randn(3, 8)
    before = model(x)
    found = layers(model, ["weight"])
    assert torch.equal(model(x), before)
    assert dispatch.select_for(found, "weight", 0.0) == "dense"
    untouched = nn.Linear(8, 8)
    layers(untouched, ["weight"], "dense")
    assert "forward" not in vars(untouched)


@pytest.mark.parametrize("backend", ["cpu", "narrow"])
@pytest.mark.parametrize("again", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_transformers_conv1d_multiplies_with_what_its_mask_keeps(backend, again):
    """It stores (inputs, outputs): GPT-2's layers, which are no nn.Linear."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model, x = conv1d(6, 9), torch.randn(5, 9)
    nn.init.normal_(model.bias)
    rows, columns = torch.rand(9) < 0.7, torch.rand(6) < 0.7
    active = rows[:, None] & columns if backend == "narrow" else torch.rand(9, 6) < 0.4
    model.weight.data[~active] = 0
    expected = model(x)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    channels = backend == "narrow"
    found = SparseLayers(
        model, {"weight": model.weight}, {"weight": (9, 6)}, "auto" if channels else backend, channels=channels
    )
    assert torch.equal(model(x), expected)  # its own product, while no mask is set
    assert found.products["weight"].across and not found.left_dense
    with pytest.raises(UserError, match="this mask is"):
        found.set_mask("weight", active.T, backend)
    found.set_mask("weight", active, backend)
    for dense in (False, True):
        found.dense_gradients(dense)
        model.zero_grad()
        y = model(x)
        assert torch.allclose(y, expected, atol=1e-6)  # float32 sums in another order
        y.square().sum().backward()
        wanted = gradients[0] if dense else gradients[0].masked_fill(~active, 0)
        assert torch.allclose(model.weight.grad, wanted, atol=1e-5)
        assert torch.allclose(model.bias.grad, gradients[1], atol=1e-5)
    assert torch.allclose(again(model)(x), expected, atol=1e-6)


def test_what_is_no_linear_layer_stays_dense_and_is_named(caplog):
    model = nn.ModuleDict({"a": nn.Linear(4, 6), "b": Other()})
    with caplog.at_level(logging.INFO, logger="mst_scale"):
        found = layers(model, ["a.weight", "b.weight"])
    assert list(found.products) == ["a.weight"] and dispatch.select_for(found, "b.weight", 0.9) == "dense"
    assert "1 of 2 sparse parameters" in caplog.text and "b.weight" in caplog.text


def test_wrong_shapes_dtypes_and_the_mask_of_another_layer_are_refused():
    model = nn.Linear(8, 6)
    found = sparse(model, ["weight"])
    with pytest.raises(UserError, match="this mask is"):
        found.set_mask("weight", torch.ones(8, 6, dtype=torch.bool), "cpu")
    with pytest.raises(UserError, match="the last dimension must be 8"):
        model(torch.randn(3, 7))
    with pytest.raises(UserError, match="float64"):
        model(torch.randn(3, 8).double())
    with pytest.raises(UserError, match=r"the mask .*\(6, 8\)"):
        found.products["weight"](torch.randn(3, 8), torch.randn(5, 8))
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    for bias in (torch.randn(5), torch.randn(6).double(), torch.randn(6, device="meta")):
        with pytest.raises(UserError, match=r"the bias is .* must be \(6,\)"):
            found.products["weight"](x, weight, bias)
    targets = torch.zeros(3, dtype=torch.int64)
    for wrong in ((torch.randn(3, 7), weight), (x.double(), weight), (x.to("meta"), weight), (x, torch.randn(5, 8))):
        with pytest.raises(UserError, match=r"dtypes and devices|the mask belongs to"):
            found.products["weight"].loss(*wrong, targets)


@pytest.mark.parametrize(
    ("backend", "why"),
    [("block", "topology.granularity"), ("gpu", "auto, dense, cpu, block")],
)
def test_a_backend_that_cannot_run_is_refused(backend, why):
    with pytest.raises(UserError, match=why):
        layers(nn.Linear(8, 8), ["weight"], backend)


def test_auto_follows_the_measured_crossover_and_says_so_once(monkeypatch, tmp_path, caplog):
    table = tmp_path / "crossover.json"
    rows = [
        {"backend": "cpu", "dtype": "float32", "threads": 1, "shape": [512, 512], "sparsity": 0.6},
        {"backend": "cpu", "dtype": "float32", "threads": 1, "shape": [4096, 512], "sparsity": 0.8},
    ]
    table.write_text(json.dumps({"crossovers": rows}))
    monkeypatch.setattr(crossovers, "SHIPPED", table)
    monkeypatch.setattr(crossovers, "own", lambda: tmp_path / "own.json")
    crossovers.table.cache_clear()
    dispatch._log_choice.cache_clear()
    auto = layers(nn.Linear(600, 512), ["weight"], "auto")
    try:
        with caplog.at_level(logging.INFO, logger="mst_scale"):
            found = [dispatch.select_for(auto, "weight", s) for s in (0.5, 0.7, 0.7)]
        assert found == ["dense", "cpu", "cpu"]
        said = [r.message.split("backend ")[1] for r in caplog.records]
        assert [line.split(",")[0] for line in said] == ["dense", "cpu"] and all("60%" in line for line in said)
        assert dispatch.choose("cpu", torch.float32, (5000, 512), 0.7, 1)[0] == "dense"
        assert dispatch.choose("cpu", torch.bfloat16, (512, 512), 0.99, 1)[0] == "dense"  # nothing measured
        assert dispatch.choose("cpu", torch.float32, (64, 64), 0.99, 1)[0] == "dense"  # too small
        assert dispatch.choose("cuda", torch.float32, (512, 512), 0.99, 1)[0] == "dense"  # unstructured on a GPU
        crossovers.keep([{**rows[0], "sparsity": 0.9}])
        found = [dispatch.choose("cpu", torch.float32, (512, 512), s, 1)[0] for s in (0.85, 0.95)]
        assert found == ["dense", "cpu"] and not list(tmp_path.glob("*.new"))
    finally:
        crossovers.table.cache_clear()
        dispatch._log_choice.cache_clear()


def test_the_table_that_is_shipped_holds_what_dispatch_reads(monkeypatch, tmp_path):
    monkeypatch.setattr(crossovers, "own", lambda: tmp_path / "own.json")
    crossovers.table.cache_clear()
    try:
        for row in crossovers.table():
            assert row["backend"] in dispatch.BACKENDS and 0 < row["sparsity"] <= 1 and len(row["shape"]) == 2
        assert dispatch.choose("cpu", torch.float32, (3072, 768), 0.96, 1)[0] == "cpu"
    finally:
        crossovers.table.cache_clear()


def test_a_layer_with_a_forward_of_its_own_is_rejected():
    """It would be called in place of ours."""
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].forward = nn.Linear(8, 8).forward
    with pytest.raises(UserError, match="forward of its own"):
        sparse(model, ["0.weight"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_the_products_of_a_copied_model_can_be_removed_and_replaced_again(copied):
    torch.manual_seed(0)
    shape = ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=8, vocab_size=40, vocab_multiple=8, tied_head=True)
    for model, names in (
        (GPT(shape), ["wte.weight", "blocks.0.attention.qkv.weight"]),
        (nn.Sequential(nn.Linear(8, 4)), ["0.weight"]),
    ):
        sparse(model, names)
        x = torch.randint(40, (2, 8)) if isinstance(model, GPT) else torch.randn(2, 8)
        again = copied(model)
        remove_products(again)
        assert torch.allclose(again(x), model(x), atol=1e-6)
        assert all(product.index is not None for product in sparse(again, names).products.values())
        assert torch.equal(again(x), model(x))

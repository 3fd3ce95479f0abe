"""The weight of a compact layer: what is true of its matrix can be read, and all else is rejected in one line."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mst_scale.errors import UserError
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.sparse_linear.guarded import CompactLayer, GuardedWeight, parameter_of
from mst_scale.sparse_linear.replaced import replace_forward, restore_forward


def doubled(layer, replacement, x):
    return 2 * x


@pytest.fixture
def layer():
    made = nn.Linear(6, 4)
    made._parameters["weight"] = nn.Parameter(torch.randn(5))
    replace_forward(made, doubled, CompactIndex("up.weight", (4, 6), torch.arange(5)), CompactLayer)
    return made


WRONG = {
    "a product": lambda w: F.linear(torch.ones(6), w),
    "an operator": lambda w: torch.ones(6) @ w,
    "a comparison": lambda w: w == 0,
    "a count": torch.count_nonzero,
    "a list": lambda w: torch.cat([torch.ones(3), w]),
    "the shape": lambda w: w.shape,
    "the size": lambda w: w.numel(),
    "the length": len,
    "the data": lambda w: w.data,
    "the gradient": lambda w: w.grad,
    "a write": lambda w: w.copy_(torch.ones(5)),
    "a read": lambda w: w[0],
    "an update": lambda w: w.add_(1),
    "freezing": lambda w: w.requires_grad_(False),
    "a hook": lambda w: w.register_hook(print),
    "an attribute": lambda w: setattr(w, "own", 1),
    "numpy": lambda w: w.detach().numpy(),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_what_takes_it_for_the_matrix_is_rejected(layer, what):
    with pytest.raises(UserError, match=r"up\.weight: .*state_dict.*mst\.compute\.compact to off"):
        WRONG[what](layer.weight)


def test_what_is_true_of_the_matrix_can_be_read(layer):
    parameter = dict(layer.named_parameters())["weight"]
    assert (layer.weight.dtype, layer.weight.device) == (torch.float32, torch.device("cpu"))
    assert layer.weight.requires_grad and not layer.weight.is_cuda
    parameter.requires_grad_(False)
    assert not layer.weight.requires_grad
    assert not hasattr(layer.weight, "ds_id")
    parameter.ds_id = 3
    assert layer.weight.ds_id == 3
    assert repr(layer.weight) == "<the active weights of up.weight>"


def test_the_parameter_is_where_modules_keep_it(layer):
    parameter = layer._parameters["weight"]
    assert parameter_of(layer.weight) is parameter and parameter_of(parameter) is parameter
    assert next(iter(layer.parameters())) is parameter
    assert type(layer.state_dict()["weight"]) is torch.Tensor
    layer.weight = nn.Parameter(torch.zeros(5))  # DeepSpeed and torch replace parameters so
    assert layer._parameters["weight"].count_nonzero() == 0


def test_a_layer_is_guarded_after_pickling_and_not_after_it_is_restored(layer):
    again = pickle.loads(pickle.dumps(layer))
    assert isinstance(again.weight, GuardedWeight) and torch.equal(again(torch.ones(2)), torch.full((2,), 2.0))
    restore_forward(layer)
    assert type(layer.weight) is nn.Parameter


def test_compiled_code_may_ask_for_the_type(layer):
    compiled = torch.compile(lambda x: layer(x.to(layer.weight.dtype)), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(6)), torch.full((6,), 2.0))

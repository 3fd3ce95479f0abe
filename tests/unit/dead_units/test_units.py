"""The units that a model has, and the rule by which one is dead, compared with autograd.

All of a dead unit's gradients are exactly zero; filling what `to_fill` says changes gradients, not the output.
"""

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from mst_scale.config.blocks import ModelConfig
from mst_scale.dead_units import format_counts
from mst_scale.dead_units.units import LineFlags, find_units, nonzero_lines, positions
from mst_scale.models import build
from mst_scale.shard import Cut, Shard


def ours(**more):
    return build(ModelConfig(n_layer=1, n_head=2, n_embd=8, seq_length=6, vocab_size=17, vocab_multiple=1, **more))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=6, vocab_size=17))


def llama():
    shape = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=17, max_position_embeddings=6, **shape))


MODELS = {
    "gpt": (ours, {"mlp": 32, "value": 8, "query_key": 8}),
    "gpt with biases": (lambda: ours(bias=True), {"mlp": 32, "value": 8, "query_key": 8}),
    "bert": (lambda: ours(arch="bert", bias=True), {"mlp": 32, "value": 8, "query_key": 8}),
    "transformers gpt2": (gpt2, {"mlp": 32, "value": 8, "query_key": 8}),
    "transformers llama": (llama, {"mlp": 12, "value": 4}),
}


def made(name):
    torch.manual_seed(1)
    model = MODELS[name][0]().eval()
    for parameter in model.parameters():  # biases too
        nn.init.normal_(parameter, std=0.3)
    return model


def zero(model, factor, unit):
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for part in factor.parts:
            lines = line_numbers(part, unit)
            parameters[part.name].data.index_fill_(part.axis, lines, 0.0)


def line_numbers(part, unit):
    return torch.tensor(
        [part.first + (unit // part.width * part.group + i) * part.width + unit % part.width for i in range(part.group)]
    )


def flags(model):
    parameters = dict(model.named_parameters())
    found = LineFlags(find_units(model)[0], {name: p.shape for name, p in parameters.items()})
    for name in found.shapes:
        found.add(Shard.whole(name, parameters[name].shape), parameters[name].detach().view(-1))
    return found


def loss_of(model):
    tokens = torch.arange(12).view(2, 6) % 17
    out = model(tokens)
    logits = out if torch.is_tensor(out) else out.logits
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), (tokens.view(-1) * 5 + 1) % 17)


def largest_gradient(model, factor, unit):
    parameters = dict(model.named_parameters())
    return max(
        float(parameters[p.name].grad.index_select(p.axis, line_numbers(p, unit)).abs().max()) for p in factor.parts
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_unit_is_dead_exactly_when_none_of_its_gradients_is_nonzero(name):
    """Every set of zero factors, each in a unit of its own; the dead ones wake without a trace in the loss."""
    model = made(name)
    units, left_out = find_units(model)
    assert {u.kind: u.count for u in units} == MODELS[name][1] and not left_out
    cases = []
    for some in units:
        for subset in range(2 ** len(some.factors)):
            chosen = [k for k in range(len(some.factors)) if subset >> k & 1]
            unit = len([case for case in cases if case[0] is some])
            if unit >= some.count:
                continue
            cases.append((some, unit, chosen))
            for k in chosen:
                zero(model, some.factors[k], unit)
    before = loss_of(model)
    before.backward()
    found = flags(model)
    for some, unit, chosen in cases:
        sizes = [largest_gradient(model, factor, unit) for factor in some.factors]
        is_dead = bool(some.dead(some.zero_factors(found.nonzero))[unit])
        assert is_dead == (max(sizes) == 0) == (len(chosen) >= 2), (some.kind, chosen, sizes)
    dead = {kind: count for kind, (count, _) in found.tally().items()}
    expected = {u.kind: sum(c[0] is u and len(c[2]) >= 2 for c in cases) for u in units}
    assert dead == expected and all(expected.values())

    parameters = dict(model.named_parameters())
    for some in units:
        all_can = torch.ones(len(some.factors), dtype=torch.bool)
        fill = some.to_fill(some.zero_factors(found.nonzero), all_can) & some.dead(some.zero_factors(found.nonzero))
        for factor, mine in zip(some.factors, fill, strict=True):
            part = factor.weight
            lines = part.spread(mine, parameters[part.name].shape[part.axis]).nonzero().view(-1)
            if len(lines):
                shape = list(parameters[part.name].shape)
                shape[part.axis] = len(lines)
                parameters[part.name].data.index_copy_(part.axis, lines, 0.3 * torch.randn(shape))
    model.zero_grad()
    after = loss_of(model)
    after.backward()
    assert torch.equal(after, before), "bit for bit"
    assert not any(count for count, _ in flags(model).tally().values())
    for some, unit, _ in cases:
        assert max(largest_gradient(model, factor, unit) for factor in some.factors) > 0


def test_uncountable_units_are_left_out_with_the_reason():
    model = gpt2()
    model.transformer.h[0].mlp.act = nn.Sigmoid()
    units, left_out = find_units(model)
    assert {u.kind for u in units} == {"value", "query_key"} and "activation" in left_out[0]
    model.transformer.h[0].mlp.act = nn.ReLU()  # no slope: a row at zero is dead whatever its column
    assert "mlp" not in {u.kind for u in find_units(model)[0]}
    model = ours()
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    units, left_out = find_units(model)
    assert {u.kind for u in units} == {"value", "query_key"} and "frozen" in left_out[0]
    assert find_units(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))) == ([], [])
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 6, "vocab_size": 17}
    units, left_out = find_units(GPTBigCodeForCausalLM(GPTBigCodeConfig(**shape, multi_query=False)))
    assert {u.kind for u in units} == {"mlp"} and "head by head" in left_out[0]


def test_any_cut_shows_the_same_lines():
    generator = torch.Generator().manual_seed(3)
    for shape in ((7, 5), (1, 9), (9,), (6, 2)):
        matrix = torch.where(torch.rand(shape, generator=generator) < 0.2, 1.0, 0.0)
        flat, as_rows = matrix.view(-1), matrix.view(shape[0], -1)
        for axis in range(len(shape)):
            whole = as_rows.bool().any(1 - axis)
            for start in range(flat.numel() + 1):
                for stop in (start, start + 1, start + 4, flat.numel()):
                    part = flat[start:stop]
                    only = torch.zeros_like(flat)
                    only[start:stop] = part
                    expected = only.view_as(as_rows).bool().any(1 - axis)
                    shard = Shard.of_range("w", shape, start, len(part))
                    assert torch.equal(nonzero_lines(part, shard, axis), expected)
                    of_lines = torch.zeros_like(as_rows, dtype=torch.bool)
                    of_lines.index_fill_(axis, whole.nonzero().view(-1), True)
                    where = of_lines.view(-1)[start:stop].nonzero().view(-1)
                    assert torch.equal(torch.cat([*positions(whole, axis, shard), where[:0]]), where)


def test_rows_and_columns_of_a_cut_matrix_are_lines_of_the_whole():
    generator = torch.Generator().manual_seed(4)
    matrix = torch.where(torch.rand(8, 6, generator=generator) < 0.2, 1.0, 0.0)
    cut = Cut((8, 6), ((1, 3), (5, 8)), ((0, 2), (3, 4)))
    rows, columns = torch.tensor([1, 2, 5, 6, 7]), torch.tensor([0, 1, 3])
    local = matrix[rows][:, columns].reshape(-1)
    only = torch.zeros_like(matrix)
    only[rows[:, None], columns] = matrix[rows][:, columns]
    for start, stop in ((0, 15), (2, 11), (4, 4)):
        shard = Shard("w", cut, start, stop - start)
        part = torch.zeros(15)
        part[start:stop] = local[start:stop]
        seen = torch.zeros_like(matrix)
        seen[rows[:, None], columns] = part.view(5, 3)
        for axis in (0, 1):
            assert torch.equal(nonzero_lines(local[start:stop], shard, axis), seen.bool().any(1 - axis))
            whole = only.bool().any(1 - axis)
            line = (rows[:, None] if axis == 0 else columns).expand(5, 3).reshape(-1)
            where = whole[line][start:stop].nonzero().view(-1)
            assert torch.equal(torch.cat([*positions(whole, axis, shard), where[:0]]), where)


def test_stored_values_of_a_compact_matrix_show_the_same_lines():
    model = ours()
    units, _ = find_units(model)
    named = {name: p.detach() for name, p in model.named_parameters()}
    shapes = {part.name: named[part.name].shape for some in units for factor in some.factors for part in factor.parts}
    generator = torch.Generator().manual_seed(0)
    whole, stored = LineFlags(units, shapes), LineFlags(units, shapes)
    for name, shape in shapes.items():
        matrix = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.05)
        whole.add(Shard.whole(name, matrix.shape), matrix.view(-1))
        if matrix.dim() == 1:  # a bias
            stored.add(Shard.whole(name, matrix.shape), matrix)
            continue
        active = matrix.view(-1) != 0
        active[:3] = True  # zeros that are stored, as those of weights that have just grown
        at = active.nonzero().view(-1)
        for some in at.split(-(-len(at) // 2)):  # of two ranks
            stored.add_stored(name, matrix.view(-1)[some], some.to(torch.int32))
    assert any(not flags.all() for flags in whole.found.values()), "some lines are zero"
    assert all(torch.equal(whole.found[place], stored.found[place]) for place in whole.found)


def test_format_counts():
    assert format_counts({"mlp": (17, 512), "value": (14, 1280)}) == "17 of 512 MLP neurons, 14 of 1,280 value channels"


def test_other_modules_with_submodules_of_these_names_are_left_out():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc, self.act, self.c_proj = nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 4)

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.gelu = nn.ModuleList([nn.Linear(4, 8)]), nn.ModuleList(), nn.GELU()

    for module in (Gated(), Listed()):
        units, left_out = find_units(module)
        assert units == [] and type(module).__name__ in left_out[0]

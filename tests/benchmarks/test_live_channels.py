"""The prototype of channels that live and die: which live, how they are born, and where single weights take over."""

from __future__ import annotations

import contextlib
import copy
import io
import json

import pytest
import torch
from mst_scale.benchmarks.studies import live_channels
from mst_scale.benchmarks.studies.live_channels import Channels, Now, exchanged, importance
from mst_scale.benchmarks.studies.plan import read_plan

from mst_scale.benchmarks import study
from mst_scale.config import ModelConfig
from mst_scale.costs.flops import step_flops
from mst_scale.data.prepare import prepare
from mst_scale.data.recipe import Recipe
from mst_scale.mixed_growing.evolve import Layer
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import policy
from mst_scale.models import GPT
from mst_scale.shard import Shard
from tests.benchmarks.tiny_study import TINY

CONFIG = ModelConfig(n_layer=2, n_head=2, n_embd=16, seq_length=8, vocab_size=8, init_std=0.2)
DENSITY = 0.25


class Run:
    """A model whose matrices have masks, as `SparseController` would hold them, and a batch that it has seen."""

    def __init__(self, weights_from: int = 1_000) -> None:
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        self.parameters = {
            name: p for name, p in self.model.named_parameters() if name.endswith("weight") and ".ln" not in name
            and name.startswith("blocks")
        }  # fmt: skip
        self.masks = {n: LayerMask(Shard.whole(n, tuple(p.shape)), p.device) for n, p in self.parameters.items()}
        self.channels = Channels(self.model, CONFIG.n_head, weights_from)
        self.channels.sparsify(self.layers(DENSITY), how="random", seed=1, exchange=Exchange())
        self.retain()
        self.batch = tuple(torch.randint(8, (2, 4, 8), generator=torch.Generator().manual_seed(2)))
        self.loss = self.model(*self.batch).item()

    def layers(self, density: float) -> list[Layer]:
        return [
            Layer(self.masks[name], round(density * p.numel()), p.data.view(-1)) for name, p in self.parameters.items()
        ]

    def retain(self) -> None:
        for name, p in self.parameters.items():
            self.masks[name].retain_(p.data.view(-1))

    def evolve(self, density: float = DENSITY, step: int = 1, swaps: float = 0.5, random_share: float = 1.0):
        by = policy("mst", random_share=random_share)
        how = {"policy": by, "update_fraction": swaps, "seed": 1, "step": step, "exchange": Exchange()}
        changes = self.channels.evolve(self.layers(density), **how, gradient_size=False)
        self.retain()
        return changes

    def alive(self) -> dict[live_channels.Key, torch.Tensor]:
        layers = self.layers(DENSITY)
        assert self.channels._whole(layers)
        return {group.key: self.channels._alive(layers, group) for group in self.channels.groups}


@torch.no_grad()
def loss_of(run: Run) -> float:
    return run.model.eval()(*run.batch).item()


def test_as_many_live_in_every_head_and_mlp_before_and_after_an_exchange():
    run = Run()
    before = run.alive()
    assert [len(flags) for flags in before.values()] == [8, 8, 8, 8, 64] * 2
    changes = run.evolve()
    after = run.alive()
    for key, flags in after.items():
        assert flags.sum() == before[key].sum() == DENSITY * len(flags)
        assert (flags & before[key]).sum() == flags.sum() / 2, "half of them are others"
    for change in changes:
        assert change.pruned == change.grown == change.grown_indices().numel() > 0
        assert change.active == run.masks[change.name].count()


def test_a_birth_changes_nothing_that_the_model_computes():
    run = Run()
    run.evolve(density=0.5, swaps=0.0)
    assert all(flags.sum() == len(flags) / 2 for flags in run.alive().values())
    assert loss_of(run) == pytest.approx(run.loss, abs=1e-6)
    run.evolve(density=1.0, swaps=0.0)
    assert all(mask.dense for mask in run.masks.values())
    assert loss_of(run) == pytest.approx(run.loss, abs=1e-6)
    loss = run.model(*run.batch)
    assert all((p.grad is None) for p in run.parameters.values())
    gradients = torch.autograd.grad(loss, list(run.parameters.values()))
    for group in run.channels.groups:  # and what was born can learn
        of = dict(zip(run.parameters, gradients, strict=True))[group.outgoing.weight.name]
        assert group.lines(group.outgoing, of).abs().sum(1).gt(0).all()


def test_the_least_important_go_and_the_largest_slopes_are_born():
    run = Run()
    before, weights = run.alive(), {name: p.data for name, p in run.parameters.items()}
    size = {group.key: importance(group, weights).clone() for group in run.channels.groups}
    copied = copy.deepcopy(run.model)  # with its hook: what it sees is the batch
    run.evolve(random_share=0.0)
    after = run.alive()
    # the oracle: the slope of the loss along a small outgoing line, for the incoming weights that were drawn
    draw = torch.Generator().manual_seed(live_channels.counter_hash("channels", 1, 1) >> 1)
    twin = dict(copied.named_parameters())
    now = Now({name: twin[name].data for name in run.parameters}, before, draw)
    run.channels._try(now)
    gradients = torch.autograd.grad(copied(*run.batch), [twin[name] for name in run.parameters])
    of = dict(zip(run.parameters, gradients, strict=True))
    for group in run.channels.groups:
        was, new = before[group.key], after[group.key] & ~before[group.key]
        gone = was & ~after[group.key]
        assert size[group.key][gone].max() <= size[group.key][was & ~gone].min()
        slopes = group.lines(group.outgoing, of[group.outgoing.weight.name]).norm(dim=1)
        assert slopes[new].min() >= slopes[~was & ~new].max()
        for factor in group.incoming:
            lines = group.lines(factor, weights[factor.weight.name])
            assert torch.equal(lines[new], group.lines(factor, now.weights[factor.weight.name])[new])


def test_what_has_just_been_pruned_is_not_born_again_and_there_is_enough_to_be_born():
    run = Run()
    group = run.channels.groups[1]
    alive = torch.tensor([True] * 6 + [False] * 2)
    weights = {name: p.data for name, p in run.parameters.items()}
    now = Now(weights, {group.key: alive}, torch.Generator().manual_seed(0))
    after = exchanged(now, group, 6, 5, random_share=1.0, slopes=None)
    assert after.tolist().count(True) == 6 and after[6:].all(), "two are dead, so two can go"


def test_single_weights_take_over_and_reach_units_that_were_dead():
    run = Run(weights_from=1)
    dead = {key: ~flags for key, flags in run.alive().items()}
    run.evolve(step=2)
    for name, p in run.parameters.items():
        assert run.masks[name].active == round(DENSITY * p.numel())
    assert not run.channels._whole(run.layers(DENSITY))
    for group in run.channels.groups:
        for factor in group.incoming:
            lines = group.lines(factor, run.parameters[factor.weight.name].data)
            assert (lines[dead[group.key]] != 0).any(), "no gradient would reach two zeros"
    masks = {name: mask.flags().clone() for name, mask in run.masks.items()}
    run.evolve(step=3)
    assert any(not torch.equal(masks[name], mask.flags()) for name, mask in run.masks.items())
    assert all(run.masks[name].active == round(DENSITY * p.numel()) for name, p in run.parameters.items())


def test_attention_is_as_cheap_as_its_channels_are_few():
    narrow = live_channels.Narrow("strided", 4, 0.25)
    for accounting in ("paper", "causal"):
        assert narrow.share(16, accounting) == 0.25 * live_channels.Pattern("strided", 4).share(16, accounting)
    assert torch.equal(narrow.mask(16), live_channels.Pattern("strided", 4).mask(16))


def test_a_study_runs_it_and_counts_its_narrower_products(folder, monkeypatch):
    plan = {**TINY, "seeds": [1], "rates": [1e-2], "program": live_channels.__name__}
    sparse = {"mst.sparsity.variation": "sd", "mst.sparsity.warmup": 0, "mst.sparsity.ultra": 0.5}
    more = {"mst.sparsity.max": 0.75, "mst.topology.interval": 5, "mst.topology.random_ratio": 0.0}
    plan["variants"] = {"channels": {"method": "channels", "set": {**sparse, **more, "mst.attention.stride": 8}}}
    (folder / "queue.json").write_text(json.dumps(plan))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    prepare(Recipe(source=str(folder / "text.txt"), tokenizer="byte"), folder / "corpus", workers=1)
    monkeypatch.setattr(study, "FOLDER", folder)
    monkeypatch.setattr(study, "read_plan", lambda name: read_plan(name, folder))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = ["queue", "--out", str(folder / "out"), "--results", str(folder), "--data", str(folder / "corpus")]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        assert study.main([*words, "--json"]) == 0, said.getvalue()
    (metrics,) = (folder / "out" / "runs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    model = ModelConfig(n_layer=1, n_embd=16, n_head=2, seq_length=32, vocab_size=257, vocab_multiple=1)
    pattern = live_channels.Pattern("strided", 8)
    whole = step_flops(model, dict.fromkeys(["wte.weight"], 1.0), pattern)
    narrow = 0.25 * (whole.matrices - whole.head + whole.attention) + whole.head
    first = rows[0]
    assert first["sparsity"] == 0.75 and rows[-1]["sparsity"] == 0.0
    of_optimizer = first["flops_optimizer"] / first["step"] if "flops_optimizer" in first else 0.0
    assert first["flops"] / first["step"] == pytest.approx(4 * narrow + of_optimizer, rel=1e-3)

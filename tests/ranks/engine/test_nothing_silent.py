"""A run checks what it assumes, refuses by name what it cannot do, and says once what it has chosen."""

import io
import logging
import sys

import pytest
import torch
from torch import nn

import mst_scale
from mst_scale.errors import UserError
from mst_scale.zero_shards import loss_scale
from tests.ranks.engine.test_own_models import hugging_face
from tests.support import pool
from tests.support.engines import whole_masks
from tests.support.messages import logged
from tests.support.toy_engine import STAGES, mst_config, train
from tests.support.toys import allow_fp16, deepspeed_config, toy


def raised(rank, world, config, steps, optimizer=None, model=toy):  # noqa: PLR0917
    """What stops a run of so many steps, on every rank; None when nothing does."""
    made = model()
    given = {} if optimizer is None else {"optimizer": optimizer(made)}
    try:
        engine, *_ = mst_scale.initialize(model=made, config=config, **given)
        train(engine, rank, world, steps)
    except ValueError as error:
        return str(error)
    return engine.mst.sparsity


# --- the zero invariant is checked, not assumed ---


def muon(model):
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2]
    return torch.optim.Muon(matrices, lr=1e-2)


def adam_without_eps(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.0)


class Restless(torch.optim.SGD):
    """Moves every weight from its third update on: code that touches weights without a gradient."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.updates = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.updates += 1
        for group in self.param_groups:
            for p in group["params"] if self.updates > 20 else ():
                p.add_(1e-4)


def restless(model):
    return Restless(model.parameters(), lr=1e-2)


def sparse_config(stage, world, precision="fp32", steps=40, **topology):
    config = mst_config(stage, world, precision, steps=steps, topology={"interval": 10, "check_every": 25, **topology})
    config["mst"]["sparsity"] = {"variation": "sparse", "max": 0.8}
    config["mst"]["targets"]["include"] = ["up.weight", "down.weight"]
    config["mst"]["attention"] = {"pattern": "dense"}
    del config["optimizer"]
    config["zero_allow_untested_optimizer"] = True
    return config


class Matrices(nn.Module):
    """No vectors, which Muon cannot take."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(19, 37, bias=False), nn.Linear(37, 7, bias=False)

    def forward(self, tokens, targets):
        x = nn.functional.one_hot(tokens, 19).to(self.up.weight.dtype)
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))).float(), targets)


def test_muon_is_named_after_its_first_update():
    for message in pool.run(raised, 2, sparse_config(0, 2), 5, muon, Matrices):  # it takes no flat parameters
        assert message.startswith("Muon moves weights that have no gradient: ")
        assert "after step 1, " in message and "mst.topology.rezero" in message


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_moves_inactive_weights_is_named_after_its_first_update(stage):
    for message in pool.run(raised, 2, sparse_config(stage, 2), 5, adam_without_eps):
        assert message.startswith("AdamW moves weights that have no gradient: ") and "after step 1," in message


@pytest.mark.parametrize("stage", STAGES)
def test_what_moves_them_later_is_found_at_the_next_check(stage):
    """From update 21 on: the check after the topology step at 20 sees it, where check_every alone is at 25."""
    for message in pool.run(raised, 2, sparse_config(stage, 2), 30, restless):
        assert message.startswith("Restless moves weights that have no gradient: ") and "after step 21," in message


def test_without_topology_steps_the_regular_check_finds_it():
    for message in pool.run(raised, 2, sparse_config(2, 2, update_fraction=0.0), 30, restless):
        assert "after step 25," in message


def kept_zero(rank, world, stage, optimizer, model):
    made = model()
    config = sparse_config(stage, world, rezero=True)
    engine, *_ = mst_scale.initialize(model=made, optimizer=optimizer(made), config=config)
    train(engine, rank, world, 30)
    stray = sum(m.count_inactive(engine.mst.store.weight(i)) for i, m in enumerate(engine.mst.masks))
    finite = all(bool(engine.mst.store.weight(i).isfinite().all()) for i in range(len(engine.mst.masks)))
    return stray, finite, round(engine.mst.sparsity, 2)


@pytest.mark.parametrize(("optimizer", "model", "stages"), [(muon, Matrices, [0]), (restless, toy, STAGES)])
def test_rezero_keeps_inactive_weights_at_zero_under_any_optimizer(optimizer, model, stages):
    for stage in stages:
        assert pool.run(kept_zero, 2, stage, optimizer, model) == [(0, True, 0.8)] * 2


# --- scores are in true units ---


def masks_by_mest(rank, world, stage, power):
    """Masks under the same gradients times a loss scale of 2^power."""
    allow_fp16()
    config = mst_config(stage, world, "fp16", method="mest", topology={"mest_lambda": 1.0, "random_ratio": 1.0})
    config["fp16"]["initial_scale_power"] = power
    config["optimizer"]["params"] |= {"lr": 0.0, "weight_decay": 0.0}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)

    def given(i):
        s = engine.mst.store.slices[i]
        whole = torch.randn(s.shape, generator=torch.Generator().manual_seed(100 * engine.mst.step + i)).flatten()
        return whole[s.start : s.start + s.length] * loss_scale(engine)

    engine.mst.store.gradient = given
    engine.mst.store.put_gradient = lambda i, gradient: None
    history = []
    for step in range(7):
        train(engine, rank, world, 1, first=step)
        history.append(whole_masks(engine))
    assert loss_scale(engine) == 2.0**power, "no overflow came between"
    return history


@pytest.mark.parametrize("stage", [0, 2])
def test_mest_ranks_by_the_true_gradient_at_any_loss_scale(stage):
    low, middle, high = (pool.run(masks_by_mest, 2, stage, power)[0] for power in (0, 5, 10))
    assert low == middle == high and low[0] != low[-1]


# --- what a config does not say ---


def test_a_block_without_a_method_is_refused():
    config = mst_config(1, 1)
    del config["mst"]["method"]
    (message,) = pool.run(raised, 1, config, 1)
    assert "has no method" in message and '"method": "mst"' in message


def test_a_loop_of_ones_own_says_how_long_it_is():
    config = mst_config(1, 1)
    del config["training"]["steps"]
    (message,) = pool.run(raised, 1, config, 1)
    assert "training.steps" in message and '"training": {"steps": N}' in message
    config["mst"]["sparsity"] |= {"warmup": 10, "ultra": 20, "restore": 5}  # nothing depends on the length now
    assert pool.run(raised, 1, config, 1) == [0.0]


# --- a target that no update reaches ---


def some_of_it(model):
    return torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("up")], lr=1e-2)


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (2, "bf16")]
)
def test_a_matrix_that_is_in_no_group_is_refused_or_left_out(stage, precision):
    config = mst_config(stage, 2, precision)
    del config["optimizer"]
    config["zero_allow_untested_optimizer"] = True
    for message in pool.run(raised, 2, config, 3, some_of_it):
        assert message.startswith("up.weight cannot become sparse, because it is in no parameter group")
        assert "mst.targets.exclude" in message


# --- what was chosen is said once ---


class Around(nn.Module):
    """A transformers model in a module of the user's."""

    def __init__(self, **config):
        super().__init__()
        self.inner = hugging_face()
        self.inner.config.attn_pdrop = config.get("attn_pdrop", 0.0)

    def forward(self, tokens):
        return self.inner(input_ids=tokens, labels=tokens).loss


class WithDropout(Around):
    def __init__(self):
        super().__init__(attn_pdrop=0.1)


METHOD = "mst"


def what_is_said(rank, world, model, config):
    """stderr of a process whose logging nobody has set up."""
    logger = logging.getLogger("mst_scale")
    before, logger.handlers, level = logger.handlers, [], logger.level
    root, logging.getLogger().handlers = logging.getLogger().handlers, []
    logger.setLevel(logging.NOTSET)
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        engine, *_ = mst_scale.initialize(model=model(), config=config)
        said = sys.stderr.getvalue()
    finally:
        sys.stderr, logger.handlers, logging.getLogger().handlers = stderr, before, root
        logger.setLevel(level)
    return [line for line in said.splitlines() if line.startswith(f"mst_scale: {METHOD}: ")], engine.mst.attended


def warnings_of(rank, world, model, config):
    with logged(logging.WARNING) as found:
        mst_scale.initialize(model=model(), config=config)
    return found


def test_one_line_on_rank_0_says_what_was_chosen():
    config = mst_config(1, 2, steps=140)
    (first, _), (second, _) = pool.run(what_is_said, 2, toy, config)
    assert second == []
    (line,) = first
    sizes = ("3 matrices with 1,053 of 1,418 parameters", "80 %", "policy mst", "57 bytes")
    phases = ("ultra from step 10", "restore from step 110", "dense from step 120, of 140", "attention stays dense")
    assert all(fact in line for fact in (*sizes, *phases))


@pytest.mark.parametrize(("initial", "says"), [("random", "are random"), ("magnitude", "keep the largest weights")])
def test_a_run_that_starts_sparse_says_what_its_first_masks_keep(initial, says):
    config = mst_config(1, 1, steps=140)
    config["mst"]["sparsity"] = {"max": 0.8, "warmup": 0, "initial": initial}
    ((said, _),) = pool.run(what_is_said, 1, toy, config)
    assert f"of 140; the first masks {says}" in said[0]


@pytest.mark.parametrize(("stride", "told"), [(16, 1), (4, 0), (0.25, 1)])
def test_a_pattern_that_is_sparse_by_its_name_alone_is_warned_of_in_a_transformers_model(stride, told):
    """A share is of 1,024 tokens where the config has no model; this one's context is 16."""
    config = {**deepspeed_config(1, 1), "training": {"steps": 14}}
    config["mst"] = {"method": "mst", "attention": {"stride": stride}, "targets": {"include": ["transformer.h.*"]}}
    (said,) = pool.run(warnings_of, 1, hugging_face, config)
    assert sum("mst.attention.stride" in line and "Use 4 " in line for line in said) == told


def test_stated_keys_without_effect_are_named_once():
    config = mst_config(1, 2, method="rigl")
    config["mst"]["sparsity"] = {"max": 0.8, "warmup": 0.1}
    config["mst"]["topology"]["mest_lambda"] = 2.0
    said = [line for line in pool.run(warnings_of, 2, toy, config)[0] if "no effect with method" in line]
    assert said == ["mst.sparsity.warmup, mst.topology.mest_lambda have no effect with method rigl: leave them out"]


def test_attention_of_a_transformers_model_in_a_users_module_is_sparse_or_the_line_says_why_not():
    config = {**deepspeed_config(1, 1), "training": {"steps": 14}}
    config["mst"] = {"method": "mst", "attention": {"stride": 4}, "targets": {"include": ["inner.transformer.h.*"]}}
    ((said, layers),) = pool.run(what_is_said, 1, Around, config)
    assert layers == 2 and "attention of 2 layers follows" in said[0] and "until step 12" in said[0]
    ((said, layers),) = pool.run(what_is_said, 1, WithDropout, config)
    assert layers == 0 and "attention stays dense: GPT2Config has attn_pdrop = 0.1" in said[0]


# --- methods that need mst_scale.pretrain ---


@pytest.mark.parametrize(
    ("mst", "fix"),
    [
        ({"method": "tiny"}, "pass your own smaller model"),
        ({"method": "dense-short"}, "set training.steps to the smaller number of steps"),
        ({"method": "dense-short", "like": "/nonexistent"}, "set training.steps to the smaller number of steps"),
    ],
)
@pytest.mark.parametrize("training", [{}, {"steps": 10}])
def test_methods_that_choose_the_model_or_the_length(mst, fix, training):
    config = {**deepspeed_config(0, 1), "mst": mst, "training": training}
    method = mst["method"]
    with pytest.raises(UserError, match=rf"method {method} is available only in mst_scale\.pretrain: .*{fix}"):
        mst_scale.initialize(model=toy(), config=config)

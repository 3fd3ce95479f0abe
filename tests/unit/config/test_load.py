import copy
import json
import pickle
from dataclasses import dataclass

import pytest

from mst_scale.config import METHODS, MODELS, RECIPES, in_steps, load, overridden_in_recipe, to_dict
from mst_scale.config.check import check
from mst_scale.config.deepspeed import batch_shape, precision_of
from mst_scale.config.presets import ready_configs
from mst_scale.errors import UserError
from mst_scale.flops.ledger import forecast
from mst_scale.validation import fields_of, parse

READY = list(ready_configs().values())
MINIMAL = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_configs_load_and_survive_a_round_trip(path):
    experiment = load(path)
    check(experiment)
    assert load(json.loads(json.dumps(to_dict(experiment)))) == experiment


def test_the_papers_config():
    paper = load(READY[0].parent / "gpt2_small.json")
    assert (paper.model.n_layer, paper.model.n_embd, paper.model.padded_vocab) == (12, 768, 50304)
    assert paper.deepspeed["optimizer"]["params"] == {
        "lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1
    }  # fmt: skip
    assert paper.deepspeed["gradient_clipping"] == 0.1
    assert batch_shape(paper.deepspeed, 8)[0] == 12 * 40  # the sequences of a step; a node holds them at once
    sparsity, topology = paper.mst.sparsity, paper.mst.topology
    assert (sparsity.max, sparsity.stages) == (0.96, 5)
    schedule = paper.schedule
    assert [(phase.name, phase.start) for phase in schedule.phases] == [
        ("warmup", 0), ("ultra", 10_000), ("restore", 110_000), ("dense", 120_000)
    ]  # fmt: skip
    assert (topology.interval, topology.update_fraction, topology.random_ratio) == (100, 0.3, 0.25)
    assert (paper.mst.attention.pattern, paper.mst.attention.stride) == ("strided", 256)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_not_a_method(recipe):
    with pytest.raises(UserError, match=f"'{recipe}' is a recipe, not a method: --set recipe={recipe}"):
        load(MINIMAL, method=recipe)
    assert load(MINIMAL, [f"recipe={recipe}"]).mst.method == "mst"


def test_overrides_reach_any_key_and_win():
    experiment = load(
        {**MINIMAL, "mst": {"sparsity": {"max": 0.5}}},
        ["mst.sparsity.max=0.9", "zero_optimization.stage=2", "data.dir=some/where", "model.bias=true"],
    )
    assert experiment.mst.sparsity.max == 0.9
    assert experiment.deepspeed["zero_optimization"] == {"stage": 2}
    assert experiment.data.dir == "some/where"
    assert experiment.model.bias is True


@pytest.mark.parametrize("method", METHODS)
def test_every_method_resolves(method):
    overrides = ["mst.like=c.json"] if method == "dense-short" else []
    assert load(MINIMAL, overrides, method=method).mst.method == method


def test_who_wins_preset_file_method_override():
    raw = {**MINIMAL, "mst": {"method": "mst", "sparsity": {"max": 0.9}}}
    assert load(raw).mst.sparsity.max == 0.9, "the file wins over the preset of its method"
    assert load(raw, method="rigl").mst.sparsity.max == 0.8, "a method named on the command line wins over the file"
    assert load(raw, ["mst.sparsity.max=0.7"], method="rigl").mst.sparsity.max == 0.7, "--set wins over all"
    assert load(raw, method="mst").mst.sparsity.max == 0.9, "naming the file's own method changes nothing"


def test_overrides_do_not_reach_the_presets():
    before = copy.deepcopy((METHODS, MODELS, RECIPES))
    load({**MINIMAL, "recipe": "paper"}, ["mst.sparsity.max=0.5", "training.lr_schedule=wsd"], method="rigl")
    assert before == (METHODS, MODELS, RECIPES)


def test_only_dense_short_names_a_run_to_match():
    assert load(MINIMAL, method="dense-short").mst.like is None
    with pytest.raises(UserError, match="is for method dense-short, not for rigl"):
        load(MINIMAL, ["mst.like=c.json"], method="rigl")
    assert load(MINIMAL, ["mst.like=c.json"], method="dense-short").mst.sparsity.variation == "dense"


def test_null_is_no_recipe():
    assert load({**MINIMAL, "recipe": None}) == load(MINIMAL)
    assert load({**MINIMAL, "recipe": "mst-best"}, ["recipe=null"]) == load(MINIMAL)


def test_another_method_does_not_take_the_topology_of_a_recipe():
    for recipe in ("mst-best", "mst-channels"):
        raw = {**MINIMAL, "recipe": recipe}
        assert load(raw, method="rigl").mst.topology == load(MINIMAL, method="rigl").mst.topology
        assert load({**raw, "mst": {"method": "rigl"}}).mst.topology == load(MINIMAL, method="rigl").mst.topology
    assert load({**MINIMAL, "recipe": "mst-best"}, method="mst").mst.topology.grown_moments == "active_mean"


@pytest.mark.parametrize("method", ["dense", "rigl", "gmp", "spdf"])
@pytest.mark.parametrize("recipe", ["mst-best", "mst-channels"])
def test_a_recipe_and_a_method_on_the_command_line_are_those_of_a_file(recipe, method):
    of_file = load({**MINIMAL, "recipe": recipe}, method=method)
    for raw in (MINIMAL, {**MINIMAL, "mst": {"method": "dense"}}):
        for found in (load(raw, [f"recipe={recipe}"], method), load(raw, [f"recipe={recipe}", f"mst.method={method}"])):
            assert found.mst == of_file.mst
    assert of_file.mst.stays_dense == (method == "dense")


def test_a_recipe_on_the_command_line_replaces_the_limit_of_the_sparse_phase():
    raw = {**MINIMAL, "mst": {"method": "mst", "sparsity": {"sparse_tokens": 5}}}
    assert load(raw, ["recipe=mst-lean"]).mst == load(MINIMAL, ["recipe=mst-lean"]).mst


@pytest.mark.parametrize("variation", ["sv", "sd"])
def test_channels_that_nothing_would_revive_are_rejected(variation):
    changes = ["recipe=mst-channels", f"mst.sparsity.variation={variation}", "mst.topology.revive_dead_units=false"]
    with pytest.raises(UserError, match="revive_dead_units"):
        load(MINIMAL, changes)


def test_keys_that_override_a_recipe_are_named_in_one_line():
    assert overridden_in_recipe({**MINIMAL, "recipe": "mst-best"}) is None
    assert overridden_in_recipe({**MINIMAL, "mst": {"method": "rigl"}}) is None, "no recipe"
    own = {**MINIMAL, "recipe": "mst-best", "mst": {"method": "mst", "sparsity": {"max": 0.9, "warmup": 0.1}}}
    said = overridden_in_recipe(own, ["training.decay=0.1"])
    assert "mst.sparsity.max = 0.9 (recipe: 0.8)" in said and "training.decay = 0.1 (recipe: 0.4)" in said
    assert "warmup" not in said and "method" not in said, "only what the recipe says otherwise"
    assert 'mst.method = "rigl"' in overridden_in_recipe({**MINIMAL, "recipe": "mst-best"}, method="rigl")


def test_recipes():
    assert load({**MINIMAL, "recipe": "mst-wsd"}).training.lr_schedule == "wsd"
    assert load({**MINIMAL, "recipe": "paper"}).training.lr_schedule == "cosine"
    assert load({**MINIMAL, "recipe": "mst-wsd"}).mst.method == "mst"
    best = load({**MINIMAL, "recipe": "mst-best"})
    assert (best.mst.method, best.mst.sparsity.max, best.mst.topology.random_ratio) == ("mst", 0.8, 1.0)
    assert (best.training.lr_schedule, best.training.decay) == ("wsd", 0.4)
    assert not best.mst.topology.grows_by_dense_gradients
    assert best.mst.attention.stride * 4 == best.model.seq_length, "as in the paper, whatever the context"
    lean = load({**MINIMAL, "recipe": "mst-lean", "training": {"steps": 280}})
    points = [lean.schedule.at(step) for step in (0, 259, 270, 279)]
    assert [point.phase for point in points] == ["ultra", "ultra", "dense", "dense"]
    assert [point.sparsity for point in points] == [0.8, 0.8, 0.0, 0.0]
    assert {lean.attention_schedule.pattern_at(step).kind for step in (0, 279, 280)} == {"strided"}
    assert (lean.mst.topology, lean.training.decay) == (best.mst.topology, best.training.decay)
    small = load({**MINIMAL, "recipe": "mst-small", "training": {"steps": 280}})
    assert {small.schedule.at(step).sparsity for step in range(281)} == {0.8}
    assert (small.mst.compute.compact, small.mst.topology) == ("auto", best.mst.topology)
    for more in (["recipe=mst-best"], ["mst.sparsity.warmup=0.1", "recipe=mst-best"]):  # laid over what a file says
        over = load("gpt2_small", more)
        assert (over.mst.sparsity.max, over.mst.topology.random_ratio) == (0.8, 1.0)
        assert (over.training.lr_schedule, over.training.decay, over.training.steps) == ("wsd", 0.4, 140_000)
    assert load("demo", method="mst") == load("demo"), "the method of a file's recipe is no other"
    assert load(MINIMAL, ['recipe="mst-best"']) == load(MINIMAL, ["recipe=mst-best"]), "JSON, as for every key"
    asked = ["mst.sparsity.max=0.9", "recipe=mst-best"]
    assert load("gpt2_small", asked).mst.sparsity.max == 0.9, "a key of its own goes over a recipe"
    rigl = load({**MINIMAL, "mst": {"method": "rigl"}}, ["recipe=mst-best"])
    assert (rigl.mst.method, rigl.mst.topology.policy, rigl.mst.sparsity.variation) == ("mst", "mst", "sv")
    assert load(MINIMAL, ["recipe=mst-best"], method="rigl").mst.topology.policy == "rigl"
    own = load({**MINIMAL, "recipe": "mst-best", "mst": {"sparsity": {"max": 0.9}}, "training": {"decay": 0.1}})
    assert (own.mst.sparsity.max, own.mst.topology.random_ratio, own.training.decay) == (0.9, 1.0, 0.1)
    with pytest.raises(UserError, match="nearest is 'mst-wsd'"):
        load({**MINIMAL, "recipe": "mst-wds"})


LIMITED = {
    **MINIMAL,
    "train_batch_size": 16,
    "recipe": "mst-best",
    "model": {"n_layer": 2, "n_head": 4, "n_embd": 64, "seq_length": 128, "vocab_size": 257, "vocab_multiple": 1},
}


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_the_sparse_phase_of_mst_best_does_not_grow_with_the_length_of_the_run(schedule):
    """20 tokens per parameter of 122,944 are 1,201 steps of 16 sequences of 128 tokens."""

    def run(steps, *more):
        return load(LIMITED, [f"training.steps={steps}", f"training.lr_schedule={schedule}", *more])

    ends = {steps: run(steps).schedule.sparse_until for steps in (1_200, 1_400, 3_000, 24_000)}
    assert ends == {1_200: 1_029, 1_400: 1_200, 3_000: 1_201, 24_000: 1_201}
    no_limit = "mst.sparsity.sparse_tokens=null"
    assert run(1_400).schedule == run(1_400, no_limit).schedule, "23 tokens per parameter: as before"
    assert run(3_000).attention_schedule.pattern_at(1_201).kind == "dense", "attention follows the masks"
    assert run(3_000, no_limit).schedule.sparse_until == 2_571
    assert run(3_000, "train_batch_size=32").schedule.sparse_until == 600
    assert load(to_dict(run(3_000))) == run(3_000)


def test_durations_replace_the_limit_of_a_recipe_and_a_recipe_those_of_a_file():
    assert load(LIMITED, ["mst.sparsity.warmup=0.1"]).mst.sparsity.sparse_tokens is None
    assert load({**LIMITED, "mst": {"sparsity": {"ultra": 5}}}).mst.sparsity.sparse_tokens is None
    assert load("gpt2_small", ["mst.sparsity.warmup=9", "recipe=mst-best"]).mst.sparsity.sparse_tokens is None
    over = load("gpt2_small", ["recipe=mst-best"])
    assert (over.mst.sparsity.sparse_tokens, over.mst.sparsity.warmup) == (20, 1 / 14), "the file has 10,000 steps"
    assert load("gpt2_small", ["recipe=mst-best"], method="spdf").mst.sparsity.sparse_tokens is None
    assert load(LIMITED, ["mst.sparsity.variation=sparse"]).schedule.sparse_until == 140_000
    for both in (
        ["mst.sparsity.sparse_tokens=5", "mst.sparsity.warmup=0.1"],
        ["mst.sparsity.sparse_tokens=5", "recipe=mst-lean"],
    ):
        with pytest.raises(UserError, match="both determine the length of the sparse phase"):
            load(LIMITED, both)


def test_a_limit_counts_the_tokens_of_the_batch_that_the_ranks_share():
    """A config may state the micro-batch alone."""
    own = {key: value for key, value in LIMITED.items() if key != "train_batch_size"}
    one = load({**own, "train_micro_batch_size_per_gpu": 8}, ["training.steps=9000"])
    assert one.schedule.sparse_until == 2_401
    assert one.with_batch(32).schedule.sparse_until == 600 and one.with_batch(8).schedule == one.schedule
    assert forecast(one, ranks=4).phases[-1].start == 600
    free = load({**own, "recipe": "mst-lean"})
    assert free.with_batch(32) is free, "a schedule that does not depend on it"


def test_a_stride_may_be_a_share_of_the_context():
    """Resolved at once, so that runs and their records have tokens; a number of tokens stays one."""
    model = {"seq_length": 128}

    def of(stride):
        return load({**MINIMAL, "model": model, "mst": {"method": "mst", "attention": {"stride": stride}}})

    assert [of(stride).mst.attention.stride for stride in (0.25, 1.0, 0.001, 1, 24)] == [32, 128, 1, 1, 24]
    assert of(0.25) == of(32)
    assert load({**MINIMAL, "model": model, "recipe": "mst-best"}).mst.attention.stride == 32
    for wrong in (0.0, -0.5, 1.5, 96.0):
        with pytest.raises(UserError, match=r"mst.attention.stride = .* must be tokens \(an integer\)"):
            of(wrong)
    assert load({"recipe": "mst-best"}).mst.attention.stride == 256, "of a model that is not ours"


def test_model_presets_fill_in_under_the_users_keys():
    model = load({**MINIMAL, "model": {"preset": "gpt2-xl", "bias": True, "n_layer": 3}}).model
    assert (model.n_layer, model.n_embd, model.n_head, model.bias) == (3, 1600, 25, True)
    assert set(MODELS) >= {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-1.3b", "gpt3-175b", "tiny"}


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(MINIMAL), "utf-8-sig")
    assert load(path) == load(MINIMAL)


@pytest.mark.parametrize(
    ("ds", "world", "shape"),
    [
        ({"train_batch_size": 8}, 2, (8, 4, 1)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, 1, (8, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 4, (24, 2, 3)),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, 2, (8, 2, 2)),
        (
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            3,
            (12, 2, 2),
        ),
    ],
)
def test_batch_shape(ds, world, shape):
    assert batch_shape(ds, world) == shape


def test_bert_presets():
    model = load({"model": {"preset": "bert-base"}}).model
    assert (model.arch, model.n_layer, model.n_embd, model.seq_length, model.vocab_size, model.bias) == (
        "bert", 12, 768, 512, 30522, True
    )  # fmt: skip
    assert load({"model": {"preset": "bert-large"}}).model.n_layer == 24
    tiny = load({"model": {"preset": "bert-base"}}, method="tiny").model
    assert (tiny.arch, tiny.n_layer, tiny.n_embd, tiny.seq_length) == ("bert", 6, 384, 512), "a small BERT, not a GPT"
    with pytest.raises(UserError, match=r"model\.mask_share must be .*, not 0"):
        load({"model": {"arch": "bert", "mask_share": 0}})


def test_a_warm_up_as_a_share_follows_the_length_of_the_run():
    for steps in (1, 10, 140_000):
        training = load({**MINIMAL, "training": {"steps": steps}}).training
        assert in_steps(training.warmup, steps) == max(1, steps // 70)


def test_validation_sequences_may_be_the_same_whatever_the_seed():
    own, same = ({"training": {"seed": seed}} for seed in (1, 2)), {"eval_seed": 0}
    assert [load(raw).eval_seed for raw in own] == [1, 2]
    assert [load({"training": {"seed": seed, **same}}).eval_seed for seed in (1, 2)] == [0, 0]


@pytest.mark.parametrize(
    ("mst", "last"),
    [
        ({}, "dense"),
        ({"attention": {"dense_from": 1.0}}, "strided"),  # to the end, and evaluated so
        ({"sparsity": {"ultra": 0.857143}}, "strided"),  # restoration takes the last step
        ({"sparsity": {"variation": "sparse"}}, "strided"),
    ],
)
def test_after_the_last_step_attention_is_unchanged(mst, last):
    experiment = load({"training": {"steps": 140}, "mst": {"method": "mst", "attention": {"stride": 64}, **mst}})
    attention = experiment.attention_schedule
    assert attention.pattern_at(140) == attention.pattern_at(139) and attention.pattern_at(140).kind == last


@pytest.mark.parametrize(
    ("deepspeed", "precision"),
    [({}, "fp32"), ({"bf16": {"enabled": True}}, "bf16"), ({"bf16": True, "fp16": {"enabled": True}}, "fp16"),
     ({"bf16": True}, "fp32"), ({"fp16": None}, "fp32")],
)  # fmt: skip
def test_a_precision_is_a_block_that_is_enabled(deepspeed, precision):
    """What is no block is DeepSpeed's to refuse."""
    assert precision_of(deepspeed) == precision


def test_a_run_too_short_for_a_warm_up_is_named():
    def said(steps: int, **topology) -> str | None:
        raw = {**MINIMAL, "mst": {"method": "mst", "topology": topology}}
        return load(raw, [f"training.steps={steps}"]).describe_skipped_ramp()

    assert "phase warmup (steps 0 to 21)" in said(300)
    assert said(3000) is None and said(300, interval=5) is None


@dataclass(frozen=True)
class Plain:
    """Options of a method of one's own."""

    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError("mst.options.share must lie in [0, 1]")


def test_options_in_a_plain_dataclass_are_validated_and_can_be_sent_to_other_ranks():
    made = parse(Plain, {"share": 0.25}, "mst.options", "config")
    assert type(made) is Plain and pickle.loads(pickle.dumps(made)) == made == Plain(0.25)
    assert list(fields_of(Plain)) == ["share"]
    for wrong in ({"shares": 0.25}, {"share": "a"}, {"share": 2}):
        with pytest.raises(UserError, match=r"mst\.options\.share"):
            parse(Plain, wrong, "mst.options", "config")


def test_keys_that_are_null_are_left_to_deepspeed():
    """Of blocks whose keys DeepSpeed itself does not take as null."""
    zero = {"stage": 2, "reduce_bucket_size": None, "offload_optimizer": {"device": None}, "offload_param": None}
    found = load(
        {**MINIMAL, "zero_optimization": zero, "bf16": {"enabled": None}, "fp16": {"loss_scale": None}}
    ).deepspeed
    assert found["zero_optimization"] == {"stage": 2, "offload_optimizer": {}}
    assert found["bf16"] == found["fp16"] == {}

"""An error of a config names the key and the fix."""

import pytest

from mst_scale.config import load
from mst_scale.config.check import check
from mst_scale.config.deepspeed import batch_shape
from mst_scale.errors import UserError
from tests.unit.config.test_load import MINIMAL


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"modle": {}}, "unknown key 'modle': did you mean 'model'"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"mts": {}}, "unknown key 'mts': did you mean 'mst'"),
        ({"n_layer": 3}, "unknown key 'n_layer': did you mean 'model.n_layer'"),
        ({"sparsity": {"max": 0.5}}, "unknown key 'sparsity': did you mean 'mst.sparsity'"),
        ({"lr": 3}, "unknown key 'lr': did you mean 'optimizer.params.lr'"),
        ({"mst": {"method": "mst", "stride": 8}}, "'mst.stride': the nearest valid one is 'mst.attention.stride'"),
        ({"mst": {"method": "mst", "interval": 8}}, "'mst.interval': the nearest valid one is 'mst.topology.interval'"),
        ({"MST": {}}, "unknown key 'MST': did you mean 'mst'"),
        ({"recipes": "paper"}, "unknown key 'recipes': did you mean 'recipe'"),
        ({"mst": {"method": []}}, r"unknown mst.method \[\]"),
        ({"training": {"min_lr": -1e-5}}, "training.min_lr must be"),
        ({"training": {"min_lr": float("nan")}}, "training.min_lr must be .*, not nan"),
        (
            {"mst": {"sparsity": {"warmup": float("inf")}}},
            "mst.sparsity.warmup must be steps .* or a share of the run .*, not inf",
        ),
        ({"mst": {"topology": {"check_every": -1}}}, "mst.topology.check_every must be"),
        ({"mst": {"attention": {"dense_from": -0.5}}}, "mst.attention.dense_from must be .*, not -0.5"),
        (
            {"mst": {"sparsity": {"maximum": 0.9}}},
            r"'mst.sparsity.maximum': the nearest valid one is 'mst.sparsity.max'",
        ),
        ({"mst": {"method": "rigl", "options": {"n": 2}}}, "unknown key 'mst.options.n': mst.options takes no"),
        (
            {"mst": {"method": "rigl", "grow_from": "runs/small"}},
            "mst.grow_from is for methods expand, ligo and stack, not for rigl: leave it out",
        ),
        ({"mst": {"sparsity": {"max": "0.9"}}}, "mst.sparsity.max must be .*, not '0.9'"),
        ({"mst": {"sparsity": {"max": 1.0}}}, "mst.sparsity.max must be .*, not 1.0"),
        ({"mst": {"method": "mts"}}, "unknown mst.method 'mts': the nearest is 'mst'"),
        ({"mst": {"sparsity": [1]}}, "mst.sparsity must be an object"),
        ({"model": {"preset": "gpt5"}}, "unknown model.preset 'gpt5': the nearest is 'gpt2'"),
        ({"model": {"n_layer": 0}}, "model.n_layer must be .*, not 0"),
        ({"model": {"n_layer": True}}, "model.n_layer must be an integer .*, not True"),
        ({"model": {"n_embd": 100, "n_head": 3}}, "model.n_embd = 100"),
        ({"model": {"dropout": 1.0}}, "model.dropout must be"),
        ({"training": {"lr_schedule": "cos"}}, "must be 'cosine' or 'wsd', not 'cos'"),
        ({"training": {"steps": 0}}, "training.steps must be .*, not 0"),
        ({"training": {"warmup": -1}}, "training.warmup must be .*, not -1"),
        ({"training": {"warmup": 1.5}}, "training.warmup must be .*, not 1.5"),
        ({"training": 3}, "training must be an object"),
        ({"data": {"dir": 3}}, "data.dir must be a string or null, not 3"),
        ({"mst": {"targets": {"include": "blocks.*"}}}, "must be a list of strings"),
        ({"model": {"n_layer": 10**9}}, "model.n_layer must be .*1,024, not 1000000000"),
        ({"model": {"n_embd": 2**20, "n_head": 1, "n_layer": 1000}}, r"model: .* 1.3e\+16 weights"),
        ({"training": {"steps": 10**30}}, "training.steps must be a number below 2"),
        ({"training": {"steps": 10**5000}}, "not a number of 5,000 digits"),
        ({"training": {"steps": 10**10}}, "training.steps must be .*10,000,000"),
        ({"training": {"seed": 2**70}}, "training.seed must be a number below 2"),
        ({"training": {"seed": -1}}, "training.seed must be .*, not -1"),
        ({"training": {"eval_seed": -1}}, "training.eval_seed must be .*, not -1"),
        ({"mst": {"seed": 2**64}}, "mst.seed must be a number below 2"),
        ({"mst": {"seed": -3}}, "mst.seed must be .*, not -3"),
        ({"data": {"seed": -3}}, "data.seed must be .*, not -3"),
        ({"mst": {"attention": {"stride": 10**20}}}, "mst.attention.stride must be a number below 2"),
        ({"mst": {"attention": {"stride": 10**9}}}, "mst.attention.stride must be .*16,777,216"),
        ({"zero_optimization": {"reduce_bucket_size": 2**64}}, "zero_optimization.reduce_bucket_size must be a number"),
        ({"training": {"steps": 10, "warmup": 20}}, "training.warmup = 20 steps do not fit in training.steps = 10"),
        ({"training": {"steps": 10, "decay": 11}}, "training.decay = 11 steps do not fit"),
        ({"training": {"memory_every": 40, "save_every": 20}}, "training.memory_every = 40 makes no copy"),
        ({"data": {"val_fraction": -1.0}}, "data.val_fraction must be a number in .*1e-06, 1"),
        ({"training": {"baseline": {"spread": -1.0}}}, "training.baseline.spread must be a number of at least 0"),
        ({"zero_optimization": {"reduce_bucket_size": 1000.5}}, "zero_optimization.reduce_bucket_size must be"),
        ({"fp16": {"hysteresis": 1.5}}, "fp16.hysteresis must be"),
        ({"training": {"memory_every": 5, "async_save": False}}, "training.memory_every needs .* training.async_save"),
        ({"data": {"dir": "a\nb"}}, r"data.dir must not contain a line break: 'a\\nb'"),
        ({"data": {"dir": "a\0b"}}, r"data.dir must not contain the character '\\x00'"),
        ({"tensorboard": {"output_path": "a\nb"}}, "tensorboard.output_path must not contain a line break"),
        ({"model": {"n\nlayer": 1}}, r"the key must not contain a line break: 'n\\nlayer'"),
        ({"data": {"dir": "\ud800"}}, r"data.dir must not contain the character '\\ud800'"),
    ],
)
def test_errors_name_the_key_and_the_fix(raw, message):
    with pytest.raises(UserError, match=message):
        load({**MINIMAL, **raw})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON: .* at line 1"),
        ('{"a": 1,\n}', "not valid JSON: .*comma"),  # Python 3.13 says so by itself
        ('{"a": [1, ]}', "not valid JSON: .*comma"),
        ('{"a": 1, b}', "not valid JSON: .* at line 1, column 10$"),
        ("[1]", "a config must be a JSON object"),
        ('{"mst": {"seed": 1, "seed": 2}}', "c.json: the key 'seed' occurs twice in one object"),
        (None, "no such config file"),
        ("[" * 100_000, "not valid JSON: nested too deep"),
        ('{"a": ' * 40 + "1" + "}" * 40, "nested more than 32 levels"),
        ('{"model": {"n_layer": 1' + "0" * 5000 + "}}", "not valid JSON: .*digits"),
    ],
)
def test_unreadable_files(tmp_path, text, message):
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        load(path)


def test_a_folder_is_not_a_config(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be read: Is a directory$"):
        load(tmp_path)


@pytest.mark.parametrize("override", ["mst", "=3", "mst..max=1", "train_batch_size.x=1"])
def test_malformed_overrides(override):
    with pytest.raises(UserError, match="--set"):
        load(MINIMAL, [override])


@pytest.mark.parametrize(
    ("ds", "message"),
    [
        ({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}, "9 does not divide into 2 processes × 2"),
        ({"train_batch_size": 7}, "does not divide into 2 processes"),
        ({}, "needs train_batch_size"),
        ({"train_batch_size": 0}, "must be a positive integer"),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            "leave gradient_accumulation_steps out",
        ),
    ],
)
def test_batches_that_do_not_divide(ds, message):
    with pytest.raises(UserError, match=message):
        batch_shape(ds, 2)


def _adam(**params):
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **params}}}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"zero_optimization": {"stage": 7}}, "stage = 7: the stages are 0, 1, 2 and 3"),
        ({"zero_optimization": 2}, "zero_optimization must be an object"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "offload_optimizer must be an object"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "offload_param.device must be 'none' or 'cpu'"),
        ({"zero_optimization": {"reduce_bucket_size": float("nan")}}, "reduce_bucket_size must be a number"),
        ({"zero_optimization": {"stage3_prefetch_bucket_size": -5}}, "prefetch_bucket_size must be a number from 0"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "choose one"),
        ({"fp16": {"enabled": "no"}}, "fp16.enabled must be true or false"),
        ({"bf16": {"enabled": "no"}}, "bf16.enabled must be true or false"),
        ({"mst": {"method": "top-kast", "topology": {"granularity": {"block": 8}}}}, "mst.topology.granularity"),
        ({"mst": {"method": "powerprop", "topology": {"granularity": {"block": 8}}}}, "mst.topology.granularity"),
        ({"scheduler": {"type": "WarmupLR"}}, "training.lr_schedule"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "must be a positive number"),
        ({"optimizer": None}, "must be an object"),
        ({"gradient_clipping": -1}, "gradient_clipping must be"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping must be"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": float("nan")}}}, "optimizer.params.lr must be"),
        ({"optimizer": {"type": "AdamW", "params": 3}}, "optimizer.params must be an object, not 3"),
        ({"hybrid_engine": {"enabled": True}}, "has not been tested"),
        ({"train_micro_batch_size_per_gpu": 10**12}, "train_micro_batch_size_per_gpu must be .*1,000,000"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.type must be a string"),
        (_adam(weight_decay="x"), "optimizer.params.weight_decay must be .*, not 'x'"),
        (_adam(eps=-1), "optimizer.params.eps must be .*, not -1"),
        (_adam(betas=[0.9]), "optimizer.params.betas must be two numbers"),
        (_adam(betas=[0.9, 1.0]), "optimizer.params.betas must be .*, not 1.0"),
        (_adam(betas="ab"), "optimizer.params.betas must be two numbers"),
        ({"gradient_clipping": True}, "gradient_clipping must be .*, not True"),
        ({"zero_optimization": {"stage": 1.0}}, "the stages are 0, 1, 2 and 3"),
        ({"steps_per_print": "x"}, "steps_per_print must be an integer"),
        ({"prescale_gradients": "yes"}, "prescale_gradients must be true or false"),
        ({"data_types": {"grad_accum_dtype": "float"}}, "data_types.grad_accum_dtype must be fp32, fp16 or bf16"),
    ],
)
def test_deepspeed_keys_that_cannot_be_right(extra, message):
    with pytest.raises(UserError, match=message):
        check(load({**MINIMAL, **extra}))


@pytest.mark.parametrize("std", [0, -0.02, 2.0])
def test_init_std_is_a_deviation(std: float):
    with pytest.raises(UserError, match=r"model\.init_std must be"):
        load({"model": {"init_std": std}})

"""The attention pattern of a training run: it follows the schedule whatever else the run does."""

import pytest
import torch

import mst_scale
from mst_scale.config import load
from mst_scale.config.blocks import ModelConfig
from mst_scale.engine import attention
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, SelfAttention
from mst_scale.models import BERT, GPT
from tests.support import pool
from tests.support.toys import deepspeed_config

SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 32, "seq_length": 16, "vocab_size": 64}
CASES = {
    "no weight is masked": {"method": "mst", "sparsity": {"max": 0}},
    "dense": {"method": "dense", "attention": {"pattern": "strided", "stride": 4, "dense_from": 3}},
    "sparse": {"method": "mst", "sparsity": {"max": 0.5}, "attention": {"stride": 4, "dense_from": 3}},
}


def config(mst, optimizer=None):
    raw = deepspeed_config(0, 1, "fp32", 1)
    raw |= {"model": SMALL, "training": {"steps": 6, "seed": 3}, "mst": mst}
    return raw if optimizer is None else raw | {"optimizer": optimizer}


def patterns(rank, world, folder, mst):
    mst = {"attention": {"pattern": "strided", "stride": 4, "dense_from": 3, "backend": "blocked"}, **mst}
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))

    def engine_of():
        torch.manual_seed(0)
        return mst_scale.initialize(model=GPT(ModelConfig(**SMALL)), config=config(mst))[0]

    def now(engine):
        (layer,) = (m for m in engine.module.modules() if isinstance(m, SelfAttention))
        assert layer.pattern == engine.mst.pattern, "what is used is what is said"
        return layer.pattern, layer.backend

    engine, seen = engine_of(), []
    for step in range(5):
        seen.append(now(engine))
        engine.backward(engine(tokens, tokens))
        engine.step()
        engine.save_checkpoint(folder, tag=f"after{step}")
    again = engine_of()
    again.load_checkpoint(folder, tag="after3")
    warm = engine_of()
    mst_scale.warm_start(warm, f"{folder}/after3")
    return seen, now(again), now(warm)


@pytest.mark.parametrize("name", CASES)
def test_attention_turns_dense_when_it_should_also_after_a_load(tmp_path, name):
    seen, loaded, warm = pool.run(patterns, 1, str(tmp_path), CASES[name])[0]
    sparse = (Pattern("strided", 4), "auto" if "attention" in CASES[name] else "blocked")
    dense = (Pattern("dense"), "auto")
    assert seen == [sparse, sparse, sparse, dense, dense] and loaded == warm == dense


def warnings_of(rank, world, kind, stride):
    """Warnings of a start whose model, of 16 tokens, is ours or one of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = {"gpt": GPT, "bert": BERT}
    if kind in ours:
        made = ours[kind](ModelConfig(**SMALL, arch=kind))
    else:
        made = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=16, vocab_size=64, attn_pdrop=0))
    found = config({"method": "mst", "attention": {"pattern": "strided", "stride": stride}})
    del found["model"]
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.logger, "warning", lambda text, *given: seen.append(text % given))
        mst_scale.initialize(model=made, config=found)
    return [line for line in seen if "leaves nothing out" in line]


@pytest.mark.parametrize("kind", ["gpt", "bert", "gpt2 of transformers"])
def test_a_stride_that_leaves_nothing_out_is_named_for_every_model(kind):
    (seen,) = pool.run(warnings_of, 1, kind, 16)
    assert len(seen) == 1 and "mst.attention.stride (16) is not below the context (16)" in seen[0]
    assert pool.run(warnings_of, 1, kind, 4) == [[]]


def test_a_backend_that_is_none_is_refused():
    for backend, message in (("blockd", "blocked"), ("dense", "computes every pair")):
        with pytest.raises(UserError, match=message):
            load(config({"method": "mst", "attention": {"backend": backend}}))


def unfit(rank, world, mst, optimizer):
    with pytest.raises(UserError) as caught:
        mst_scale.initialize(model=GPT(ModelConfig(**SMALL)), config=config(mst, optimizer))
    return str(caught.value)


def test_snfs_wants_moments():
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    assert "grows by Adam's first moment" in pool.run(unfit, 1, {"method": "snfs"}, sgd)[0]

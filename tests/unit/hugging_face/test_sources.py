"""What a checkpoint of a transformers model says about its training, whatever configuration is passed for it."""

import json

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from mst_scale.checkpoints import model_config
from mst_scale.config import load
from mst_scale.hugging_face.sources import TransformersSource
from mst_scale.hybrid_sparse_attention import Pattern

EXPERIMENT = {
    "train_batch_size": 4,
    "training": {"steps": 10},
    "mst": {"method": "mst", "attention": {"pattern": "strided", "stride": 4, "dense_from": 8}},
}


def source(folder):
    """A checkpoint at step 5 of a run whose schedule was sparse then, with --config as Trainer writes it."""
    made = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=32))
    made.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert "mst_scale" not in config
    found = TransformersSource(
        checkpoint=folder / "global_step5", config_file=path, config=config, run=None, experiment=load(EXPERIMENT),
        step=5, weights=None, untrained={}, targets=frozenset(),
    )  # fmt: skip
    return made, found


@pytest.mark.parametrize("pattern", [Pattern("dense"), Pattern("strided", 8)], ids=str)
def test_the_checkpoint_says_which_attention_it_was_trained_with(tmp_path, pattern):
    made, found = source(tmp_path)
    model_config.save(found.checkpoint, made, method="rigl", step=5, pattern=pattern)
    assert (found.pattern, found.method) == (pattern, "rigl")


def test_a_checkpoint_that_says_nothing_followed_the_schedule(tmp_path):
    assert (source(tmp_path)[1].pattern, source(tmp_path)[1].method) == (Pattern("strided", 4), "mst")

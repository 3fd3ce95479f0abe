"""What a run spends beside the products of its steps, by hand."""

import pytest

from mst_scale.config import load
from mst_scale.costs.beside import beside
from mst_scale.costs.flops import dense_step_flops

RAW = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "seq_length": 32, "vocab_size": 50, "vocab_multiple": 1},
    "training": {"steps": 60, "warmup": 6},
}
WEIGHTS = (50 + 32) * 16 + 2 * 12 * 16 * 16  # embeddings and matrices


def test_a_dense_run_has_its_optimizer_alone():
    assert beside(load(RAW, method="dense"), 240) == 17 * 60 * WEIGHTS


def test_dense_gradients_of_topology_steps_are_added_for_every_sequence():
    """RigL at half sparsity reads 5 of them in 60 steps: two thirds of what is masked, of 4 sequences each."""
    overrides = ["mst.sparsity.max=0.5", "mst.topology.interval=10", "mst.sparsity.distribution=uniform"]
    experiment = load(RAW, [*overrides, "mst.targets.lm_head=true"], "rigl")
    masked = 0.5 * dense_step_flops(experiment.model).matrices
    by_hand = 5 * 4 * 2 / 3 * masked + 17 * 60 * WEIGHTS
    assert beside(experiment, 240) == pytest.approx(by_hand, rel=1e-3)

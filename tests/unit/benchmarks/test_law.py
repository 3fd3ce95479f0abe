"""The law of average weights: found again in runs that obey it, and what a run's weights are."""

import numpy as np
import pytest
from mst_scale.benchmarks.studies.law import Law, Spot, active_weights, fit

from mst_scale.config import load
from mst_scale.mixed_growing.distribution import active_counts

TRUE = Law(least=1.2, of_weights=40.0, of_tokens=300.0, alpha=0.35, beta=0.45)
SIZES, LENGTHS = (4e4, 1e5, 4e5), (1e6, 3e6, 9e6)


def spots(law: Law = TRUE) -> list[Spot]:
    return [Spot(n, d, law.loss(n, d)) for n in SIZES for d in LENGTHS]


def test_a_law_is_recovered_and_predicts_runs_that_were_not_fitted():
    found = fit(spots())
    assert found is not None and (found.alpha, found.beta) == (TRUE.alpha, TRUE.beta)
    assert found.loss(2e5, 5e6) == pytest.approx(TRUE.loss(2e5, 5e6), rel=1e-6)
    assert "N^0.35" in str(found)


def test_a_method_that_fails_bends_it_little():
    failed = Spot(2e5, 5e6, TRUE.loss(2e5, 5e6) + 0.4)
    found = fit([*spots(), failed])
    assert found is not None
    assert max(abs(found.loss(s.weights, s.tokens) - s.loss) for s in spots()) < 0.4 / 20
    assert failed.loss - found.loss(failed.weights, failed.tokens) == pytest.approx(0.4, abs=0.4 / 20)


def test_no_part_of_it_is_below_zero():
    """Losses that fall with fewer weights: size explains nothing then."""
    odd = [Spot(n, d, 2 + 100 / d**0.4 + 1e-6 * n) for n in SIZES for d in LENGTHS]
    found = fit(odd)
    assert found is not None and min(found.least, found.of_weights, found.of_tokens) >= 0
    assert found.of_weights * SIZES[0] ** -found.alpha < 1e-6


@pytest.mark.parametrize(
    "some", [spots()[:5], spots()[:3] * 2, spots()[::3] * 2], ids=["few", "one size", "one length"]
)
def test_models_without_it_have_no_step_count(some):
    assert fit(some) is None


def test_active_weights_are_the_mean_over_the_steps():
    raw = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "seq_length": 32, "vocab_size": 50, "vocab_multiple": 1},
        "training": {"steps": 60, "warmup": 6},
        "mst": {"sparsity": {"max": 0.8}, "targets": {"lm_head": False}},
    }
    assert active_weights(load(raw, method="dense")) == (50 + 32) * 16 + 2 * 12 * 16 * 16
    experiment = load(raw, method="mst")
    shapes = [(48, 16), (16, 16), (64, 16), (16, 64)] * 2
    steps = [sum(active_counts(shapes, experiment.schedule.at(s).sparsity)) for s in range(60)]
    assert active_weights(experiment) == pytest.approx((50 + 32) * 16 + np.mean(steps))

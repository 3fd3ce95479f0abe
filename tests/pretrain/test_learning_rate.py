import pytest

from mst_scale.config import TrainingConfig
from mst_scale.pretrain.learning_rate import learning_rate, share_of

PAPER = TrainingConfig()


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 3e-7), (999, 3e-4), (1999, 6e-4), (2000, 6e-4), (71_000, 3.3e-4), (140_000, 6e-5)],
)
def test_the_papers_cosine(step, rate):
    # 6e-4 → 6e-5 over 140,000 steps after 2,000 of warm-up; half-way between 2,000 and 140,000 lies the mean
    assert learning_rate(step, 6e-4, PAPER) == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (9, 1.0), (10, 1.0), (79, 1.0), (80, 1.0), (90, 0.55), (100, 0.1)]
)
def test_warmup_stable_decay(step, rate):
    wsd = TrainingConfig(steps=100, lr_schedule="wsd", warmup=10, decay=0.2, min_lr=0.1)
    assert learning_rate(step, 1.0, wsd) == pytest.approx(rate, rel=1e-9)


def test_shares_of_the_run_scale_with_its_length():
    short = TrainingConfig(steps=100, warmup=0.1, min_lr=0.0)
    long = TrainingConfig(steps=1000, warmup=0.1, min_lr=0.0)
    assert learning_rate(9, 1.0, short) == learning_rate(99, 1.0, long) == 1.0
    assert learning_rate(55, 1.0, short) == pytest.approx(learning_rate(550, 1.0, long))


def test_no_warmup_and_one_step():
    assert learning_rate(0, 1.0, TrainingConfig(steps=1, warmup=0, min_lr=0.0)) == 1.0


def test_the_halves_of_muon_have_their_own_rates():
    params = {"lr": 0.01, "muon_lr": 0.02}
    shares = [share_of(group, params) for group in ({"use_muon": True}, {"use_muon": False}, {})]
    assert shares == [2.0, 1.0, 1.0]

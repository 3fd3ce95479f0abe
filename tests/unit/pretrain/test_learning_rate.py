import pytest

from mst_scale.config import TrainingConfig, load
from mst_scale.config.check import check
from mst_scale.errors import UserError
from mst_scale.pretrain.learning_rate import MASKED, learning_rate, rate_ratio, set_groups

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


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (9, 1.0), (39, 1.0), (40, 1.0), (50, 0.5), (60, 0.1), (69, 1.0), (80, 1.0), (90, 0.5)]
)
def test_the_schedule_restarts_with_its_warmup_and_its_decay(step, rate):
    # parts of 60 and 40 steps: each has ten of warm-up, and falls over its last 20
    again = TrainingConfig(steps=100, lr_schedule="wsd", warmup=10, decay=20, min_lr=0.0, restart=0.6)
    assert learning_rate(step, 1.0, again) == pytest.approx(rate, rel=1e-9)


def test_where_warmup_and_decay_overlap_the_smaller_rate_applies():
    overlapping = TrainingConfig(steps=10, lr_schedule="wsd", warmup=8, decay=8, min_lr=0.0)
    rates = [learning_rate(step, 1.0, overlapping) for step in range(10)]
    assert rates == [0.125, 0.25, 0.375, 0.5, 0.625, 0.625, 0.5, 0.375, 0.25, 0.125]


@pytest.mark.parametrize("peak", [0.1, 6e-4, 0.003, 0.7])
@pytest.mark.parametrize(("schedule", "decay"), [("wsd", 42), ("wsd", 43), ("wsd", 0), ("cosine", 0.2)])
def test_without_overlap_the_warmup_is_a_line_to_the_bit(peak, schedule, decay):
    """Down to a decay that begins with the first step after the warm-up, so that recorded runs continue identically."""
    training = TrainingConfig(steps=49, lr_schedule=schedule, warmup=7, decay=decay, min_lr=1e-5)
    assert [learning_rate(step, peak, training) for step in range(7)] == [peak * n / 7 for n in range(1, 8)]


def test_each_part_of_a_restarted_cosine_is_a_cosine():
    again = TrainingConfig(steps=100, warmup=0, min_lr=0.1, restart=40)
    first, second = (TrainingConfig(steps=n, warmup=0, min_lr=0.1) for n in (40, 60))
    ours = [learning_rate(step, 1.0, again) for step in range(100)]
    assert ours == [learning_rate(s, 1.0, first) for s in range(40)] + [
        learning_rate(s, 1.0, second) for s in range(60)
    ]


def test_no_warmup_and_one_step():
    assert learning_rate(0, 1.0, TrainingConfig(steps=1, warmup=0, min_lr=0.0)) == 1.0


def test_the_halves_of_muon_have_their_own_rates():
    params = {"lr": 0.01, "muon_lr": 0.02}
    shares = [rate_ratio(group, params) for group in ({"use_muon": True}, {"use_muon": False}, {})]
    assert shares == [2.0, 1.0, 1.0]


def test_masked_matrices_have_a_rate_and_a_decay_of_their_own_while_they_are_sparse():
    training = {"steps": 100, "lr_schedule": "wsd", "warmup": 0, "decay": 0, "sparse_rate": 0.5, "sparse_decay": 0.25}
    sparsity = {"variation": "sd", "max": 0.84, "warmup": 0, "ultra": 60, "initial": "random"}
    experiment = load(
        {
            "training": training,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
            "mst": {"method": "static", "sparsity": sparsity},
        }
    )
    groups = [{"weight_decay": 0.1}, {"weight_decay": 0.0}, {"weight_decay": 0.1, MASKED: True}]

    def at(step: int) -> list[tuple[float, float]]:
        set_groups(groups, step, 0.01, experiment)
        return [(group["lr"], pytest.approx(group["weight_decay"])) for group in groups]

    sparse = (pytest.approx(0.025), 0.025)  # 0.16^-1/2 = 2.5
    assert at(0) == at(59) == [(0.01, 0.1), (0.01, 0.0), sparse]
    with pytest.raises(RuntimeError):
        set_groups(groups[:2], 0, 0.01, experiment)
    assert at(60) == at(99) == [(0.01, 0.1), (0.01, 0.0), (0.01, 0.1)], "dense again"


@pytest.mark.parametrize("key", ["sparse_rate", "sparse_decay"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"type": "Muon", "params": {"lr": 0.01, "weight_decay": 0.1}}}, "Muon"),
        ({"pipeline": {"stages": 2}}, "stages differ"),
        ({"mst": {"method": "fixed"}}, "method fixed"),
        ({"mst": {"method": "monarch"}}, "method monarch"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}, "set that too"),
    ],
)
def test_where_masked_matrices_cannot_be_apart(key, changes, message):
    base = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 8, "seq_length": 8},
        "training": {"steps": 100, key: 0.5},
        "mst": {"method": "static"},
    }
    check(load(base))
    if key == "sparse_rate" and message == "set that too":
        check(load({**base, **changes}))
        return
    with pytest.raises(UserError, match=message):
        check(load({**base, **changes}))

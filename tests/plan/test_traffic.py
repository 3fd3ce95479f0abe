"""Every collective of a real step on 2 ranks, byte for byte; and of a topology step."""

from collections import Counter

import pytest

from mst_scale.config import load
from mst_scale.plan.setting import setting_of
from mst_scale.plan.traffic import traffic
from tests import pool
from tests.plan import measured
from tests.plan.configs import config

KINDS = {"all_reduce": "all-reduce", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}
EACH = {"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 0}
CASES = {
    "0 fp32": config(0, "fp32"),
    "0 bf16": config(0, "bf16"),
    "1 bf16": config(1, "bf16"),
    "1 fp32": config(1, "fp32", tied_head=False, bias=True),
    "2 bf16": config(2, "bf16+fp32"),
    "2 bert": config(2, "bf16", arch="bert", bias=True),
    "2 fp32, one bucket": config(2, "fp32", bucket=10**6, accumulation=1),
    "3 all ahead": config(3, "bf16+fp32", zero={"stage3_param_persistence_threshold": 40}),
    "3 one by one": config(3, "bf16", zero={**EACH, "stage3_max_reuse_distance": 12_000}),
    "3 at once forgotten": config(3, "fp32", zero={**EACH, "stage3_max_reuse_distance": 0}, bias=True),
    "3 recomputed": config(
        3, "bf16", zero={**EACH, "stage3_max_reuse_distance": 12_000}, activation_checkpointing=True, tied_head=False
    ),
    "3 short looks ahead": config(
        3, "bf16", zero={"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 5_000,
                         "stage3_max_reuse_distance": 3_000, "stage3_max_live_parameters": 20_000}
    ),
}  # fmt: skip


def logs(rank, world, configs):
    return [measured.calls(rank, world, raw) for raw in configs]


def test_every_call_of_a_dense_step():
    (found, other) = pool.run(logs, 2, list(CASES.values()))
    assert found == other
    for (name, raw), log in zip(CASES.items(), found, strict=True):
        experiment = load(raw)
        setting = setting_of(experiment, 2)
        wanted = traffic(experiment.model, setting).of_step(setting.accumulation)
        real = Counter((KINDS[kind], size) for kind, size in log)
        assert Counter((call.kind, call.payload) for call in wanted) == real, name


def test_one_rank_sends_nothing():
    experiment = load(config(2, "bf16"))
    assert traffic(experiment.model, setting_of(load({**config(2, "bf16"), "train_batch_size": 2}), 1)).of_step(2) == []


@pytest.mark.parametrize(("stage", "factor"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_how_often_gradients_are_sent(stage, factor):
    """With 2 micro-batches a step: stages 2 and 3 send gradients with each."""
    experiment = load(config(stage, "bf16"))
    calls = traffic(experiment.model, setting_of(experiment, 2)).of_step(2)
    weights = 33_440
    kind = "scatter" if stage == 3 else "all-reduce"
    assert sum(c.payload for c in calls if c.kind == kind and c.payload > 8) == factor * 2 * weights

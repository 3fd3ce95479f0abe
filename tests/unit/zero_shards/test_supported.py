"""What the engine itself must not use with masks, and that the table of keys says the same."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from mst_scale import zero_shards
from mst_scale.config import support
from mst_scale.config.deepspeed import PRECISIONS, STAGES
from mst_scale.errors import UserError
from mst_scale.zero_shards import supported


class Fake(SimpleNamespace):
    """What the checks read of an engine; every mode off."""

    def __init__(self, zero=None, offload=None, stage=3, precision="fp32", overflow=True, **changes):
        off = {
            "zenflow": None, "mics_shard_size": -1, "zero_hpz_partition_size": 1, "offload_param": None,
            "compute_grad_norm": True, "round_robin_gradients": False,
        }  # fmt: skip
        zero = off | (zero or {})
        self._config = SimpleNamespace(
            zero_config=SimpleNamespace(**zero),
            bfloat16_config=SimpleNamespace(check_grad_overflow=overflow),
            compile_config=SimpleNamespace(deepcompile=changes.pop("deepcompile", False)),
        )
        self.optimizer = SimpleNamespace(param_groups=[{"params": []}])
        self.module = torch.nn.Linear(2, 2)
        self.module.weight.muon_num_heads = changes.get("heads")
        self.mpu = changes.pop("mpu", None)
        self.has_moe_layers = changes.pop("moe", False)
        self.autotp_size = lambda: changes.get("autotp", 1)
        self.sequence_parallel_size = changes.get("sequence", 1)
        self.mp_world_size = changes.get("slices", 1)
        self.torch_autocast_enabled = lambda: changes.get("autocast", False)
        self.zero_optimization_stage = lambda: stage
        self.zero_optimization = lambda: stage > 0
        self.zero_round_robin_gradients = lambda: zero["round_robin_gradients"]
        self.bfloat16_enabled = lambda: precision == "bf16"
        self.fp16_enabled = lambda: precision == "fp16"
        self.zero_offload_optimizer = lambda: offload


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ({"zero": {"zenflow": SimpleNamespace()}}, "zero_optimization.zenflow"),
        ({"deepcompile": True}, "compile.deepcompile"),
        ({"zero": {"mics_shard_size": 2}}, "mics_shard_size"),
        ({"zero": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"heads": 2}, "per_head_muon"),
        ({"mpu": SimpleNamespace()}, "a model-parallel unit"),
        ({"sequence": 2}, "sequence_parallel_size"),
        ({"moe": True}, "mixture-of-experts"),
        ({"autocast": True}, "torch_autocast"),
        ({"offload": SimpleNamespace(device="nvme", ratio=1.0)}, "NVMe: set offload_optimizer.device to cpu"),
        ({"zero": {"offload_param": SimpleNamespace(device="nvme")}}, "NVMe: set offload_param.device to cpu"),
        ({"offload": SimpleNamespace(device="cpu", ratio=0.5)}, r"ratio = 0\.5 is untested .* set it to 1\.0"),
        ({"offload": SimpleNamespace(device="cpu", super_offload=True)}, "super_offload .* set it to false"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_untested_modes_are_rejected_by_name(mode, message):
    with pytest.raises(UserError, match=message):
        zero_shards.shards_of(Fake(**mode), {})
    supported.check_engine(Fake())


KEYS = {
    "zero_optimization.zenflow": lambda value: {"zero": {"zenflow": value}},
    "zero_optimization.mics_shard_size": lambda value: {"zero": {"mics_shard_size": value}},
    "zero_optimization.zero_hpz_partition_size": lambda value: {"zero": {"zero_hpz_partition_size": value}},
    "zero_optimization.round_robin_gradients": lambda value: {"zero": {"round_robin_gradients": value}},
    "zero_optimization.compute_grad_norm": lambda value: {"zero": {"compute_grad_norm": value}},
    "zero_optimization.offload_optimizer.device": lambda value: {"offload": SimpleNamespace(device=value)},
    "zero_optimization.offload_optimizer.ratio": lambda value: {"offload": SimpleNamespace(device="cpu", ratio=value)},
    "zero_optimization.offload_optimizer.super_offload": lambda value: {
        "offload": SimpleNamespace(device="cpu", super_offload=value)
    },
    "zero_optimization.offload_param.device": lambda value: {"zero": {"offload_param": SimpleNamespace(device=value)}},
    "bf16.check_grad_overflow": lambda value: {"overflow": value},
    "torch_autocast.enabled": lambda value: {"autocast": value},
    "compile.deepcompile": lambda value: {"deepcompile": value},
}
VALUES = {
    "zenflow": [SimpleNamespace()], "mics_shard_size": [2], "zero_hpz_partition_size": [1, 2],
    "device": ["none", "cpu", "nvme"], "ratio": [1, 0.5],
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_the_engine_rejects_what_the_table_rejects(key):
    """A config that passes the table must not fail after minutes, when the engine is complete, and the reverse."""
    for value, stage, precision in product(VALUES.get(key.split(".")[-1], [False, True]), STAGES, PRECISIONS):
        row = support.row_of(key, value, stage, precision)
        try:
            supported.check_engine(Fake(**KEYS[key](value), stage=stage, precision=precision))
            accepted = True
        except UserError:
            accepted = False
        # at other stages, DeepSpeed does not read these keys, and the table is stricter
        unread = {"compute_grad_norm": (0, 3), "device": (0,), "ratio": (0,)}
        if stage not in unread.get(key.split(".")[-1], ()):
            assert accepted == (row.status in ("exact", "harmless")), (value, stage, precision)

"""ZeRO-3: how many parameters are whole at once?"""

from __future__ import annotations

from mst_scale.plan.parameters import Parameter
from mst_scale.plan.setting import Setting


def whole_at_once(found: list[Parameter], setting: Setting) -> int:
    """Elements. At most what DeepSpeed may keep alive and fetch ahead, and never more than there are."""
    everything = sum(p.numel for p in found)
    return min(everything, setting.live_parameters + setting.prefetch_bucket)

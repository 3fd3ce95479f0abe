"""Lets Accelerate see the ranks of a CPU under DeepSpeed, as it does those of GPUs: for tests of what is built on it.

Upstream asks for an accelerator's backend where DeepSpeed is on, finds none on a CPU, and takes each rank for alone.
"""

import torch


def see_ranks() -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def set_device(state):
        state.device = torch.device("cpu")

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    PartialState.set_device = set_device

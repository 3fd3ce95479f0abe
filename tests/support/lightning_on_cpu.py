"""A stand-in for Lightning's GPU accelerator: its DeepSpeed strategies refuse any other, and a test has only a CPU."""

import torch


def accelerator(kind):
    """`kind` is CUDAAccelerator of lightning.fabric or of lightning.pytorch."""

    class OnCPU(kind):
        def setup_device(self, device): ...

        def setup(self, trainer): ...

        def teardown(self): ...

        def get_device_stats(self, device):
            return {}

        @staticmethod
        def parse_devices(devices):
            return list(range(devices))

        @staticmethod
        def get_parallel_devices(devices):
            return [torch.device("cpu", 0) for _ in devices]

        @staticmethod
        def auto_device_count():
            return 1

        @staticmethod
        def is_available():
            return True

    return OnCPU()

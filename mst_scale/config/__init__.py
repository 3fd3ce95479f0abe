"""One JSON file describes one experiment: a DeepSpeed config with four blocks of ours."""

from mst_scale.config.blocks import (
    AttentionConfig,
    ComputeConfig,
    DataConfig,
    Experiment,
    ModelConfig,
    MSTConfig,
    SparsityConfig,
    SpikeConfig,
    TargetsConfig,
    TopologyConfig,
    TrainingConfig,
    in_steps,
)
from mst_scale.config.load import load, read, resolve, states, to_dict
from mst_scale.config.presets import METHODS, MODELS, RECIPES

__all__ = [
    "METHODS",
    "MODELS",
    "RECIPES",
    "AttentionConfig",
    "ComputeConfig",
    "DataConfig",
    "Experiment",
    "MSTConfig",
    "ModelConfig",
    "SparsityConfig",
    "SpikeConfig",
    "TargetsConfig",
    "TopologyConfig",
    "TrainingConfig",
    "in_steps",
    "load",
    "read",
    "resolve",
    "states",
    "to_dict",
]

"""Reads the JSON file of an experiment: a DeepSpeed config with four blocks of ours."""

from mst_scale.config.blocks import (
    RATE_DURATIONS,
    DataConfig,
    Experiment,
    ModelConfig,
    SpikeConfig,
    TrainingConfig,
    in_steps,
)
from mst_scale.config.load import BLOCKS, load, read, resolve, states, to_dict
from mst_scale.config.method import MSTConfig
from mst_scale.config.presets import MODELS, RECIPES
from mst_scale.config.targets import TargetsConfig
from mst_scale.methods import METHODS

__all__ = [
    "BLOCKS",
    "METHODS",
    "MODELS",
    "RATE_DURATIONS",
    "RECIPES",
    "DataConfig",
    "Experiment",
    "MSTConfig",
    "ModelConfig",
    "SpikeConfig",
    "TargetsConfig",
    "TrainingConfig",
    "in_steps",
    "load",
    "read",
    "resolve",
    "states",
    "to_dict",
]

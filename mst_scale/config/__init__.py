"""Reads the JSON file of an experiment: a DeepSpeed config with four blocks of ours.

load          a file → an experiment; ready: the file that a name means
blocks        the blocks model, data and training; method: the block mst
deepspeed     DeepSpeed's keys that are validated; the batch, the precision and the stage of a config
presets       model shapes and recipes by name
check         combinations that cannot run
parallel      over how many ranks layers, sequences and the model are cut; placement: on which nodes
changes       keys that change the result, and in which of them a resumed run differs
renamed       keys and values of version 0.1
growth        the smaller run that a model grows out of
support       whether sparse training is exact with a key of DeepSpeed
schema        the JSON schema of all that; pages: the tables of it in the docs
"""

from mst_scale.config.blocks import (
    RATE_DURATIONS,
    DataConfig,
    Experiment,
    ModelConfig,
    SpikeConfig,
    TrainingConfig,
    in_steps,
)
from mst_scale.config.load import (
    BLOCKS,
    load,
    load_of_run,
    overridden_in_recipe,
    read,
    read_of_run,
    read_saved,
    resolve,
    states,
    to_dict,
)
from mst_scale.config.method import MSTConfig, TargetsConfig
from mst_scale.config.presets import MODELS, RECIPES
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
    "load_of_run",
    "overridden_in_recipe",
    "read",
    "read_of_run",
    "read_saved",
    "resolve",
    "states",
    "to_dict",
]

"""Reads the JSON file of an experiment: a DeepSpeed config with four additional blocks.

load          reads a file and returns an experiment
blocks        the blocks model, data and training; method: the block mst
deepspeed     the DeepSpeed keys that are validated; batch, precision and stage of a config
presets       what can be chosen by name: model shapes, recipes, ready-made configs
check         rejects combinations of keys that cannot run, and a smaller run that a model cannot grow from
compact       whether a config allows sparse layers to store their active weights alone
parallel      tensor, sequence and pipeline parallelism of a config
changes       keys that change the result, and the differences of a resumed run
renamed       keys and values of version 0.1
support       whether sparse training is exact with a key of DeepSpeed
unread        stated keys that the method or another key leaves without effect
schema        writes the JSON schema
"""

# ruff: noqa: F401 (the names that other packages use)

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
from mst_scale.config.unread import describe_unread
from mst_scale.methods import METHODS

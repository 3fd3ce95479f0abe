"""Reads the JSON file of an experiment: a DeepSpeed config with four blocks of ours.

load          a file → an experiment; ready: the file that a name means
blocks        the four blocks; method and targets: those inside `mst`
presets       model shapes and recipes by name
limits        values that no experiment can have
check         experiments that cannot run, or not on so many ranks
parallel      over how many ranks layers, sequences and the model are cut
changes       keys that change the result, and in which of them a resumed run differs
growth        the smaller run that a model grows out of
support       whether sparse training is exact with a key of DeepSpeed; support_page: the table of it in the docs
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
    overridden_in_recipe,
    read,
    read_saved,
    resolve,
    states,
    to_dict,
)
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
    "overridden_in_recipe",
    "read",
    "read_saved",
    "resolve",
    "states",
    "to_dict",
]

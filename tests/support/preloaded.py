"""Imports and compiled operators that take every rank of a test seconds: loaded once, before ranks are forked."""

import gc

import torch._dynamo  # noqa: F401  (the first step of an optimizer of torch imports it)
from deepspeed.accelerator import get_accelerator
from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM, Trainer  # noqa: F401

from mst_scale.checkpoints import reshape  # noqa: F401
from mst_scale.pretrain import engines  # noqa: F401
from tests.support import tiny_run  # noqa: F401

for name in ("FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder"):
    get_accelerator().create_op_builder(name).load()
gc.freeze()  # DeepSpeed collects garbage each time ZeRO-3 starts, and would traverse all of these modules

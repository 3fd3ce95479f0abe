"""Imports and compiled operators that take every rank of a test seconds: loaded once, before ranks are forked.

In a new environment, DeepSpeed compiles each operator for a minute or two. The quick run does without one of the two:
it offloads the optimizer with torch's Adam (tests.support.toys).
"""

import encodings.idna  # noqa: F401  (of the first name of a host)
import gc

import deepspeed.module_inject.auto_ep_layer
import deepspeed.moe.ep_repack
import deepspeed.ops
import torch._dynamo  # noqa: F401  (the first step of an optimizer of torch imports it)
from deepspeed.accelerator import get_accelerator
from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM, Trainer  # noqa: F401

from mst_scale.checkpoints import reshape  # noqa: F401
from mst_scale.config.unread import describe_unread
from mst_scale.pretrain import engines  # noqa: F401
from tests.support import forked_writer, tiny_run  # noqa: F401
from tests.support.quick import is_quick

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as `mst_scale.comm` leaves it out of training
for name in ["FusedAdamBuilder", *([] if is_quick() else ["CPUAdamBuilder"])]:
    get_accelerator().create_op_builder(name).load()
forked_writer.install()
# pydantic builds a block's validators when they are first used
describe_unread({"train_batch_size": 1, "training": {"steps": 100}, "model": {}})
gc.freeze()  # DeepSpeed collects garbage each time ZeRO-3 starts, and would traverse all of these modules
gc.enable()

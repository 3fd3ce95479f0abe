"""Calls `mst_scale.integrate()` for one test and undoes it; in a program it holds to the end."""

import atexit
import contextlib
import sys

import torch


def forget():
    """What Accelerate and transformers keep for a whole process, ZeRO-3 for every model among it."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()


@contextlib.contextmanager
def opened(**given):
    """Integrate with a framework; Accelerate sees two ranks on a CPU."""
    with closing():
        import mst_scale
        from mst_scale.integrations import integrate

        mst_scale.integrate(**given)
        yield integrate._installed


@contextlib.contextmanager
def closing():
    """Undo an integration inside, and what Accelerate keeps for a process."""
    import deepspeed
    import transformers.trainer

    from mst_scale.integrations import integrate
    from tests.support.accelerate_on_cpu import see_ranks

    module = transformers.trainer
    before = deepspeed.initialize, sys.excepthook, module.Trainer.train, module.deepspeed_init
    see_ranks()
    forget()
    try:
        yield
    finally:
        atexit.unregister(integrate._installed.warn_if_unused)
        integrate._installed = None
        deepspeed.initialize, sys.excepthook, module.Trainer.train, module.deepspeed_init = before
        forget()


MST = {
    "method": "mst",
    "sparsity": {"max": 0.8, "warmup": 2, "ultra": 5, "restore": 2},
    "topology": {"interval": 2},
    "targets": {"lm_head": False},
    "attention": {"pattern": "strided", "stride": 4},
    "compute": {"backend": "auto"},  # which is not Accelerate's to fill in
}


def deepspeed_config(stage, mst=None, **more):
    """As Trainer's documentation has it: what the arguments say stands in "auto"."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
        },
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "steps_per_print": 10**9,
        "training": {"steps": "auto"},
        "mst": {**MST, **(mst or {})},
        **more,
    }


def model(kind="llama", seed=0):
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    rest = {
        "llama": {"intermediate_size": 64, "max_position_embeddings": 16, "num_key_value_heads": 2},
        "gpt2": {"n_positions": 16, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    }[kind]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, bos_token_id=0, eos_token_id=1, pad_token_id=2, **small, **rest)
    )


class Words(torch.utils.data.Dataset):
    """Sequences that can be learned."""

    def __init__(self, count=64):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        tokens = (torch.arange(16) * (1 + i % 5) + 7 * i) % 64
        return {"input_ids": tokens, "labels": tokens}


def digests(engine):
    return engine.mst.masks.digests(engine.mst.state.exchange)

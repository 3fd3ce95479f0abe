"""Train LoRA adapters on a pruned model: its zeros stay while the adapters train and when they are merged.

This example needs peft.

python examples/lora.py --steps 40
python examples/lora.py --steps 40 --trainer       # with the Hugging Face Trainer instead of a plain loop
deepspeed --num_accelerators 2 examples/lora.py    # on 2 GPUs
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mst_scale

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
    "mst": {"method": "fixed", "targets": {"include": ["*layers*"]}},  # the masks are the zeros of the weights
}


def batch(step: int, stride: int) -> torch.Tensor:
    """Return sequences in which each token is the previous one plus `stride`; replace them with your own text."""
    start = torch.randint(64, (16, 1), generator=torch.Generator().manual_seed(step))
    return (start + stride * torch.arange(32)) % 64


def pruned_model() -> LlamaForCausalLM:
    """Return a small model, trained briefly, with half of each matrix set to 0; use a pruned checkpoint instead."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        tokens = batch(step, stride=3)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in model.named_parameters():
        if "layers" in name and weight.dim() == 2:
            weight.data[weight.abs() < weight.abs().median()] = 0
    return model


def zeros(model: torch.nn.Module) -> float:
    """Return the fraction of zeros in the matrices of the layers, without adapters."""
    weights = [p for n, p in model.named_parameters() if "layers" in n and p.dim() == 2 and "lora_" not in n]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    tokens = batch(10_000, stride=5).to(next(model.parameters()).device)
    return float(model(input_ids=tokens, labels=tokens).loss)


class Sequences(Dataset):
    """The sequences of the first steps, for Trainer."""

    def __init__(self, steps: int):
        self.tokens = torch.cat([batch(step, stride=5) for step in range(steps)])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def train_with_trainer(model: torch.nn.Module, steps: int) -> None:
    """Train with the Trainer, whose engine `integrate` makes sparse."""
    mst_scale.integrate()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, deepspeed={**CONFIG, "training": {"steps": "auto"}}, max_steps=steps, learning_rate=1e-2,
            weight_decay=0.01, per_device_train_batch_size=16, lr_scheduler_type="constant", logging_steps=20,
            save_strategy="no", report_to="none", use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        Trainer(model, args, train_dataset=Sequences(steps)).train()


def train(model: torch.nn.Module, steps: int) -> None:
    """Train in a plain loop."""
    engine, *_ = mst_scale.initialize(model=model, config={**CONFIG, "training": {"steps": steps}})
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for step in range(steps):
        tokens = batch(ranks * step + rank, stride=5).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, {engine.mst.sparsity:.1%} sparse", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    parser.add_argument("--trainer", action="store_true", help="train with the Hugging Face Trainer")
    given = parser.parse_args()
    model = get_peft_model(pruned_model(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(f"before: {zeros(model):.1%} of the base is 0, loss {loss_of(model):.3f} on the new task", flush=True)
    (train_with_trainer if given.trainer else train)(model, given.steps)
    tuned = loss_of(model)
    merged = mst_scale.merge_adapters(model)
    if first:
        print(
            f"after: {zeros(merged):.1%} of the merged weights are 0, loss {loss_of(merged):.3f} (unmerged {tuned:.3f})"
        )


if __name__ == "__main__":
    main()

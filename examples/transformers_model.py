"""Train a Hugging Face GPT-2 with sparse weights and sparse attention; save and load it with its masks.

deepspeed --num_accelerators 2 examples/transformers_model.py --out runs/hf
python examples/transformers_model.py --steps 40 --out runs/hf
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import mst_scale


def config(steps: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        "training": {"steps": steps},
        "mst": {
            "method": "mst",
            "targets": {"include": ["transformer.h.*"], "lm_head": False},
            "attention": {"pattern": "strided", "stride": 16},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", required=True)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = GPT2Config(  # a small one; GPT2LMHeadModel.from_pretrained("gpt2", attn_pdrop=0.0) works the same way
        n_layer=2, n_head=4, n_embd=64, n_positions=64, vocab_size=256, attn_pdrop=0.0
    )
    engine, *_ = mst_scale.initialize(model=GPT2LMHeadModel(shape), config=config(args.steps))
    rank = torch.distributed.get_rank()
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        start = torch.randint(256, (4, 1), generator=generator)
        tokens = ((start + 3 * torch.arange(64)) % 256).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {engine.mst.sparsity:.0%} sparse", flush=True)
        if step + 1 == args.steps // 2:
            engine.save_checkpoint(args.out)
    path, _ = engine.load_checkpoint(args.out)
    if rank == 0:
        print(f"back at {path}: step {engine.mst.step}, {engine.mst.sparsity:.0%} sparse", flush=True)


if __name__ == "__main__":
    main()

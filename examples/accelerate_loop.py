"""Train in a loop with Accelerate: one line makes it sparse, and two more add a report.

python examples/accelerate_loop.py --out runs/accelerate && mst report runs/accelerate
accelerate launch --num_processes 2 examples/accelerate_loop.py --out runs/accelerate     # on two GPUs
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn

import mst_scale

STEPS = 60


class Model(nn.Module):
    """Predicts the next of a few symbols; replace it with your own model."""

    def __init__(self, symbols: int = 64, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))


CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "steps_per_print": 10**9,
    "training": {"steps": STEPS},  # the phases are fractions of this number
    "mst": {"method": "mst", "sparsity": {"max": 0.8}, "targets": {"exclude": ["head.*"]}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    mst_scale.integrate()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
    torch.manual_seed(0)
    model = Model()
    tokens = torch.arange(64).repeat(32 * accelerator.num_processes)  # each process gets its share of the batches
    pairs = torch.utils.data.TensorDataset(tokens, (tokens * 7 + 3) % 64)
    loader = torch.utils.data.DataLoader(pairs, batch_size=32, shuffle=True)
    engine, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
    recording = mst_scale.record(engine, out)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(engine(x), y)
        accelerator.backward(loss)  # also runs DeepSpeed's optimizer step
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == STEPS:
            break
    recording.log(val_loss=float(loss.detach()))
    accelerator.save_state(f"{out}/state")
    accelerator.print(f"loss {loss.item():.4f}, {engine.mst.sparsity:.0%} sparse at the end")


if __name__ == "__main__":
    main()

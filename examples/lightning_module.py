"""Train a LightningModule with the DeepSpeed strategy: one line makes it sparse, and the phases follow `max_steps`.

python examples/lightning_module.py --out runs/lightning     # needs a GPU, like Lightning's strategy
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

import mst_scale


class Model(lightning.LightningModule):
    """Predicts the next of a few symbols; replace it with your own model."""

    def __init__(self, symbols: int = 64, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, symbols)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        tokens, targets = batch
        x = self.embed(tokens)
        loss = nn.functional.cross_entropy(self.head(x + self.down(torch.relu(self.up(x)))), targets)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.log("sparsity", self.trainer.strategy.model.mst.sparsity)  # of DeepSpeed's engine

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
    "mst": {"method": "mst", "sparsity": {"max": 0.8}, "targets": {"exclude": ["head.*"]}},
}


def fit(out: str, steps: int = 60, accelerator: Any = "gpu", devices: Any = "auto", resume: str | None = None) -> Any:
    mst_scale.integrate()
    lightning.seed_everything(0)
    tokens = torch.arange(64).repeat(64)
    pairs = torch.utils.data.TensorDataset(tokens, (tokens * 7 + 3) % 64)
    trainer = lightning.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=DeepSpeedStrategy(config=CONFIG),
        max_steps=steps,
        default_root_dir=out,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(out, every_n_train_steps=steps // 2, save_top_k=-1)],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(pairs, batch_size=32), ckpt_path=resume)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    trainer = fit(parser.parse_args().out)
    metrics = trainer.callback_metrics
    print(f"loss {metrics['loss']:.4f}, {metrics['sparsity']:.0%} sparse at the end")


if __name__ == "__main__":
    main()

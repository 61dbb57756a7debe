"""Train with Lightning's Trainer on nc10d; needs `pip install lightning`.

    python examples/torch_lightning.py

Lightning's DDPStrategy starts the second rank itself, and asks torch.distributed for "nc10d".
"""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nc10d.torch  # registers the backend, also where nc10d is not installed

assert nc10d.torch


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main() -> None:
    data = load_digits()
    digits = TensorDataset(
        torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="nc10d"),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), DataLoader(digits, batch_size=64, shuffle=True))
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"]
        print(f"backend {torch.distributed.get_backend()}, loss {loss:.3f}")


if __name__ == "__main__":
    main()

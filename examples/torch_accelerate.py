"""Train with Hugging Face's accelerate on nc10d; needs `pip install accelerate`.

    python -m nc10d.run --nproc-per-node 2 examples/torch_accelerate.py

The group is made before the Accelerator, which takes over a group that it finds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nc10d.torch  # registers the backend, also where nc10d is not installed

assert nc10d.torch


def main() -> None:
    data = load_digits()
    digits = TensorDataset(
        torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    )
    dist.init_process_group("nc10d")
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, batches = accelerator.prepare(
        model, optimizer, DataLoader(digits, batch_size=64, shuffle=True)
    )
    for _ in range(3):
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(
        f"{accelerator.num_processes} ranks, backend {dist.get_backend()}, "
        f"{type(model).__name__}, loss {mean:.3f}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

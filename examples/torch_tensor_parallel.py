"""Train a network whose layers are split over the ranks by torch's tensor parallelism, on nc10d.

    python -m nc10d.run --nproc-per-node 2 examples/torch_tensor_parallel.py

The first layer is split by columns and the second by rows, so that a forward pass needs a single
all_reduce. The parameters are DTensors on a mesh of CPUs. The data are scikit-learn's digits. At
the end the split network is compared with the same network in one piece.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nc10d.torch  # registers the backend, also where nc10d is not installed

assert nc10d.torch
STEPS = 40


def network() -> nn.Module:
    """Return the network, with the same parameters at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))


def train(model: nn.Module, images: torch.Tensor, digits: torch.Tensor) -> list[float]:
    """Train in place; return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(images), digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train the split network and the whole one."""
    torch.set_num_threads(1)
    data = load_digits()
    images, digits = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    dist.init_process_group("nc10d")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    split = train(parallelize_module(network(), mesh, plan), images, digits)
    whole = train(network(), images, digits)
    far = max(abs(a - b) for a, b in zip(split, whole, strict=True))
    if dist.get_rank() == 0:
        print(f"loss {split[0]:.3f} to {split[-1]:.3f}; largest difference {far:.1e}")
    assert far < 1e-2, "the split network learns otherwise than the whole one"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

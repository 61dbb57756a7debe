"""Train on handwritten digits with the same weights, bit for bit, on any number of ranks.

    pip install ".[torch,demo]"    # in the checkout: torch, and scikit-learn
    OMP_NUM_THREADS=1 python -m nc10d.run --nproc-per-node 3 examples/same_weights.py

Each global batch is cut into 8 micro-batches, the leaves of a fixed tree. A rank computes some of
them, one by one, and DistributedDataParallel adds the gradients along the tree. The line with the
digest is the same for 1 to 8 ranks. With `--keep FILE`, the job keeps its state there after half of
the epochs, and goes on from it when it is started again, on another number of ranks as well.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import nc10d
import nc10d.torch

LEAVES = 8
EPOCHS = 6
MICRO_BATCH = 16
TEST_IMAGES = 360


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def digest(model: nn.Module) -> str:
    """Return a digest of all weights' bits."""
    found = hashlib.sha256()
    for x in model.parameters():
        found.update(x.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def train(model: nc10d.torch.DistributedDataParallel, keep: Path | None) -> None:
    """Train in place, from the state that is kept on."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    first, parts = 0, {"model": model, "optimizer": optimizer}
    if keep is not None and keep.exists():
        state = nc10d.torch.load(keep)
        first = state["epoch"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    x, y = (part[TEST_IMAGES:] for part in load())
    step = LEAVES * MICRO_BATCH
    for epoch in range(first, EPOCHS):
        if keep is not None and epoch == EPOCHS // 2 and first == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            nc10d.torch.save({**state, "epoch": epoch}, keep)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch + 1))
        for batch in order[: len(x) // step * step].reshape(-1, LEAVES, MICRO_BATCH):
            for leaf in model.my_leaves:
                nn.functional.cross_entropy(model(x[batch[leaf]]), y[batch[leaf]]).backward()
            optimizer.step()


def main() -> int:
    """Train, and print the accuracy and the digest of rank 0's weights."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="keep the state here, and go on from it")
    options = parser.parse_args()
    torch.set_num_threads(1)  # other numbers of threads may add in another order
    torch.manual_seed(0)
    nc10d.init_process_group()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    train(nc10d.torch.DistributedDataParallel(model, leaves=LEAVES), options.keep)
    if nc10d.get_rank() == 0:
        x, y = (part[:TEST_IMAGES] for part in load())
        right = (model(x).argmax(1) == y).float().mean()
        print(f"{nc10d.get_world_size()} rank(s): accuracy {100 * right:.1f} %")
        print(f"weights {digest(model)}")
    nc10d.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C: no traceback from every rank

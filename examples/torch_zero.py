"""Train with an optimizer that is divided over the ranks; go on with another number of ranks.

    pip install ".[torch]"    # in the checkout
    python -m nc10d.run --nproc-per-node 4 examples/torch_zero.py --save-after 20 half.pt
    python -m nc10d.run --nproc-per-node 3 examples/torch_zero.py --resume half.pt

Every rank has the model, a share of each global batch, and the optimizer's state of its share of
the parameters. A checkpoint has the state of all, as the optimizer on a single process would save
it. Both runs see the same batches, so the resumed run has the losses that the first run has from
there on; it compares them.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import nc10d as dist
from nc10d.torch import DistributedDataParallel, ZeroRedundancyOptimizer

BATCH = 24
WIDTH = 32
LAYERS = 12
NEAR = 1e-4
"""The largest allowed difference of two losses, since the order of additions differs."""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a global batch, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(BATCH, 8, generator=generator) * 2 - 1
    return x, torch.sin(3 * x).sum(1, keepdim=True)


def held(zero: ZeroRedundancyOptimizer) -> int:
    """Return the bytes of optimizer state on this rank."""
    return sum(x.nbytes for row in zero.optim.state.values() for x in row.values())


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="the last step")
    parser.add_argument("--save-after", nargs=2, metavar=("STEPS", "FILE"), help="checkpoint")
    parser.add_argument("--resume", type=Path, help="begin with this checkpoint")
    return parser.parse_args(words)


def train(options: argparse.Namespace) -> tuple[int, list[float]]:
    """Train from a checkpoint or from the start; return this rank's bytes of state, the losses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if BATCH % size:
        raise SystemExit(f"a batch of {BATCH} can't be divided over {size} ranks evenly")
    layers: list[nn.Module] = [nn.Linear(8, WIDTH), nn.Tanh()]
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 1)))
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=3e-3
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(zero, 100)
    first, before = 0, []
    if options.resume:
        saved = torch.load(options.resume)  # every rank takes its share of the optimizer's state
        model.module.load_state_dict(saved["model"])
        zero.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first, before = saved["step"], saved["losses"]
    stop, file = options.save_after or (None, None)
    losses: list[float] = []
    for step in range(first, options.steps):
        x, y = (part.chunk(size)[rank] for part in batch(step))
        loss = nn.functional.mse_loss(model(x), y)
        zero.zero_grad()
        loss.backward()
        zero.step()
        schedule.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
        if file and step + 1 == int(stop):
            zero.consolidate_state_dict(to=0)
            if rank == 0:
                parts = {"model": model.module, "optimizer": zero, "schedule": schedule}
                saved = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    print(f"rank {rank} of {size} holds {held(zero)} bytes of optimizer state", flush=True)
    if rank == 0:
        print(f"steps {first} to {options.steps - 1}: loss {losses[-1]:.5f}")
        if file:  # with the losses behind the checkpoint, for the other run to compare
            later = losses[int(stop) - first :]
            torch.save({**saved, "step": int(stop), "losses": later}, file)
        if before:
            worst = max(abs(a - b) for a, b in zip(losses, before, strict=False))
            same = "the same curve" if worst <= NEAR else "ANOTHER CURVE"
            print(f"{same}: at most {worst:.1e} apart")
    return held(zero), losses


def main() -> None:
    """Train as one of the ranks that the launcher has started."""
    options = parsed()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group()
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

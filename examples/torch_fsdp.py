"""Train a transformer whose parameters are sharded over the ranks by torch's FSDP2, on nc10d.

    python -m nc10d.run --nproc-per-node 4 examples/torch_fsdp.py --save build/checkpoint
    python -m nc10d.run --nproc-per-node 2 examples/torch_fsdp.py --resume build/checkpoint

torch.distributed.init_process_group("nc10d") is all that differs from a program for gloo. The
checkpoint is torch's distributed checkpoint: each rank writes its shards, and any number of ranks
reads them. The data are Python's own help texts, as in torch_ddp.py.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_ddp import LEARNING_RATE, Letters, Transformer

import nc10d.torch  # registers the backend, also where nc10d is not installed

assert nc10d.torch


def sharded(letters: Letters) -> nn.Module:
    """Return the model; a rank holds a share of each layer's parameters."""
    torch.manual_seed(0)
    model = Transformer(len(letters.alphabet))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.blocks.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    """Train for some steps, from a checkpoint or from the beginning."""
    parser = argparse.ArgumentParser(description="Train a sharded transformer on nc10d.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save", help="folder of a checkpoint to write at the end")
    parser.add_argument("--resume", help="folder of a checkpoint to go on from")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nc10d")
    rank = dist.get_rank()
    letters = Letters()
    model = sharded(letters)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    first = 0
    if given.resume:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
        dcp.load(state, checkpoint_id=given.resume)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"]
        )
        first = int(state["step"])
    for step in range(first, first + given.steps):
        x, y = letters.batch(rank, step)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone(), dist.ReduceOp.AVG)
        if rank == 0 and (step - first) % 10 in (0, 9):
            print(f"step {step}: loss {mean:.3f}")
    if given.save:
        weights, moments = get_state_dict(model, optimizer)
        step = torch.tensor(first + given.steps)
        dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=given.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

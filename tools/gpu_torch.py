"""Time torch.distributed's NCCL and torch's packing; the arguments are the fields of a Size.

tools/gpu_times.py runs it. The last line of its output has the rows as JSON. Without CUDA in torch,
a row reports that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as c10d
from gpu_rows import Row
from gpu_times import Size, often, timed

from benchmarks.micro import flatten

DEVICE = "cuda:0"


def main() -> list[Row]:
    """Return all rows."""
    if torch.version.cuda is None:
        return [Row("  torch", "not run: torch is installed without CUDA")]
    size = Size(*map(int, sys.argv[1:]))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = c10d.TCPStore("127.0.0.1", 0, 1, is_master=True)
    c10d.init_process_group(
        "nccl", store=store, rank=0, world_size=1, device_id=torch.device(DEVICE)
    )
    rows = blocks(size) + packing(size)
    c10d.destroy_process_group()
    return rows


def blocks(size: Size) -> list[Row]:
    """Time single calls, a coalesced block, flattened arrays, and an array that is flat."""
    xs = [torch.ones(size.nbytes // 4, device=DEVICE) for _ in range(size.arrays)]
    flat = torch.ones(size.arrays * size.nbytes // 4, device=DEVICE)

    def one_by_one() -> None:
        for x in xs:
            c10d.all_reduce(x)

    def coalesced() -> None:
        with c10d._coalescing_manager(device=torch.device(DEVICE)):
            one_by_one()

    def flattened() -> None:
        together = torch._utils._flatten_dense_tensors(xs)
        c10d.all_reduce(together)
        torch._foreach_copy_(xs, torch._utils._unflatten_dense_tensors(together, xs))

    ways: dict[str, Callable[[], object]] = {
        "one by one": one_by_one,
        "coalesced": coalesced,
        "flattened and back": flattened,
        "one flat array": lambda: c10d.all_reduce(flat),
    }
    return measured(ways, size)


def packing(size: Size) -> list[Row]:
    """Time torch's ways to pack the tensors of a bucket."""
    sizes = flatten.counts(size.tensors, size.bucket // 4)
    xs = [torch.ones(n, device=DEVICE) for n in sizes]
    flat = torch.empty(sum(sizes), device=DEVICE)
    views = list(flat.split(sizes))
    ways: dict[str, Callable[[], object]] = {
        "_foreach_copy_": often(lambda: torch._foreach_copy_(views, xs)),
        "_flatten_dense_tensors": often(lambda: torch._utils._flatten_dense_tensors(xs)),
    }
    return measured(ways, size, 10 * 2 * 4 * sum(sizes))


def measured(ways: dict[str, Callable[[], object]], size: Size, moved: int = 0) -> list[Row]:
    """Return a row for each function in `ways`."""
    return [
        timed(f"  torch, {name}", way, torch.cuda.synchronize, size.rounds, moved)
        for name, way in ways.items()
    ]


if __name__ == "__main__":
    print(json.dumps([asdict(row) for row in main()]))

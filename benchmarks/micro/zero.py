"""Measure a step of a ZeroRedundancyOptimizer, of nc10d and of torch over gloo.

The same parameters are stepped by AdamW on the same ranks, by each library with and without views
of buckets, and by the plain optimizer, which holds the whole state and sends nothing. Steps take
turns. A step's time is the slowest rank's. All ways are compared at the end: they have to be equal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.background_load import BackgroundLoad
from benchmarks.estimates import Times, slower, turns
from benchmarks.micro.ddp import LIMIT, Size
from nc10d.testing.ranks import Ranks

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

PLAIN = "plain"
TORCH, OURS = "torch", "nc10d"
VIEWS = ", views"
WAYS = (PLAIN, TORCH, OURS, TORCH + VIEWS, OURS + VIEWS)
SIZES = [Size(50, 200, True, 1), Size(12, 1020, False, 1)]


def measure(group: ProcessGroup, size: Size, meeting: str, rounds: int, steps: int) -> Times:
    """Return this rank's mean seconds of a step, by way and round. Blocks for all rounds."""
    import torch
    import torch.distributed as gloo

    torch.set_num_threads(1)
    meet = f"file://{meeting}"
    gloo.init_process_group("gloo", init_method=meet, rank=group.rank, world_size=group.size)
    try:
        stepped = {way: _optimizer(way, size) for way in WAYS}
        times: Times = {way: [] for way in WAYS}
        for number in range(-1, rounds):
            for way in turns(WAYS, number % len(WAYS)):
                group.barrier()
                began = time.perf_counter()
                for _ in range(steps):
                    stepped[way].step()
                if number >= 0:  # the first round sets everything up
                    times[way].append((time.perf_counter() - began) / steps)
        _compare(stepped)
        return times
    finally:
        gloo.destroy_process_group()


def _optimizer(way: str, size: Size) -> Any:
    """Return an optimizer in a given way, whose parameters have gradients."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    from nc10d.torch import ZeroRedundancyOptimizer

    generator = torch.Generator().manual_seed(0)
    shapes = [(size.width, size.width), *[(size.width,)] * size.biased] * size.layers
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for x in params:
        x.grad = torch.randn(x.shape, generator=generator)
    if way == PLAIN:
        return torch.optim.AdamW(params, lr=1e-3)
    kind = TorchZero if way.startswith(TORCH) else ZeroRedundancyOptimizer
    views = way.endswith(VIEWS)
    return kind(params, torch.optim.AdamW, parameters_as_bucket_view=views, lr=1e-3)


def _compare(stepped: dict[str, Any]) -> None:
    """Raise RuntimeError unless all ways have led to the same parameters."""
    import torch

    expected, *others = [o.param_groups[0]["params"] for o in stepped.values()]
    if not all(all(map(torch.equal, found, expected)) for found in others):
        raise RuntimeError("the ways have led to different parameters")


def line(size: Size, ranks: int, times: Times) -> str:
    """Return a row of the table: medians in ms, and ratios."""
    shown = {way: statistics.median(times[way]) for way in WAYS}
    figures = " | ".join(f"{1e3 * seconds:.2f}" for seconds in shown.values())
    ratios = [shown[OURS + kind] / shown[TORCH + kind] for kind in ("", VIEWS)]
    return f"| {size.name} | {ranks} | {figures} | {ratios[0]:.2f} | {ratios[1]:.2f} |"


HEADER = f"""\
| parameters | ranks | {" | ".join(f"{way}, ms" for way in WAYS)} | ratio | ratio{VIEWS} |
|{"---|" * (len(WAYS) + 4)}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks zero", description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of turns (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn (%(default)s)")
    options = parser.parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"  # for the ranks, which import NumPy anew
    print(f"# {len(os.sched_getaffinity(0))} cores\n{HEADER}", flush=True)
    for count in map(int, options.ranks.split(",")):
        for size in SIZES:
            with (
                BackgroundLoad() as others,
                tempfile.TemporaryDirectory() as folder,
                Ranks(count, "processes", timeout=LIMIT) as ranks,
            ):
                given = (size, str(Path(folder) / "meeting"), options.rounds, options.steps)
                times = slower(ranks.run(measure, *([argument] * count for argument in given)))
            print(line(size, count, times), f" others: {others.cores:.2f} cores", flush=True)
    return 0

"""Measure compiled programs with collectives beside eager mode and torch's own collectives on gloo.

Two ranks run three programs: a tensor-parallel layer, a step that reduces a bucket of gradients,
and a stage of a pipeline. A figure is the median of a round's means, on rank 0; the ways take
turns. `breaks` counts the graphs of a program beyond the first.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nc10d.testing.ranks import Ranks

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

LIMIT = 600.0
REPEATS = 20
Program = Callable[[Any], Any]


def programs(functional: Any, group: Any, width: int) -> dict[str, Program]:
    """Return the programs on a library's functional collectives; a pipeline is nc10d's alone."""
    import torch

    weight = torch.ones(width, width)

    def tensor_parallel(x: Any) -> Any:
        return functional.all_reduce(torch.relu(x @ weight) @ weight, "sum", group) + 1

    def data_parallel(x: Any) -> Any:
        gradients = functional.all_reduce_coalesced([x.mT @ x, x.sum(0)], "sum", group)
        return weight - gradients[0], gradients[1] * 2

    def pipeline(x: Any) -> Any:
        if group.rank == 0:
            functional.send(torch.relu(x @ weight), 1, group)
            return x
        return functional.recv(x, 0, group) @ weight

    found = {"tensor parallel": tensor_parallel, "data parallel": data_parallel}
    return {**found, "pipeline": pipeline} if hasattr(functional, "send") else found


def measure(own: ProcessGroup, meeting: str, rounds: int, width: int, backend: str) -> None:
    """Print the rows on rank 0. Blocks until all ranks have measured them."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives

    from nc10d.torch import functional

    torch.set_num_threads(1)
    where: dict[str, Any] = {"rank": own.rank(), "world_size": own.size()}
    dist.init_process_group("gloo", init_method=f"file://{meeting}", **where)
    try:
        ours = programs(functional, own, width)
        theirs = programs(_functional_collectives, dist.group.WORLD, width)
        x = torch.ones(width, width)
        for name, program in ours.items():
            breaks = torch._dynamo.explain(program)(x).graph_break_count
            ways = {"eager": program, "compiled": torch.compile(program, backend=backend)}
            if name in theirs:
                ways["torch, eager"] = theirs[name]
                ways["torch, compiled"] = torch.compile(theirs[name], backend=backend)
            seconds = _medians(ways, x, rounds, own)
            if own.rank() == 0:
                times = "".join(f"  {way} {1e6 * value:9.1f} µs" for way, value in seconds.items())
                print(f"{name:<16} breaks {breaks}{times}", flush=True)
    finally:
        dist.destroy_process_group()


def _medians(ways: dict[str, Program], x: Any, rounds: int, own: ProcessGroup) -> dict[str, float]:
    means: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, program in ways.items():
            own.barrier()
            start = time.perf_counter()
            for _ in range(REPEATS):
                program(x)
            if turn:  # the first round compiles
                means[way].append((time.perf_counter() - start) / REPEATS)
    return {way: statistics.median(values) for way, values in means.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compile", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=128, help="of the square matrices")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, Ranks(2, "processes", timeout=LIMIT) as ranks:
        meeting = str(Path(folder) / "meeting")
        row = meeting, options.rounds, options.width, options.backend
        ranks.run(measure, *([value] * 2 for value in row))
    return 0

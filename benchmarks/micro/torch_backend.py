"""Measure torch.distributed on nc10d beside torch.distributed on gloo, in the same processes.

The ranks have a torch group of each backend, and calls on the two take turns, round by round. A
figure is the median of the rounds' means, on rank 0. Most rows also have nc10d's own call on the
same tensors, or nc10d's own class for the same step. Rows of steps have a step without
communication, too, and the share of what gloo adds to it that torch adds on nc10d.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nc10d.testing.ranks import Ranks

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 64 << 20)
OURS, GLOO, OWN, ALONE = "nc10d", "gloo", "own", "alone"
LIMIT = 600.0
"""Seconds for a call of a rank: far more than any row takes."""
Call = Callable[[], object]


class Row(NamedTuple):
    """A row: the calls to time, by column; a row of a step has one alone."""

    name: str
    nbytes: int
    calls: Mapping[str, Call]


class Figures(NamedTuple):
    """Seconds of a call, by column."""

    name: str
    nbytes: int
    seconds: dict[str, float]


def measure(own: ProcessGroup, meeting: str, rounds: int, sizes: Sequence[int]) -> None:
    """Print the rows on rank 0. Blocks until all ranks have measured them."""
    import torch
    import torch.distributed as dist

    import nc10d.torch

    assert nc10d.torch
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch's new names are not in all versions
    place: dict[str, Any] = {"rank": own.rank(), "world_size": own.size()}
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("nc10d", init_method=f"file://{meeting}", timeout=limit, **place)
    gloo = dist.new_group(backend="gloo", timeout=limit)
    try:
        groups = {OURS: dist.group.WORLD, GLOO: gloo}
        for row in _rows(groups, own, sizes):
            figures = _figures(row, rounds, own)
            if own.rank() == 0:
                print(line(figures), flush=True)
    finally:
        dist.destroy_process_group()


def _figures(row: Row, rounds: int, own: ProcessGroup) -> Figures:
    """Time each call of a row in turns, `rounds` times."""
    seconds: dict[str, list[float]] = {way: [] for way in row.calls}
    for call in row.calls.values():
        for _ in range(3):
            call()
    count = 3 if ALONE in row.calls else max(1, min(500, (32 << 20) // max(row.nbytes, 1)))
    for _ in range(rounds):
        for way, call in row.calls.items():
            own.barrier()
            began = time.perf_counter()
            for _ in range(count):
                call()
            seconds[way].append((time.perf_counter() - began) / count)
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    return Figures(row.name, row.nbytes, medians)


def _rows(groups: dict[str, Any], own: ProcessGroup, sizes: Sequence[int]) -> Iterator[Row]:
    yield from _collectives(groups, own, sizes)
    yield from _small(groups, own)
    yield from _steps(groups, own)


def _collectives(groups: dict[str, Any], own: ProcessGroup, sizes: Sequence[int]) -> Iterator[Row]:
    import torch
    import torch.distributed as dist

    ranks = own.size()
    for nbytes in sizes:
        x = torch.zeros(nbytes // 4)
        whole = torch.zeros(max(1, nbytes // 4 // ranks) * ranks)
        part = whole[: whole.numel() // ranks].clone()
        other = torch.zeros_like(whole)
        calls: dict[str, Any] = {
            "all_reduce": (
                lambda g, x=x: dist.all_reduce(x, group=g),
                lambda x=x: own.all_reduce(x),
            ),
            "all_gather_into_tensor": (
                lambda g, o=whole, i=part: dist.all_gather_into_tensor(o, i, group=g),
                lambda o=whole, i=part: own.all_gather_into_tensor(o, i),
            ),
            "reduce_scatter_tensor": (
                lambda g, o=part, i=whole: dist.reduce_scatter_tensor(o, i, group=g),
                lambda o=part, i=whole: own.reduce_scatter_tensor(o, i),
            ),
            "broadcast": (
                lambda g, x=x: dist.broadcast(x, 0, group=g),
                lambda x=x: own.broadcast(x, 0),
            ),
            "all_to_all_single": (
                lambda g, o=other, i=whole: dist.all_to_all_single(o, i, group=g),
                lambda o=other, i=whole: own.all_to_all_single(o, i),
            ),
            "send, recv": (
                lambda g, x=x: _there_and_back(x, dist.send, dist.recv, g),
                lambda x=x: _there_and_back(x, own.send, own.recv),
            ),
        }
        for name, (call, third) in calls.items():
            yield Row(name, nbytes, _turns(groups, call) | {OWN: third})


def _there_and_back(x: Any, send: Callable[..., Any], recv: Callable[..., Any], *on: Any) -> None:
    """Send `x` from rank 0 to 1 and back; the other ranks do nothing."""
    import torch.distributed as dist

    options = {"group": on[0]} if on else {}
    if dist.get_rank() == 0:
        send(x, 1, **options)
        recv(x, 1, **options)
    elif dist.get_rank() == 1:
        recv(x, 0, **options)
        send(x, 0, **options)


def _turns(groups: dict[str, Any], call: Callable[[Any], object]) -> dict[str, Call]:
    return {way: partial(call, group) for way, group in groups.items()}


def _small(groups: dict[str, Any], own: ProcessGroup) -> Iterator[Row]:
    import torch
    import torch.distributed as dist

    import nc10d

    yield Row("barrier", 0, _turns(groups, dist.barrier) | {OWN: own.barrier})
    many = [torch.zeros(64) for _ in range(64)]

    def coalesced(group: Any) -> None:
        with dist._coalescing_manager(group=group, async_ops=True) as manager:
            for x in many:
                dist.all_reduce(x, group=group, async_op=True)
        manager.wait()

    def by_list(group: Any) -> None:
        dist.all_reduce_coalesced(many, group=group)

    def own_block() -> None:
        with nc10d.coalescing_manager(own):
            for x in many:
                own.all_reduce(x)

    # torch refuses its manager on gloo, which has no such call: there a list is the nearest.
    calls = {OURS: lambda: coalesced(groups[OURS]), GLOO: lambda: by_list(groups[GLOO])}
    yield Row("64 coalesced all_reduces", 256, calls | {OWN: own_block})
    value = {"step": 1, "names": ["a", "b"]}
    gathered: list[Any] = [None] * own.size()
    objects = _turns(groups, lambda g: dist.all_gather_object(gathered, value, group=g))
    own_objects = {OWN: lambda: nc10d.all_gather_object(gathered, value, group=own)}
    yield Row("all_gather_object", 64 << 10, objects | own_objects)


def _steps(groups: dict[str, Any], own: ProcessGroup) -> Iterator[Row]:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    import nc10d.torch

    def model(layers: int = 8, width: int = 512) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

    def step_of(network: nn.Module, width: int = 512) -> Call:
        batch = torch.ones(16, width)
        optimizer = torch.optim.SGD(network.parameters(), 1e-4)

        def step() -> None:
            optimizer.zero_grad()
            network(batch).square().mean().backward()
            optimizer.step()

        return step

    ddp = nn.parallel.DistributedDataParallel
    on = {way: step_of(ddp(model(), process_group=group)) for way, group in groups.items()}
    on[OWN] = step_of(nc10d.torch.DistributedDataParallel(model(), process_group=own))
    yield Row("a step of DDP", 8 << 20, on | {ALONE: step_of(model())})
    # With names of their own: torch takes meshes of equal names for one and the same in its caches.
    meshes = {
        way: DeviceMesh.from_group(group, "cpu", mesh_dim_names=(way,))
        for way, group in groups.items()
    }

    def sharded(network: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for layer in network:
            fully_shard(layer, mesh=mesh)
        return fully_shard(network, mesh=mesh)

    for shape in (8, 512), (24, 200):
        layers, width = shape
        on = {way: step_of(sharded(model(*shape), mesh), width) for way, mesh in meshes.items()}
        divided = nc10d.torch.fully_shard(model(*shape), nn.Linear, own)
        on |= {OWN: step_of(divided, width), ALONE: step_of(model(*shape), width)}
        yield Row(f"FSDP2, {layers} layers", 4 * layers * width**2, on)
    x = torch.ones(256, 256)

    def product(mesh: DeviceMesh) -> Call:
        a, b = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(x, mesh, [Shard(0)])
        return lambda: (a @ b).full_tensor()

    on = {way: product(mesh) for way, mesh in meshes.items()}
    yield Row("a product of DTensors", 256 << 10, on | {ALONE: lambda: x @ x})


def line(row: Figures) -> str:
    """Return a row as text, in the columns of `header`."""
    us = {way: seconds * 1e6 for way, seconds in row.seconds.items()}
    ours, gloo = us[OURS], us[GLOO]
    text = f"{row.name:<26}{row.nbytes:>9}{ours:>12.1f}{gloo:>12.1f}{gloo / ours:>8.1f}"
    text += f"{us[OWN]:>12.1f}{ours / us[OWN]:>8.2f}" if OWN in us else f"{'':>20}"
    if ALONE in us:
        alone = us[ALONE]
        added = (ours - alone) / (gloo - alone) if gloo > alone else float("nan")
        text += f"{alone:>12.1f}{added:>8.2f}"
    return text


HEADER = (
    f"{'':<26}{'bytes':>9}{'nc10d us':>12}{'gloo us':>12}{'ahead':>8}"
    f"{'own us':>12}{'ratio':>8}{'alone us':>12}{'added':>8}"
)


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 0. Blocks for all measurements."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks torch", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of every row (default 7)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of collectives")
    given = parser.parse_args(arguments)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"# {given.ranks} ranks on {cores} cores; load average at the start {load:.2f}")
    print(HEADER, flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks(given.ranks, "processes", timeout=LIMIT) as ranks,
    ):
        columns = [str(Path(folder, "meeting")), given.rounds, given.sizes]
        ranks.run(measure, *([column] * given.ranks for column in columns))
    return 0

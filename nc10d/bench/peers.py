"""One library's side of a comparison: `python -m nc10d.bench.peers LIBRARY JOBS OUT`, on each rank.

JOBS is a JSON list of [collective, nbytes]; rank 0 writes a JSON list of [collective, nbytes,
seconds, wrong] to the file OUT. All libraries do the same work on the same kind of arrays: float32
in plain NumPy arrays (torch tensors over the same memory), the sizes of nccl-tests.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDS = 5
BUDGET = 0.15
"""Seconds that one round of one job should take."""


class Library(Protocol):
    """The calls of a library, on flat float32 arrays, in place or into `out`."""

    rank: int
    size: int

    def all_reduce(self, x: Array) -> None:
        """x := sum over ranks of x."""

    def all_gather(self, out: Array, x: Array) -> None:
        """out := all ranks' x."""

    def reduce_scatter(self, out: Array, x: Array) -> None:
        """out := my chunk of the sum of x."""

    def broadcast(self, x: Array) -> None:
        """x := rank 0's x."""

    def all_to_all(self, out: Array, x: Array) -> None:
        """out[r] := rank r's x[me]."""

    def barrier(self) -> None:
        """Nobody leaves before everybody has come."""

    def exchange(self, out: Array, x: Array) -> None:
        """A ping-pong between ranks 0 and 1."""

    def close(self) -> None:
        """Leave."""


class Nc10d:
    """nc10d by its public API."""

    def __init__(self) -> None:
        from nc10d import api, queries, world

        world.init_process_group()
        self._api = api
        self._close = world.destroy_process_group
        self.rank, self.size = queries.get_rank(), queries.get_world_size()
        self.all_reduce = api.all_reduce
        self.all_gather = api.all_gather_into_tensor
        self.reduce_scatter = api.reduce_scatter_tensor
        self.all_to_all = api.all_to_all_single
        self.barrier = api.barrier

    def broadcast(self, x: Array) -> None:
        """x := rank 0's x."""
        self._api.broadcast(x, 0)

    def exchange(self, out: Array, x: Array) -> None:
        """A ping-pong between ranks 0 and 1."""
        if self.rank == 0:
            self._api.send(x, 1)
            self._api.recv(out, 1)
        elif self.rank == 1:
            self._api.recv(out, 0)
            self._api.send(x, 0)

    def close(self) -> None:
        """Leave."""
        self._close()


class Mpi:
    """MPI by mpi4py, with its fast calls on buffers."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size

    def all_reduce(self, x: Array) -> None:
        """x := sum over ranks of x."""
        self._comm.Allreduce(self._mpi.IN_PLACE, x)

    def all_gather(self, out: Array, x: Array) -> None:
        """out := all ranks' x."""
        self._comm.Allgather(x, out)

    def reduce_scatter(self, out: Array, x: Array) -> None:
        """out := my chunk of the sum of x."""
        self._comm.Reduce_scatter_block(x, out)

    def broadcast(self, x: Array) -> None:
        """x := rank 0's x."""
        self._comm.Bcast(x, 0)

    def all_to_all(self, out: Array, x: Array) -> None:
        """out[r] := rank r's x[me]."""
        self._comm.Alltoall(x, out)

    def barrier(self) -> None:
        """Nobody leaves before everybody has come."""
        self._comm.Barrier()

    def exchange(self, out: Array, x: Array) -> None:
        """A ping-pong between ranks 0 and 1."""
        if self.rank == 0:
            self._comm.Send(x, 1)
            self._comm.Recv(out, 1)
        elif self.rank == 1:
            self._comm.Recv(out, 0)
            self._comm.Send(x, 0)

    def close(self) -> None:
        """MPI ends by itself."""


class Gloo:
    """torch.distributed over gloo; tensors are made once for each array."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._torch, self._dist = torch, dist
        self._tensors: dict[int, Any] = {}
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier = dist.barrier

    def _of(self, x: Array) -> Any:
        found = self._tensors.get(id(x))
        if found is None or found[0] is not x:
            found = self._tensors[id(x)] = (x, self._torch.from_numpy(x))
        return found[1]

    def all_reduce(self, x: Array) -> None:
        """x := sum over ranks of x."""
        self._dist.all_reduce(self._of(x))

    def all_gather(self, out: Array, x: Array) -> None:
        """out := all ranks' x."""
        self._dist.all_gather_into_tensor(self._of(out), self._of(x))

    def reduce_scatter(self, out: Array, x: Array) -> None:
        """out := my chunk of the sum of x."""
        self._dist.reduce_scatter_tensor(self._of(out), self._of(x))

    def broadcast(self, x: Array) -> None:
        """x := rank 0's x."""
        self._dist.broadcast(self._of(x), 0)

    def all_to_all(self, out: Array, x: Array) -> None:
        """out[r] := rank r's x[me]."""
        self._dist.all_to_all_single(self._of(out), self._of(x))

    def exchange(self, out: Array, x: Array) -> None:
        """A ping-pong between ranks 0 and 1."""
        if self.rank == 0:
            self._dist.send(self._of(x), 1)
            self._dist.recv(self._of(out), 1)
        elif self.rank == 1:
            self._dist.recv(self._of(out), 0)
            self._dist.send(self._of(x), 0)

    def close(self) -> None:
        """Leave."""
        self._dist.destroy_process_group()


LIBRARIES: dict[str, Callable[[], Any]] = {
    "nc10d": Nc10d,
    "mpich": Mpi,
    "openmpi": Mpi,
    "gloo": Gloo,
}
SHARE = {"all_reduce", "broadcast", "exchange"}
"""Collectives whose arrays all have the whole size; in the others a chunk is 1/size of it."""


def prepare(
    library: Library, collective: str, nbytes: int
) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return the call to time, and a function that checks it once and counts wrong elements."""
    if collective == "barrier":
        return library.barrier, lambda: 0
    size, rank = library.size, library.rank
    count = max(1, nbytes // 4 // (1 if collective in SHARE else size))
    whole = count * (1 if collective in SHARE else size)
    inputs = [((np.arange(whole) + 3 * r) % 7).astype(np.float32) for r in range(size)]
    mine = inputs[rank]
    chunk = slice(rank * count, (rank + 1) * count)
    total: Array = np.sum(inputs, axis=0).astype(np.float32)
    x, small, large = mine.copy(), np.zeros(count, np.float32), np.zeros(whole, np.float32)
    part = mine[:count].copy()
    table: dict[str, tuple[Callable[[], None], Array, Array]] = {
        "all_reduce": (lambda: library.all_reduce(x), x, total),
        "broadcast": (lambda: library.broadcast(x), x, inputs[0]),
        "all_gather": (
            lambda: library.all_gather(large, part),
            large,
            np.concatenate([a[:count] for a in inputs]),
        ),
        "reduce_scatter": (lambda: library.reduce_scatter(small, mine), small, total[chunk]),
        "all_to_all": (
            lambda: library.all_to_all(large, mine),
            large,
            np.concatenate([a[chunk] for a in inputs]),
        ),
        "exchange": (
            lambda: library.exchange(large, mine),
            large,
            inputs[rank ^ 1] if rank < 2 <= size else large,
        ),
    }
    call, out, want = table[collective]

    def check() -> int:
        x[:] = mine
        call()
        return int(np.count_nonzero(out != want))

    return call, check


def measure(library: Library, collective: str, nbytes: int) -> tuple[float, int]:
    """Return the median over rounds of the slowest rank's mean seconds, and wrong elements."""
    call, check = prepare(library, collective, nbytes)
    wrong = np.array([check()], np.float32)
    library.all_reduce(wrong)
    probe = np.array([_mean(library, call, 3)], np.float32)
    library.all_reduce(probe)
    calls = int(min(3000, max(3, BUDGET / max(float(probe[0]) / library.size, 1e-7))))
    means = []
    for _ in range(ROUNDS):
        mean = np.zeros(library.size, np.float32)
        mean[library.rank] = _mean(library, call, calls)
        library.all_reduce(mean)
        means.append(float(mean.max()))
    half = 2 if collective == "exchange" else 1
    return statistics.median(means) / half, int(wrong[0])


def _mean(library: Library, call: Callable[[], None], calls: int) -> float:
    library.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def main() -> None:
    """Measure the jobs on this rank; rank 0 writes what came out."""
    name, jobs, out = sys.argv[1:4]
    library = LIBRARIES[name]()
    rows = []
    for collective, nbytes in json.loads(jobs):
        seconds, wrong = measure(library, collective, nbytes)
        rows.append([collective, nbytes, seconds, wrong])
    if library.rank == 0:
        Path(out).write_text(json.dumps(rows))
    library.close()


if __name__ == "__main__":
    main()

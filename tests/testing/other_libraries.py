"""Runs programs of nc10d.testing on nc10d, torch over gloo, or an MPI; see test_programs.py.

    python other_libraries.py torch RANK FOLDER      (one process a rank)
    mpirun -n SIZE python other_libraries.py mpi FOLDER

FOLDER has `programs`, a pickle of them, and gets a pickle of each rank's results. A program that
raises has the error's text in place of its results.
"""

import functools
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def run_all(folder: Path, rank: int, dist: Any, arrays: Any) -> None:
    """Run all programs as a rank, and write the results."""
    found = []
    for program in pickle.loads((folder / "programs").read_bytes()):
        try:
            found.append([_plain(result) for result in program.run(rank, dist, arrays)])
        except (RuntimeError, ValueError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    (folder / f"rank{rank}").write_bytes(pickle.dumps(found))


def _plain(result: Any) -> Any:
    if result is None:
        return None
    return [np.array(x) for x in result] if isinstance(result, list) else np.array(result)


def run_torch(rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    size = pickle.loads((folder / "programs").read_bytes())[0].size
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    arrays = SimpleNamespace(
        arange=lambda n, dtype: torch.arange(n, dtype=getattr(torch, dtype)),
        zeros=lambda n, dtype: torch.zeros(n, dtype=getattr(torch, dtype)),
    )
    run_all(folder, rank, with_kept_groups(dist), arrays)
    dist.destroy_process_group()


def with_kept_groups(dist: Any) -> Any:
    """Return a library that makes each group once: it has sockets and threads of its own."""
    groups: dict[tuple[int, ...], Any] = {}

    def new_group(ranks: list[int]) -> Any:
        return groups.get(tuple(ranks)) or groups.setdefault(tuple(ranks), dist.new_group(ranks))

    names = {name: getattr(dist, name) for name in dir(dist) if not name.startswith("_")}
    return SimpleNamespace(**names | {"new_group": new_group})


def run_nc10d(group: Any, folder: Path) -> None:
    """Run all programs as a rank of run_ranks."""
    import nc10d

    run_all(folder, int(group.rank), with_kept_groups(nc10d), np)


class MpiWork:
    """A request, and what is left to do after it."""

    def __init__(self, request: Any, after: Any = None) -> None:
        self._request, self._after = request, after

    def wait(self) -> None:
        self._request.Wait()
        if self._after is not None:
            self._after()


def over_mpi(mpi: Any) -> SimpleNamespace:
    """Return the calls of a program, by mpi4py."""
    world = mpi.COMM_WORLD
    inplace = mpi.IN_PLACE
    reductions = {"SUM": mpi.SUM, "MAX": mpi.MAX, "MIN": mpi.MIN, "PRODUCT": mpi.PROD}

    @functools.cache
    def _group(ranks: tuple[int, ...]) -> Any:
        return ranks, world.Create(world.group.Incl(ranks))

    def started(call: Any) -> Any:
        def run(*arguments: Any, group: Any = None, async_op: bool = False, **named: Any) -> Any:
            ranks, comm = group or (range(world.size), world)
            for name in {"src", "dst"} & named.keys():
                named[name] = ranks.index(named[name])
            work = call(comm, *arguments, **named)
            return work if async_op else work.wait()

        return run

    def all_reduce(comm: Any, x: Any, op: Any) -> MpiWork:
        return MpiWork(comm.Iallreduce(inplace, x, op))

    def reduce(comm: Any, x: Any, dst: int, op: Any) -> MpiWork:
        root = comm.rank == dst
        return MpiWork(comm.Ireduce(inplace if root else x, x if root else None, op, dst))

    def gather(comm: Any, x: Any, parts: Any, dst: int) -> MpiWork:
        whole = np.zeros((comm.size, x.size), x.dtype) if parts is not None else None

        def unpack() -> None:
            for part, row in zip(parts or (), whole if parts is not None else (), strict=True):
                part[...] = row

        return MpiWork(comm.Igather(x, whole, dst), unpack)

    def scatter(comm: Any, y: Any, parts: Any, src: int) -> MpiWork:
        whole = None if parts is None else np.concatenate(parts)
        return MpiWork(comm.Iscatter(whole, y, src), lambda: whole)

    def send(x: Any, dst: int, tag: int, group: Any = None, blocks: bool = True) -> Any:
        ranks, comm = group or (range(world.size), world)
        work = MpiWork(comm.Isend(x, ranks.index(dst), tag))
        return work.wait() if blocks else work

    def recv(y: Any, src: int, tag: int, group: Any = None, blocks: bool = True) -> Any:
        ranks, comm = group or (range(world.size), world)
        work = MpiWork(comm.Irecv(y, ranks.index(src), tag))
        return work.wait() if blocks else work

    return SimpleNamespace(
        new_group=lambda ranks: _group(tuple(ranks)),
        ReduceOp=SimpleNamespace(**reductions),
        all_reduce=started(all_reduce),
        reduce=started(reduce),
        broadcast=started(lambda comm, x, src: MpiWork(comm.Ibcast(x, src))),
        all_gather_into_tensor=started(lambda comm, y, x: MpiWork(comm.Iallgather(x, y))),
        reduce_scatter_tensor=started(
            lambda comm, y, x, op: MpiWork(comm.Ireduce_scatter_block(x, y, op))
        ),
        all_to_all_single=started(lambda comm, y, x: MpiWork(comm.Ialltoall(x, y))),
        gather=started(gather),
        scatter=started(scatter),
        barrier=started(lambda comm: MpiWork(comm.Ibarrier())),
        send=send,
        recv=recv,
        isend=functools.partial(send, blocks=False),
        irecv=functools.partial(recv, blocks=False),
    )


def run_mpi(folder: Path) -> None:
    from mpi4py import MPI

    run_all(folder, MPI.COMM_WORLD.rank, over_mpi(MPI), np)


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        run_torch(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        run_mpi(Path(sys.argv[2]))

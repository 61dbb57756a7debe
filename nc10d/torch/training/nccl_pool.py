"""A torch.cuda.MemPool whose memory is NCCL's, and its registration with a group.

    pool = nc10d.torch.nccl_pool()
    with torch.cuda.use_mem_pool(pool):
        buffer = torch.zeros(1 << 20, device="cuda")
    registered = nc10d.torch.register_pool(pool)

NCCL reads and writes registered memory in place, where the machine can. This has not run on a GPU.
"""

from __future__ import annotations

import torch

from nc10d.backend.nccl.comm.communicator import Registration
from nc10d.backend.nccl.pools import allocator_functions
from nc10d.backend.nccl.registered_memory import nccl_backend
from nc10d.base.deadline import Deadline
from nc10d.errors import UnsupportedPlatform
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import group_or_default


def nccl_pool(**options: object) -> torch.cuda.MemPool:
    """Return a torch.cuda.MemPool on ncclMemAlloc (NCCL 2.19); `options` are MemPool's.

    Any rank may call alone. UnsupportedPlatform if torch has no CUDA.
    """
    make = getattr(torch._C, "_cuda_customAllocator", None)
    if make is None or not torch.cuda.is_available():
        raise UnsupportedPlatform("a pool of NCCL's memory needs a torch with CUDA, and a GPU")
    functions = allocator_functions()  # kept for the process: torch may free at its end
    allocator = make(functions.allocate.address, functions.free.address)
    return torch.cuda.MemPool(allocator, **options)


def register_pool(
    pool: torch.cuda.MemPool, group: ProcessGroup | None = None
) -> list[Registration]:
    """Register the memory that a pool has now with a group's communicator; all ranks call.

    Blocks until the ranks have met. `close` each result before the pool gives its memory back.
    TypeError for a group whose device arrays do not go by NCCL.
    """
    which = group_or_default(group)
    backend = nccl_backend(which)
    comm = backend.communicator(Deadline.after(which.timeout))
    mine = [x for x in pool.snapshot() if x["device"] == backend.device]
    with comm.lock:
        comm.settle(Deadline.after(which.timeout), "registering a pool")
        return [comm.register(int(x["address"]), int(x["total_size"])) for x in mine]

"""What NCCL has beyond collectives, for groups whose device arrays go by NCCL: `nc10d.nccl`.

    from nc10d import nccl

    dist.init_process_group("nccl", pg_options=nccl.NcclOptions(nccl.NCCLConfig(max_ctas=8)))
    zeros = nccl.symmetric_zeros(dist.group.WORLD)
    with nccl.time_estimate() as estimate:
        dist.all_reduce(x)
    print(estimate.seconds)

`group` is a ProcessGroup (where it has a default, the default group); TypeError if its device
arrays go by another backend. A function that the loaded NCCL is too old for raises
UnsupportedPlatform, which names the first release that has it. docs/gpu/README.md tells what was
run on a GPU.
"""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from nc10d.backend.nccl import estimates, suspension
from nc10d.backend.nccl.bindings.library import library
from nc10d.backend.nccl.comm.options import NCCLConfig, NcclOptions
from nc10d.backend.nccl.pools import cupy_allocator, numba_memory_manager
from nc10d.backend.nccl.registered_memory import nccl_backend, registered_zeros, symmetric_zeros
from nc10d.backend.nccl.suspension import MemoryStats
from nc10d.backend.nccl.windows import Window
from nc10d.base.deadline import Deadline
from nc10d.group.coalescing import Batch, CoalescingManager
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import group_or_default
from nc10d.work import Work

__all__ = [
    "MemoryStats",
    "NCCLConfig",
    "NcclOptions",
    "Window",
    "cupy_allocator",
    "memory_stats",
    "numba_memory_manager",
    "registered_zeros",
    "resume",
    "suspend",
    "symmetric_zeros",
    "time_estimate",
    "version",
    "window",
]


def version() -> tuple[str, tuple[int, int, int]]:
    """Return the loaded library's name, "NCCL" or "RCCL", and its version.

    UnsupportedPlatform if there is none; NC10D_NCCL_LIBRARY names another than the wheel's.
    """
    found = library()
    return found.name, found.version


def window(
    count: int, dtype: npt.DTypeLike = np.float32, group: ProcessGroup | None = None
) -> Window:
    """Make an array of zeros that every rank can write to by `put`; all ranks call.

    Count and dtype must be the same on all ranks. Blocks until all have made theirs. NCCL 2.29.2,
    and devices that reach each other's memory: UnsupportedPlatform elsewhere.
    """
    which = group_or_default(group)
    return Window(nccl_backend(which), count, dtype, which.timeout)


def suspend(group: ProcessGroup | None = None) -> None:
    """Release the device memory that NCCL can give up; all ranks call (NCCL 2.29.7).

    Blocks until the operations in flight have ended and all ranks have called. Until `resume`, a
    call with device arrays is a ValueError; CUDA graphs of the group must not run, nor puts.
    RendezvousError if a rank does not come within the group's timeout; the group then goes on.
    """
    which = group_or_default(group)
    suspension.suspend(nccl_backend(which), Deadline.after(which.timeout))


def resume(group: ProcessGroup | None = None) -> None:
    """Take the memory of a suspended group again; all ranks call, and it blocks.

    ValueError if the group is not suspended; RendezvousError as in `suspend`.
    """
    which = group_or_default(group)
    suspension.resume(nccl_backend(which), Deadline.after(which.timeout))


def memory_stats(group: ProcessGroup | None = None) -> MemoryStats:
    """Return how much device memory this rank's communicators of a group have (NCCL 2.29.7).

    Does not block. The communicators are those of collectives, of each link for messages, and of
    windows, as far as they have been used.
    """
    return suspension.memory_stats(nccl_backend(group_or_default(group)))


class time_estimate(CoalescingManager):
    """A block whose calls are not launched: NCCL estimates how long they would take together.

    `seconds` is the estimate, after the block. Calls with device arrays on `group` join the block,
    as in `coalescing_manager`; those with `async_op` return a Work that fails. NCCL 2.22. The first
    use of a group blocks until all ranks have formed its communicator; then each rank is alone.
    ValueError for messages, which NCCL does not estimate, for arrays in host memory, and for a
    group with nonblocking communicators, where NCCL would launch.
    """

    seconds = 0.0
    """NCCL's estimate, in seconds; 0 for a block without calls."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        which = group_or_default(group)
        self._backend = nccl_backend(which)
        estimates.check_estimates(self._backend)
        super().__init__(which, False)
        self._batch = self._simulated = _Simulated(which)

    def __enter__(self) -> time_estimate:
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        ops, batch = self._batch.ops, self._simulated
        batch.drop(RuntimeError("the call was estimated, not launched"))
        if error is None and len(ops):
            if batch.device != "cuda":
                raise ValueError(f"NCCL estimates device arrays, got arrays on {batch.device}")
            deadline = Deadline.after(batch.timeout)
            self.seconds = estimates.seconds_of(self._backend, ops, deadline)


class _Simulated(Batch):
    """A batch that is not launched."""

    def launch(self, async_op: bool) -> Work | None:
        """Do nothing."""
        return None

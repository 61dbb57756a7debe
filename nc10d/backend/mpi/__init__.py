"""The MPI backend: a group's operations as MPI's own, through mpi4py (extra `mpi`).

Under `mpirun`, `init_process_group("mpi")` takes rank and size from MPI; nothing else is needed.
For machines and networks that MPI serves and the built-in engine does not. Results are those of
every backend: the rules of `nc10d.arrays.dtypes`, folded in rank order, bit for bit, unless
`MpiOptions(any_order=True)` lets MPI's own algorithms choose the order of sums.

MPI has limits that the built-in engine does not have:

- An operation can't be cancelled: after a failure MPI may still write into the arrays of begun
  operations, so these arrays are kept alive for good. No operation begins before all ranks have
  entered the same call, though.
- MPI makes communicators in calls that block for as long as a rank is missing. Ranks meet before
  such a call, with a timeout; a rank that dies in between still hangs the others.
- A process that dies takes the job with it (`mpirun` or a fault-tolerant MPI does that). An abort
  or a timeout reaches a rank at its next poll: in a call, in a wait, or on the progress thread.
  When two ranks fail at the same time, ranks may differ about which failed first.
- A message's element type is not compared, only the size.
- MPI has no wait with a timeout: a waiting rank polls, first at full speed, then yielding the core,
  then every half millisecond.

nc10d requests MPI_THREAD_MULTIPLE. At SERIALIZED (no other code may call MPI meanwhile) nc10d logs
a warning; a lower level is refused.
"""

from importlib.util import find_spec

from nc10d.errors import UnsupportedPlatform


def require() -> None:
    """Raise UnsupportedPlatform if mpi4py is not installed."""
    if find_spec("mpi4py") is None:
        raise UnsupportedPlatform("mpi4py is not installed: pip install mpi4py, beside an MPI")

"""The MPI backend: a group's operations as MPI's own, through mpi4py (extra `mpi`).

Under `mpirun`, `init_process_group("mpi")` takes rank and size from MPI; nothing else is needed.
For machines and networks that MPI serves and the built-in engine does not. Results are those of
every backend: the rules of `nc10d.arrays.dtypes`, folded in rank order, bit for bit, unless
`MpiOptions(any_order=True)` lets MPI's own algorithms choose the order of sums.

What MPI can't, and what therefore is different from the built-in engine:

- An operation can't be taken back: after a failure MPI may still write into arrays of operations
  that had begun, so they are kept alive for good. Nothing begins before all ranks have entered the
  same call, though.
- MPI makes communicators in calls that block for as long as a rank is missing. Ranks meet before,
  with a timeout; one that dies in between still hangs the others.
- A process that dies takes the job with it (that is `mpirun`'s doing, or a site's fault-tolerant
  MPI's), and an abort or a timeout reaches a rank when that rank next looks: in a call, in a wait,
  or on the thread that moves asynchronous operations along. When two ranks fail at the same time,
  ranks may differ about which was the first.
- A message's element type is not compared, only its size.
- MPI has no wait with a timeout: waiting looks again and again, first at once, then yielding the
  core, then every half millisecond.

MPI is asked for MPI_THREAD_MULTIPLE. With less it is told: a warning for SERIALIZED (no other
code may call MPI meanwhile), an error below.
"""

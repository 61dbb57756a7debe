"""The UCC backend: a group's collectives by libucc, through ctypes.

UCC (github.com/openucx/ucc) is the collective library in UCX and HPC-X. `init_process_group("ucc")`
loads the user's own libucc; see `library`. Results are those of every backend: the rules of
`nc10d.arrays.dtypes`, folded in rank order, bit for bit, unless `UccOptions(any_order=True)` lets
UCC's own algorithms choose the order of sums.

A group has a CPU backend beside its UCC team. This backend carries messages, which UCC does not
have, and the check that all ranks make the same call. The backend also detects dead ranks, and
agrees with all ranks on a cause. UCC moves no data before all ranks have entered the same call.

UCC has limits that the CPU backend does not have:

- An operation can't be cancelled: after a failure UCC may still write into the arrays of begun
  operations, so these arrays are kept alive for good.
- A group runs its launches one after the other; a block's operations run side by side.
- Device arrays must be contiguous and not in lists. A call waits on the host for the work on the
  array's stream, and `wait()` until the operation ends. Reductions of device arrays are UCC's own,
  in UCC's own order; one that UCC lacks is a TypeError. Messages take host arrays only.
- UCC has no wait with a timeout: a waiting rank polls, first at full speed, then yielding the core,
  then every half millisecond.

Two kinds of UCC's collectives, fan-in and fan-out, have no counterpart in c10d.
"""

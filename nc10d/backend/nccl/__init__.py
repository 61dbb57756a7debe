"""The NCCL backend: device arrays by NCCL, through ctypes, cuda.bindings and a compiled loop.

`init_process_group()` uses it for device arrays, and loads it for the first of them. Packages, from
the bottom, each importing only those before it:

- `bindings`: NCCL's header as data, NCCL's functions as Python, and the compiled loop of C calls.
- `comm`: communicators, and their streams.
- `launch`: an operation as NCCL calls, a launch as a table of calls, the cache of launches, and the
  calls as peers compare them.
- this package: works, pending works, the watchdog, receives from any rank, a group on its device,
  and the backend.

NCCL makes this backend different from others:

- `wait()` makes the current stream wait for the operation and does not block the host, as in c10d;
  `wait_blocking()` and `wait(timeout)` do block.
- 16-bit ints can be moved but not reduced; bitwise reductions are for bools; products of complex
  numbers are refused. NCCL chooses the order of sums, and the result of MIN and MAX of NaNs.
- Arrays must be aligned to their elements; others are a ValueError before anything is sent. Strided
  arrays are copied in C order, at the cost of a driver's copy for each separate row. Arrays that
  need thousands of them are refused. c10d sends permuted arrays without gaps as they lie in
  memory, which is wrong if ranks' strides differ, and refuses all others.
- All arrays of a group must be on the same device.
- A receive from any rank has to be launched by itself (ValueError in a block), and needs the CPU
  backend in the group, or as its failure detector. Its timeout fails this receive alone.
- Ranks that make different calls raise CollectiveMismatch, but what the arrays of the earlier ranks
  hold then is undefined. Sizes of messages, and of exchanges where ranks have sizes of their own,
  are not compared.
"""

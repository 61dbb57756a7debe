"""The NCCL backend: device arrays by NCCL, through ctypes, cuda.bindings and a compiled loop.

`init_process_group()` uses it for device arrays, and loads it for the first of them. Packages, from
the bottom, each importing only those before it:

- `bindings`: NCCL's header as data, NCCL's functions as Python, and the compiled loop of C calls.
- `comm`: communicators, and their streams.
- `launch`: an operation as NCCL calls, a launch as a table of calls, and the cache of launches.
- this package: works, pending works, the watchdog, a group on its device, and the backend.

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
- A receive must name its sender (ValueError), as in c10d's NCCL.
- Ranks that make different calls run into their timeout; nothing detects the mismatch earlier.
"""
